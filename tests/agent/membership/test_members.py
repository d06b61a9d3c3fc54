"""All ranks of a world, from the reply to a join."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankmesh_agent.membership.join import all_members, check_settings
from rankmesh_agent.wire.errors import DistNetworkError
from rankmesh_agent.wire.schemas import HostTable, JoinReply, Member, Process

PROCESSES = st.lists(st.builds(Process, st.sampled_from("abc"), st.integers(0, 3), st.integers(1, 1 << 22)))


@given(PROCESSES)
def test_the_table_gives_the_processes_again(processes):
    table = HostTable.of(processes)
    assert list(table.processes()) == processes
    assert len(table.hosts) == len(list(itertools.groupby(processes, lambda each: each[:2])))


def member(rank: int, number: int) -> Member:
    return Member(rank, f"i{rank}", f"node{number}", f"id-of-{number}", 100 + rank, ["a:1"], "http://a:2")


def test_listed_members_are_whole_and_all_have_hosts_and_processes():
    on = [0, 0, 1, 1, 2, 0]
    hosts = HostTable.of(Process(f"node{number}", number, 100 + rank) for rank, number in enumerate(on))
    listed = [member(rank, on[rank]) for rank in (1, 2)]
    found = all_members(JoinReply(True, "job", 1, 6, listed, [], hosts=hosts))
    assert [found[rank] for rank in (1, 2)] == listed
    assert [each.described() for each in found.values()] == [member(rank, on[rank]).described() for rank in range(6)]
    ids = [each.host_id for each in found.values()]
    assert [ids.index(each) for each in ids] == [on.index(number) for number in on], "equal where ranks share a host"
    assert ids[0] == "id-of-0"
    assert [bool(each.addresses) for each in found.values()] == [False, True, True, False, False, False]


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ([(65536, "auto"), (65536, "tcp"), (65536, "auto")], None),
        ([(-1, ""), (1024, "shm"), (1024, "auto")], None),  # an older version does not report its settings
        ([(65536, ""), (65536, ""), (1024, "")], r"EAGER_BYTES .*: 65536 on rank 0 .*, rank 1 .*; 1024 on rank 2 "),
        ([(0, "tcp"), (0, "shm"), (0, "tcp")], r"TRANSPORT .*: tcp on rank 0 .*, rank 2 .*; shm on rank 1 \(here, pid"),
        (
            [(512 if rank == 9 else 1024, "") for rank in range(20)],
            r"rank 3 \(here, pid 7\) and 15 more; 512 on rank 9 ",
        ),
    ],
)
def test_settings_that_have_to_be_the_same_are_compared(settings: list[tuple[int, str]], error: str | None) -> None:
    members = [
        Member(rank, f"{rank:032x}", "here", "host", 7, ["127.0.0.1:1"], "", eager, transport)
        for rank, (eager, transport) in enumerate(settings)
    ]
    if error is None:
        check_settings(members)
    else:
        with pytest.raises(DistNetworkError, match=error) as caught:
            check_settings(members)
        assert len(members) == 3 or caught.value.ranks == (9,)
