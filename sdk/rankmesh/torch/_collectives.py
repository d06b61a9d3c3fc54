"""What c10d calls on a process group, carried out by the SDK's functions.

torch has checked arguments and turned global ranks into group ranks by then. Every method returns a Work: what was
called synchronously has been carried out in the calling thread when it returns. torch 2.13 renamed some methods; older
torch, and parts of newer, call the old names, which are here, too.
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

import rankmesh
from rankmesh._collectives.arguments import Timeout
from rankmesh._session.process_group import ProcessGroup as MeshGroup
from rankmesh.torch._errors import to_torch_error
from rankmesh.torch._patches import untraced
from rankmesh.torch._sparse import all_reduce_sparse
from rankmesh.torch._work import CompletedWork, MessageWork, PendingWork
from rankmesh_agent.group.call_queue import Options
from rankmesh_agent.group.work import Work
from rankmesh_agent.wire.errors import CollectiveTimeoutError, DistError
from rankmesh_agent.wire.ops import PremulSum, ReduceOp

Method = TypeVar("Method", bound=Callable[..., Any])

# Arguments and options

_OPS = {
    getattr(c10d.ReduceOp.RedOpType, op.name): op
    for op in ReduceOp
    if op is not ReduceOp.PREMUL_SUM and hasattr(c10d.ReduceOp.RedOpType, op.name)
}
_UNSET = timedelta(milliseconds=-1)
"""The timeout in torch's options where nobody said one."""
_profiling = torch.autograd._profiler_enabled


@dataclass
class _Said:
    """What torch's options would say, of a call in the short form: ``broadcast(tensor, root)`` say."""

    rootRank: int = 0  # noqa: N815  # torch's names
    reduceOp: Any = c10d.ReduceOp.SUM  # noqa: N815
    timeout: timedelta | None = None
    asyncOp: bool = True  # noqa: N815

    def hear(self, argument: Any) -> None:
        """Take an argument for what it is, by its type: torch's methods differ in their order."""
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
    """Return what makes a method a call of the group.

    Tensors of another device go to the backend that the user named for it; errors are torch's as well as ours; a
    profiler sees the call under the name ``rankmesh:…``, as it sees ``gloo:…``. A method whose last argument is
    ``opts``, torch's options, can be called with root, operation and timeout instead.
    """

    def made(method: Method) -> Method:
        takes = method.__code__.co_varnames[1 : method.__code__.co_argcount]
        count = len(takes) if takes[-1:] == ("opts",) else 0

        @untraced
        @functools.wraps(method)
        def call(self: Any, *arguments: Any, **named: Any) -> Any:
            device = _device_of(arguments)
            if device is not None:
                return getattr(self._beside(device), method.__name__)(*arguments, **named)
            if count and (len(arguments) != count or not hasattr(arguments[-1], "asyncOp")):
                arguments, named = _in_full(arguments, named, count), {}
            try:
                if not _profiling():
                    return method(self, *arguments, **named)
                with torch.profiler.record_function(f"rankmesh:{name}"):
                    return method(self, *arguments, **named)
            except DistError as error:
                raise to_torch_error(error) from error.__cause__

        return call  # type: ignore[return-value]

    return made


def _in_full(arguments: tuple[Any, ...], named: dict[str, Any], count: int) -> tuple[Any, ...]:
    """Return a call's arguments with torch's options, or what says the same, as the last of ``count``."""
    if hasattr(named.get("opts"), "asyncOp"):
        return *arguments, named["opts"]
    said = _Said()
    for argument in (*arguments[count - 1 :], *named.values()):
        said.hear(argument)
    return *arguments[: count - 1], said


def _device_of(arguments: Any) -> Any:
    """Return the device of the first tensor, None if it is in host memory or there is none."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            return None if argument.is_cpu else argument.device
        if isinstance(argument, list | tuple) and argument:
            return _device_of(argument)
    return None


class Collectives:
    """The calls of a process group.

    Attributes:
        mesh: the SDK's group that carries them out.
    """

    mesh: MeshGroup
    _beside: Callable[[Any], Any]
    _begun: list[Work] | None = None
    """Messages begun in torch's batch, which are made at once; None outside of one."""

    @_call("all_reduce")
    def allreduce(self, tensors: Any, opts: Any = None) -> CompletedWork:
        """Reduce a tensor over all ranks, in place; sparse ones can be summed."""
        tensors = _listed(tensors)
        op, timeout, is_async = _reducing(opts)
        if tensors[0].layout is not torch.strided:
            return self._sparse(tensors, op, timeout, is_async)
        if len(tensors) > 1:
            return self.allreduce_coalesced(tensors, opts)
        return _work(tensors, rankmesh.all_reduce(tensors[0], op, self.mesh, is_async, timeout=timeout))

    @_call("all_reduce_coalesced")
    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> CompletedWork:
        """Reduce several tensors over all ranks, together."""
        op, timeout, is_async = _reducing(opts)
        with self._together(is_async, timeout) as made:
            for tensor in tensors:
                rankmesh.all_reduce(tensor, op, self.mesh)
        return _works(tensors, made)

    @_call("reduce")
    def reduce(self, tensors: Any, opts: Any = None) -> CompletedWork:
        """Reduce a tensor over all ranks into the root's."""
        tensors = _listed(tensors)
        op, timeout, is_async = _reducing(opts)
        done = rankmesh.reduce(tensors[0], None, op, self.mesh, is_async, opts.rootRank, timeout=timeout)
        return _work(tensors, done)

    @_call("broadcast")
    def broadcast(self, tensors: Any, opts: Any = None) -> CompletedWork:
        """Copy the root's tensor to all ranks."""
        tensors = _listed(tensors)
        timeout, is_async = _how(opts)
        done = rankmesh.broadcast(tensors[0], None, self.mesh, is_async, opts.rootRank, timeout=timeout)
        return _work(tensors, done)

    @_call("all_gather")
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> CompletedWork:
        """Copy every rank's tensor into a list on all ranks."""
        inputs = _listed(inputs)
        outs = _one(outputs)
        timeout, is_async = _how(opts)
        done = rankmesh.all_gather(outs, inputs[0], self.mesh, is_async, timeout=timeout)
        return _work(outs, done)

    @_call("all_gather_into_tensor")
    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> CompletedWork:
        """Copy every rank's tensor into one on all ranks, behind one another."""
        timeout, is_async = _how(opts)
        done = rankmesh.all_gather_single(output, input, self.mesh, is_async, timeout=timeout)
        return _work([output], done)

    @_call("all_gather_coalesced")
    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> CompletedWork:
        """Gather several tensors: ``outputs`` has for each rank a list of that rank's."""
        timeout, is_async = _how(opts)
        with self._together(is_async, timeout) as made:
            for input, outs in zip(inputs, zip(*outputs, strict=True), strict=True):
                rankmesh.all_gather(outs, input, self.mesh)
        return _works([out for outs in outputs for out in outs], made)

    @_call("all_gather_into_tensor_coalesced")
    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> CompletedWork:
        """Gather several tensors, each into one."""
        timeout, is_async = _how(opts)
        with self._together(is_async, timeout) as made:
            for output, input in zip(outputs, inputs, strict=True):
                rankmesh.all_gather_single(output, input, self.mesh)
        return _works(outputs, made)

    @_call("gather")
    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> CompletedWork:
        """Copy every rank's tensor into a list on the root."""
        inputs = _listed(inputs)
        timeout, is_async = _how(opts)
        outs = _one(outputs) or None
        done = rankmesh.gather(inputs[0], outs, None, self.mesh, is_async, opts.rootRank, timeout=timeout)
        return _work(outs or [], done)

    @_call("scatter")
    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> CompletedWork:
        """Give every rank its tensor of the root's list."""
        outputs = _listed(outputs)
        timeout, is_async = _how(opts)
        ins = _one(inputs) or None
        done = rankmesh.scatter(outputs[0], ins, None, self.mesh, is_async, opts.rootRank, timeout=timeout)
        return _work(outputs, done)

    @_call("reduce_scatter")
    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> CompletedWork:
        """Reduce the tensors that all ranks have for each rank into that rank's."""
        outputs = _listed(outputs)
        ins = _one(inputs)
        op, timeout, is_async = _reducing(opts)
        done = rankmesh.reduce_scatter(outputs[0], ins, op, self.mesh, is_async, timeout=timeout)
        return _work(outputs, done)

    @_call("reduce_scatter_tensor")
    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> CompletedWork:
        """Reduce a tensor over all ranks; each gets its share."""
        op, timeout, is_async = _reducing(opts)
        done = rankmesh.reduce_scatter_single(output, input, op, self.mesh, is_async, timeout=timeout)
        return _work([output], done)

    @_call("reduce_scatter_tensor_coalesced")
    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> CompletedWork:
        """Reduce several tensors; each rank gets its share of each."""
        op, timeout, is_async = _reducing(opts)
        with self._together(is_async, timeout) as made:
            for output, input in zip(outputs, inputs, strict=True):
                rankmesh.reduce_scatter_single(output, input, op, self.mesh)
        return _works(outputs, made)

    @_call("all_to_all_single")
    def all_to_all_single(
        self, output: Any, input: Any, output_splits: Sequence[int], input_splits: Sequence[int], opts: Any = None
    ) -> CompletedWork:
        """Give every rank its rows of a tensor; without splits all get as many."""
        timeout, is_async = _how(opts)
        done = rankmesh.all_to_all_single(
            output, input, output_splits, input_splits, self.mesh, is_async, timeout=timeout
        )
        return _work([output], done)

    @_call("all_to_all")
    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> CompletedWork:
        """Give every rank the tensor that this rank has for it."""
        timeout, is_async = _how(opts)
        done = rankmesh.all_to_all(outputs, inputs, self.mesh, is_async, timeout=timeout)
        return _work(list(outputs), done)

    @_call("barrier")
    def barrier(self, opts: Any = None) -> CompletedWork:
        """Wait until all ranks have come."""
        timeout, is_async = _how(opts)
        return _work([], rankmesh.barrier(self.mesh, is_async, timeout=timeout))

    @_call("monitored_barrier")
    def monitored_barrier(self, timeout: Timeout = None, wait_all_ranks: bool = False) -> None:
        """Wait until all ranks have come, and say which did not; see rankmesh.torch.monitored_barrier."""
        try:
            rankmesh.monitored_barrier(self.mesh, timeout, wait_all_ranks)
        except CollectiveTimeoutError as error:
            # in gloo's words, which people search their logs for
            ranks = [self.mesh._communicator.global_ranks.index(each) for each in error.ranks]
            late = f"Rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
            rank = self.mesh.rank()
            here = "successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0"
            words = f"Rank {rank} {'timed out in monitoredBarrier' if rank == 0 else here}"
            words = f"{words}. {late} failed to pass monitoredBarrier: {error.message}"
            raise CollectiveTimeoutError(words, **error.details()) from error.__cause__

    # Names of torch before 2.13

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # Messages

    @_call("send")
    def send(self, tensors: Any, dst: int, tag: int = 0) -> CompletedWork:
        """Begin to send a tensor to a group rank."""
        tensors = _listed(tensors)
        return self._message(tensors, rankmesh.isend(tensors[0], None, self.mesh, tag, dst))

    @_call("recv")
    def recv(self, tensors: Any, src: int, tag: int = 0) -> CompletedWork:
        """Begin to receive a tensor from a group rank."""
        tensors = _listed(tensors)
        return self._message(tensors, rankmesh.irecv(tensors[0], None, self.mesh, tag, src))

    @_call("recv")
    def recv_anysource(self, tensors: Any, tag: int = 0) -> CompletedWork:
        """Begin to receive a tensor from any rank; the Work's ``_source_rank()`` says from which."""
        tensors = _listed(tensors)
        return self._message(tensors, rankmesh.irecv(tensors[0], None, self.mesh, tag))

    def _message(self, tensors: list[Any], work: Work | None) -> CompletedWork:
        assert work is not None  # only members have the group
        if self._begun is not None and self.mesh._communicator.batching:
            self._begun.append(work)
        return MessageWork(tensors, work, self.mesh._communicator.global_ranks)

    # Batches, by torch's coalescing manager

    @contextlib.contextmanager
    def _together(self, is_async: bool, timeout: timedelta | None) -> Iterator[rankmesh.Batch]:
        """Make the calls of the block together when it ends, or those of the batch that is open when that ends."""
        if self.mesh._communicator.batching:
            yield rankmesh.Batch()
        else:
            with rankmesh.batch(self.mesh, is_async, timeout=timeout) as made:
                yield made

    def _start_coalescing(self, device: Any = None) -> None:
        if _elsewhere(device):
            self._beside(torch.device(device))._start_coalescing(device)
            return
        self.mesh._communicator.open_batch()
        self._begun = []

    def _end_coalescing(self, device: Any = None) -> Any:
        if _elsewhere(device):
            return self._beside(torch.device(device))._end_coalescing(device)
        comm = self.mesh._communicator
        begun, self._begun = self._begun or [], None
        try:
            return PendingWork([], [*comm.close_batch(Options(comm.timeout, True)), *begun])
        except DistError as error:
            raise to_torch_error(error) from error.__cause__

    # What is special

    def _sparse(self, tensors: list[Any], op: Any, timeout: timedelta | None, is_async: bool) -> CompletedWork:
        if self.mesh._communicator.batching:
            raise RuntimeError(
                "a sparse all_reduce cannot be part of a batch of collectives: call it before or after it"
            )
        # Several calls one after the other, of which each needs the result of the one before: made here and now, also
        # where a Work is wanted.
        all_reduce_sparse(tensors[0], op, self.mesh, timeout)
        return CompletedWork(tensors)


def _elsewhere(device: Any) -> bool:
    """Whether tensors of a device are not in host memory; None means they are."""
    return device is not None and torch.device(device).type != "cpu"


def _listed(tensors: Any) -> list[Any]:
    return list(tensors) if isinstance(tensors, list | tuple) else [tensors]


def _one(lists: Any) -> list[Any]:
    """Return the list of tensors of a call that may have it in a list of such, one a device."""
    return list(lists[0] if lists and isinstance(lists[0], list | tuple) else lists)


def _how(opts: Any) -> tuple[timedelta | None, bool]:
    """Return what torch's options say: how long it may take, and whether the call returns at once."""
    timeout = opts.timeout
    return None if timeout == _UNSET else timeout, opts.asyncOp


def _reducing(opts: Any) -> tuple[ReduceOp | PremulSum, timedelta | None, bool]:
    """Return the same of a reduction's options, and the reduction."""
    return _op(opts.reduceOp), *_how(opts)


def _op(op: Any) -> ReduceOp | PremulSum:
    kind = getattr(op, "op", op)
    found = _OPS.get(kind)
    if found is not None:
        return found
    if kind == c10d.ReduceOp.RedOpType.PREMUL_SUM:
        return ReduceOp.PREMUL_SUM(op.__getstate__()[1])
    raise TypeError(f"op must be a torch.distributed.ReduceOp, got {op!r}")


def _work(tensors: list[Any], work: Work | None) -> CompletedWork:
    return CompletedWork(tensors) if work is None else PendingWork(tensors, [work])


def _works(tensors: Sequence[Any], made: rankmesh.Batch) -> CompletedWork:
    return PendingWork(list(tensors), made.works) if made.works else CompletedWork(list(tensors))
