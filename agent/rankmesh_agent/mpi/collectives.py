"""A group's collectives as calls of MPI.

Arrays that are contiguous in memory are passed as they are, others as a copy. A call with more elements than MPI can
count is split, by facts that all members share: one MPI call takes the first pieces of all arrays, the next one the
second pieces. Element types too narrow to accumulate in are reduced in a wider type, also by pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from rankmesh_agent.collectives.link import Array
from rankmesh_agent.collectives.reduction import combine_partials, ignore_fp_errors, partial_dtype
from rankmesh_agent.collectives.rounds import to_partials
from rankmesh_agent.collectives.select import Algorithm
from rankmesh_agent.mpi.buffers import PackedBuffer, address, datatype, is_native, operation, overlaps, spec
from rankmesh_agent.mpi.library import mpi
from rankmesh_agent.shared_memory.slots import CallMismatchError
from rankmesh_agent.wire.ops import Call, OpType, ReduceOp

MAX_COUNT = (1 << 31) - 1
"""Largest count of an MPI call, in C's int: elements of all parts of an array together."""
_PIECE_ELEMENTS = 1 << 24
"""Elements of all parts together in one piece of a call that is split, or reduced in a wider type."""


class Collectives:
    """One rank's side of a group's collectives; ``max_count`` is smaller in tests."""

    def __init__(self, comm: Any, max_count: int = MAX_COUNT) -> None:
        self._comm = comm
        self._rank: int = comm.rank
        self._size: int = comm.size
        self._max_count = max_count
        self._piece_elements = min(max_count, _PIECE_ELEMENTS)
        self._in_place = mpi().IN_PLACE
        self._quiet = ignore_fp_errors()

    def algorithm(self, call: Call) -> Algorithm:
        """Return the algorithm of a call."""
        direct = self._direct_all_reduce(call) if call.kind is OpType.ALL_REDUCE else None
        return direct or partial(self._quiet.run, getattr(self, call.name))

    # Reductions

    def _direct_all_reduce(self, call: Call) -> Algorithm | None:
        """Return a single MPI call with all its arguments resolved, None unless MPI's own arithmetic suffices."""
        dtype, count, op = call.dtype, call.count, call.reduce_op
        assert dtype is not None
        assert op is not None
        if (
            op is ReduceOp.AVG
            or count > self._max_count
            or not is_native(dtype)
            or self._wide_dtype(op, dtype) is not None
        ):
            return None
        all_reduce, in_place = self._comm.Allreduce, self._in_place
        mpi_type, mpi_op = datatype(dtype), operation(op, dtype)
        if not mpi_op.is_predefined:
            return None
        return lambda array, op: all_reduce(in_place, (array, count, mpi_type), mpi_op)

    def all_reduce(self, array: Array, op: ReduceOp) -> None:
        """Reduce an array over all members, in place."""
        for piece in self._pieces(op, array):
            partial = self._partial(op, piece)
            self._comm.Allreduce(self._in_place, spec(partial), operation(op, partial.dtype))
            self._finish(op, partial, piece)

    def reduce(self, array: Array, op: ReduceOp, root: int) -> None:
        """Reduce an array over all members, into the root's."""
        for piece in self._pieces(op, array):
            partial = self._partial(op, piece)
            mpi_op = operation(op, partial.dtype)
            if self._rank == root:
                self._comm.Reduce(self._in_place, spec(partial), mpi_op, root)
                self._finish(op, partial, piece)
            else:
                self._comm.Reduce(spec(partial), None, mpi_op, root)

    def reduce_scatter(self, output: Array, inputs: Sequence[Array], op: ReduceOp) -> None:
        """Reduce each member's inputs into the outputs of the members they are for."""
        wide = self._wide_dtype(op, output.dtype) is not None
        longest, total = max(part.size for part in inputs), sum(part.size for part in inputs)
        for piece in self._piece_slices(longest, total, self._piece_elements if wide else self._max_count):
            parts = PackedBuffer([self._partial(op, part[piece]) for part in inputs]).pack()
            mine = output[piece]
            # MPI's send and receive buffers must not overlap.
            apart = wide or overlaps(mine, inputs)
            into = np.empty(mine.size, self._wide_dtype(op, mine.dtype) or mine.dtype) if apart else mine
            self._comm.Reduce_scatter(parts.spec(), spec(into), parts.counts, operation(op, into.dtype))
            self._finish(op, into, mine)

    def _wide_dtype(self, op: ReduceOp, dtype: np.dtype[Any]) -> np.dtype[Any] | None:
        """Return the wider dtype of a reduction, None for the arrays' own."""
        partial = partial_dtype(op, dtype, self._size)
        return None if self._size == 1 or partial == dtype else partial

    def _pieces(self, op: ReduceOp, array: Array) -> Iterator[Array]:
        most = self._max_count if self._wide_dtype(op, array.dtype) is None else self._piece_elements
        for begin in range(0, array.size, most):
            yield array[begin : begin + most]

    def _partial(self, op: ReduceOp, array: Array) -> Array:
        """Return the array, or a copy in the wider dtype, for MPI to reduce."""
        return to_partials(array, op, self._wide_dtype(op, array.dtype) or array.dtype)

    def _finish(self, op: ReduceOp, partial: Array, out: Array) -> None:
        """Write the result of MPI's reduction into the output."""
        if self._size > 1 and (op is ReduceOp.AVG or partial.dtype != out.dtype):
            combine_partials(op, [partial], self._size, out)
        elif partial is not out:
            out[:] = partial

    # Moves

    def barrier(self) -> None:
        """Wait until all members have called it."""
        self._comm.Barrier()

    def broadcast(self, array: Array, root: int) -> None:
        """Copy the root's array to all members."""
        for begin in range(0, array.size, self._max_count):
            self._comm.Bcast(spec(array[begin : begin + self._max_count]), root)

    def all_gather(self, outputs: Sequence[Array], array: Array) -> None:
        """Copy every member's array to the output of its rank, at all members."""
        longest, total = max(part.size for part in outputs), sum(part.size for part in outputs)
        for piece in self._piece_slices(longest, total):
            parts = PackedBuffer([output[piece] for output in outputs])
            given = self._send_spec(array[piece], outputs, parts)
            if parts.uniform:
                self._comm.Allgather(given, parts.spec())
            else:
                self._comm.Allgatherv(given, parts.vector_spec())
            parts.unpack()

    def gather(self, outputs: Sequence[Array], array: Array, root: int) -> None:
        """Copy every member's array to the root's output of its rank."""
        for piece in self._piece_slices(array.size, array.size * self._size):
            if self._rank == root:
                parts = PackedBuffer([output[piece] for output in outputs])
                self._comm.Gather(self._send_spec(array[piece], outputs, parts), parts.spec(), root)
                parts.unpack()
            else:
                self._comm.Gather(spec(array[piece]), None, root)

    def scatter(self, output: Array, inputs: Sequence[Array], root: int) -> None:
        """Copy the root's input of each rank to that member's output."""
        for piece in self._piece_slices(output.size, output.size * self._size):
            if self._rank == root:
                parts = PackedBuffer([part[piece] for part in inputs], copy=overlaps(output, inputs)).pack()
                self._comm.Scatter(parts.spec(), spec(output[piece]), root)
            else:
                self._comm.Scatter(None, spec(output[piece]), root)

    def all_to_all(self, outputs: Sequence[Array], inputs: Sequence[Array]) -> None:
        """Copy every member's input of each rank to that member's output."""
        longest, total = self._check_lengths(outputs, inputs)
        for piece in self._piece_slices(longest, total):
            given = PackedBuffer([part[piece] for part in inputs]).pack()
            taken = PackedBuffer([output[piece] for output in outputs])
            self._comm.Alltoallv(given.vector_spec(), taken.vector_spec())
            taken.unpack()

    def _check_lengths(self, outputs: Sequence[Array], inputs: Sequence[Array]) -> tuple[int, int]:
        """Return the elements of the longest array, and the most at a member; CallMismatchError if two differ."""
        sent = np.array([(given.size, taken.size) for given, taken in zip(inputs, outputs, strict=True)], np.int64)
        received = np.empty_like(sent)
        self._comm.Alltoall(sent, received)
        wrong = int((received != sent[:, ::-1]).any())
        most = np.array([wrong, sent.max(), sent.sum(axis=0).max()])
        self._comm.Allreduce(self._in_place, most, mpi().MAX)
        if most[0]:
            raise CallMismatchError
        return int(most[1]), int(most[2])

    def _piece_slices(self, longest: int, total: int, most: int | None = None) -> Iterator[slice]:
        """Return the slice of every array for each of several MPI calls: a single one where MPI can count it."""
        piece = longest if total <= (most or self._max_count) else self._piece_elements // self._size
        for begin in range(0, longest, max(1, piece)):
            yield slice(begin, begin + max(1, piece))

    def _send_spec(self, array: Array, outputs: Sequence[Array], parts: PackedBuffer) -> Any:
        """Return mpi4py's buffer specification of this rank's contribution, which may overlap an output."""
        if not parts.is_copy and overlaps(array, outputs):
            mine = outputs[self._rank]
            return self._in_place if address(array) == address(mine) else spec(array.copy())
        return spec(array)
