"""Reduction operations of the public functions, and torch's deprecated name for them."""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from rankmesh_agent.collectives.reduction import check_op
from rankmesh_agent.wire.ops import PremulSum, ReduceOp

_NOT_COMPLEX = frozenset({ReduceOp.MIN, ReduceOp.MAX, ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR})


class Reduction(NamedTuple):
    """A checked operation; ``factor``: PREMUL_SUM's factor for this rank's elements; None for other reductions."""

    op: ReduceOp
    factor: complex | None


def reduction(op: Any, dtype: np.dtype[Any]) -> Reduction:
    """Return the checked operation of an ``op`` argument; torch's own ReduceOp is one, too."""
    if isinstance(op, ReduceOp):
        return _checked(op, dtype)
    if isinstance(op, PremulSum):
        check_op(op, dtype)
        return Reduction(ReduceOp.PREMUL_SUM, op.factor)
    torchs = getattr(op, "op", op)  # a script may import ReduceOp from torch
    if type(op).__module__.startswith("torch.") and getattr(torchs, "name", None) in ReduceOp.__members__:
        return _checked(ReduceOp[torchs.name], dtype)
    names = ", ".join(f"ReduceOp.{name}" for name in ReduceOp.__members__)
    raise TypeError(f"op must be a rankmesh.ReduceOp, got {op!r}: one of {names}")


@lru_cache(1024)
def _checked(op: ReduceOp, dtype: np.dtype[Any]) -> Reduction:
    check_op(op, dtype)
    return Reduction(op, None)


def supports_complex(reduceOp: ReduceOp | PremulSum) -> bool:  # noqa: N803  # torch's name
    """Return whether a reduction works on complex numbers: SUM, AVG, PRODUCT and PREMUL_SUM do.

    Source: torch.distributed.distributed_c10d.supports_complex (where PRODUCT does not)
    """
    return reduceOp not in _NOT_COMPLEX


def _make_nccl_premul_sum(factor: Any) -> PremulSum:
    """Return ReduceOp.PREMUL_SUM(factor).

    Args:
        factor: a number, or an array or tensor of one element.

    Source: https://pytorch.org/docs/2.1/distributed.html#torch.distributed.ReduceOp
    """
    return ReduceOp.PREMUL_SUM(factor)


class _ReduceOps:
    """The deprecated ``reduce_op``: the names of ReduceOp, with a warning."""

    def __getattr__(self, name: str) -> ReduceOp:
        if name not in ReduceOp.__members__:
            raise AttributeError(f"reduce_op has no {name!r}; it has {', '.join(ReduceOp.__members__)}")
        warnings.warn("rankmesh.reduce_op is deprecated; use rankmesh.ReduceOp", FutureWarning, stacklevel=2)
        return ReduceOp[name]

    def __dir__(self) -> list[str]:
        return list(ReduceOp.__members__)


reduce_op = _ReduceOps()
"""Deprecated: use ReduceOp. Source: https://pytorch.org/docs/2.1/distributed.html#torch.distributed.reduce_op"""
