"""Messages between two ranks over MPI."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from support.mpi import MpiRun
from support.processes import Me, Ranks, wait_until

import rankmesh as dist


def test_sizes_around_what_goes_with_the_head(ranks: Ranks) -> None:
    """Also in pieces, as more than MPI can count would go."""
    from rankmesh_agent.engine.backends.mpi.messages import INLINE

    sizes = [0, 1, INLINE - 1, INLINE, INLINE + 1, 10 * INLINE]
    run = MpiRun(ranks, all_sizes, 2, sizes=sizes)
    assert run.succeed()[1]["wrong"] == []


def all_sizes(me: Me, sizes: list[int]) -> None:
    dist.init_process_group("mpi", timeout=60)
    messages, wrong = dist.group.WORLD._communicator._mpi.messages, []
    for most in (2**31 - 1, 1000):
        messages.most = most
        for size in sizes:
            sent = np.random.default_rng(size).integers(0, 256, size, np.uint8)
            if me.rank == 0:
                dist.send(sent, 1, tag=size)
                continue
            whole = np.full(size + 2, 99, np.uint8)
            dist.recv(whole[1:-1], 0, tag=size)
            if whole.tolist() != [99, *sent.tolist(), 99]:
                wrong.append((most, size))
    dist.barrier()
    me.say(wrong=wrong)


@pytest.mark.parametrize("count", [5, 5000])
@pytest.mark.parametrize(("sent", "expected"), [("float32", "int32"), ("float32", "float64"), ("float64", "float32")])
def test_what_does_not_fit_is_refused(ranks: Ranks, count: int, sent: str, expected: str) -> None:
    sender, receiver = MpiRun(ranks, misfit, 2, count=count, sent=sent, expected=expected).succeed()
    why = f"rank 0 sent {sent}[{count}] with tag 3, but the receive expects {expected}[{count}]"
    assert receiver["error"] == "DistBackendError"
    assert why in receiver["text"]
    assert receiver["untouched"]
    assert sender["error"] == "DistBackendError"
    assert why in sender["text"]
    assert receiver["then"] == [7.0] * count


def misfit(me: Me, count: int, sent: str, expected: str) -> None:
    dist.init_process_group("mpi", timeout=60)
    if me.rank == 0:
        dist.send(np.ones(count, sent), 1, tag=3)
        me.wait_for("refused")
        matching = dist.group.WORLD._communicator._matching
        wait_until(lambda: matching.refusals, "the refusal")
        me.say(**me.attempt(dist.send, np.ones(count), 1))
        dist.send(np.full(count, 7.0), 1)
    else:
        array, then = np.zeros(count, expected), np.zeros(count)
        me.say(**me.attempt(dist.recv, array, 0, tag=3), untouched=not array.any())
        me.mark("refused")
        dist.recv(then, 0)
        me.say(then=then.tolist())
    dist.barrier()


def test_messages_of_a_tag_keep_their_order(ranks: Ranks) -> None:
    said = MpiRun(ranks, in_order, 3).succeed()
    assert said[0]["from_1"] == list(range(20))
    assert sorted(said[0]["any"]) == sorted([*range(100, 110), *range(200, 210)])
    assert said[0]["sources"] == [value // 100 for value in said[0]["any"]]


def in_order(me: Me) -> None:
    dist.init_process_group("mpi", timeout=60)
    lengths = [1, 3000, 1, 50_000]
    if me.rank == 0:
        arrays = [np.zeros(lengths[number % 4], np.int64) for number in range(20)]
        works = [dist.irecv(array, 1, tag=5) for array in arrays]
        for work in works[::-1]:
            work.wait()
        got, sources = [], []
        for _ in range(20):
            array = np.zeros(1, np.int64)
            sources.append(dist.recv(array))
            got.append(int(array[0]))
        me.say(from_1=[int(array[-1]) for array in arrays], any=got, sources=sources)
    else:
        if me.rank == 1:
            for number in range(20):
                dist.send(np.full(lengths[number % 4], number), 0, tag=5)
        for number in range(10):
            dist.send(np.full(1, 100 * me.rank + number), 0)
    dist.barrier()


def test_a_message_that_is_late_names_who_should_have_sent(ranks: Ranks) -> None:
    said = MpiRun(ranks, late, 2).succeed()[0]
    assert said["error"] == "CollectiveTimeoutError"
    assert said["ranks"] == [1]
    assert "recv from rank 1 (tag 4) in group 'world' waited 0.5 s for rank 1 (" in said["text"]
    assert said["then"] == [2.0]


def late(me: Me) -> None:
    dist.init_process_group("mpi", timeout=60)
    array = np.zeros(1)
    if me.rank == 0:
        me.say(**me.attempt(dist.recv, array, 1, tag=4, timeout=0.5))
        me.mark("late")
        dist.recv(array, 1, tag=4)
        me.say(then=array.tolist())
    else:
        me.wait_for("late")
        dist.send(np.full(1, 2.0), 0, tag=4)
    dist.barrier()


def test_a_sender_that_is_gone_is_named(ranks: Ranks) -> None:
    said = MpiRun(ranks, gone, 2).succeed()[0]
    assert said["error"] == "RankFailedError"
    assert said["ranks"] == [1]


def gone(me: Me) -> None:
    dist.init_process_group("mpi", timeout=60)
    if me.rank == 0:
        me.say(**me.attempt(dist.recv, np.zeros(1), 1))
        me.mark("told")
    else:
        dist.destroy_process_group()
        me.wait_for("told")


@pytest.mark.parametrize("tag", [1 << 40, -(1 << 40)])
def test_tags_that_mpi_does_not_have_are_refused(ranks: Ranks, tag: int) -> None:
    for said in MpiRun(ranks, tagged, 2, tag=tag).succeed():
        assert said["error"] == "ValueError"
        assert f"tag {tag} is more than this MPI has" in said["text"]


def tagged(me: Me, tag: int) -> None:
    dist.init_process_group("mpi", timeout=60)
    call: Any = dist.send if me.rank else dist.recv
    me.say(**me.attempt(call, np.zeros(1), 1 - me.rank, tag=tag))


def test_messages_move_while_nobody_waits(ranks: Ranks) -> None:
    """The sender of a large one sleeps: the guard moves it."""
    said = MpiRun(ranks, asleep, 2).succeed()
    assert said[1]["last"] == 1.0
    assert said[0]["done"]


def asleep(me: Me) -> None:
    dist.init_process_group("mpi", timeout=60)
    array = np.full(1 << 20, 1.0 - me.rank)
    if me.rank == 0:
        work = dist.isend(array, 1)
        me.wait_for("received")
        me.say(done=wait_until(work.is_completed, "the message"))
    else:
        time.sleep(0.2)
        dist.recv(array, 0)
        me.say(last=float(array[-1]))
        me.mark("received")
    dist.barrier()
