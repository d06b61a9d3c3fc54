"""What a join that waits logs, and which ranks do."""

from __future__ import annotations

import logging
import re

import pytest

from rankmesh_agent.config.settings import Settings
from rankmesh_agent.membership import missing
from rankmesh_agent.membership.missing import MissingRanks
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.wire.schemas import UNASSIGNED, JoinReply, Member

URL = "http://10.0.0.1:29500"
ALONE = Settings(job="job")
"""Of a process without a launcher."""
FIRST, SECOND = (Settings(job="job", local_rank=rank, local_size=4) for rank in range(2))
"""Of two of the four ranks of a node."""


def member(rank: int, host: str = "a", instance: str = "") -> Member:
    return Member(rank, instance or f"r{rank}", host, host, 100 + rank, [], "")


def reply(members: list[Member]) -> JoinReply:
    return JoinReply(False, "job", 1, 2, members, [])


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    """Returns what one of the members logs; the interval is over at once."""
    monkeypatch.setattr(missing, "REPORT_SECONDS", 0.0)
    caplog.set_level(logging.WARNING, "rankmesh")

    def run(world_size: int, members: list[Member], me: int = 0, launched: Settings = ALONE) -> list[str]:
        caplog.clear()
        MissingRanks(launched, world_size, Deadline(300)).ranks_missing(URL, members[me], reply(members))
        return [re.sub(r"^waiting for (.*); 0 s of 300 s .*", r"\1", text) for text in caplog.messages]

    return run


def test_the_line(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr(missing, "REPORT_SECONDS", 0.0)
    reports = MissingRanks(ALONE, 2, Deadline(300))
    reports.ranks_missing(URL, member(0), reply([member(0)]))
    assert caplog.messages == [
        (
            "waiting for 1 of 2 ranks: a (rank 0) is here, rank 1 is missing; 0 s of 300 s have passed; "
            f"gateway {URL}, job 'job'"
        )
    ]


def test_nodes_of_a_launcher(logged):
    first = [member(rank) for rank in range(4)]
    launched = FIRST
    assert logged(8, first, launched=launched) == [
        "1 of 2 nodes: node 0 (a, ranks 0-3) is here, ranks 4-7 are missing (node 1)"
    ]
    assert logged(16, [*first, *(member(rank, "c") for rank in range(8, 12))], launched=launched) == [
        (
            "2 of 4 nodes: node 0 (a, ranks 0-3), node 2 (c, ranks 8-11) are here, ranks 4-7, 12-15 are missing "
            "(nodes 1, 3)"
        )
    ]
    assert logged(8, [*first, member(5, "b")], launched=launched) == [
        "3 of 8 ranks: node 0 (a, ranks 0-3), node 1 (b, rank 5) are here, ranks 4, 6-7 are missing"
    ], "a part of a node"
    assert logged(7, first, launched=launched) == ["3 of 7 ranks: a (ranks 0-3) is here, ranks 4-6 are missing"]


def test_processes_without_a_rank(logged):
    some = [member(1), *(member(UNASSIGNED, "b", f"b{number}") for number in range(2))]
    assert logged(4, some) == ["1 of 4 processes: a (rank 1), b (2 processes) are here"]


def test_one_rank_of_a_host_reports_and_not_every_host(logged):
    ranks = [member(rank, f"host-{rank // 2}") for rank in range(40)]
    assert [bool(logged(41, ranks, each)) for each in range(40)] == [rank < 16 and rank % 2 == 0 for rank in range(40)]
    assert logged(41, ranks)[0].endswith("host-7 (ranks 14-15), 12 more hosts are here, rank 40 is missing")


@pytest.mark.parametrize(
    ("launched", "reports"),
    [
        (FIRST, True),
        (ALONE, True),
        (SECOND, False),
    ],
)
def test_a_gateway_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, launched: Settings, reports: bool
):
    monkeypatch.setattr(missing, "GATEWAY_SECONDS", 0.0)
    MissingRanks(launched, 8, Deadline(300)).gateway_missing(URL, member(4), "connection refused")
    text = f"rank 4 (a, pid 104) still waits for the gateway at {URL}: connection refused; 0 s of 300 s have passed"
    assert caplog.messages == [text] * reports


def test_the_interval(caplog: pytest.LogCaptureFixture):
    reports = MissingRanks(ALONE, 2, Deadline(300))
    assert 0 < reports.seconds_to_next() <= missing.REPORT_SECONDS
    reports.ranks_missing(URL, member(0), reply([member(0)]))
    reports.gateway_missing(URL, member(0), "connection refused")
    assert caplog.messages == []
