"""What is more than MPI can count in one call, with small numbers for that, and once with more than 2 GiB."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from support.mpi import MpiRun
from support.processes import Me, Ranks

import rankmesh as dist

GIB = 1 << 30
NEEDED = 4 * GIB


def free() -> int:
    """Return how many bytes of memory these processes may take."""
    limit = Path("/sys/fs/cgroup/memory.max")
    allowed = limit.read_text().strip() if limit.exists() else "max"
    there = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return there if allowed == "max" else min(there, int(allowed))


FREE = free()


def in_pieces(me: Me, limits: list[int]) -> None:
    import itertools

    from mpi4py import MPI
    from support import oracle

    from rankmesh_agent.mpi.collectives import Collectives
    from rankmesh_agent.wire.ops import Call, OpType, ReduceOp

    comm, wrong = MPI.COMM_WORLD.Dup(), []
    rank, size, everyone = me.rank, me.size, range(me.size)

    def make(kind, dtype, count, arguments, op=None, counts=None):
        calls.algorithm(Call(kind, dtype, count, op, None, counts))(*arguments)

    def check(what, found, wanted):
        if not np.array_equal(found.view(np.uint8), wanted.view(np.uint8)):
            wrong.append(str((most, *what)))

    def values(of, count, lane=0):
        return oracle.values(of + size * lane, count, dtype)

    for most, name in itertools.product(limits, ("uint8", "float16", "float32", "complex128")):
        calls = Collectives(comm, most)
        dtype = np.dtype(name)
        for count in (0, 1, 2, 5, 13, 30):
            lengths = [count + (2 * each + 1) % 3 for each in everyone]
            for op in (ReduceOp.SUM, ReduceOp.AVG):
                total = oracle.expected(op, [values(each, count) for each in everyone])
                array = values(rank, count)
                make(OpType.ALL_REDUCE, dtype, count, (array, op), op)
                check((name, count, op, "all_reduce"), array, total)
                array = values(rank, count)
                make(OpType.REDUCE, dtype, count, (array, op, 1), op)
                check((name, count, op, "reduce"), array, total if rank == 1 else values(rank, count))
                output = np.zeros(lengths[rank], dtype)
                make(
                    OpType.REDUCE_SCATTER, dtype, -1,
                    (output, [values(rank, lengths[each], each) for each in everyone], op), op, tuple(lengths),
                )  # fmt: skip
                parts = [values(each, lengths[rank], rank) for each in everyone]
                check((name, count, op, "reduce_scatter"), output, oracle.expected(op, parts))
            array = values(rank, count)
            make(OpType.BROADCAST, dtype, count, (array, 1))
            check((name, count, "broadcast"), array, values(1, count))
            for each_length, counts in ([count] * size, None), (lengths, tuple(lengths)):
                whole = np.zeros(sum(each_length), dtype)
                ends = np.cumsum([0, *each_length])
                outputs = [whole[ends[each] : ends[each + 1]] for each in everyone]
                arguments = outputs, values(rank, each_length[rank])
                make(OpType.ALL_GATHER, dtype, count if counts is None else -1, arguments, None, counts)
                wanted = np.concatenate([values(each, each_length[each]) for each in everyone])
                check((name, count, "all_gather", counts), whole, wanted)
            apart = [np.zeros(count, dtype) for _ in everyone] if rank == 1 else []
            make(OpType.GATHER, dtype, count, (apart, values(rank, count), 1))
            for each, found in enumerate(apart):
                check((name, count, "gather"), found, values(each, count))
            output = np.zeros(count, dtype)
            make(
                OpType.SCATTER, dtype, count, (output, [values(1, count, e) for e in everyone] if rank == 1 else [], 1)
            )
            check((name, count, "scatter"), output, values(1, count, rank))
            taken = [np.zeros(count + (2 * each + rank) % 3, dtype) for each in everyone]
            given = [values(rank, count + (2 * rank + each) % 3, each) for each in everyone]
            make(OpType.ALL_TO_ALL, dtype, -1, (taken, given))
            for each, found in enumerate(taken):
                check((name, count, "all_to_all"), found, values(each, found.size, rank))
    me.say(wrong=wrong, done=True)


def test_calls_are_cut_into_what_can_be_counted(ranks: Ranks) -> None:
    for said in MpiRun(ranks, in_pieces, 3, limits=[1, 7, 1000]).succeed():
        assert said["done"]
        assert said["wrong"] == []


@pytest.mark.skipif(FREE < NEEDED, reason=f"needs {NEEDED // GIB} GiB of free memory, and {FREE // GIB} GiB are there")
def test_more_than_2_gib(ranks: Ranks) -> None:
    for said in MpiRun(ranks, more_than_2_gib, 2).succeed():
        assert said["ends"] == [[1, 2, 3], [4, 5, 6]]


def more_than_2_gib(me: Me) -> None:
    """Rank 0, which only sends, needs hardly any memory: the kernel has one page for all zeros that are only read."""
    dist.init_process_group("mpi", timeout=100)
    count, ends = (1 << 31) + 5, []
    array = np.zeros(count, np.uint8)
    places = [0, count // 2, count - 1]
    if me.rank == 0:
        array[places] = [1, 2, 3]
    dist.broadcast(array, 0)
    ends.append(array[places].tolist())
    if me.rank == 0:
        array[places] = [4, 5, 6]
        dist.send(array, 1)
    else:
        dist.recv(array, 0)
    ends.append(array[places].tolist())
    me.say(ends=ends)
    dist.barrier()
