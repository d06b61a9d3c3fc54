"""The collectives of a group on MPI's calls.

Arrays that lie behind one another in memory are passed as they are, others by way of a copy. What is more than MPI can
count in one call is cut: every array of the call into pieces, and a call is made for all first ones, then for all
second ones, and so on. Whether that is so depends on what all members know alike. Element types too narrow to
accumulate in are reduced in a wider one, also piece by piece, so that the copy is small.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from rankmesh_agent.collectives.link import Array
from rankmesh_agent.collectives.reduction import combine_partials, combine_to_partial, ignore_fp_errors, partial_dtype
from rankmesh_agent.collectives.select import Algorithm
from rankmesh_agent.mpi.buffers import PackedBuffer, address, overlaps, spec
from rankmesh_agent.mpi.library import mpi
from rankmesh_agent.mpi.types import datatype, is_native, operation
from rankmesh_agent.transports.segment import CallMismatchError
from rankmesh_agent.wire.ops import Call, OpType, ReduceOp

MAX_COUNT = (1 << 31) - 1
"""What MPI's calls count up to: elements of all parts of an array together, in C's int."""
_STAGED = 1 << 24
"""Elements, of all parts together, in one piece of what is cut or reduced in a wider type."""


class Collectives:
    """One rank's side of a group's collectives.

    Args:
        comm: the group's communicator.
        most: elements that one MPI call may count: fewer for tests.
    """

    def __init__(self, comm: Any, most: int = MAX_COUNT) -> None:
        self._comm = comm
        self._rank: int = comm.rank
        self._size: int = comm.size
        self._most = most
        self._staged = min(most, _STAGED)
        self._in_place = mpi().IN_PLACE
        self._quiet = ignore_fp_errors()
        self._algorithms: dict[OpType, Algorithm] = {
            OpType.BARRIER: lambda: comm.Barrier(),
            OpType.ALL_REDUCE: self._all_reduce,
            OpType.REDUCE: self._reduce,
            OpType.BROADCAST: self._broadcast,
            OpType.ALL_GATHER: self._all_gather,
            OpType.GATHER: self._gather,
            OpType.SCATTER: self._scatter,
            OpType.REDUCE_SCATTER: self._reduce_scatter,
            OpType.ALL_TO_ALL: self._all_to_all,
        }

    def algorithm(self, call: Call) -> Algorithm:
        """Return what carries out such a call."""
        short = self._short_all_reduce(call) if call.kind is OpType.ALL_REDUCE else None
        return short or partial(self._quiet.run, self._algorithms[call.kind])

    # Reductions

    def _short_all_reduce(self, call: Call) -> Algorithm | None:
        """Return what makes one call of MPI of its own arithmetic, if that is enough, with all that is known before."""
        dtype, count, op = call.dtype, call.count, call.reduce_op
        assert dtype is not None
        assert op is not None
        if op is ReduceOp.AVG or count > self._most or not is_native(dtype) or self._wide(op, dtype) is not None:
            return None
        all_reduce, in_place = self._comm.Allreduce, self._in_place
        elements, how = datatype(dtype), operation(op, dtype)
        if not how.is_predefined:
            return None
        return lambda array, op: all_reduce(in_place, (array, count, elements), how)

    def _all_reduce(self, array: Array, op: ReduceOp) -> None:
        for piece in self._pieces(op, array):
            partial = self._partial(op, piece)
            self._comm.Allreduce(self._in_place, spec(partial), operation(op, partial.dtype))
            self._finish(op, partial, piece)

    def _reduce(self, array: Array, op: ReduceOp, root: int) -> None:
        for piece in self._pieces(op, array):
            partial = self._partial(op, piece)
            how = operation(op, partial.dtype)
            if self._rank == root:
                self._comm.Reduce(self._in_place, spec(partial), how, root)
                self._finish(op, partial, piece)
            else:
                self._comm.Reduce(spec(partial), None, how, root)

    def _reduce_scatter(self, output: Array, inputs: Sequence[Array], op: ReduceOp) -> None:
        wide = self._wide(op, output.dtype) is not None
        longest, total = max(part.size for part in inputs), sum(part.size for part in inputs)
        for piece in self._rounds(longest, total, self._staged if wide else self._most):
            parts = PackedBuffer([self._partial(op, part[piece]) for part in inputs]).pack()
            mine = output[piece]
            # MPI must not write to where it reads.
            apart = wide or overlaps(mine, inputs)
            into = np.empty(mine.size, self._wide(op, mine.dtype) or mine.dtype) if apart else mine
            self._comm.Reduce_scatter(parts.total_spec(), spec(into), parts.counts, operation(op, into.dtype))
            self._finish(op, into, mine)

    def _wide(self, op: ReduceOp, dtype: np.dtype[Any]) -> np.dtype[Any] | None:
        """Return the dtype in which to reduce, None for the arrays' own."""
        partial = partial_dtype(op, dtype, self._size)
        return None if self._size == 1 or partial == dtype else partial

    def _pieces(self, op: ReduceOp, array: Array) -> Iterator[Array]:
        most = self._most if self._wide(op, array.dtype) is None else self._staged
        for begin in range(0, array.size, most):
            yield array[begin : begin + most]

    def _partial(self, op: ReduceOp, array: Array) -> Array:
        """Return what MPI is to reduce: the array, or a wider copy."""
        wide = self._wide(op, array.dtype)
        if wide is None:
            return array
        partial = np.empty(array.size, wide)
        combine_to_partial(op, [array], partial)
        return partial

    def _finish(self, op: ReduceOp, partial: Array, out: Array) -> None:
        """Make the result of what MPI has reduced."""
        if self._size > 1 and (op is ReduceOp.AVG or partial.dtype != out.dtype):
            combine_partials(op, [partial], self._size, out)
        elif partial is not out:
            out[:] = partial

    # Moves

    def _broadcast(self, array: Array, root: int) -> None:
        for begin in range(0, array.size, self._most):
            self._comm.Bcast(spec(array[begin : begin + self._most]), root)

    def _all_gather(self, outputs: Sequence[Array], array: Array) -> None:
        longest, total = max(part.size for part in outputs), sum(part.size for part in outputs)
        for piece in self._rounds(longest, total):
            parts = PackedBuffer([output[piece] for output in outputs])
            given = self._given(array[piece], outputs, parts)
            if parts.uniform:
                self._comm.Allgather(given, parts.uniform_spec())
            else:
                self._comm.Allgatherv(given, parts.vector_spec())
            parts.unpack()

    def _gather(self, outputs: Sequence[Array], array: Array, root: int) -> None:
        for piece in self._rounds(array.size, array.size * self._size):
            if self._rank == root:
                parts = PackedBuffer([output[piece] for output in outputs])
                self._comm.Gather(self._given(array[piece], outputs, parts), parts.uniform_spec(), root)
                parts.unpack()
            else:
                self._comm.Gather(spec(array[piece]), None, root)

    def _scatter(self, output: Array, inputs: Sequence[Array], root: int) -> None:
        for piece in self._rounds(output.size, output.size * self._size):
            if self._rank == root:
                parts = PackedBuffer([part[piece] for part in inputs], apart=overlaps(output, inputs)).pack()
                self._comm.Scatter(parts.uniform_spec(), spec(output[piece]), root)
            else:
                self._comm.Scatter(None, spec(output[piece]), root)

    def _all_to_all(self, outputs: Sequence[Array], inputs: Sequence[Array]) -> None:
        longest, total = self._agree(outputs, inputs)
        for piece in self._rounds(longest, total):
            given = PackedBuffer([part[piece] for part in inputs]).pack()
            taken = PackedBuffer([output[piece] for output in outputs])
            self._comm.Alltoallv(given.vector_spec(), taken.vector_spec())
            taken.unpack()

    def _agree(self, outputs: Sequence[Array], inputs: Sequence[Array]) -> tuple[int, int]:
        """Have the members compare how much goes where, which each knows only of itself.

        Returns:
            Elements of the longest array, and in all arrays of the member that has most.

        Raises:
            CallMismatchError: a member sends more or less than another expects; at all of them.
        """
        sent = np.array([(given.size, taken.size) for given, taken in zip(inputs, outputs, strict=True)], np.int64)
        came = np.empty_like(sent)
        self._comm.Alltoall(sent, came)
        wrong = int((came != sent[:, ::-1]).any())
        most = np.array([wrong, sent.max(), sent.sum(axis=0).max()])
        self._comm.Allreduce(self._in_place, most, mpi().MAX)
        if most[0]:
            raise CallMismatchError
        return int(most[1]), int(most[2])

    def _rounds(self, longest: int, total: int, most: int | None = None) -> Iterator[slice]:
        """Return which elements of every array come in each of several calls of MPI: all in one, where that can be."""
        piece = longest if total <= (most or self._most) else self._staged // self._size
        for begin in range(0, longest, max(1, piece)):
            yield slice(begin, begin + max(1, piece))

    def _given(self, array: Array, outputs: Sequence[Array], parts: PackedBuffer) -> Any:
        """Return this rank's contribution, which may lie in one of the outputs, as an argument for mpi4py."""
        if not parts.is_copy and overlaps(array, outputs):
            mine = outputs[self._rank]
            return self._in_place if address(array) == address(mine) else spec(array.copy())
        return spec(array)
