"""Engines from outside: what they are asked to do, and that order, checks and errors are those of the mesh."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.sweep.cover import cells_of, go_through
from support.sweep.media import OverCommunicator
from support.threads import LATER, NOW, World, in_threads, world

from rankmesh._collectives.coalescing import CallRecorder
from rankmesh_agent.collectives.reduction import combine
from rankmesh_agent.group.local import LocalCommunicator
from rankmesh_agent.wire.errors import CollectiveMismatchError, DistBackendError, GroupAbortedError
from rankmesh_agent.wire.ops import ReduceOp

SIZE = 3
Array = np.ndarray[Any, Any]


class Board:
    """What the threads of a test share: each leaves something, all read."""

    def __init__(self) -> None:
        self._left: list[Any] = [None] * SIZE
        self._barrier = threading.Barrier(SIZE)

    def swap(self, rank: int, value: Any) -> list[Any]:
        self._left[rank] = value
        self._barrier.wait(10)
        everything = list(self._left)
        self._barrier.wait(10)
        return everything


class Engine:
    """Every collective, over a board."""

    def __init__(self, board: Board, rank: int) -> None:
        self._board = board
        self._rank = rank
        self.closed = 0
        self.calls: list[str] = []

    def _swap(self, name: str, value: Any) -> list[Any]:
        self.calls.append(name)
        return self._board.swap(self._rank, copy.deepcopy(value))

    def all_reduce(self, array: Array, op: ReduceOp) -> None:
        combine(op, self._swap("all_reduce", array), array)

    def reduce(self, array: Array, op: ReduceOp, root: int) -> None:
        parts = self._swap("reduce", array)
        if self._rank == root:
            combine(op, parts, array)

    def broadcast(self, array: Array, root: int) -> None:
        array[:] = self._swap("broadcast", array)[root]

    def all_gather(self, outputs: list[Array], array: Array) -> None:
        for output, part in zip(outputs, self._swap("all_gather", array), strict=True):
            output[:] = part

    def gather(self, outputs: list[Array], array: Array, root: int) -> None:
        parts = self._swap("gather", array)
        assert bool(outputs) == (self._rank == root)
        for output, part in zip(outputs, parts, strict=False):
            output[:] = part

    def scatter(self, output: Array, inputs: list[Array], root: int) -> None:
        assert bool(inputs) == (self._rank == root)
        output[:] = self._swap("scatter", inputs)[root][self._rank]

    def reduce_scatter(self, output: Array, inputs: list[Array], op: ReduceOp) -> None:
        combine(op, [parts[self._rank] for parts in self._swap("reduce_scatter", inputs)], output)

    def all_to_all(self, outputs: list[Array], inputs: list[Array]) -> None:
        for output, parts in zip(outputs, self._swap("all_to_all", inputs), strict=True):
            output[:] = parts[self._rank]

    def barrier(self) -> None:
        self._swap("barrier", None)

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def trio() -> Iterator[tuple[World, list[Engine]]]:
    board = Board()
    engines = [Engine(board, rank) for rank in range(SIZE)]
    with world(SIZE, "tcp") as made:
        made.run(lambda members: members.use_custom_backend("board", engines[members.rank]))
        yield made, engines


def test_every_collective_goes_to_the_engine(trio: tuple[World, list[Engine]]) -> None:
    made, engines = trio
    assert {(comm.backend, comm.medium) for comm in made.communicators} == {("board", "board")}
    (cells,) = cells_of("communicator", (SIZE,))
    found = made.run(lambda comm: go_through(OverCommunicator(comm), cells[::5]))
    assert not [text for each in found for text in each["wrong"]]
    made.run(lambda comm: comm.barrier(NOW))
    assert set(engines[0].calls) == {
        "all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter", "reduce_scatter", "all_to_all",
        "barrier",
    }  # fmt: skip


def test_a_batch_is_merged_for_the_engine_too(trio: tuple[World, list[Engine]]) -> None:
    made, engines = trio

    def attempt(members: LocalCommunicator) -> None:
        arrays = [np.ones(2), np.ones(3)]
        recorder = CallRecorder(members)
        for array in arrays:
            members.all_reduce(array, ReduceOp.SUM, NOW)
        recorder.close(NOW)
        assert [array.tolist() for array in arrays] == [[3, 3], [3, 3, 3]]

    made.run(attempt)
    assert engines[0].calls == ["all_reduce"]


def test_different_calls_do_not_reach_the_engine_and_the_group_goes_on(trio: tuple[World, list[Engine]]) -> None:
    made, engines = trio

    def attempt(members: LocalCommunicator) -> str:
        array = np.full(4, float(members.rank))
        with pytest.raises(CollectiveMismatchError, match=r"rank 2: all_reduce\(float64\[4\], MAX\)") as mismatch:
            members.all_reduce(array, ReduceOp.MAX if members.rank == 2 else ReduceOp.SUM, NOW)
        assert (array == members.rank).all()
        members.barrier(NOW)
        return str(mismatch.value)

    assert len(set(made.run(attempt))) == 1
    assert [engine.calls for engine in engines] == [["barrier"]] * SIZE


def test_what_the_engine_does_not_offer_is_said_and_the_group_goes_on() -> None:
    class OnlyBarrier:
        def barrier(self) -> None:
            pass

    def attempt(members: LocalCommunicator) -> None:
        members.use_custom_backend("only-barrier", OnlyBarrier())
        for options in (NOW, LATER):
            with pytest.raises(DistBackendError, match="backend 'only-barrier' does not offer all_reduce") as missing:
                members.all_reduce(np.ones(2), ReduceOp.SUM, options)
            assert missing.value.op == "all_reduce"
        members.barrier(NOW)

    with world(SIZE, "tcp") as made:
        made.run(attempt)


def test_an_engine_that_raises_ends_the_group_and_the_others_are_told() -> None:
    class Failing:
        def __init__(self, rank: int) -> None:
            self._rank = rank

        def barrier(self) -> None:
            if self._rank == 1:
                raise OSError("fibre cut")

    def barriers(members: LocalCommunicator) -> None:
        for _ in range(1000):
            members.barrier(NOW)

    def attempt(members: LocalCommunicator) -> None:
        members.use_custom_backend("failing", Failing(members.rank))
        with pytest.raises((OSError, GroupAbortedError), match="fibre cut") as caught:
            barriers(members)
        assert (caught.type is OSError) == (members.rank == 1)
        with pytest.raises(GroupAbortedError, match=r"rank 1 .* gave up during barrier #1: OSError fibre cut"):
            members.barrier(NOW)

    with world(SIZE, "tcp") as made:
        made.run(attempt)


def test_messages_go_over_the_mesh(trio: tuple[World, list[Engine]]) -> None:
    def attempt(members: LocalCommunicator) -> None:
        if members.rank == 0:
            members.send(np.arange(5), 1, 0, NOW)
        elif members.rank == 1:
            got = np.zeros(5, int)
            assert members.receive(got, 0, 0, NOW) == 0
            assert got.tolist() == [0, 1, 2, 3, 4]

    trio[0].run(attempt)


def test_the_engine_is_closed_once_with_its_group(trio: tuple[World, list[Engine]]) -> None:
    made, engines = trio
    made.close()
    made.close()
    assert [engine.closed for engine in engines] == [1] * SIZE


def test_an_engine_whose_close_fails_does_not_keep_the_mesh_from_closing(caplog: pytest.LogCaptureFixture) -> None:
    class Stuck:
        def close(self) -> None:
            raise OSError("still busy")

    with world(SIZE, "tcp") as made:
        made.run(lambda members: members.use_custom_backend("stuck", Stuck()))
        in_threads(SIZE, lambda rank: made.communicators[rank].close())
    assert "still busy" in caplog.text
    assert len(caplog.records) == SIZE
