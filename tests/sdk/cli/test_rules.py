"""What ``rankmesh doctor`` makes of what it found."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest

from rankmesh._cli.probe import AgentProbe, Clock, Pair, ProbeResults, rounds
from rankmesh._cli.rules import Finding, evaluate
from rankmesh_agent.wire.schemas import ProbeReply

GOOD = ProbeReply("http://x", reached=True, connect=1e-4, round_trip=1e-3)
DROPPED = ProbeReply("http://x", reached=False, stage="connect", error="no answer to a connection")


def agent(rank: int, **changes: Any) -> AgentProbe:
    report = {"version": "1", "host_id": f"h{rank}", "shm_dir": "/dev/shm", "shm_total": 1 << 30, "shm_free": 1 << 30,
              "shm_trouble": "", "slot_bytes": 1 << 20, "transport": "auto"}  # fmt: skip
    found = {"way": GOOD, "clock": Clock(0.0, 0.001), "report": report | changes.pop("report", {}), **changes}
    return AgentProbe(f"rank {rank}", "job", rank, f"host{rank}", 100 + rank, ["http://x"], "alive", "", **found)


def silent(rank: int) -> AgentProbe:
    gone = agent(rank, way=DROPPED, clock=None)
    gone.report = None
    return gone


def findings(agents: list[AgentProbe], bad: set[tuple[int, int]] = frozenset(), **changes: Any) -> list[Finding]:  # type: ignore[assignment]
    pairs = [
        Pair(source, target, DROPPED if (source, target) in bad else GOOD)
        for source, target in permutations(range(len(agents)), 2)
        if agents[source].answers
    ]
    gateway = {"url": "http://g", "version": "1", "round_trip": 1e-3, "clock": Clock(0.2, 1.0)}
    found = {"here": {"version": "1"}, "gateway": gateway, "agents": agents, "pairs": pairs, **changes}
    return evaluate(ProbeResults(**found))


def test_all_is_well():
    assert findings([agent(rank) for rank in range(3)]) == []


def test_a_pair_that_is_cut():
    (found,) = findings([agent(rank) for rank in range(3)], {(1, 2), (2, 1)})
    assert (found.level, found.about, found.names) == ("problem", "pair", ("rank 1", "rank 2"))
    assert found.text == "rank 1 (host1) and rank 2 (host2) do not reach each other: no answer to a connection"


def test_a_way_that_is_cut_in_one_direction():
    (found,) = findings([agent(rank) for rank in range(3)], {(2, 1)})
    assert found.names == ("rank 2", "rank 1")
    assert found.text.startswith("rank 2 (host2) does not reach rank 1 (host1): ")


def test_an_agent_that_nobody_reaches_is_told_once():
    (found,) = findings([agent(0), agent(1), silent(2)], {(0, 2), (1, 2)})
    assert (found.level, found.about, found.names) == ("problem", "agent", ("rank 2",))
    assert "cannot be asked from here, nor does any of 2 others reach it: no answer" in found.text


def test_an_agent_that_only_others_reach():
    (found,) = findings([agent(0), agent(1), silent(2)], {(1, 2)})[1:]
    assert (found.level, found.names) == ("warning", ("rank 2",))
    assert "cannot be asked from here, though rank 0 reaches it" in found.text


def test_a_rank_that_has_failed():
    gone = agent(1)
    gone.state, gone.reason = "failed", "killed"
    (found,) = findings([agent(0), gone])
    assert (found.level, found.text) == ("problem", "rank 1 (host1, pid 101) is failed for the gateway: killed")


def test_pairs_that_could_not_be_measured():
    pairs = [Pair(0, 1, None, "it is busy"), Pair(1, 0, None, "the time was over", timed_out=True)]
    found = findings([agent(0), agent(1)], pairs=pairs)
    assert [(each.level, each.text) for each in found] == [
        ("problem", "the way from rank 0 to rank 1 was not measured: it is busy"),
        ("warning", "the way from rank 1 to rank 0 was not measured: the time was over; give more of it by --timeout"),
    ]


def test_versions_that_differ():
    (found,) = findings([agent(0), agent(1, report={"version": "2"})])
    assert (found.level, found.about) == ("problem", "version")
    assert "1: this command, the gateway, rank 0; 2: rank 1" in found.text


@pytest.mark.parametrize(
    ("clock", "told"),
    [
        (Clock(0.9, 0.0), ""),
        (Clock(5.0, 4.5), ""),
        (Clock(30.0, 0.1), "the clock of the host of rank 1 is 30.0 s ahead of this one"),
        (Clock(-30.0, 0.1), "the clock of the host of rank 1 is 30.0 s behind this one"),
    ],
    ids=["little", "uncertain", "ahead", "behind"],
)
def test_clocks(clock: Clock, told: str):
    found = findings([agent(0), agent(1, clock=clock)])
    assert bool(found) == bool(told)
    assert all(each.level == "warning" and each.text.startswith(told) for each in found)


def test_no_room_for_shared_memory():
    crowd = [agent(rank, report={"host_id": "h", "shm_free": 1 << 20}) for rank in range(2)]
    (found,) = findings([*crowd, agent(2)])
    assert (found.level, found.about, found.names) == ("warning", "shm", ("rank 0", "rank 1"))
    assert "/dev/shm on host0 has 1.05 MB free" in found.text
    assert findings([agent(rank, report={"host_id": "h", "shm_free": 1, "transport": "tcp"}) for rank in (0, 1)]) == []


def test_a_pair_that_is_slow():
    def at(rate: float) -> ProbeReply:
        return ProbeReply("http://x", reached=True, bytes=1000, seconds=1000 / rate)

    pairs = [Pair(i, j, at(1e6 if (i, j) == (0, 1) else 1e9)) for i, j in permutations(range(3), 2)]
    (found,) = findings([agent(rank) for rank in range(3)], pairs=pairs)
    assert (found.level, found.names) == ("warning", ("rank 0", "rank 1"))
    assert "rank 1 (host1) sends to rank 0 (host0) at 1 MB/s, others at 1 GB/s" in found.text


def test_ranks_that_wait_for_others():
    (found,) = findings([], joining={"train": [0, 2, 1]})
    assert found.text == "job train waits for more ranks to join; 0-2 are there: look at what the others say"


@pytest.mark.parametrize("count", range(10))
def test_turns_are_all_pairs_and_nobody_is_asked_twice_at_a_time(count: int):
    made = list(rounds(count))
    assert sorted(pair for turn in made for pair in turn) == sorted(permutations(range(count), 2))
    for turn in made:
        there = [agent for pair in turn for agent in pair]
        assert len(there) == len(set(there))
