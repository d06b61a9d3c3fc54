"""Wrong calls raise before anything is sent, mismatched ones raise everywhere; the group goes on. Three ranks."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
from support import hosting
from support.me import GATEWAY
from support.once import Said, once
from support.processes import Me, Ranks
from support.wrong import MISMATCHED, SIZE, WRONG, try_mismatched, try_wrong

import rankmesh as dist

pytestmark = pytest.mark.processes

each_transport = pytest.mark.parametrize("transport", ["shm", "tcp"])


def wrong_ones(me: Me) -> None:
    me.init(timeout=60)
    try_wrong(me)
    dist.destroy_process_group()


def mismatched_ones(me: Me) -> None:
    me.init(timeout=60)
    try_mismatched(me)
    dist.destroy_process_group()


def variables(ranks: Ranks, medium: str) -> dict[str, str] | Callable[[int], dict[str, str]]:
    """Return the variables of ranks over a transport, attached to standalone agents, or on the hosts given by letters.

    Ranks with different RANKMESH_SHM_DIR share no memory, as if they were on several hosts.
    """
    if medium == "attached":
        return {GATEWAY: hosting.cluster({}, SIZE).url}
    if medium in ("shm", "tcp"):
        return {"RANKMESH_TRANSPORT": medium}
    for host in set(medium):
        (ranks.folder / host).mkdir()
    return lambda rank: {"RANKMESH_SHM_DIR": str(ranks.folder / medium[rank])}


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Said]:
    """What the ranks said of a body over a medium."""
    return once(
        tmp_path_factory,
        lambda ranks, body, medium: [rank.said for rank in ranks.run(body, SIZE, env=variables(ranks, medium))],
    )


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_raises_before_anything_is_sent(tried: Callable[..., Said], name: str) -> None:
    said = tried(wrong_ones, "tcp")
    assert len(said[1][name]) == 2, "rank 1 made it alone, then with the others"
    for attempt in (attempt for of_rank in said for attempt in of_rank[name]):
        assert attempt["error"] == WRONG[name].error.__name__, attempt["text"]
        assert re.search(WRONG[name].says, attempt["text"])
        assert attempt["seconds"] < 30
        assert attempt["unchanged"]
        assert attempt["usable"]


@pytest.mark.parametrize("medium", ["shm", "tcp", "aab", "attached"])
@pytest.mark.parametrize("name", MISMATCHED)
def test_a_mismatch_raises_on_every_rank(tried: Callable[..., Said], medium: str, name: str) -> None:
    said = tried(mismatched_ones, medium)
    for attempt in (attempt for of_rank in said for attempt in of_rank[name]):
        assert attempt["error"] == "CollectiveMismatchError", attempt["text"]
        assert "the ranks did not make the same call" in attempt["text"]
        assert all(f"rank {rank}: " in attempt["text"] for rank in range(SIZE)), "names each rank's call"
        assert attempt["unchanged"]
        assert attempt["usable"]


def outsider(me: Me) -> None:
    import warnings

    me.init(timeout=60)
    group = dist.new_group([0, 2])
    ones = np.ones(3)
    if me.rank == 1:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            returned = [
                dist.all_reduce(ones, group=group),
                dist.all_reduce(ones, group=group, async_op=True),
                dist.gather(ones, group=group, dst=2),
                dist.all_to_all([ones], [ones, ones], group=group),
                dist.recv(ones, src=0, group=group),
            ]
        me.say(returned=returned, warned=[str(one.message) for one in caught])
    else:
        me.say(
            by_number=me.attempt(dist.broadcast, ones, src=1, group=group)["text"],
            by_group_rank=me.attempt(dist.broadcast, ones, group_src=2, group=group)["text"],
            send=me.attempt(dist.send, ones, dst=1, group=group)["text"],
            new_rank=dist.get_rank(group),
        )
        dist.all_reduce(ones, group=group)
        dist.broadcast(ones, src=2, group=group)
    me.say(ones=ones.tolist())
    dist.all_reduce(ones)
    me.say(later=ones.tolist())
    dist.destroy_process_group()


def test_who_is_not_a_member_is_told(ranks: Ranks) -> None:
    zero, one, two = (rank.said for rank in ranks.run(outsider, 3))
    assert one["returned"] == [None, None, None, None, -1]
    assert len(one["warned"]) == 5
    assert all("not a member of the group" in text for text in one["warned"])
    assert one["ones"] == [1, 1, 1]
    for number, said in enumerate((zero, two)):
        assert said["by_number"] == "src=1 is not in the group, whose ranks are [0, 2]"
        assert said["by_group_rank"] == "group_src=2 is not in the group, whose ranks are 0 to 1"
        assert said["send"] == "dst=1 is not in the group, whose ranks are [0, 2]"
        assert (said["new_rank"], said["ones"]) == (number, [2, 2, 2])
    assert zero["later"] == one["later"] == two["later"] == [5, 5, 5]


def unfitting_messages(me: Me) -> None:
    me.init(timeout=60)
    mine = np.full(50_000, me.rank + 1, np.float32)
    others = {"size": np.full(50_001, 7, np.float32), "dtype": np.full(50_000, 7, np.int32)}
    for what, other in others.items():
        if me.rank == 0:
            me.say(**{what: me.attempt(lambda: dist.isend(mine, 1).wait())})
        else:
            me.say(**{what: me.attempt(dist.recv, other, 0), "unchanged": bool((other == 7).all())})
    dist.all_reduce(mine)
    me.say(later=mine[:2].tolist())
    dist.destroy_process_group()


@each_transport
def test_a_message_that_does_not_fit_is_refused_at_both_ends(ranks: Ranks, transport: str) -> None:
    said = [rank.said for rank in ranks.run(unfitting_messages, 2, env={"RANKMESH_TRANSPORT": transport})]
    for what, expected in {"size": "float32[50001]", "dtype": "int32[50000]"}.items():
        for of_rank in said:
            assert of_rank[what]["error"] == "DistBackendError"
            assert f"rank 0 sent float32[50000] with tag 0, but the receive expects {expected}" in of_rank[what]["text"]
    assert said[1]["unchanged"]
    assert [of_rank["later"] for of_rank in said] == [[3, 3]] * 2


@pytest.mark.usefixtures("alone")
def test_a_wrong_factor_is_refused_also_after_an_equal_one_of_the_right_type() -> None:
    numbers = np.ones(2, int)
    dist.all_reduce(numbers, dist.ReduceOp.PREMUL_SUM(2))
    assert numbers.tolist() == [2, 2]
    with pytest.raises(TypeError, match=r"PREMUL_SUM of int64 needs a factor of type int, got 2\.0"):
        dist.all_reduce(numbers, dist.ReduceOp.PREMUL_SUM(2.0))


@pytest.mark.usefixtures("alone")
def test_factors_that_are_equal_but_for_their_sign_are_not_the_same() -> None:
    for factor in (0.0, -0.0):
        array = np.ones(1)
        dist.all_reduce(array, dist.ReduceOp.PREMUL_SUM(factor))
        assert np.signbit(array[0]) == np.signbit(factor)
