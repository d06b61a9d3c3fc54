"""Methods that c10d calls on a process group, implemented by the SDK's functions.

torch has checked the arguments and translated global ranks into group ranks. Every method returns a Work; a synchronous
call has completed when it returns. torch 2.13 renamed some methods; the old names, which older torch and parts of newer
call, exist here as well.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as c10d
from torch.autograd.graph import increment_version

import rankmesh
import rankmesh._session.debug as _debug
from rankmesh._collectives.arguments import Timeout
from rankmesh._collectives.coalescing import CallRecorder, is_recording
from rankmesh._session.process_group import ProcessGroup as MeshGroup
from rankmesh._tensors.torch_buffer import flat_array
from rankmesh.torch._device_backend import backend_names
from rankmesh.torch._errors import to_torch_error, translating
from rankmesh.torch._patches import complete_options, untraced
from rankmesh.torch._sparse import all_reduce_sparse
from rankmesh.torch._work import CompletedWork, MessageWork, PendingWork
from rankmesh_agent.group.communicator import ALL_GATHER, ALL_REDUCE, BROADCAST, REDUCE, REDUCE_SCATTER, Communicator
from rankmesh_agent.group.options import Options
from rankmesh_agent.group.work import Work
from rankmesh_agent.wire.errors import CollectiveTimeoutError, DistError
from rankmesh_agent.wire.ops import OpType, PremulSum, ReduceOp

Method = TypeVar("Method", bound=Callable[..., Any])
_Written = tuple[Any, ...]

# Arguments and options

_OPS = {
    getattr(c10d.ReduceOp.RedOpType, op.name): op
    for op in ReduceOp
    if op is not ReduceOp.PREMUL_SUM and hasattr(c10d.ReduceOp.RedOpType, op.name)
}
_REDUCTIONS, _ROOTED = {ALL_REDUCE, REDUCE, REDUCE_SCATTER}, {BROADCAST, REDUCE}
_UNSET_TIMEOUT = timedelta(milliseconds=-1)
"""Value of the timeout in torch's options if the caller gave none."""
_profiling = torch.autograd._profiler_enabled
complete_options(c10d)


@dataclass
class _CallOptions:
    """Substitute for torch's options in a call of the short form, such as ``broadcast(tensor, root)``."""

    rootRank: int = 0  # noqa: N815  # torch's names
    reduceOp: Any = c10d.ReduceOp.SUM  # noqa: N815
    timeout: timedelta | None = None
    asyncOp: bool = True  # noqa: N815

    def set(self, argument: Any) -> None:
        """Set the option that an argument is for, by its type: the order differs between torch's methods."""
        if isinstance(argument, c10d.ReduceOp | c10d.ReduceOp.RedOpType):
            self.reduceOp = argument
        elif isinstance(argument, timedelta):
            self.timeout = argument
        elif isinstance(argument, int):
            self.rootRank = argument
        elif argument is not None:
            raise TypeError(
                f"expected a root, an operation or a timeout, got {argument!r}; pass tensors and splits by position"
            )


def _call(name: str) -> Callable[[Method], Method]:
    """Return a decorator that makes a method a call of the group.

    Tensors of another device go to the backend named for it. With a meta tensor, which has no data, the call does
    nothing, as in torch. Errors are also of torch's classes. A profiler sees the call as ``rankmesh:NAME``, like
    ``gloo:NAME``.
    """

    def decorate(method: Method) -> Method:
        @untraced
        @functools.wraps(method)
        def call(self: Any, *arguments: Any, **named: Any) -> Any:
            device = _device_of(arguments)
            if device is not None and not self.carries(device):
                if device.type == "meta" and "meta" not in backend_names(self):
                    return CompletedWork([])
                return getattr(self._device_backend(device), method.__name__)(*arguments, **named)
            try:
                if not _profiling():
                    return method(self, *arguments, **named)
                with torch.profiler.record_function(f"rankmesh:{name}"):
                    return method(self, *arguments, **named)
            except DistError as error:
                raise to_torch_error(error) from error.__cause__

        return call  # type: ignore[return-value]

    return decorate


def _collective(
    name: str, counts_version: bool = False, kind: OpType | None = None
) -> Callable[[Callable[..., _Written]], Callable[..., CompletedWork]]:
    """Return a decorator that makes a method a collective of the group, with a Work of torch's as its result.

    The last argument is torch's options; root, operation and timeout are accepted in their place. The method returns
    the tensors that the call writes to, and its Works, None in the place of one that has completed.

    Args:
        counts_version: increment the tensors' version, by which autograd notices that they were overwritten: where
            gloo does.
        kind: of the calls that the compiled core may carry out at once: with one tensor, or an output and an input.
    """

    def decorate(method: Callable[..., _Written]) -> Callable[..., CompletedWork]:
        count = method.__code__.co_argcount - 1

        @_call(name)
        @functools.wraps(method)
        def general(self: Any, *arguments: Any, **named: Any) -> CompletedWork:
            if len(arguments) != count or not hasattr(arguments[-1], "asyncOp"):
                arguments = _with_options(arguments, named, count)
            tensors, *works = method(self, *arguments)
            if counts_version:
                increment_version(tensors)
            return PendingWork(tensors, works) if works and works[0] is not None else CompletedWork(tensors)

        @untraced
        @functools.wraps(method)
        def collective(self: Any, *arguments: Any, **named: Any) -> CompletedWork:
            if named or len(arguments) != count or not self._at_once(kind, arguments):
                return general(self, *arguments, **named)
            if counts_version:
                increment_version(arguments[0])
            return CompletedWork(_as_list(arguments[0]))

        return general if kind is None else collective

    return decorate


def _with_options(arguments: tuple[Any, ...], named: dict[str, Any], count: int) -> tuple[Any, ...]:
    """Return a call's arguments with torch's options, or a substitute for them, as the last of ``count``."""
    if hasattr(named.get("opts"), "asyncOp"):
        return *arguments, named["opts"]
    options = _CallOptions()
    for argument in (*arguments[count - 1 :], *named.values()):
        options.set(argument)
    return *arguments[: count - 1], options


def _device_of(arguments: Any) -> Any:
    """Return the device of the first tensor, None for host memory or without a tensor."""
    for argument in arguments:
        while isinstance(argument, list | tuple) and argument:
            argument = argument[0]
        if isinstance(argument, torch.Tensor):
            return None if argument.is_cpu else argument.device
    return None


class Collectives:
    """Collectives and messages of a process group."""

    mesh: MeshGroup
    comm: Communicator
    carries: Callable[[Any], bool]
    _device_backend: Callable[[Any], Any]
    _batched: list[Work] | None = None
    """Works of messages inside torch's coalescing manager, which are sent at once; None outside of it."""
    _recorder: CallRecorder | None = None
    """Records the collectives inside it."""

    @_collective("all_reduce", kind=ALL_REDUCE)
    def allreduce(self, tensors: Any, opts: Any = None) -> _Written:
        """Reduce a tensor over all ranks, in place; sparse ones can be summed."""
        tensors, op = _as_list(tensors), _op(opts.reduceOp)
        if tensors[0].layout is not torch.strided:
            self._sum_sparse(tensors[0], op, opts)
            return (tensors,)
        if len(tensors) > 1:
            return self._reduce_together(tensors, op, opts)
        flat = flat_array(torch, tensors[0]) if _debug.below_detail else None  # DETAIL names the shapes
        return tensors, rankmesh.all_reduce(tensors[0] if flat is None else flat, op, **self._options(opts))

    @_collective("all_reduce_coalesced", counts_version=True)
    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> _Written:
        """Reduce several tensors over all ranks, together."""
        return self._reduce_together(list(tensors), _op(opts.reduceOp), opts)

    def _reduce_together(self, tensors: list[Any], op: ReduceOp | PremulSum, opts: Any) -> _Written:
        with self._coalesced(opts) as made:
            for tensor in tensors:
                rankmesh.all_reduce(tensor, op, self.mesh)
        return tensors, *made.works

    @_collective("reduce", kind=REDUCE)
    def reduce(self, tensors: Any, opts: Any = None) -> _Written:
        """Reduce a tensor over all ranks into the root's."""
        tensors, op = _as_list(tensors), _op(opts.reduceOp)
        return tensors, rankmesh.reduce(tensors[0], op=op, group_dst=opts.rootRank, **self._options(opts))

    @_collective("broadcast", kind=BROADCAST)
    def broadcast(self, tensors: Any, opts: Any = None) -> _Written:
        """Copy the root's tensor to all ranks."""
        tensors = _as_list(tensors)
        return tensors, rankmesh.broadcast(tensors[0], group_src=opts.rootRank, **self._options(opts))

    @_collective("all_gather", counts_version=True)
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> _Written:
        """Copy every rank's tensor into a list on all ranks."""
        outs = _inner_list(outputs)
        return outs, rankmesh.all_gather(outs, _as_list(inputs)[0], **self._options(opts))

    @_collective("all_gather_into_tensor", counts_version=True, kind=ALL_GATHER)
    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> _Written:
        """Copy every rank's tensor into one concatenated tensor on all ranks."""
        return [output], rankmesh.all_gather_single(output, input, **self._options(opts))

    @_collective("all_gather_coalesced", counts_version=True)
    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> _Written:
        """Gather several tensors; ``outputs`` has one list per rank."""
        with self._coalesced(opts) as made:
            for input, outs in zip(inputs, zip(*outputs, strict=True), strict=True):
                rankmesh.all_gather(outs, input, self.mesh)
        return [out for outs in outputs for out in outs], *made.works

    @_collective("all_gather_into_tensor_coalesced", counts_version=True)
    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> _Written:
        """Gather several tensors, each into one concatenated tensor."""
        with self._coalesced(opts) as made:
            for output, input in zip(outputs, inputs, strict=True):
                rankmesh.all_gather_single(output, input, self.mesh)
        return list(outputs), *made.works

    @_collective("gather", counts_version=True)
    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> _Written:
        """Copy every rank's tensor into a list on the root."""
        outs = _inner_list(outputs)
        tensor = _as_list(inputs)[0]
        return outs, rankmesh.gather(tensor, outs or None, group_dst=opts.rootRank, **self._options(opts))

    @_collective("gather_single", counts_version=True)
    def gather_single(self, output: Any, input: Any, opts: Any = None) -> _Written:
        """Copy every rank's tensor into one concatenated tensor on the root."""
        return [output], rankmesh.gather_single(input, output, group_dst=opts.rootRank, **self._options(opts))

    gather_into_tensor = gather_single

    @_collective("scatter")
    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> _Written:
        """Copy to every rank its tensor of the root's list."""
        outputs, ins = _as_list(outputs), _inner_list(inputs) or None
        return outputs, rankmesh.scatter(outputs[0], ins, group_src=opts.rootRank, **self._options(opts))

    @_collective("reduce_scatter", counts_version=True)
    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> _Written:
        """Reduce the input tensors for each rank into that rank's output."""
        outputs, op = _as_list(outputs), _op(opts.reduceOp)
        return outputs, rankmesh.reduce_scatter(outputs[0], _inner_list(inputs), op, **self._options(opts))

    @_collective("reduce_scatter_tensor", counts_version=True, kind=REDUCE_SCATTER)
    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> _Written:
        """Reduce a tensor over all ranks, and scatter the result."""
        return [output], rankmesh.reduce_scatter_single(output, input, _op(opts.reduceOp), **self._options(opts))

    @_collective("reduce_scatter_tensor_coalesced", counts_version=True)
    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> _Written:
        """Reduce several tensors, and scatter each result."""
        op = _op(opts.reduceOp)
        with self._coalesced(opts) as made:
            for output, input in zip(outputs, inputs, strict=True):
                rankmesh.reduce_scatter_single(output, input, op, self.mesh)
        return list(outputs), *made.works

    @_collective("all_to_all_single")
    def all_to_all_single(
        self, output: Any, input: Any, output_splits: Sequence[int], input_splits: Sequence[int], opts: Any = None
    ) -> _Written:
        """Send every rank its rows of a tensor; without splits, all get the same number."""
        call = self._options(opts)
        return [output], rankmesh.all_to_all_single(output, input, output_splits, input_splits, **call)

    @_collective("all_to_all", counts_version=True)
    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> _Written:
        """Send every rank its tensor of a list."""
        return list(outputs), rankmesh.all_to_all(outputs, inputs, **self._options(opts))

    @_collective("barrier")
    def barrier(self, opts: Any = None) -> _Written:
        """Wait until all ranks have called it."""
        return [], rankmesh.barrier(**self._options(opts))

    def _at_once(self, kind: OpType, arguments: Sequence[Any]) -> bool:
        """Have the compiled core carry out a synchronous call with dense tensors; return whether it did."""
        opts, at_once = arguments[-1], self.comm.at_once
        if at_once is None or getattr(opts, "asyncOp", True) or opts.timeout != _UNSET_TIMEOUT:
            return False
        if _profiling() or not _debug.below_detail:
            return False
        arrays = []
        for argument in arguments[:-1]:
            array = flat_array(torch, argument[0] if type(argument) is list and len(argument) == 1 else argument)
            if array is None:
                return False
            arrays.append(array)
        op = _OPS.get(opts.reduceOp.op) if kind in _REDUCTIONS else None
        root = self._global_rank(opts.rootRank) if kind in _ROOTED else None
        try:
            return at_once(self.comm.default_options, kind, arrays[0], arrays[-1], op, root)
        except DistError as error:
            raise to_torch_error(error) from error.__cause__

    def _message_at_once(self, sends: bool, tensor: Any, rank: int, tag: int) -> bool:
        """Have the compiled core carry out a message that need not wait; return whether it did."""
        at_once, array = self.comm.message_at_once, flat_array(torch, tensor)
        if at_once is None or array is None or self._batched is not None:
            return False
        return at_once(sends, array, self._global_rank(rank), tag, False)

    def _global_rank(self, rank: int) -> int | None:
        ranks = self.comm.state.global_ranks
        return ranks[rank] if 0 <= rank < len(ranks) else None

    def _options(self, opts: Any) -> dict[str, Any]:
        """Return the arguments of the SDK's functions that torch's options contain, and the group."""
        timeout = None if opts.timeout == _UNSET_TIMEOUT else opts.timeout
        return {"group": self.mesh, "async_op": opts.asyncOp, "timeout": timeout}

    @_call("monitored_barrier")
    def monitored_barrier(self, timeout: Timeout = None, wait_all_ranks: bool = False) -> None:
        """Wait until all ranks have called it, or name those that have not; see rankmesh.torch.monitored_barrier."""
        try:
            rankmesh.monitored_barrier(self.mesh, timeout, wait_all_ranks)
        except CollectiveTimeoutError as error:
            # in gloo's wording, which users search their logs for
            ranks = [self.comm.global_ranks.index(each) for each in error.ranks]
            late = f"Rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
            rank = self.mesh.rank()
            here = "successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0"
            words = f"Rank {rank} {'timed out in monitoredBarrier' if rank == 0 else here}"
            words = f"{words}. {late} failed to pass monitoredBarrier: {error.message}"
            raise CollectiveTimeoutError(words, **error.details()) from error.__cause__

    # Names in torch before 2.13

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # Messages

    @_call("send")
    def send(self, tensors: Any, dst: int, tag: int = 0) -> CompletedWork:
        """Begin to send a tensor to a group rank."""
        tensors = _as_list(tensors)
        if self._message_at_once(True, tensors[0], dst, tag):
            return CompletedWork(tensors)
        return self._message_work(tensors, rankmesh.isend(tensors[0], None, self.mesh, tag, dst))

    @_call("recv")
    def recv(self, tensors: Any, src: int, tag: int = 0) -> CompletedWork:
        """Begin to receive a tensor from a group rank."""
        tensors = _as_list(tensors)
        if self._message_at_once(False, tensors[0], src, tag):
            return CompletedWork(tensors, src)
        return self._message_work(tensors, rankmesh.irecv(tensors[0], None, self.mesh, tag, src))

    @_call("recv")
    def recv_anysource(self, tensors: Any, tag: int = 0) -> CompletedWork:
        """Begin to receive a tensor from any rank; the Work's ``_source_rank()`` is the source."""
        tensors = _as_list(tensors)
        return self._message_work(tensors, rankmesh.irecv(tensors[0], None, self.mesh, tag))

    def _message_work(self, tensors: list[Any], work: Work | None) -> CompletedWork:
        assert work is not None  # only members have the group
        if self._batched is not None and is_recording(self.comm):
            self._batched.append(work)
        return MessageWork(tensors, work, self.comm.global_ranks)

    # Batches, by torch's coalescing manager

    @contextlib.contextmanager
    def _coalesced(self, opts: Any) -> Iterator[rankmesh.Batch]:
        """Run the calls of the block as one batch at its end, or as part of the batch that is open already."""
        if is_recording(self.comm):
            yield rankmesh.Batch()
        else:
            call = self._options(opts)
            with rankmesh.batch(self.mesh, call["async_op"], timeout=call["timeout"]) as made:
                yield made

    def _start_coalescing(self, device: Any = None) -> None:
        if not self.carries(device):
            self._device_backend(torch.device(device))._start_coalescing(device)
            return
        self._recorder, self._batched = CallRecorder(self.comm), []

    def _end_coalescing(self, device: Any = None) -> Any:
        if not self.carries(device):
            return self._device_backend(torch.device(device))._end_coalescing(device)
        recorder, self._recorder = self._recorder, None
        batched, self._batched = self._batched or [], None
        works = [] if recorder is None else translating(recorder.close, Options(self.comm.timeout, True))
        return PendingWork([], [*works, *batched])

    # Sparse tensors

    def _sum_sparse(self, tensor: Any, op: Any, opts: Any) -> None:
        """Reduce a sparse tensor; always synchronous: several calls, each of which needs the previous one's result."""
        if is_recording(self.comm):
            raise RuntimeError(
                "a sparse all_reduce cannot be part of a batch of collectives: call it before or after it"
            )
        all_reduce_sparse(tensor, op, self.mesh, self._options(opts)["timeout"])


def _as_list(tensors: Any) -> list[Any]:
    return list(tensors) if isinstance(tensors, list | tuple) else [tensors]


def _inner_list(lists: Any) -> list[Any]:
    """Return a call's list of tensors, which may be the only element of another list."""
    return list(lists[0] if lists and isinstance(lists[0], list | tuple) else lists)


def _op(op: Any) -> ReduceOp | PremulSum:
    kind = getattr(op, "op", op)
    found = _OPS.get(kind)
    if found is not None:
        return found
    if kind == c10d.ReduceOp.RedOpType.PREMUL_SUM:
        return ReduceOp.PREMUL_SUM(op.__getstate__()[1])
    raise TypeError(f"op must be a torch.distributed.ReduceOp, got {op!r}")
