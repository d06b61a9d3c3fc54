"""The findings of ``rankmesh doctor``."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest
from support import overview

from rankmesh._cli.checks import AgentProbe, CheckResult, Clock, Pair, ProbeResults, evaluate, rounds
from rankmesh_agent.wire.schemas import ProbeReply

GOOD = ProbeReply("http://x", reached=True, connect=1e-4, round_trip=1e-3)
DROPPED = ProbeReply("http://x", reached=False, stage="connect", error="no answer to a connection")
BOTH = "rank 1 (host1) and rank 2 (host2)"
UNREACHED = "rank 2 (host2, pid 102) cannot be asked from here"
NO_ANSWER = ": no answer to a connection"
MORE_TIME = "raise --timeout"
FAILURES = [overview.failure("rank 1 has failed: killed", ranks=[1])]
SUSPECT = "rank 1 (host1, pid 101) of job job is suspect: no heartbeat for 4.0 s"
JOINING = "job train waits for more ranks to join; 0-2 are there: look at what the others say"
VERSIONS = "RankMesh is not of one version everywhere: 1: this command, the gateway, rank 0; 2: rank 1; install one"


def agent(rank: int, **changes: Any) -> AgentProbe:
    report = {"version": "1", "host_id": f"h{rank}", "shm_dir": "/dev/shm", "shm_total": 1 << 30, "shm_free": 1 << 30,
              "shm_trouble": "", "slot_bytes": 1 << 20, "transport": "auto", "load": 0.5}  # fmt: skip
    found = {"way": GOOD, "clock": Clock(0.0, 0.001), "report": report | changes.pop("report", {}), **changes}
    found = {"state": "alive", "reason": "", **found}
    return AgentProbe(f"rank {rank}", "job", rank, f"host{rank}", 100 + rank, ["http://x"], **found)


def silent(rank: int, way: ProbeReply = DROPPED, **changes: Any) -> AgentProbe:
    gone = agent(rank, way=way, clock=None, **changes)
    gone.report = None
    return gone


def findings(agents: list[AgentProbe], bad: set[tuple[int, int]] = frozenset(), **changes: Any) -> list[CheckResult]:  # type: ignore[assignment]
    pairs = [
        Pair(one, other, DROPPED if (source, target) in bad else GOOD)
        for (source, one), (target, other) in permutations(enumerate(agents), 2)
        if one.report is not None
    ]
    gateway = {"url": "http://g", "version": "1", "round_trip": 1e-3, "clock": Clock(0.2, 1.0)}
    found = {
        "here": {"version": "1", "host": "host9", "load": 0.5},
        "gateway": gateway,
        "agents": agents,
        "pairs": pairs,
        **changes,
    }
    return evaluate(ProbeResults(**found))


def trio() -> list[AgentProbe]:
    return [agent(rank) for rank in range(3)]


TWO = [agent(0), agent(1)]
LOADED = [agent(0), agent(1, report={"load": 7.75})]


def test_all_is_well():
    assert findings(trio()) == []


CASES: dict[str, tuple[Callable[[], list[CheckResult]], CheckResult]] = {
    "a pair that is cut": (
        lambda: findings(trio(), {(1, 2), (2, 1)}),
        CheckResult("problem", "pair", ("rank 1", "rank 2"), f"{BOTH} do not reach each other{NO_ANSWER}"),
    ),
    "a pair that is cut in one direction": (
        lambda: findings(trio(), {(2, 1)}),
        CheckResult(
            "problem", "pair", ("rank 2", "rank 1"), f"rank 2 (host2) does not reach rank 1 (host1){NO_ANSWER}"
        ),
    ),
    "an agent that no other reaches": (
        lambda: findings([agent(0), agent(1), silent(2)], {(0, 2), (1, 2)}),
        CheckResult("problem", "agent", ("rank 2",), f"{UNREACHED}, nor does any of 2 others reach it{NO_ANSWER}"),
    ),
    "an agent that only others reach": (
        lambda: findings([agent(0), agent(1), silent(2)], {(1, 2)})[1:],
        CheckResult("warning", "agent", ("rank 2",), f"{UNREACHED}, though rank 0 reaches it{NO_ANSWER}"),
    ),
    "a rank that has failed": (
        lambda: findings([agent(0), agent(1, state="failed")], problems=FAILURES),
        CheckResult("problem", "agent", ("rank 1",), "rank 1 has failed: killed"),
    ),
    "a job that is over": (
        lambda: findings([], problems=FAILURES),
        CheckResult("warning", "agent", (), "job job is over: rank 1 has failed: killed"),
    ),
    "a rank that is silent": (
        lambda: findings(
            [agent(0), agent(1, state="suspect")], problems=[overview.finding(SUSPECT, kind="suspect", ranks=[1])]
        ),
        CheckResult("warning", "agent", ("rank 1",), SUSPECT),
    ),
    "a pair that could not be measured": (
        lambda: findings(TWO, pairs=[Pair(*TWO, None, "it is busy")]),
        CheckResult("problem", "pair", ("rank 0",), "the way from rank 0 to rank 1 was not measured: it is busy"),
    ),
    "a pair that was not measured in time": (
        lambda: findings(TWO, pairs=[Pair(*TWO[::-1], None, "late", timed_out=True)]),
        CheckResult(
            "warning", "pair", ("rank 1",), f"the way from rank 1 to rank 0 was not measured: late; {MORE_TIME}"
        ),
    ),
    "versions that differ": (
        lambda: findings([agent(0), agent(1, report={"version": "2"})]),
        CheckResult("problem", "version", ("this command", "the gateway", "rank 0", "rank 1"), VERSIONS),
    ),
    "ranks that wait for others": (
        lambda: findings([], joining={"train": [0, 2, 1]}),
        CheckResult("warning", "agent", (), JOINING),
    ),
}


@pytest.mark.parametrize(("found", "expected"), CASES.values(), ids=CASES)
def test_a_finding(found: Callable[[], list[CheckResult]], expected: CheckResult):
    assert found() == [expected]


BUSY = {"version": "1", "host": "host1", "load": 7.75}
LATE = ProbeReply("http://x", reached=False, stage="answer", error="no answer within 3 s")
ASKED = "rank 1 (host1, pid 101) cannot be asked from here, and there is no other agent to try: no answer within 3 s"
HINT = (
    "; host1 is busy, with 7.8 processes for each of its processors: raise --request-timeout before you look for a "
    "fault"
)


@pytest.mark.parametrize(
    ("found", "level", "text"),
    [
        (lambda: findings([silent(1, LATE)], here=BUSY), "warning", ASKED + HINT),
        (lambda: findings([silent(1, LATE)]), "problem", ASKED),
        (
            lambda: findings([silent(1, LATE, process="T")], here=BUSY),
            "problem",
            f"{ASKED}; the process is stopped (state T): kill -CONT 101 lets it go on",
        ),
        (lambda: findings([silent(1)], here=BUSY), "problem", ASKED.replace("within 3 s", "to a connection")),
        (
            lambda: findings(LOADED, pairs=[Pair(*LOADED, LATE)]),
            "warning",
            f"rank 0 (host0) does not reach rank 1 (host1): no answer within 3 s{HINT}",
        ),
    ],
    ids=["a busy host", "an idle host", "a stopped process", "dropped packets", "a pair with a busy host"],
)
def test_a_busy_host_is_told_from_a_broken_one(found: Callable[[], list[CheckResult]], level: str, text: str):
    assert [(each.level, each.text) for each in found()] == [(level, text)]


@pytest.mark.parametrize(
    ("clock", "text"),
    [
        (Clock(0.9, 0.0), ""),
        (Clock(5.0, 4.5), ""),
        (Clock(30.0, 0.1), "the clock of the host of rank 1 is 30.0 s ahead of this one"),
        (Clock(-30.0, 0.1), "the clock of the host of rank 1 is 30.0 s behind this one"),
    ],
    ids=["little", "uncertain", "ahead", "behind"],
)
def test_clocks(clock: Clock, text: str):
    found = findings([agent(0), agent(1, clock=clock)])
    assert bool(found) == bool(text)
    assert all(each.level == "warning" and each.text.startswith(text) for each in found)


def test_no_room_for_shared_memory():
    crowd = [agent(rank, report={"host_id": "h", "shm_free": 1 << 20}) for rank in range(2)]
    (found,) = findings([*crowd, agent(2)])
    assert (found.level, found.about, found.names) == ("warning", "shm", ("rank 0", "rank 1"))
    assert "/dev/shm on host0 has 1.05 MB free" in found.text
    assert findings([agent(rank, report={"host_id": "h", "shm_free": 1, "transport": "tcp"}) for rank in (0, 1)]) == []


def test_a_pair_that_is_slow():
    def at(rate: float) -> ProbeReply:
        return ProbeReply("http://x", reached=True, bytes=1000, seconds=1000 / rate)

    agents = trio()
    pairs = [Pair(*both, at(1e6 if both == tuple(agents[:2]) else 1e9)) for both in permutations(agents, 2)]
    (found,) = findings(agents, pairs=pairs)
    assert (found.level, found.names) == ("warning", ("rank 0", "rank 1"))
    assert "rank 1 (host1) sends to rank 0 (host0) at 1 MB/s, others at 1 GB/s" in found.text


@pytest.mark.parametrize("count", [0, 1, 2, 3, 8, 9])
def test_turns_are_all_pairs_and_nobody_is_asked_twice_at_a_time(count: int):
    made = list(rounds(count))
    assert sorted(pair for turn in made for pair in turn) == sorted(permutations(range(count), 2))
    for turn in made:
        there = [agent for pair in turn for agent in pair]
        assert len(there) == len(set(there))
