"""Backend of a group of one rank: each collective is at most a copy, without a frame, a fingerprint or a wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from rankmesh_agent.backends.base import Backend, CallContext
from rankmesh_agent.backends.fingerprint import mismatch_error
from rankmesh_agent.backends.registered import Outcome
from rankmesh_agent.collectives.link import Array
from rankmesh_agent.collectives.select import Algorithm
from rankmesh_agent.net.callers import call_site
from rankmesh_agent.shared_memory.slots import CallMismatchError
from rankmesh_agent.wire.ops import Call, OpType


def _nothing(*_: Any) -> None:
    """The result is where it belongs: the array itself is all ranks' reduction."""


def _gather(outputs: Sequence[Array], array: Array, *_: Any) -> None:
    np.copyto(outputs[0], array)


def _scatter(output: Array, inputs: Sequence[Array], *_: Any) -> None:
    np.copyto(output, inputs[0])


def _all_to_all(outputs: Sequence[Array], inputs: Sequence[Array]) -> None:
    if outputs[0].size != inputs[0].size:
        raise CallMismatchError
    np.copyto(outputs[0], inputs[0])


def _empty(directory: str, job: str, nbytes: int, outcome: Outcome) -> None:
    outcome.append(np.empty(nbytes, np.uint8))


_ALGORITHMS: dict[OpType, Callable[..., None]] = {
    OpType.ALL_GATHER: _gather,
    OpType.GATHER: _gather,
    OpType.SCATTER: _scatter,
    OpType.REDUCE_SCATTER: _scatter,
    OpType.ALL_TO_ALL: _all_to_all,
    OpType.EMPTY: _empty,
}
"""By kind; the collectives that are missing leave the array as it is."""


class SelfBackend(Backend):
    """Executes the calls of a rank that is alone in its group, like ``MPI_COMM_SELF``."""

    name: ClassVar[str] = "mesh"
    medium = "self"
    allocates = True

    def algorithm(self, call: Call) -> Algorithm:
        return _ALGORITHMS.get(call.kind, _nothing)

    def run(self, algorithm: Algorithm, arguments: Sequence[Any], context: CallContext) -> None:
        try:
            algorithm(*arguments)
        except CallMismatchError:
            raise mismatch_error(context, [(str(context.call), call_site(), context.describe())]) from None
