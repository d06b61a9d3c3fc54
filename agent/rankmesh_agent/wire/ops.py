"""Collective and reduction operations, and the description of a call with the fingerprint that ranks compare."""

from __future__ import annotations

import contextlib
import enum
import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from rankmesh_agent.wire.dtypes import display


class OpType(enum.IntEnum):
    """A collective operation."""

    BARRIER = 1
    ALL_REDUCE = 2
    BROADCAST = 3
    ALL_GATHER = 4
    NEW_GROUP = 5
    REDUCE = 6
    GATHER = 7
    SCATTER = 8
    REDUCE_SCATTER = 9
    ALL_TO_ALL = 10
    EMPTY = 11
    """Allocate registered arrays."""


class ReduceOp(enum.Enum):
    """Reduction operation, with the names and numbers of torch.distributed.ReduceOp.

    ``AVG`` of integers is an integer, rounded towards zero.
    ``PREMUL_SUM`` needs its factor: ``ReduceOp.PREMUL_SUM(0.5)``.
    """

    SUM = 0
    AVG = 1
    PRODUCT = 2
    MIN = 3
    MAX = 4
    BAND = 5
    BOR = 6
    BXOR = 7
    PREMUL_SUM = 8

    __hash__ = object.__hash__  # no call of Python, unlike Enum's

    def __str__(self) -> str:
        """Return the operation's name as torch's ReduceOp does: ``RedOpType.SUM``."""
        return f"RedOpType.{self.name}"

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)

    def __call__(self, factor: complex) -> PremulSum:
        """Return the sum of each rank's array multiplied by its factor; raise TypeError unless this is PREMUL_SUM."""
        if self is not ReduceOp.PREMUL_SUM:
            raise TypeError(f"ReduceOp.{self.name} takes no factor; only ReduceOp.PREMUL_SUM(factor) does")
        return PremulSum(factor)


@dataclass(frozen=True)
class PremulSum:
    """PREMUL_SUM with its factor, which may differ from rank to rank.

    Attributes:
        factor: a number, also as an array or tensor of one element; an int for arrays of integers.

    Raises:
        TypeError: the factor is not a number.
    """

    factor: complex

    def __post_init__(self) -> None:
        number: Any = self.factor
        if hasattr(number, "item"):
            with contextlib.suppress(ValueError, RuntimeError):  # an array, or a tensor, of several elements
                number = number.item()
        if not isinstance(number, int | float | complex):
            raise TypeError(f"the factor of PREMUL_SUM must be one number, got {self.factor!r}")
        object.__setattr__(self, "factor", number)


@dataclass(frozen=True)
class Call:
    """Arguments of a collective on which all ranks of a group must agree before data moves.

    Attributes:
        dtype: element type of the arrays, None for calls without arrays.
        count: elements that each rank contributes or receives; -1 where every rank has its own splits.
        reduce_op: reduction operation, None for collectives without one.
        root: global rank of the source or destination, None for collectives without one.
        counts: elements of each rank where they differ, otherwise None.
        subject: further arguments that must be equal, as text (for example the ranks of a new group); OBJECTS if the
            arrays are rests of encoded objects.
        place: memory of the arrays: empty for host memory, ``cuda`` for GPU memory.
    """

    kind: OpType
    dtype: np.dtype[Any] | None = None
    count: int = 0
    reduce_op: ReduceOp | None = None
    root: int | None = None
    counts: tuple[int, ...] | None = None
    subject: str = ""
    place: str = ""

    @cached_property
    def name(self) -> str:
        """The collective's name in the API."""
        return self.kind.name.lower()

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the largest contribution."""
        widest = self.count if self.counts is None else max(self.counts)
        return 0 if self.dtype is None else max(widest, 0) * self.dtype.itemsize

    @cached_property
    def arguments(self) -> str:
        """The arguments as text, for example ``float32[1024], SUM``."""
        parts = []
        if self.dtype is not None:
            counts = self.counts or ((self.count,) if self.count >= 0 else ())
            parts.append(display(self.dtype) + (f"[{'+'.join(map(str, counts))}]" if counts else ""))
        if self.reduce_op is not None:
            parts.append(self.reduce_op.name)
        if self.root is not None:
            parts.append(f"{'src' if self.kind in _FROM_ROOT else 'dst'}={self.root}")
        if self.subject:
            parts.append(self.subject)
        if self.place:
            parts.append(f"on {self.place}")
        return ", ".join(parts)

    @cached_property
    def fingerprint(self) -> int:
        """64 bits that are equal for equal calls and differ for others, on every machine and version of Python."""
        digest = hashlib.blake2b(str(self).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big")

    def __str__(self) -> str:
        return f"{self.name}({self.arguments})"


_FROM_ROOT = frozenset({OpType.BROADCAST, OpType.SCATTER})
