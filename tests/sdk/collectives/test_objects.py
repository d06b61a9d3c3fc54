"""Collectives and messages of objects: arguments in a world of one rank, everything else with ranks as processes."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from support.processes import Me, Ranks, on_ranks

import rankmesh as dist

NOBODY = dist.GroupMember.NON_GROUP_MEMBER
HAVE_A_TOKEN = {"RANKMESH_TOKEN": "secret"}


# Arguments, in a world of one rank

COLLECTIVES: dict[str, Callable[..., Any]] = {
    "broadcast_object_list": lambda **options: dist.broadcast_object_list(["a"], **options),
    "all_gather_object": lambda **options: dist.all_gather_object([None], "a", **options),
    "gather_object": lambda **options: dist.gather_object("a", [None], **options),
    "scatter_object_list": lambda **options: dist.scatter_object_list([None], ["a"], **options),
    "all_to_all_object": lambda **options: dist.all_to_all_object([None], ["a"], **options),
}
MESSAGES: dict[str, Callable[..., Any]] = {
    "send_object_list": lambda **options: dist.send_object_list(["a"], **{"dst": 0, **options}),
    "recv_object_list": lambda **options: dist.recv_object_list([None], **{"src": 0, **options}),
}
EVERY = COLLECTIVES | MESSAGES


@pytest.mark.usefixtures("alone")
class TestAlone:
    def test_one_rank_gets_its_own(self) -> None:
        obj = {"a": np.arange(3)}
        lists = [[None] for _ in range(4)]
        dist.all_gather_object(lists[0], obj)
        dist.gather_object(obj, lists[1])
        dist.scatter_object_list(lists[2], [obj])
        dist.all_to_all_object(lists[3], [obj])
        for (got,) in lists:
            assert got is not obj
            assert got["a"].tolist() == [0, 1, 2]
        objects = [obj, 1]
        dist.broadcast_object_list(objects)
        assert objects[0] is obj, "the source keeps its own"

    @pytest.mark.parametrize("name", EVERY)
    def test_ranks_outside_the_group_are_warned(self, name: str) -> None:
        with pytest.warns(RuntimeWarning, match=rf"{name}\(\) does nothing on this rank") as caught:
            assert EVERY[name](group=NOBODY) == (-1 if name == "recv_object_list" else None)
        assert caught[0].filename == __file__

    @pytest.mark.parametrize("name", COLLECTIVES)
    def test_a_timeout_is_a_timedelta_or_seconds(self, name: str) -> None:
        for timeout in (timedelta(seconds=5), 5, 0.5, None):
            COLLECTIVES[name](timeout=timeout)

    def test_no_rank_sends_to_the_only_one(self) -> None:
        with pytest.raises(ValueError, match="no other rank"):
            dist.recv_object_list([None])

    @pytest.mark.parametrize("device", [None, "cpu", "cuda:0", 0])
    def test_objects_travel_through_host_memory_whatever_the_device(self, device: Any) -> None:
        objects = [1]
        dist.broadcast_object_list(objects, device=device)
        assert objects == [1]

    def test_only_the_first_item_of_a_scattered_list_changes(self) -> None:
        out = [0, 1, 2]
        dist.scatter_object_list(out, ["new"])
        assert out == ["new", 1, 2]

    @pytest.mark.parametrize(
        ("call", "where"),
        [
            (lambda out, bad: dist.all_gather_object(out, [bad]), "obj[0]"),
            (lambda out, bad: dist.gather_object({"k": bad}, out), "obj['k']"),
            (lambda out, bad: dist.broadcast_object_list([1, bad]), "object_list[1]"),
            (lambda out, bad: dist.scatter_object_list(out, [bad]), "scatter_object_input_list[0]"),
            (lambda out, bad: dist.all_to_all_object(out, [[2, bad]]), "input_list[0][1]"),
        ],
    )
    def test_what_is_not_plain_is_refused_without_a_token(self, call: Callable[..., Any], where: str) -> None:
        out = ["as it was"]
        with pytest.raises(TypeError, match=rf"^{re.escape(where)} is a .*set RANKMESH_TOKEN to the same secret"):
            call(out, lambda: 1)
        cycle: list[Any] = []
        cycle.append(cycle)
        with pytest.raises(ValueError, match="contains itself"):
            call(out, cycle)
        assert out == ["as it was"]
        dist.all_gather_object(out, "fine")
        assert out == ["fine"]


# What arrives


class Point:
    """Not plain data."""

    def __init__(self, x: int) -> None:
        self.x = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Point) and self.x == other.x

    __hash__ = None  # type: ignore[assignment]


def collect(group: object, ranks: list[int]) -> None:
    """Every collective from and to every rank, objects of every size: none fits the record, all do, some do."""
    rank, size = ranks.index(dist.get_rank()), len(ranks)
    sizes = [0, 900, 1200, 100_000, 500_000]
    for number in range(5):
        made = [[each, bytes(sizes[(each + number) % 5 if number < 3 else 4 * (number - 3)])] for each in range(size)]
        made[0].append(np.arange(sizes[number], dtype=np.uint8))

        def same(got: list, wanted: list) -> None:
            assert [one[:2] for one in got] == [one[:2] for one in wanted]
            for one, two in zip(got, wanted, strict=True):
                assert len(one) == len(two)
                if len(one) > 2:
                    np.testing.assert_array_equal(one[2], two[2])
                    one[2][...] = 1

        out = [None] * size
        dist.all_gather_object(out, made[rank], group=group)
        same(out, made)
        for root in range(size):
            out = [None] * size if rank == root else []
            dist.gather_object(made[rank], out, dst=ranks[root], group=group)
            same(out, made if rank == root else [])
            out = list(made) if rank == root else [None] * size
            dist.broadcast_object_list(out, group=group, group_src=root)
            same(out, made)
            made[0][2:] = [np.arange(sizes[number], dtype=np.uint8)]  # the source's own objects stay in its list
            out = [None, "stays"]
            dist.scatter_object_list(out, made if rank == root else None, src=ranks[root], group=group)
            assert out.pop() == "stays"
            same(out, [made[rank]])
        out = [None] * size
        dist.all_to_all_object(out, [[rank, made[each]] for each in range(size)], group=group)
        assert [sender for sender, _ in out] == list(range(size))
        same([got for _, got in out], [made[rank]] * size)


def pass_round() -> None:
    """Messages round a ring, from a known and from any rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % size, (rank - 1) % size
    for length in (1, 2000, 1_000_000):
        for source in ({"src": before}, {}, {"group_src": before}):
            objects, got = [rank, bytes(length), np.ones(3)], [None] * 3
            if rank == 0:
                dist.send_object_list(objects, after)
            assert dist.recv_object_list(got, **source) == before
            if rank != 0:
                dist.send_object_list(objects, group_dst=after, use_batch=True)
            assert got[:2] == [before, bytes(length)]
            assert got[2].tolist() == [1, 1, 1]
            dist.barrier()
    # Several at once to one receiver, each of two parts: they do not mix.
    if rank == 0:
        senders = []
        for _ in range(3 * (size - 1)):
            got = [None, None]
            senders.append(dist.recv_object_list(got))
            assert got == [senders[-1], bytes(3000 + senders[-1])]
        assert sorted(senders) == sorted(list(range(1, size)) * 3)
    else:
        for _ in range(3):
            dist.send_object_list([rank, bytes(3000 + rank)], 0)


def everything(me: Me) -> None:
    me.init()
    rank, size = dist.get_rank(), dist.get_world_size()
    everyone = list(range(size))
    collect(None, everyone)
    if size > 1:
        pass_round()
    some = everyone[1:] or everyone
    group = dist.new_group(some)
    if rank in some:
        collect(group, some)
    # With a token, what is not plain is pickled.
    out = [None] * size
    dist.all_gather_object(out, (np.arange(3), Point(rank), {"kind": Point}))
    assert [point.x for _, point, _ in out] == everyone
    assert out[0][2] == {"kind": Point}
    objects = [Point(size)] if rank == size - 1 else [None]
    dist.broadcast_object_list(objects, src=size - 1)
    assert objects == [Point(size)]
    dist.destroy_process_group()


@pytest.mark.processes
@pytest.mark.parametrize(("size", "transport"), [(1, "auto"), (2, "tcp"), (3, "shm")])
def test_objects_arrive(ranks: Ranks, size: int, transport: str) -> None:
    env = {**HAVE_A_TOKEN, "RANKMESH_TRANSPORT": transport}
    ranks.run(everything, size, env=env)


# What does not fit


@on_ranks(3)
def test_mistakes_of_one_rank_are_told_to_all_and_the_group_goes_on(me: Me) -> None:
    """Mistakes of one rank: all come out of the call, nothing changes, and the group goes on."""
    me.init()
    rank, size = dist.get_rank(), dist.get_world_size()

    def wrong(kind: str, words: list, call: object, *arguments: object, **options: object) -> list:
        reported = me.attempt(call, *arguments, **options)
        assert reported["error"] == kind, reported
        assert all(word in reported["text"] for word in words), (words, reported)
        return reported["ranks"]

    def fine() -> None:
        out = [None] * size
        dist.all_gather_object(out, rank)
        assert out == list(range(size))

    told = ["rank 1 had no object to send: TypeError: obj['f'] is a builtins.function"]
    refused = ["DistBackendError", told]
    mine = ["TypeError", ["obj['f'] is a builtins.function", "set RANKMESH_TOKEN"]]
    obj = {"f": (lambda: 1) if rank == 1 else bytes(5000)}

    out = ["as it was"] * size
    assert wrong(*(mine if rank == 1 else refused), dist.all_gather_object, out, obj) == ([] if rank == 1 else [1])
    assert out == ["as it was"] * size
    fine()

    if rank == 0:
        wrong(*refused, dist.gather_object, obj, out, dst=0)
    elif rank == 1:
        wrong(*mine, dist.gather_object, obj, dst=0)
    else:
        dist.gather_object(obj, dst=0)
    assert out == ["as it was"] * size
    fine()

    objects = [3, {"f": lambda: 1}] if rank == 1 else ["as it was"] * 2
    told = ["rank 1 had no object to send: TypeError: object_list[1]['f'] is a builtins.function"]
    kind = "TypeError" if rank == 1 else "DistBackendError"
    wrong(kind, ["object_list[1]['f'] is"] if rank == 1 else told, dist.broadcast_object_list, objects, src=1)
    assert rank == 1 or objects == ["as it was"] * 2
    fine()

    objects = [1, {2: lambda: 1}, 3][:size] if rank == 1 else None
    wrong(kind, ["scatter_object_input_list[1][2] is"], dist.scatter_object_list, out, objects, src=1)
    assert out == ["as it was"] * size
    fine()

    objects = [bytes(5000)] * size if rank != 1 else [1, lambda: 1, 3][:size]
    wrong(kind, ["input_list[1] is"], dist.all_to_all_object, out, objects)
    assert out == ["as it was"] * size
    fine()

    # The number of objects.
    objects = ["as it was", bytes(5000), 3][: 3 if rank == 1 else 2]
    lengths = ["same length on all ranks", "2 on rank 0, 3 on rank 1, 2 on rank 2", "No list was changed"]
    for src in range(size):
        named = wrong("CollectiveMismatchError", lengths, dist.broadcast_object_list, objects, src=src)
        assert named == ([0, 2] if src == 1 else [1])
    assert objects[0] == "as it was"
    fine()

    # Another source, another collective, an array.
    reported = ["rank 1: all_gather(", "broadcast_object_list of 1 objects from rank 1", "from rank 0"]
    wrong("CollectiveMismatchError", reported, dist.broadcast_object_list, [1], src=1 if rank == 1 else 0)
    reported = ["(gather_object)", "(all_gather_object)"]
    if rank == 1:
        wrong("CollectiveMismatchError", reported, dist.gather_object, 1)
    else:
        wrong("CollectiveMismatchError", reported, dist.all_gather_object, out, 1)
    if rank == 1:
        wrong("CollectiveMismatchError", ["all_gather_object"], dist.all_reduce, np.ones(3))
    else:
        wrong("CollectiveMismatchError", ["all_gather_object"], dist.all_gather_object, out, 1)
    if rank == 1:
        dist.all_gather([np.zeros(1024, np.uint8) for _ in range(size)], np.ones(1024, np.uint8))
    else:
        wrong("ProtocolError", ["array of another call"], dist.all_gather_object, out, 1)
    assert out == ["as it was"] * size
    fine()

    # Messages.
    if rank == 0:
        dist.send_object_list([1, bytes(5000)], dst=1)
        wrong("TypeError", ["object_list[0] is"], dist.send_object_list, [lambda: 1], dst=1)
        dist.send_object_list([1, 2], dst=1)
    if rank == 1:
        got = ["as it was"]
        reported = ["rank 0 sent 2 objects, but object_list has 1 items"]
        assert wrong("DistBackendError", reported, dist.recv_object_list, got, src=0) == []
        assert got == ["as it was"]
        got = [None, None]
        assert dist.recv_object_list(got, src=0) == 0
        assert got == [1, 2]
    fine()
    dist.destroy_process_group()


def hostile(me: Me) -> None:
    """Rank 0 sends pickles that make a file where they are read; nobody but rank 0 may read pickles."""
    import rankmesh._collectives.objects
    from rankmesh._collectives.serialize import Message

    me.init()
    rank = dist.get_rank()
    path = me.folder / "hostile"

    class Touch:
        def __reduce__(self) -> tuple:
            return open, (str(path), "x")

    honest = rankmesh._collectives.objects.dumps

    def malicious(obj: object, name: str, weights_only: bool = False) -> Message:
        import pickle

        try:
            return honest(obj, name)
        except TypeError:
            return Message(pickle.dumps(obj), [], pickled=True)

    def refused(call: object, *arguments: object, **options: object) -> None:
        if rank == 0:
            call(*arguments, **options)
            return
        reported = me.attempt(call, *arguments, **options)
        assert reported["error"] == "ProtocolError", reported
        assert "what rank 0 sent cannot be read: a pickled object arrived and was not read" in reported["text"], (
            reported
        )
        assert reported["ranks"] == [], "the sender has not failed"

    def fine() -> None:
        out = [None] * 3
        dist.all_gather_object(out, rank)
        assert out == [0, 1, 2]

    if rank == 0:
        rankmesh._collectives.objects.dumps = malicious
    for size in (0, 5000):
        bad = [bytes(size), Touch()]
        out = ["as it was"] * 2
        refused(dist.broadcast_object_list, bad if rank == 0 else out)
        fine()
        refused(dist.scatter_object_list, out, [0, bad, bad] if rank == 0 else None)
        fine()
        if rank == 0:
            dist.send_object_list(bad, dst=1)
        if rank == 1:
            refused(dist.recv_object_list, out)
        fine()
        everyone = ["as it was"] * 3
        if rank == 1:
            refused(dist.gather_object, "x", everyone, dst=1)
        else:
            dist.gather_object(bad if rank == 0 else "x", dst=1)
        fine()
        refused(dist.all_to_all_object, everyone, [0, bad, bad] if rank == 0 else ["x"] * 3)
        if rank == 1:
            assert everyone == ["as it was"] * 3, "all or nothing"
            assert out == ["as it was"] * 2
        fine()
    assert not path.exists()
    dist.destroy_process_group()


@pytest.mark.processes
@pytest.mark.parametrize("env", [{}, {**HAVE_A_TOKEN, "RANKMESH_PICKLE": "never"}], ids=["no token", "never"])
def test_a_hostile_pickle_is_refused_unread(ranks: Ranks, env: dict[str, str]) -> None:
    ranks.run(hostile, 3, env=env)


def read_weights_only(me: Me) -> None:
    """Rank 0 pickles, and rank 1 takes no pickles in these calls."""
    import fractions  # not plain data

    me.init()
    bad, out, only = [fractions.Fraction(1, 2), 1], ["as it was"] * 2, {"weights_only": me.rank == 1}
    calls = (
        lambda: dist.broadcast_object_list(bad if me.rank == 0 else out, **only),
        lambda: dist.all_gather_object([None] * 2 if me.rank == 0 else out, bad if me.rank == 0 else "x", **only),
        lambda: dist.gather_object(bad if me.rank == 0 else "x", out if me.rank == 1 else None, dst=1, **only),
        lambda: dist.scatter_object_list(out if me.rank else [None], [bad, bad] if me.rank == 0 else None, **only),
        lambda: dist.recv_object_list(out, **only) if me.rank == 1 else dist.send_object_list(bad, dst=1, **only),
    )
    for number, call in enumerate(calls):
        if me.rank == 0:
            call()
        else:
            reported = me.attempt(call)
            assert reported["error"] == "ProtocolError", (number, reported)
            assert "weights_only=True forbids" in reported["text"], (number, reported)
    assert out == ["as it was"] * 2
    if me.rank == 1:
        reported = me.attempt(dist.send_object_list, bad, dst=0, **only)
        assert reported["error"] == "TypeError", reported
        assert "object_list[0] is a fractions.Fraction, which is not plain data" in reported["text"], reported
        assert "weights_only=True forbids" in reported["text"], reported
    dist.all_gather_object(out, {"x": np.arange(3)}, weights_only=True)
    assert [each["x"].tolist() for each in out] == [[0, 1, 2]] * 2
    dist.destroy_process_group()


@pytest.mark.processes
def test_a_call_that_takes_weights_only_reads_no_pickles_in_spite_of_the_token(ranks: Ranks) -> None:
    ranks.run(read_weights_only, 2, env=HAVE_A_TOKEN)


def die_half_way(me: Me) -> None:
    """Rank 1 sends the record of a large object, and dies before the rest."""
    import rankmesh._collectives.objects

    me.init()
    if me.rank == 1:
        rankmesh._collectives.objects.transfer_rests = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
    out = ["as it was"] * 3
    reported = me.attempt(dist.gather_object, bytes(1_000_000), out if me.rank == 0 else None)
    me.report(out=out, **reported)


@pytest.mark.processes
def test_a_rank_that_dies_half_way_is_named(ranks: Ranks) -> None:
    started = ranks.start(die_half_way, 3)
    ranks.wait(started)
    assert started[0].reported["error"] == "RankFailedError"
    assert started[0].reported["ranks"] == [1]
    assert started[0].reported["out"] == ["as it was"] * 3
