"""Messages between two ranks over MPI."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from support.mpi import on_mpi
from support.processes import Me, wait_until
from support.to_itself import exchange_with_itself

import rankmesh as dist


@on_mpi(2)
def test_sizes(me: Me) -> None:
    """Also in blocks, as more than MPI can count would go."""
    dist.init_process_group("mpi", timeout=60)
    messages = dist.group.WORLD._communicator.queue.backend.messages
    for most in (2**31 - 1, 1000):
        messages.max_count = most
        for size in (0, 1, 999, 1000, 1001, 4096, 40_000):
            sent = np.random.default_rng(size).integers(0, 256, size, np.uint8)
            if me.rank == 0:
                dist.send(sent, 1, tag=size)
                continue
            whole = np.full(size + 2, 99, np.uint8)
            dist.recv(whole[1:-1], 0, tag=size)
            assert whole.tolist() == [99, *sent.tolist(), 99], (most, size)
    dist.barrier()


@on_mpi(2)
def test_messages_of_a_rank_to_itself(me: Me) -> None:
    dist.init_process_group("mpi", timeout=60)
    for group in (None, dist.new_subgroups(1)[0]):
        exchange_with_itself(dist, np.full, group)
    dist.barrier()


MISFITS = [("float32", "float64", 5), ("float64", "float32", 5), ("float32", "float64", 50_000),
           ("float64", "float32", 50_000)]  # fmt: skip


@on_mpi(2)
def test_what_does_not_fit_is_refused(me: Me) -> None:
    dist.init_process_group("mpi", timeout=60)
    for sent, expected, count in MISFITS:
        group = dist.new_group([0, 1])
        given, taken = count * np.dtype(sent).itemsize, count * np.dtype(expected).itemsize
        words = f"rank 0 sent {given} bytes with tag 3, but the receive expects {expected}[{count}], {taken} bytes"
        if me.rank == 0:
            dist.send(np.ones(count, sent), 1, group=group, tag=3)
        else:
            array = np.zeros(count, expected)
            told = me.attempt(dist.recv, array, 0, group=group, tag=3)
            assert told["error"] == "DistBackendError", told
            assert words in told["text"]
            assert not array.any()
        told = me.attempt(dist.recv, np.zeros(1), 1 - me.rank, group=group)
        assert told["error"] == "GroupAbortedError", told
        assert f"rank 1 refused the message: {words}" in told["text"]
        dist.barrier()


@on_mpi(3)
def test_messages_of_a_tag_keep_their_order(me: Me) -> None:
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
        assert [int(array[-1]) for array in arrays] == list(range(20))
        assert sorted(got) == [*range(100, 110), *range(200, 210)]
        assert sources == [value // 100 for value in got]
    else:
        if me.rank == 1:
            for number in range(20):
                dist.send(np.full(lengths[number % 4], number), 0, tag=5)
        for number in range(10):
            dist.send(np.full(1, 100 * me.rank + number), 0)
    dist.barrier()


@on_mpi(2)
def test_a_message_that_is_late_names_who_should_have_sent(me: Me) -> None:
    dist.init_process_group("mpi", timeout=60)
    array = np.zeros(1)
    if me.rank == 0:
        told = me.attempt(dist.recv, array, 1, tag=4, timeout=0.5)
        me.mark("late")
        dist.recv(array, 1, tag=4)
        assert (told["error"], told["ranks"]) == ("CollectiveTimeoutError", [1]), told
        assert "recv from rank 1 (tag 4) in group 'world' waited 0.5 s for rank 1 (" in told["text"]
        assert array.tolist() == [2.0]
    else:
        me.wait_for("late")
        dist.send(np.full(1, 2.0), 0, tag=4)
    dist.barrier()


@on_mpi(2)
def test_a_sender_that_is_gone_is_named(me: Me) -> None:
    dist.init_process_group("mpi", timeout=60)
    if me.rank == 0:
        told = me.attempt(dist.recv, np.zeros(1), 1)
        me.mark("told")
        assert (told["error"], told["ranks"]) == ("RankFailedError", [1]), told
    else:
        dist.destroy_process_group()
        me.wait_for("told")


@on_mpi(2)
def test_tags_that_mpi_does_not_have_are_refused(me: Me) -> None:
    dist.init_process_group("mpi", timeout=60)
    call: Any = dist.send if me.rank else dist.recv
    for tag in (1 << 40, 1 << 29, -(1 << 29) - 1):
        told = me.attempt(call, np.zeros(1), 1 - me.rank, tag=tag)
        assert told["error"] == "ValueError", told
        assert f"tag {tag} is out of range: under backend 'mpi' tags are -536870912 to 536870911" in told["text"]
        assert "MPI_TAG_UB" in told["text"]
    for tag in ((1 << 29) - 1, -(1 << 29), -1):
        array = np.full(1, float(me.rank))
        call(array, 1 - me.rank, tag=tag)
        assert array[0] == 1.0


@on_mpi(2)
def test_objects_have_tags_of_their_own(me: Me) -> None:
    """Also where their tags are used again."""
    dist.init_process_group("mpi", timeout=60)
    dist.group.WORLD._communicator.queue.backend.messages._tags = 3
    for number in range(6):
        objects: list[Any] = [{"number": number, "rest": "x" * 5000, "array": np.arange(3000)}]
        if me.rank:
            objects = [None]
            dist.recv_object_list(objects, 0)
        else:
            dist.send_object_list(objects, 1)
        found = objects[0]
        assert (found["number"], len(found["rest"]), found["array"][-1]) == (number, 5000, 2999)
    dist.barrier()


@on_mpi(2)
def test_messages_move_while_nobody_waits(me: Me) -> None:
    """The sender of a large one sleeps: the watchdog moves it."""
    dist.init_process_group("mpi", timeout=60)
    array = np.full(1 << 20, 1.0 - me.rank)
    if me.rank == 0:
        work = dist.isend(array, 1)
        me.wait_for("received")
        wait_until(work.is_completed, "the message")
    else:
        time.sleep(0.2)
        dist.recv(array, 0)
        assert array[-1] == 1.0
        me.mark("received")
    dist.barrier()


@on_mpi(3)
def test_a_receive_does_not_wait_for_one_from_another_rank(me: Me) -> None:
    """Rank 1 sends the message that rank 0 receives first once rank 0 has the other ones."""
    dist.init_process_group("mpi", timeout=60)
    if me.rank == 0:
        got, first, second = np.zeros(1000), np.zeros(1), np.zeros(1000)
        work = dist.irecv(got, 1)
        dist.recv(first, 2)
        dist.recv(second)
        assert (first.tolist(), second[0], second[-1]) == ([2.0], 2.0, 2.0)
        me.mark("had")
        work.wait()
        assert (got[0], got[-1]) == (1.0, 1.0)
    elif me.rank == 1:
        me.wait_for("had")
        dist.send(np.full(1000, 1.0), 0)
    else:
        dist.send(np.full(1, 2.0), 0)
        dist.send(np.full(1000, 2.0), 0)
    dist.barrier()


@on_mpi(2)
def test_a_group_may_end_before_what_was_sent_in_it_has_gone(me: Me) -> None:
    """The array is forgotten, and its memory used for others."""
    dist.init_process_group("mpi", timeout=60)
    group, size = dist.new_group([0, 1]), 1 << 22
    if me.rank == 0:
        array = np.full(size, 0xAB, np.uint8)
        work = dist.isend(array, 1, group=group)
        dist.destroy_process_group(group)
        del work, array
        others = [np.full(size, 0x11, np.uint8) for _ in range(8)]
        dist.barrier()
        me.wait_for("got")
        del others
    else:
        dist.barrier()
        array = np.zeros(size, np.uint8)
        dist.recv(array, 0, group=group)
        assert np.unique(array).tolist() == [0xAB]
        me.mark("got")
    dist.barrier()


@on_mpi(2)
def test_what_comes_for_a_group_that_has_ended_is_written_nowhere(me: Me) -> None:
    """The arrays are forgotten, and their memory is used for others."""
    dist.init_process_group("mpi", timeout=60)
    group, counts = dist.new_group([0, 1]), [1000, 1 << 22]
    if me.rank == 0:
        works = [dist.irecv(np.zeros(count, np.uint8), 1, group=group) for count in counts]
        dist.destroy_process_group(group)
        del works
        others = [np.zeros(each, np.uint8) for each in counts for _ in range(50)]
        dist.barrier()
        me.wait_for("sent")
        assert not [each.size for each in others if each.any()]
    else:
        dist.barrier()
        works = [dist.isend(np.full(count, 0xAB, np.uint8), 0, group=group) for count in counts]
        time.sleep(0.5)
        me.mark("sent")
    dist.barrier()
