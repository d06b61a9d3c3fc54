"""Jobs that a launcher's ranks start at the launcher's own address: no world has the ranks of two of them."""

from __future__ import annotations

import itertools

import pytest

from rankmesh_agent.wire.errors import RankTakenError

OWN_PORT = r"started, both join the launcher's job 'job': a job that a rank starts needs a MASTER_PORT of its own"


def states(registry) -> dict[int, str]:
    return {info.member.rank: info.state for info in registry.ranks("job")}


def test_the_launchers_ranks_may_join_as_any_rank_and_through_other_processes(registry, ask):
    registry.join(ask.child(0, 1, pid=1000))
    registry.join(ask.child(1, 0, pid=7, ancestors=[6]))
    assert states(registry) == {0: "alive", 1: "alive"}


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_the_jobs_of_two_ranks_at_one_address_do_not_mix(registry, ask, order):
    """The jobs of ranks 0 and 1 have two ranks each."""
    joins = [ask.child(parent, rank, pid=10 + 2 * parent + rank) for parent in range(2) for rank in range(2)]
    refused = 0
    for number in order:
        try:
            registry.join(joins[number])
        except RankTakenError:
            refused += 1
    live = {info.member.pid // 2 for info in registry.ranks("job") if info.state == "alive"}
    whole = [info for info in registry.ranks("job") if info.state == "alive"]
    assert refused > 0
    assert len(whole) < 2 or len(live) == 1


def test_a_member_whose_place_is_in_doubt_fails(registry, ask):
    registry.join(ask.child(0, 0, pid=10))
    registry.join(ask.child(1, 1, pid=13))
    with pytest.raises(RankTakenError, match=OWN_PORT):
        registry.join(ask.child(0, 1, pid=11))
    assert states(registry) == {0: "failed", 1: "alive"}
    with pytest.raises(RankTakenError, match=OWN_PORT):
        registry.join(ask.child(0, 1, pid=11))


def test_a_joiner_whose_place_is_in_doubt_does_not_join(registry, ask):
    registry.join(ask.child(0, 0, 3, pid=10))
    registry.join(ask.child(1, 1, 3, pid=13))
    with pytest.raises(RankTakenError, match=OWN_PORT):
        registry.join(ask.child(0, 1, 3, pid=11))
    assert states(registry) == {1: "joining"}


def test_the_launchers_rank_stays_when_its_child_joins(registry, ask):
    registry.join(ask.child(0, 0, pid=1000))
    with pytest.raises(RankTakenError, match=OWN_PORT):
        registry.join(ask.child(0, 1, pid=7, ancestors=[6, 1000]))
    registry.join(ask.child(1, 1, pid=1001))
    assert states(registry) == {0: "alive", 1: "alive"}
    with pytest.raises(RankTakenError, match="already holds rank 0"):
        registry.join(ask.child(0, 0, pid=8, ancestors=[6, 1000]))
    assert states(registry) == {0: "alive", 1: "alive"}


def test_a_process_of_another_parent_joins_no_world_of_one_parent(registry, ask):
    registry.join(ask.child(0, 0, 3, pid=10))
    registry.join(ask.child(0, 1, 3, pid=11))
    with pytest.raises(RankTakenError, match=r"which the launcher's ranks 0 and 1 started"):
        registry.join(ask.child(1, 2, 3, pid=15))
    registry.join(ask.child(0, 2, 3, pid=12))
    assert set(states(registry).values()) == {"alive"}


def test_a_process_in_the_place_of_one_that_died_joins(registry, ask):
    """As a shell script that starts the rank's program again."""
    registry.join(ask.child(0, 0, pid=10))
    registry.join(ask.child(1, 1, pid=11))
    registry.process_exited("job", 0, 10, "host0", "signal SIGKILL (9)")
    registry.process_exited("job", 1, 11, "host1", "signal SIGKILL (9)")
    registry.join(ask.child(0, 0, pid=20))
    registry.join(ask.child(1, 1, pid=21))
    assert states(registry) == {0: "alive", 1: "alive"}


def test_jobs_at_other_names_may_have_any_parents(registry, ask):
    for number, rank in enumerate((0, 1, 2)):
        request = ask.child(number // 2, rank, 3, pid=10 + number)
        request.job = "another"
        registry.join(request)
    assert {info.state for info in registry.ranks("another")} == {"alive"}
