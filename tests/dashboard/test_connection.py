"""The page and its gateway: the token, a connection that breaks, a gateway that is another one."""

from __future__ import annotations

import pytest
from support import overview as made_up
from support.gateway_double import Double


@pytest.mark.unreachable
def test_the_token_is_asked_for_and_exchanged_for_a_session(browser, visit):
    with Double(token="right") as double:
        double.overview = {"ranks": [made_up.rank(0)]}
        page = visit(double.url)
        field = page.page.get_by_label("Token", exact=True)
        field.wait_for()
        assert not page.page.locator("#cluster").is_visible()
        assert page.text("#token-error") == ""
        field.fill("wrong")
        field.press("Enter")
        page.wait_for_text("#token-error", "This is not the gateway's token")
        field.fill("naïve ✓")
        field.press("Enter")
        page.wait_for_text("#token-error", "letters, digits and signs")
        field.fill("right")
        page.page.get_by_role("button", name="Connect").click()
        page.wait_for_text("#hosts h3", "host-0")
        assert not page.page.locator("#ask").is_visible()
        assert "right" not in page.page.url
        page.page.reload()
        page.wait_for_text("#hosts h3", "host-0")
        assert page.page.evaluate("sessionStorage.length + localStorage.length + document.cookie.length") == 0
        page.page.get_by_role("button", name="End session").click()
        field.wait_for()


@pytest.mark.unreachable
def test_a_gateway_that_went_and_came_back(double, visit):
    double.overview = {"ranks": [made_up.rank(0)]}
    double.log("rank-alive", detail="of the first gateway")
    page = visit(double.url)
    page.wait_for_text("#log", "of the first gateway")
    double.stop()
    page.wait_for_text("#connection", "connection lost since")
    page.wait_for_text("#connection", "cannot be reached")
    assert page.page.locator("#hosts h3").is_visible(), "what was known last stays"
    page.until(lambda: "lost" in page.page.locator("#announcer").text_content(), "it to be reported")
    page.wait_for_text("#connection", "next try in 6 s")  # the button hides when the page tries by itself
    double.start()
    double.log("rank-alive", detail="of the second gateway")
    page.page.get_by_role("button", name="Try now").click()
    page.wait_for_text("#connection", "live")
    page.wait_for_text("#log", "of the second gateway")
    page.wait_for_text("#log", "The gateway was started anew")
    assert page.page.locator("#log", has_text="of the first gateway").is_visible()
    assert page.page.locator("#log li").count() == 3


def test_a_stream_that_breaks_is_taken_up_where_it_ended(double, visit):
    double.log("rank-alive", detail="first")
    page = visit(double.url)
    page.wait_for_text("#log", "first")
    double.drop()
    page.until(lambda: len(double.asked) == 2, "the page to come back")
    double.log("rank-alive", detail="second")
    page.wait_for_text("#log", "second")
    assert double.asked == ["0", str(double.first + 1)]
    assert page.page.locator("#log li").count() == 2


def test_silence_counts_as_lost(double, visit):
    page = visit(double.url)
    page.wait_for_text("#connection", "live")
    double.silent = True
    page.wait_for_text("#connection", "nothing came for 6 s")
    double.silent = False
    page.wait_for_text("#connection", "live")


PAUSES = """async () => {
    const { Feed } = await import("/dashboard/stream.js");
    const pauses = [];
    return await new Promise((resolve) => {
        const feed = new Feed("/nowhere?", [], () => {}, (state) => {
            if (state.kind === "lost") {
                pauses.push(state.retryAt - performance.now());
                setTimeout(() => (pauses.length === 8 ? (feed.stop(), resolve(pauses)) : feed.hurry()));
            }
        });
    });
}"""


@pytest.mark.unreachable
def test_the_pauses_between_attempts_grow(double, visit):
    page = visit(double.url)
    page.wait_for_text("#connection", "live")
    for attempt, pause in enumerate(page.page.evaluate(PAUSES)):
        longest = min(500 * 2**attempt, 10_000)
        assert longest * 0.7 <= pause <= longest
