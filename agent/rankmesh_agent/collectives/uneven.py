"""gather and scatter of arrays that differ in length from rank to rank: as an all_to_all, which compares the lengths.

Of the ranks that make such a call only the root knows that. The others begin an ordinary one, all find that the calls
differ in their lengths alone, and then all make this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rankmesh_agent.collectives.link import Array
from rankmesh_agent.collectives.select import Algorithm
from rankmesh_agent.wire.ops import OpType


def algorithm(kind: OpType, all_to_all: Algorithm, size: int) -> Algorithm:
    """Return the algorithm of a gather or a scatter.

    Args:
        kind: GATHER or SCATTER.
        all_to_all: the algorithm that moves the arrays.
        size: ranks in the group.
    """

    def gather(*arguments: Any) -> None:
        *medium, outputs, array, root = arguments
        all_to_all(*medium, outputs or _nothing(array, size), _only(array, root, size))

    def scatter(*arguments: Any) -> None:
        *medium, output, inputs, root = arguments
        all_to_all(*medium, _only(output, root, size), inputs or _nothing(output, size))

    return gather if kind is OpType.GATHER else scatter


def contribution(kind: OpType, arguments: Sequence[Any]) -> Sequence[Array]:
    """Return the arrays that a rank sends."""
    return [arguments[-2]] if kind is OpType.GATHER else arguments[-2] or []


def lengths(kind: OpType, arguments: Sequence[Any]) -> str:
    """Return a description of the lengths that a rank gives and expects, for an error."""
    first, second, _ = arguments[-3:]
    array, parts, at_root = (second, first, "gathers") if kind is OpType.GATHER else (first, second, "scatters")
    has = f"has {array.size} elements"
    return f"{has}, {at_root} {'+'.join(str(part.size) for part in parts)}" if parts else has


def _nothing(like: Array, size: int) -> list[Array]:
    return [like[:0]] * size


def _only(array: Array, rank: int, size: int) -> list[Array]:
    """Return one array per rank, of which only that of ``rank`` has elements."""
    return [array if other == rank else array[:0] for other in range(size)]
