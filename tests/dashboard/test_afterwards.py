"""What the page shows of what has happened: ended jobs, causes and their consequences, events and rates of before."""

from __future__ import annotations

import time
from typing import Any

from support import overview as made_up


def job(name: str, state: str, ranks: dict[str, int], **more: Any) -> dict[str, Any]:
    """A job as ``GET /v1/jobs`` has it."""
    size, since = sum(ranks.values()), time.time() - 185
    base = {"job": name, "epoch": 1, "state": state, "world_size": size, "ranks": ranks, "since": since, "ended": None}
    return base | more


def test_jobs_and_how_they_ended(double, visit):
    ended = time.time() - 60
    over = job("old", "failed", {"left": 3, "failed": 1}, since=ended - 42, ended=ended)
    before = job("train", "failed", {"failed": 4}, since=ended - 9, ended=ended)
    double.overview = {"jobs": [over, before, job("train", "running", {"alive": 4}, epoch=2)]}
    page = visit(double.url)
    page.wait_for_text("#jobs", "old")
    running, finished = page.rows("#jobs")
    assert running[:3] == ["train epoch 2", "running", "4 alive"]
    assert running[3].startswith("for 3 min ")
    clock = time.strftime("%H:%M:%S", time.localtime(ended))
    assert finished == ["old", "failed", "1 failed, 3 left", f"42 s, until {clock}"]


def test_the_cause_comes_first_and_has_its_victims_folded_under_it(double, visit):
    victims = [
        made_up.rank(each, "failed", reason="RankFailedError: rank 2", heartbeat_age=50.0, failed_ranks=[2])
        for each in (0, 1, 3)
    ]
    cause = made_up.rank(2, "failed", reason="signal SIGKILL (9)", heartbeat_age=4.0)
    double.overview = {"ranks": [victims[0], victims[1], cause, victims[2], made_up.rank(0, "failed", job="other")]}
    page = visit(double.url)
    page.wait_for_text("#attention", "Rank 2 of job failed")
    items = page.page.locator("#attention-list > li")
    assert items.count() == 2, "one a job"
    (folded,) = page.page.locator("#attention-list > li details:visible").all()
    assert folded.locator("summary").inner_text() == "3 ranks failed because of it: 0, 1, 3"
    assert not folded.locator("li").first.is_visible()
    folded.locator("summary").click()
    assert folded.locator("li").all_inner_texts() == [f"rank {each}: RankFailedError: rank 2" for each in (0, 1, 3)]
    assert page.page.title() == "(5 failed) RankMesh"


def test_victims_whose_cause_is_not_known(double, visit):
    lost = [made_up.rank(each, "failed", reason="connection lost", failed_ranks=[9]) for each in range(2)]
    double.overview = {"ranks": lost}
    page = visit(double.url)
    page.wait_for_text("#attention", "Rank 0 of job failed")
    assert "1 rank failed because of it: 1" in page.text("#attention")


def test_events_are_in_the_order_of_time(double, visit):
    now = time.time()
    double.log("rank-alive", detail="second", time=now - 20)
    double.log("rank-failed", detail="third", time=now - 10)
    double.log("rank-suspect", detail="first: it was noticed late", time=now - 30)
    page = visit(double.url)
    page.wait_for_text("#log", "first")
    assert [text.split("\n")[-1].split(" ", 2)[-1] for text in page.page.locator("#log li p").all_inner_texts()] == [
        "third",
        "second",
        "first: it was noticed late",
    ]


def test_rates_of_before_the_page_was_opened(double, visit):
    double.overview = {"rates": {"operations": 5.0, "bytes": 0.0}}
    double.rates = [{"age": float(age), "operations": 40.0, "bytes": 2000.0} for age in range(200, 2, -2)]
    page = visit(double.url)
    drawing = page.page.locator("#operations-chart svg")
    page.until(lambda: "most 40" in (drawing.get_attribute("aria-label") or ""), "the earlier rates")
    assert "last 20" in drawing.get_attribute("aria-label"), "200 s and a little"
    assert "5 min ago" in page.text("#operations-chart")
    assert "most 2 kB" in page.page.locator("#bytes-chart svg").get_attribute("aria-label")


def test_the_rank_that_the_others_wait_for(double, visit):
    shares = {"0": 0.61, "1": 0.7, "2": 0.04, "3": 0.66}
    even = made_up.group("pair", 4, busy=dict.fromkeys("0123", 0.7))
    double.overview = {"groups": [made_up.group(busy=shares), even]}
    page = visit(double.url)
    page.wait_for_text(
        "#groups", "the others wait for rank 2: it spends 4 % of its time in operations, they 61 % to 70 %"
    )
    assert page.text("#groups").count("the others wait for") == 1
    assert [text.split()[-2:] for text in page.page.locator(".members").first.locator("li").all_inner_texts()] == [
        ["61", "%"],
        ["70", "%"],
        ["4", "%"],
        ["66", "%"],
    ]
