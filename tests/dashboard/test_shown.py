"""What the page shows of an overview."""

from __future__ import annotations

import pytest
from support import overview as made_up

EVIL = "<img src=x onerror=alert(1)>"


def test_ranks_on_their_hosts(double, visit):
    ranks = [made_up.rank(each, host=f"host-{each // 2}") for each in range(4)]
    ranks[3] |= {"state": "failed", "reason": "ended by SIGKILL", "heartbeat_age": 42.0}
    problem = made_up.failure("rank 3 (host-1, pid 4003) has failed: ended by SIGKILL", seconds=42.0)
    double.overview = {"ranks": ranks, "problems": [problem]}
    page = visit(double.url)
    page.wait_for_text("#count-ranks", "4")
    assert page.page.locator("#hosts h3").all_inner_texts() == ["host-1", "host-0"], "that with trouble first"
    second, first = page.page.locator("#hosts article").all()
    assert "2 alive" in first.inner_text()
    assert "1 failed, 1 alive" in second.inner_text()
    rows = page.rows("#hosts")
    assert sorted(row[:2] for row in rows if row[0].isdigit()) == [
        ["0", "alive"],
        ["1", "alive"],
        ["2", "alive"],
        ["3", "failed"],
    ]
    assert ["", "ended by SIGKILL"] in rows
    assert page.text("#count-ranks-note") == "1 failed, 3 alive"
    assert page.page.title() == "(1 failed) RankMesh"
    page.wait_for_text("#problems-list li", f"{problem['text']} 4")


def test_a_slow_rank(double, visit):
    ranks = [made_up.rank(0, slow=0.01), made_up.rank(1, slow=0.234, usage=made_up.usage())]
    double.overview = {"ranks": ranks, "jobs": [made_up.job(ranks=2)]}
    page = visit(double.url)
    page.wait_for_text("#jobs", "slow")
    rows = [row[1:2] + row[3:6] for row in page.rows("#hosts") if row[0].isdigit()]
    assert rows == [["alive", "", "", ""], ["slow", "23 %", "95 %", "180 MB"]]
    assert page.page.title() == "(slow) RankMesh"


def test_a_stuck_job(double, visit):
    ranks = [*map(made_up.rank, range(4)), made_up.rank(2, job="other")]
    double.overview = {"ranks": ranks, "jobs": [made_up.job(), made_up.job(job="other")]}
    double.overview["problems"] = [made_up.finding("rank 2 has not come", young=True)]
    page = visit(double.url)
    page.wait_for_text("#problems", "rank 2 has not come")
    assert [row[1] for row in page.rows("#jobs")] == ["running", "running"], "it may be a slow step"
    double.overview["problems"] = [made_up.finding("rank 2 has not come")]
    page.wait_for_text("#jobs", "stuck")
    assert sorted(row[:2] for row in page.rows("#jobs")) == [["job", "stuck"], ["other", "running"]]
    states = [row[1] for row in page.rows("#hosts") if row[0].isdigit()]
    assert states == ["alive", "alive", "stuck", "alive", "alive"]
    assert page.text("#count-ranks-note") == "1 stuck, 4 alive"
    assert page.page.title() == "(stuck) RankMesh"


def test_a_cause_is_said_once(double, visit):
    ranks = [made_up.rank(each, "failed", reason="of rank 1", failed_ranks=[1]) for each in range(3)]
    ranks[1] |= {"reason": "ended by SIGKILL", "failed_ranks": []}
    groups = [made_up.group(name, 3, failure="rank 1 failed: ended by SIGKILL") for name in ("world", "pair")]
    failure = made_up.failure("rank 1 (host-0, pid 4001) has failed: ended by SIGKILL; ranks 0, 2 failed because of it")
    double.overview = {"ranks": ranks, "groups": groups, "problems": [failure]}
    page = visit(double.url)
    page.wait_for_text("#problems", "SIGKILL")
    assert page.page.locator(".reason:visible").all_inner_texts() == ["ended by SIGKILL"]
    assert page.text("#hosts").count("because of rank 1") == 2


def test_hosts_of_one_name_that_share_no_memory_are_two(double, visit):
    ranks = [made_up.rank(each, host="node") for each in range(2)]
    ranks[1]["member"]["host_id"] = "another"
    double.overview = {"ranks": ranks}
    page = visit(double.url)
    page.wait_for_text("#count-ranks", "2")
    assert page.page.locator("#hosts h3").all_inner_texts() == ["node", "node"]


def test_a_job_that_is_over_is_a_line(double, visit):
    over = [made_up.rank(each, "left", job="old") for each in range(4)]
    double.overview = {"ranks": [*over, made_up.rank(0), made_up.rank(1, "left")]}
    page = visit(double.url)
    page.wait_for_text("#hosts", "4 ranks of jobs that are over")
    assert [row[:2] for row in page.rows("#hosts")] == [["job"], ["0", "alive"], ["1", "left"]]
    assert page.text("#count-ranks") == "1"


def test_many_ranks_are_cells_those_in_trouble_first(double, visit):
    ranks = [made_up.rank(each, host=f"host-{each // 1000}", usage=made_up.usage()) for each in range(2010)]
    ranks[1500] |= {"state": "failed"}
    ranks[302] |= {"slow": 0.2}
    double.overview, double.snapshots = {"ranks": ranks}, {302: made_up.snapshot(302)}
    page = visit(double.url)
    page.wait_for_text("#hosts-note", "and 10 ranks more; those in trouble come first")
    assert page.page.locator("#hosts h3").all_inner_texts() == ["host-1", "host-0"]
    cells = page.page.locator("#hosts .cell")
    assert cells.count() == 2000
    assert [cells.nth(place).inner_text() for place in (0, 1, 1000, 1001)] == ["1500", "1000", "302", "0"]
    assert cells.nth(1000).get_attribute("title") == "rank 302: slow 20 %, 95 % of a core, 180 MB"
    assert page.rows("#hosts") == []
    cells.nth(1000).click()
    page.wait_for_text("#rank-title", "Rank 302 of job")
    page.page.keyboard.press("Escape")
    search = page.page.get_by_label("Find", exact=False)
    for words, shown in {"302": ["302"], "FAIL host-1": ["1500"], "host-3": []}.items():
        search.fill(words)
        page.until(lambda shown=shown: [row[0] for row in page.rows("#hosts")][1:] == shown, "the ranks that it finds")
    assert page.text("#hosts-note") == "No rank is like that."


def test_groups_and_their_members(double, visit):
    ranks = [made_up.rank(each) for each in range(4)]
    ranks[2]["state"] = "suspect"
    broken = made_up.group("pair", 2, medium="tcp", failure="rank 1 (host-0, pid 4001) failed: connection closed")
    double.overview = {"ranks": ranks, "groups": [made_up.group(), broken]}
    page = visit(double.url)
    page.wait_for_text("#groups", "world")
    rows = page.rows("#groups")
    assert page.page.title() == "RankMesh"
    assert rows[0] == ["pair job", "tcp", "12/s", "3 MB/s"], "what has failed comes first"
    assert "failed: rank 1 (host-0, pid 4001) failed: connection closed" in rows[1][0]
    assert rows[2] == ["world job", "shm", "12/s", "3 MB/s"]
    members = page.page.get_by_role("list", name="Members of world").locator("li").all_text_contents()
    assert members == ["rank 0#100", "rank 1#101", "rank 2#102, suspect", "rank 3#103"]


def test_the_age_of_call_counts(double, visit):
    double.overview = {"groups": [made_up.group(ranks=2, ages={"0": 0.2, "1": 65.0})]}
    page = visit(double.url)
    page.wait_for_text("#groups", "share of the time in them, as of 1 min 5 s ago")


def test_what_is_in_flight(double, visit):
    brief = made_up.inflight(0.2, arrived=[0], missing=[1, 2, 3], seq=200)
    double.overview = {
        "inflight": [brief, made_up.inflight(12.0, arrived=[0, 1], missing=[3], differing={"2": "barrier"})]
    }
    page = visit(double.url)
    page.wait_for_text("#inflight", "all_reduce")
    (row,) = page.rows("#inflight")
    assert row[0].splitlines() == ["all_reduce(sum, float32 x 1024)", "#103 in world, job"]
    assert row[2:] == ["4.1 kB", "missing 3\nrank 2 does barrier\narrived 0, 1"]
    assert page.text("#inflight-note") == "and 1 operation under way for less than 2 s"
    assert page.text("#count-inflight") == "2"


def test_standalone_agents(double, visit):
    double.overview = {"agents": [made_up.agent("agent-10"), made_up.agent("agent-2", "leased")]}
    page = visit(double.url)
    page.wait_for_text("#agents", "agent-2")
    (leased, free) = page.rows("#agents")
    assert leased[0].splitlines()[0] == "agent-2"
    assert leased[1].splitlines() == ["leased", "job, rank 0 of 2", "python train.py (laptop, pid 77)"]
    assert (free[0].splitlines()[0], free[1]) == ("agent-10", "free")
    assert page.text("#count-agents-note") == "1 leased, 1 free"


def test_the_store(double, visit):
    double.overview = {"store": [{"job": "a", "keys": 3, "names": ["x", "y"]}, {"job": "b", "keys": 0, "names": []}]}
    page = visit(double.url)
    page.wait_for_text("#store", "and 1 more")
    assert page.page.locator("#store summary").all_inner_texts() == ["a 3 keys", "b 0 keys"]
    assert page.page.locator("#store li").all_inner_texts() == ["x", "y"]


def test_the_event_log(double, visit):
    double.log("world-complete", detail="all 2 ranks of job are here")
    page = visit(double.url)
    page.wait_for_text("#log", "all 2 ranks")
    double.log("rank-failed", detail="rank 1 failed")
    page.wait_for_text("#log", "rank 1 failed")
    lines = page.page.locator("#log li p").all_inner_texts()
    assert lines == ["rank failed rank 1 failed", "world complete all 2 ranks of job are here"]
    page.page.get_by_label("failures only").check()
    assert page.page.locator("#log li:visible p").all_inner_texts() == lines[:1]


def test_rates_as_charts_with_words(double, visit):
    double.overview = {"rates": {"operations": 1234.0, "bytes": 3e6}}
    page = visit(double.url)
    page.wait_for_text("#operations-chart", "1.2 k/s")
    assert "3 MB/s" in page.text("#bytes-chart")
    page.page.get_by_role("img", name="Collectives per second, last").wait_for()
    double.overview = {"rates": {"operations": 0.0, "bytes": 0.0}}
    page.page.get_by_role("img", name="now 0, ").wait_for()
    name = page.page.locator("#operations-chart svg").get_attribute("aria-label")
    assert name.endswith("least 0, most 1.2 k")


def test_without_ranks_it_says_how_to_start_some(double, visit):
    page = visit(double.url)
    page.wait_for_text("#no-ranks", "No rank is here yet")
    port = double.url.rpartition(":")[2]
    assert f"MASTER_ADDR=127.0.0.1 MASTER_PORT={port} WORLD_SIZE=2 RANK=0" in page.text("#start-line")
    assert page.text("#no-agents").startswith("None.")
    double.overview = {"ranks": [made_up.rank(0)]}
    page.page.locator("#no-ranks").wait_for(state="hidden")


def test_text_stays_text(double, visit):
    evil_rank = made_up.rank(0, "failed", job=EVIL, host=EVIL, reason=EVIL)
    evil_rank["member"]["http"] = EVIL
    double.overview = {
        "ranks": [evil_rank],
        "groups": [made_up.group(EVIL, 1, job=EVIL, medium=EVIL, failure=EVIL)],
        "inflight": [made_up.inflight(99.0, arrived=[], missing=[0], op=EVIL, name=EVIL, job=EVIL)],
        "agents": [made_up.agent(EVIL, "leased")],
        "store": [{"job": EVIL, "keys": 1, "names": [EVIL]}],
    }
    double.overview["problems"] = [made_up.failure(EVIL, job=EVIL, remedy=EVIL, last=EVIL)]
    double.log("rank-failed", job=EVIL, detail=EVIL)
    page = visit(double.url)
    page.wait_for_text("#log", EVIL)
    for part in (
        "#problems",
        "#hosts h3",
        "#hosts .job",
        "#hosts .reason",
        "#groups .name",
        "#inflight code",
        "#agents",
    ):
        page.wait_for_text(part, EVIL)
    for part in ("#store summary", "#store li"):
        page.wait_for_text(part, EVIL)
    assert page.page.locator("img").count() == 1, "our own"
    assert page.page.locator("[onerror]").count() == 0


def test_nothing_can_become_markup(double, visit):
    page = visit(double.url)
    page.wait_for_text("#connection", "live")
    with pytest.raises(Exception, match="TrustedHTML"):
        page.page.evaluate("document.body.innerHTML = '<b>markup</b>'")
    page.complaints.clear()


def test_elements_stay_when_their_data_changes(double, visit):
    """Sixty-four ranks, updated: the same elements with other texts, so nothing flickers."""
    ranks = [made_up.rank(each, host=f"host-{each // 8}") for each in range(64)]
    double.overview = {"ranks": ranks, "groups": [made_up.group(ranks=64)]}
    page = visit(double.url)
    page.wait_for_text("#count-ranks", "64")
    assert page.page.locator("#hosts h3").count() == 8
    assert page.page.locator(".members li").count() == 32
    assert "and 32 ranks more" in page.text("#groups")
    page.page.evaluate("window.before = [...document.querySelectorAll('#hosts li, .members li, #hosts article')]")
    ranks[9] |= {"state": "failed", "reason": "gone"}
    del ranks[63]
    page.page.locator("#hosts li[data-tone=bad]").wait_for()
    page.until(lambda: page.text("#count-ranks") == "63", "the one that is gone to go")
    gone = page.page.evaluate("window.before.filter((each) => !each.isConnected).length")
    assert gone == 1
    order = page.page.locator("#hosts .cell").all_inner_texts()
    first = [9, 8, *range(10, 16)]
    assert order == [str(each) for each in [*first, *range(8), *range(16, 63)]]


def test_ages_go_on_counting_between_reports(double, visit):
    double.overview = {"ranks": [made_up.rank(0, heartbeat_age=1.0)]}
    page = visit(double.url)
    beat = page.page.locator("#hosts tbody td.number").first
    beat.wait_for()
    double.silent = True
    page.until(lambda: beat.inner_text() >= "3.0 s ago", "the age to grow")


def test_new_problems_are_announced_once(double, visit):
    old = made_up.failure("rank 0 has failed", ranks=[0])
    double.overview = {"problems": [old]}
    page = visit(double.url)
    page.wait_for_text("#problems", "rank 0 has failed")
    announced = page.page.locator("#announcer p")
    assert announced.count() == 0, "it is on the page already"
    note, young = made_up.finding("slow", severity="note"), made_up.finding("young", young=True, ranks=[3])
    double.overview = {"problems": [old, made_up.failure("rank 1 has failed", ranks=[1]), note, young]}
    page.until(announced.count, "it to be announced")
    for number in range(9):
        double.overview = {"problems": [old, made_up.finding(f"wait {number}", ranks=[number])]}
        page.until(lambda last=f"wait {number}": last in announced.all_text_contents(), "it to be announced")
        if number == 0:
            assert announced.all_text_contents() == ["rank 1 has failed", "wait 0"]
    assert announced.all_text_contents() == [f"wait {number}" for number in range(1, 9)], "the last ones are kept"
    assert page.page.locator("[aria-live]").count() == 1


def test_joins_of_a_job_are_one_event(double, visit):
    for number in range(1, 5):
        double.log("rank-joining", detail=f"rank {number - 1} has joined: {number} of 4 ranks")
    double.log("rank-joining", job="other", detail="rank 0 has joined: 1 of 4 ranks")
    page = visit(double.url)
    page.until(lambda: page.page.locator("#log li").count() == 2, "the joins of two jobs")
    assert "4 of 4 ranks" in page.text("#log")


TIMELINE = {
    "job": "job",
    "seconds": 12.0,
    "waits": {"0": [0.5] * 120, "1": [0.0] * 120, "10": [1.0] * 60 + [0.0] * 60},
    "operations": [
        {"group": "world", "call": "all_reduce(x)", "calls": 1200, "seconds": 0.0042, "bytes": 4000}
        | {"slowest": 1, "late": 3.5},
        {"group": "world", "call": EVIL, "calls": 1, "seconds": 2e-5, "bytes": 0, "slowest": -1, "late": 0.0},
    ],
    "silent": [{"rank": 2, "detail": "no answer within 1 s"}],
}  # fmt: skip


def test_waits_and_operations(double, visit):
    double.timelines = [TIMELINE]
    page = visit(double.url)
    page.wait_for_text("#connection", "live")
    page.page.get_by_text("Waits of the ranks, and a table by operation").click()
    page.page.get_by_role("img", name="Waits: rank 0 50 %, rank 1 0 %, rank 10 50 %").wait_for()
    assert page.text("#timelines p").endswith("while the rank waits for others; 1 rank did not answer.")
    assert page.page.locator("#timelines .labels li").all_inner_texts() == ["0: 50 %", "1: 0 %", "10: 50 %"]
    assert page.rows("#timelines") == [
        ["all_reduce(x) world", "1.2 k", "4.2 ms", "4 kB", "rank 1, 3.5 s"],
        [f"{EVIL} world", "1", "20 µs", "0 B", ""],
    ]
    script = "[...document.querySelector('canvas').getContext('2d').getImageData(0, 0, 120, 3).data]"
    pixels = page.page.evaluate(script)
    assert [pixels[4 * (120 * y + x) + 3] for x, y in [(0, 0), (0, 1), (0, 2), (119, 2)]] == [
        pytest.approx(128, abs=2),
        0,
        255,
        0,
    ]
    double.timelines = []
    page.wait_for_text("#timeline-note", "No rank answers.")


def test_an_event_brings_the_overview_at_once(double, visit):
    page = visit(double.url)
    page.wait_for_text("#connection", "live")
    with page.page.expect_request("**/v1/overview"):
        double.log("rank-failed", detail="rank 1 failed")
