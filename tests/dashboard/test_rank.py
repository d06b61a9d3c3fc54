"""The problems, and a rank in the dialog that a click opens: its stack, its operations and its CPU use."""

from __future__ import annotations

import pytest
from axe_playwright_python.sync_playwright import Axe
from support import overview as made_up
from support.browser import Visit
from support.gateway_double import Double

EVIL = "<img src=x onerror=alert(1)>"
STUCK = "rank 2 has not come to all_reduce #3 for 12.0 s; it is at train.py:8 in load_batch"


@pytest.fixture
def page(double: Double, visit) -> Visit:
    double.overview = {"ranks": [made_up.rank(each) for each in range(4)], "problems": [made_up.finding(STUCK)]}
    double.snapshots = {each: made_up.snapshot(each) for each in range(4)}
    shown = visit(double.url, bypass_csp=True)
    shown.wait_for_text("#hosts h3", "host-0")
    return shown


def open_rank(page: Visit, rank: int) -> None:
    page.page.locator("#hosts").get_by_role("button", name=str(rank), exact=True).click()
    page.page.locator("#rank").wait_for()


def test_the_problems_are_at_the_top(double: Double, page: Visit):
    assert [line for line in page.text("#problems-list").splitlines() if line] == [
        STUCK,
        "last common operation: all_reduce(float32[1000], SUM) #2, 12.0 s ago",
        "what to do: look at that line",
    ]
    assert page.page.locator("#cluster > section").first.get_attribute("id") == "problems"
    young = made_up.finding(EVIL, young=True, last="")
    double.overview |= {"ranks": [*double.overview["ranks"], made_up.rank(0, job="other")], "problems": [young]}
    page.wait_for_text("#problems", f"job: {EVIL}")
    page.wait_for_text("#problems", "look at that line; the wait is young, and may be a slow step")
    old = made_up.failure("rank 2 has failed", seconds=700.0)
    double.overview |= {"problems": [old, made_up.finding("job waits", kind="joining", seconds=4.0)]}
    page.page.locator("#problems").wait_for(state="hidden")


def test_many_problems(double: Double, page: Visit):
    double.overview |= {"problems": [made_up.finding(f"finding {each}", ranks=[each]) for each in range(12)]}
    page.wait_for_text("#problems", "and 4 more problems; rankmesh status lists all")
    assert page.page.locator("#problems-list li").count() == 8


def test_a_click_on_a_rank(double: Double, page: Visit):
    open_rank(page, 2)
    page.wait_for_text("#rank-status", "at train.py:8 in step")
    assert page.text("#rank-title") == "Rank 2 of job"
    assert page.text("#rank-about") == "host-0, pid 4002, epoch 1, stuck, agent 127.0.0.1:8002"
    assert page.text("#rank-reason") == STUCK
    assert page.text("#rank-remedy") == "what to do: look at that line"
    assert page.text("#rank-cpu") == "not known"
    assert page.text("#rank-threads").splitlines() == [
        "MainThread (id 4002)",
        "/home/me/train.py:14 in <module>",
        "line 14",
        "/home/me/train.py:8 in step",
        "line 8",
        "RankMesh: all_reduce (reduce.py:76) … futex_wait (futex.py:84), 2 frames",
    ]
    assert page.text("#rank-others-count") == "1 thread without a line of yours"
    assert page.rows("#rank-operations") == [
        ["store.get(batch)", "", "waits for 5.0 s"],
        ["all_reduce(float32[1000], SUM) #3", "world", "in flight for 12 s"],
        ["all_reduce(float32[1000], SUM) #2", "world", "ended 12 s ago"],
        ["all_reduce(float32[1000], SUM) #1\nValueError: of old", "world", "ended 14 s ago"],
    ]
    fold = page.page.locator("#rank-threads summary")
    fold.click()
    page.wait_for_text("#rank-threads", "reduce.py:76 in all_reduce")
    double.snapshots[2] = made_up.snapshot(2, calls=[])
    double.overview["ranks"][2]["usage"] = made_up.usage(core_wait=0.1)
    use = "95 % of a core in the last 10 s, 180 MB of memory; its main thread waits for a core 10 % of the time"
    page.wait_for_text("#rank-cpu", use)
    page.until(lambda: len(page.rows("#rank-operations")) == 3, "the next answer of its agent")
    assert page.page.locator("#rank-threads details").get_attribute("open") is not None, "it stays open"


def test_a_failed_rank(double: Double, page: Visit):
    ranks = double.overview["ranks"]
    ranks[1] |= {"state": "failed", "reason": "ValueError: no more data at train.py:7 in load"}
    ranks[3] |= {"state": "failed", "reason": "rank 1 failed", "failed_ranks": [1]}
    double.overview["problems"] = []
    page.wait_for_text("#count-ranks-note", "2 failed, 2 alive")
    open_rank(page, 1)
    page.wait_for_text("#rank-reason", "ValueError: no more data at train.py:7 in load")
    assert page.text("#rank-status") == "", "its agent is not asked"
    page.page.keyboard.press("Escape")
    open_rank(page, 3)
    page.wait_for_text("#rank-reason", "because of rank 1: rank 1 failed")


def test_the_dialog_closes(page: Visit):
    open_rank(page, 0)
    page.wait_for_text("#rank-status", "at train.py:8")
    page.page.keyboard.press("Escape")
    page.page.locator("#rank").wait_for(state="hidden")
    assert page.page.evaluate("document.activeElement.textContent") == "0", "the focus is back"
    open_rank(page, 1)
    page.wait_for_text("#rank-title", "Rank 1 of job")
    page.page.get_by_role("button", name="Close").click()
    page.page.locator("#rank").wait_for(state="hidden")


def test_a_rank_that_does_not_answer(double: Double, page: Visit):
    double.snapshots[3] = made_up.snapshot(3, answers=False)
    open_rank(page, 3)
    page.wait_for_text("#rank-status", "it does not answer: no answer within 1 s; its process is stopped")
    assert not page.page.locator("#rank-details").is_visible()
    double.snapshots[3] = made_up.snapshot(3, attached=True)
    page.wait_for_text("#rank-status", "its process is attached to this agent: the stack is the agent's")


@pytest.mark.unreachable
def test_a_gateway_that_refuses(double: Double, page: Visit):
    double.snapshots.clear()
    open_rank(page, 3)
    page.wait_for_text("#rank-status", "the gateway does not answer: the gateway answered 500")


def test_ranks_without_an_agent(double: Double, visit):
    ranks = [made_up.rank(-1, "joining"), made_up.rank(1, "left"), made_up.rank(2)]
    double.overview = {"ranks": ranks}
    page = visit(double.url)
    page.wait_for_text("#hosts", "none yet")
    buttons = page.page.locator("#hosts button.rank")
    assert [each.is_enabled() for each in buttons.all()] == [False, False, True]


@pytest.mark.parametrize("look", ["light", "dark"])
def test_the_dialog_follows_the_rules_of_accessible_pages(double: Double, page: Visit, look: str):
    page.page.emulate_media(color_scheme=look)
    page.page.set_viewport_size({"width": 320, "height": 640})
    open_rank(page, 2)
    page.wait_for_text("#rank-status", "at train.py:8")
    found = Axe().run(page.page)
    assert not found.response["violations"], found.generate_report()
    assert page.page.evaluate("document.querySelector('#rank').scrollWidth - innerWidth") <= 0
