"""What the page shows of what has happened: ended jobs, events and rates of before."""

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


def test_the_shares_of_the_members_of_a_group(double, visit):
    double.overview = {"groups": [made_up.group(busy={"0": 0.61, "1": 0.7, "2": 0.04, "3": 0.66})]}
    page = visit(double.url)
    page.wait_for_text("#groups", "world")
    shares = [text.split()[-2:] for text in page.page.locator(".members").first.locator("li").all_inner_texts()]
    assert shares == [["61", "%"], ["70", "%"], ["4", "%"], ["66", "%"]]
