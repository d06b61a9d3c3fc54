"""GradientBucketer: averages gradients in a few large all_reduces, overlapped with the backward pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import timedelta
from itertools import zip_longest
from typing import Any, cast

import numpy as np

from rankmesh._collectives.objects import all_gather_object
from rankmesh._collectives.reduce import all_reduce
from rankmesh._session.process_group import Group
from rankmesh._session.ranks import get_process_group_ranks, get_rank
from rankmesh._tensors.layout import describe
from rankmesh_agent.collectives.reduction import check_op
from rankmesh_agent.group.work import Work
from rankmesh_agent.net.deadline import Deadline, seconds_of
from rankmesh_agent.wire.dtypes import code_of
from rankmesh_agent.wire.errors import CollectiveMismatchError
from rankmesh_agent.wire.ops import ReduceOp

Name = str | int


class GradientBucketer:
    """Averages the gradients of a hand-written backward pass over all ranks of a group.

    The gradients are views into a few flat arrays, the buckets. As soon as the last gradient of a bucket is ready, its
    ``all_reduce`` starts, and runs while the backward pass computes the next ones::

        gradients = GradientBucketer({"w1": w1, "b1": b1, "w2": w2, "b2": b2})
        for samples, labels in batches:
            ...
            np.matmul(hidden.T, delta, out=gradients.grads["w2"])  # straight into the bucket
            gradients.ready("w2")
            gradients.ready("b2", delta.sum(axis=0))  # copied into the bucket
            ...
            gradients.wait()
            for name, parameter in parameters.items():
                parameter -= rate * gradients.grads[name]

    Buckets are filled from the last parameter to the first, the order of a backward pass, and reduced in that order on
    all ranks, independent of the order of ``ready`` calls. To accumulate gradients over
    several backward passes, add to ``grads`` and call ``ready`` in the last one only.

    Construction is a collective call. A GradientBucketer is not thread-safe.

    Args:
        parameters: the arrays whose gradients are averaged, by name or as a sequence (numbered from 0), in the order
            of the forward pass; the same names, shapes and dtypes on all ranks. Only shape and dtype are used.
        bucket_bytes: size from which a bucket is closed; a parameter is never split. 4 MiB by default: enough for the
            bandwidth between CPUs, and small enough that the last bucket, which overlaps with nothing, is fast.
        group: the group, the world by default.
        average: divide by the number of ranks; otherwise the gradients are summed.

    Attributes:
        grads: an array for the gradient of each parameter, of its shape and dtype; zeros at first. Write to it before
            ``ready``; from then until ``wait`` has returned it must not be touched.

    Raises:
        ValueError: there are no parameters, ``bucket_bytes`` is not positive, or this process is not in the group.
        TypeError: a parameter is not an array, or its dtype cannot be averaged.
        CollectiveMismatchError: the ranks' parameters or options differ; names the difference, on all ranks.
        DistBackendError: as for all_reduce.

    Source: the design is that of torch's DistributedDataParallel, Li et al. 2020, https://arxiv.org/abs/2006.15704
    """

    def __init__(
        self,
        parameters: Mapping[str, Any] | Iterable[Any],
        *,
        bucket_bytes: int = 4 << 20,
        group: Group = None,
        average: bool = True,
    ) -> None:
        named: dict[Name, Any] = {}
        named.update(parameters if isinstance(parameters, Mapping) else enumerate(parameters))
        op = ReduceOp.AVG if average else ReduceOp.SUM
        if get_rank(group) < 0:
            raise ValueError("this process is not a member of the group: make a GradientBucketer at members only")
        if not named:
            raise ValueError("there are no parameters whose gradients could be averaged")
        if bucket_bytes <= 0:
            raise ValueError(f"bucket_bytes must be positive, got {bucket_bytes!r}")
        for name, parameter in named.items():
            if not hasattr(parameter, "__array_function__"):
                raise TypeError(f"parameter {name!r} must be an array, got {type(parameter).__qualname__}")
            code_of(parameter.dtype)
            check_op(op, parameter.dtype)
        lines = [f"{name!r} {describe(parameter)}" for name, parameter in named.items()]
        _require_equal([f"bucket_bytes={bucket_bytes}, average={average}", *lines], group)

        self._op = op
        self._group = group
        self._buckets = _assign_buckets(named, bucket_bytes)
        self._bucket_of = {name: number for number, names in enumerate(self._buckets) for name in names}
        self._flats = []
        views = {}
        for names in self._buckets:
            count = sum(named[name].size for name in names)
            like = named[names[0]]
            flat = np.zeros(count, like.dtype, like=like)  # an array of the parameters' own library
            begin = 0
            for name in names:
                end = begin + named[name].size
                views[name] = flat[begin:end].reshape(named[name].shape)
                begin = end
            self._flats.append(flat)
        self.grads: dict[Any, Any] = {name: views[name] for name in named}
        self._begin()

    def _begin(self) -> None:
        """Start a new backward pass."""
        self._missing = [set(names) for names in self._buckets]
        self._works: list[Work] = []

    def ready(self, name: Name, grad: Any = None) -> None:
        """Mark a gradient as complete; starts the ``all_reduce`` of its bucket after the last gradient there.

        Args:
            name: the parameter's name, or its number.
            grad: the gradient, copied to ``grads[name]``; None if it is already there.

        Raises:
            ValueError: there is no such parameter, or ``grad`` has another shape.
            TypeError: ``grad`` has another dtype.
            RuntimeError: the gradient was marked ready before, since the last ``wait``.
            DistBackendError: the group failed earlier; repeats the first failure.
        """
        if name not in self.grads:
            raise ValueError(f"there is no parameter {name!r}; there are {', '.join(map(repr, self.grads))}")
        missing, view = self._missing[self._bucket_of[name]], self.grads[name]
        if name not in missing:
            raise RuntimeError(f"the gradient of {name!r} was marked ready twice; wait() has to come in between")
        if grad is not None and grad is not view:
            wrong = f"the gradient of {name!r} must be {describe(view)}, got {describe(grad)}"
            if not hasattr(grad, "dtype") or grad.dtype != view.dtype:
                raise TypeError(wrong)
            if grad.shape != view.shape:
                raise ValueError(wrong)
            view[...] = grad
        missing.remove(name)
        self._start_full_buckets()

    def wait(self, timeout: timedelta | float | None = None) -> None:
        """Wait until ``grads`` holds all averaged gradients; the next backward pass may begin then.

        Args:
            timeout: limit, timedelta or seconds; by default the operations' own.

        Raises:
            RuntimeError: gradients are missing; names them. Mark them ready and wait again.
            CollectiveTimeoutError: ``timeout`` passed, and the caller may wait again; or ranks are missing.
            DistBackendError: an ``all_reduce`` failed; the gradients are invalid.
        """
        missing = [name for name in self.grads if name in self._missing[self._bucket_of[name]]]
        if missing:
            raise RuntimeError(
                f"no gradient was marked ready for {', '.join(map(repr, missing))}; every parameter needs one on every "
                "rank: of zeros where a rank's samples do not use it"
            )
        self._start_full_buckets()  # again, if a failure of the group kept ready() from it
        deadline = None if timeout is None else Deadline(seconds_of(timeout, 0.0))
        failure: BaseException | None = None
        for work in self._works:
            try:
                work.wait(None if deadline is None else deadline.remaining() or 1e-6)  # 0 would mean no limit
            except Exception:
                if work.exception() is None:
                    raise  # this wait timed out, not the operation
                failure = failure or work.exception()
        self._begin()
        if failure is not None:
            raise failure

    def _start_full_buckets(self) -> None:
        """Reduce complete buckets, strictly in their order: all ranks must make the same calls."""
        while (number := len(self._works)) < len(self._buckets) and not self._missing[number]:
            work = all_reduce(self._flats[number], self._op, self._group, async_op=True)
            self._works.append(cast(Work, work))


def _assign_buckets(parameters: Mapping[Name, Any], bucket_bytes: int) -> list[list[Name]]:
    """Return the names in each bucket, in the order in which a backward pass will fill the buckets.

    A bucket has one dtype. Parameters of several dtypes may alternate, so one bucket of each dtype stays open.
    """
    arrival = {name: number for number, name in enumerate(reversed(parameters))}
    buckets: list[list[Name]] = []
    filling: dict[Any, list[Name]] = {}
    filled: Counter[Any] = Counter()
    for name in arrival:
        dtype = parameters[name].dtype
        filling.setdefault(dtype, []).append(name)
        filled[dtype] += parameters[name].nbytes
        if filled[dtype] >= bucket_bytes:
            buckets.append(filling.pop(dtype))
            del filled[dtype]
    return sorted([*buckets, *filling.values()], key=lambda names: arrival[names[-1]])


def _require_equal(lines: list[str], group: Group) -> None:
    """Raise the same error at all ranks of a group unless they all have the same lines."""
    ranks = get_process_group_ranks(group)
    everyones: list[Any] = [None] * len(ranks)
    all_gather_object(everyones, lines, group)
    for number, found in enumerate(zip_longest(*everyones, fillvalue="nothing")):
        if len(set(found)) > 1:
            subject = f"parameter {number - 1}" if number else "the options"
            differ = "; ".join(f"rank {rank}: {line}" for rank, line in zip(ranks, found, strict=True))
            raise CollectiveMismatchError(
                f"a GradientBucketer needs the same parameters on all ranks, and {subject} differ: {differ}",
                ranks=ranks,
            )
