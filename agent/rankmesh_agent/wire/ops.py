"""The operations, what identifies a call of one, and the fingerprint by which ranks compare calls."""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np


class Kind(enum.IntEnum):
    """A collective operation."""

    BARRIER = 1
    ALL_REDUCE = 2
    BROADCAST = 3
    ALL_GATHER = 4
    NEW_GROUP = 5


class ReduceOp(enum.IntEnum):
    """How elements of several ranks become one, as torch.distributed.ReduceOp names it."""

    SUM = 0
    PRODUCT = 2
    MIN = 3
    MAX = 4


@dataclass(frozen=True)
class Call:
    """What all ranks of a group have to agree on before data moves.

    Attributes:
        kind: the collective.
        dtype: element type of the arrays, None where there are none.
        count: elements each rank contributes.
        reduce_op: how elements are combined, None for collectives that do not.
        root: group rank that data comes from, None for collectives without one.
        subject: anything else that has to be equal, in words (a new group's ranks, say).
    """

    kind: Kind
    dtype: np.dtype[Any] | None = None
    count: int = 0
    reduce_op: ReduceOp | None = None
    root: int | None = None
    subject: str = ""

    @cached_property
    def name(self) -> str:
        """The collective's name in the API."""
        return self.kind.name.lower()

    @cached_property
    def nbytes(self) -> int:
        """Bytes each rank contributes."""
        return 0 if self.dtype is None else self.count * self.dtype.itemsize

    @cached_property
    def arguments(self) -> str:
        """The arguments in words, for example ``float32[1024], SUM``."""
        parts = []
        if self.dtype is not None:
            parts.append(f"{self.dtype}[{self.count}]")
        if self.reduce_op is not None:
            parts.append(self.reduce_op.name)
        if self.root is not None:
            parts.append(f"src={self.root}")
        if self.subject:
            parts.append(self.subject)
        return ", ".join(parts)

    @cached_property
    def fingerprint(self) -> int:
        """64 bits that are equal for equal calls and different for others, on every machine and version of Python."""
        digest = hashlib.blake2b(str(self).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big")

    def __str__(self) -> str:
        return f"{self.name}({self.arguments})"
