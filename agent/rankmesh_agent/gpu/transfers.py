"""Collectives on GPUs as transfers between pairs of ranks, and reductions by the project's kernel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from rankmesh_agent.device import arithmetic, runtime
from rankmesh_agent.device.array import DeviceArray
from rankmesh_agent.gpu.launch import Launch
from rankmesh_agent.wire.ops import ReduceOp

RankedArrays = Sequence[tuple[int, DeviceArray]]
"""Arrays with the ranks that they come from, or go to."""


class TransferCollectives(ABC):
    """One rank's collectives over a library that moves bytes between ranks; a subclass overrides what it has itself.

    Attributes:
        rank, size: in the library's communicator.
    """

    rank: int
    size: int

    @abstractmethod
    def exchange(self, launch: Launch, incoming: RankedArrays, outgoing: RankedArrays) -> None:
        """Receive from, and send to, other ranks; no array is empty."""

    def scratch(self, launch: Launch, like: DeviceArray) -> list[DeviceArray]:
        """Return scratch arrays like another one, one per rank."""
        return launch.scratch_rows(like, self.size)

    def all_reduce(self, launch: Launch, array: DeviceArray, op: ReduceOp) -> None:
        parts = self.scratch(launch, array)
        self.all_gather(launch, parts, array)
        arithmetic.combine(op, parts, [array], launch.stream, launch.device)

    def reduce(self, launch: Launch, array: DeviceArray, op: ReduceOp, root: int) -> None:
        parts = self.scratch(launch, array) if self.rank == root else []
        self.gather(launch, parts, array, root)
        if parts:
            arithmetic.combine(op, parts, [array], launch.stream, launch.device)

    def reduce_scatter(self, launch: Launch, output: DeviceArray, inputs: Sequence[DeviceArray], op: ReduceOp) -> None:
        parts = self.scratch(launch, output)
        self.all_to_all(launch, parts, inputs)
        arithmetic.combine(op, parts, [output], launch.stream, launch.device)

    def all_gather(self, launch: Launch, outputs: Sequence[DeviceArray], array: DeviceArray) -> None:
        self._transfer(launch, list(enumerate(outputs)), [(rank, array) for rank in range(self.size)])

    def gather(self, launch: Launch, outputs: Sequence[DeviceArray], array: DeviceArray, root: int) -> None:
        self._transfer(launch, list(enumerate(outputs)), [(root, array)])

    def scatter(self, launch: Launch, output: DeviceArray, inputs: Sequence[DeviceArray], root: int) -> None:
        self._transfer(launch, [(root, output)], list(enumerate(inputs)))

    def all_to_all(self, launch: Launch, outputs: Sequence[DeviceArray], inputs: Sequence[DeviceArray]) -> None:
        self._transfer(launch, list(enumerate(outputs)), list(enumerate(inputs)))

    def _transfer(self, launch: Launch, incoming: RankedArrays, outgoing: RankedArrays) -> None:
        """Exchange arrays with other ranks; this rank's array for itself is copied on the GPU."""
        others = [[pair for pair in pairs if pair[0] != self.rank and pair[1].nbytes] for pairs in (incoming, outgoing)]
        self.exchange(launch, *others)
        output, mine = dict(incoming).get(self.rank), dict(outgoing).get(self.rank)
        if output is not None and mine is not None and mine.pointer != output.pointer:
            runtime.copy_async(output.pointer, mine.pointer, output.nbytes, launch.stream)
