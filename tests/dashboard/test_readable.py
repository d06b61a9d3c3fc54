"""Whether everybody can read it: small screens, dark and light, screen readers."""

from __future__ import annotations

from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from support import overview as made_up
from support.browser import Visit
from support.gateway_double import Double

LOOKS: dict[str, dict[str, Any]] = {
    "light": {"viewport": {"width": 1440, "height": 900}},
    "dark": {"viewport": {"width": 1440, "height": 900}, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 320, "height": 640}},
    "dark phone": {"viewport": {"width": 320, "height": 640}, "color_scheme": "dark", "reduced_motion": "reduce"},
    "forced colours": {"viewport": {"width": 800, "height": 900}, "forced_colors": "active"},
}
LONG = "a-job-with-a-name-that-does-not-end-" * 4


def everything() -> dict[str, Any]:
    """Each state there is, and long names."""
    states = ["alive", "suspect", "failed", "joining", "left"]
    ranks = [made_up.rank(each, state, host=f"host-{each // 4}") for each, state in enumerate(states)]
    ranks[2]["reason"] = "ended by SIGKILL, as its launcher saw: " + LONG
    agents = [made_up.agent(f"agent-{state}", state) for state in ("free", "leased", "suspect", "failed")]
    return {
        "ranks": [*ranks, made_up.rank(0, job=LONG, host=LONG)],
        "agents": [*agents, made_up.agent(LONG)],
        "groups": [made_up.group(ranks=5), made_up.group(LONG, 64, job=LONG, failure=LONG)],
        "inflight": [
            made_up.inflight(arrived=[0, 1], missing=[2, 3, 4]),
            made_up.inflight(3.0, arrived=[], missing=[0], op=LONG),
        ],
        "store": [{"job": "job", "keys": 120, "names": ["epoch", LONG]}],
        "rates": {"operations": 1e6, "bytes": 1e10},
        "problems": [made_up.failure(LONG), made_up.finding(LONG), made_up.finding(LONG, severity="note")],
    }


@pytest.fixture
def full(double: Double) -> Double:
    double.overview = everything()
    for event in ("rank-joining", "rank-suspect", "rank-failed", "rank-left", "agent-leased"):
        double.log(event, detail=f"{event} {LONG}")
    return double


def check(page: Visit, *, fits: bool = False) -> None:
    """Check the rules of accessible pages, and that the page is no wider than the screen."""
    found = Axe().run(page.page)
    assert not found.response["violations"], found.generate_report()
    assert not fits or page.page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


@pytest.mark.parametrize("look", LOOKS)
def test_it_follows_the_rules_of_accessible_pages(full, visit, look):
    page = visit(full.url, **LOOKS[look], bypass_csp=True)
    page.wait_for_text("#log", "agent-leased")
    page.wait_for_text("#hosts", "SIGKILL")
    check(page, fits=True)


@pytest.mark.unreachable
@pytest.mark.parametrize("look", ["light", "dark phone"])
def test_what_was_known_last_can_still_be_read(full, visit, look):
    page = visit(full.url, **LOOKS[look], bypass_csp=True)
    page.wait_for_text("#hosts", "SIGKILL")
    full.stop()
    page.wait_for_text("#connection", "connection lost since")
    check(page, fits=True)


@pytest.mark.unreachable
@pytest.mark.parametrize("look", ["light", "dark phone"])
def test_the_form_follows_them_too(visit, look):
    with Double(token="secret") as double:
        page = visit(double.url, **LOOKS[look], bypass_csp=True)
        page.page.get_by_label("Token", exact=True).fill("wrong")
        page.page.get_by_role("button", name="Connect").click()
        page.wait_for_text("#token-error", "not the gateway")
        check(page)


def test_the_outline_a_screen_reader_has(full, visit):
    page = visit(full.url).page
    page.locator("#hosts h3").first.wait_for()
    for role in ("banner", "main", "contentinfo"):
        assert page.get_by_role(role).count() == 1
    assert page.get_by_role("heading", level=1).all_inner_texts() == ["RankMesh"]
    sections = ["Needs attention", "Overview", "Ranks", "Time", "In flight", "Groups", "Events"]
    sections += ["Standalone agents", "Store"]
    assert page.get_by_role("heading", level=2).all_inner_texts() == sections
    for section in sections:
        assert page.get_by_role("region", name=section, exact=True).count() >= 1
    for table in (
        "Ranks on host-0",
        "Operations that have been under way",
        "Groups, what carries them",
        "Standalone agents",
    ):
        assert page.get_by_role("table", name=table).count() == 1
    assert page.get_by_role("rowheader", name="2", exact=True).count() == 1
    names = page.get_by_role("table", name="Ranks on host-0").get_by_role("columnheader").all_inner_texts()
    assert names == ["Rank", "State", "Heartbeat", "Slow", "CPU", "Memory", "Process"]


def test_by_keyboard(full, visit):
    page = visit(full.url).page
    page.locator("#hosts h3").first.wait_for()
    page.keyboard.press("Tab")
    skip = page.get_by_role("link", name="Skip to the cluster")
    assert skip.evaluate("(each) => each === document.activeElement && each.getBoundingClientRect().top >= 0")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    reached = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none" or (
            page.evaluate("document.activeElement === document.body")
        )
    assert {"log-failures", "log-box", "SUMMARY"} <= reached
