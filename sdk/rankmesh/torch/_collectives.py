"""What c10d calls on a process group, carried out by the SDK's functions.

torch has checked arguments and turned global ranks into group ranks by then. Every method returns a Work: what was
called synchronously has been carried out in the calling thread when it returns. torch 2.13 renamed some methods; older
torch, and parts of newer, call the old names, which are here, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as c10d

from rankmesh import _batch, _collectives, _gather_scatter, _p2p
from rankmesh._call import Timeout
from rankmesh._world import ProcessGroup as MeshGroup
from rankmesh.torch._errors import as_torchs
from rankmesh.torch._sparse import all_reduce_sparse
from rankmesh.torch._untraced import untraced
from rankmesh.torch._work import Done, Message, Pending
from rankmesh_agent.engine.order import Options
from rankmesh_agent.engine.work import Work
from rankmesh_agent.wire.errors import CollectiveTimeoutError, DistError
from rankmesh_agent.wire.ops import PremulSum, ReduceOp

Method = TypeVar("Method", bound=Callable[..., Any])
_OPS = {
    getattr(c10d.ReduceOp.RedOpType, op.name): op
    for op in ReduceOp
    if op is not ReduceOp.PREMUL_SUM and hasattr(c10d.ReduceOp.RedOpType, op.name)
}
_UNSET = timedelta(milliseconds=-1)
"""The timeout in torch's options where nobody said one."""
_profiling = torch.autograd._profiler_enabled


def _call(name: str) -> Callable[[Method], Method]:
    """Return what makes a method a call of the group.

    Tensors of another device go to the backend that the user named for it; errors are torch's as well as ours; a
    profiler sees the call under the name ``rankmesh:…``, as it sees ``gloo:…``.
    """

    def made(method: Method) -> Method:
        @untraced
        @functools.wraps(method)
        def call(self: Any, *arguments: Any, **options: Any) -> Any:
            device = _device_of(arguments)
            if device is not None:
                return getattr(self._beside(device), method.__name__)(*arguments, **options)
            try:
                if not _profiling():
                    return method(self, *arguments, **options)
                with torch.profiler.record_function(f"rankmesh:{name}") as span:
                    work = method(self, *arguments, **options)
                    if type(work) is Pending:  # the span ends when the call does; a message may never
                        ended: torch.futures.Future[None] = torch.futures.Future()
                        span._call_end_callbacks_on_future(ended)
                        work.end_later(ended)
                    return work
            except DistError as error:
                raise as_torchs(error) from error.__cause__

        return call  # type: ignore[return-value]

    return made


def _device_of(arguments: Any) -> Any:
    """Return the device of the first tensor, None if it is in host memory or there is none."""
    while isinstance(arguments, list | tuple):
        for argument in arguments:
            if isinstance(argument, torch.Tensor):
                return None if argument.is_cpu else argument.device
            if isinstance(argument, list | tuple) and argument:
                arguments = argument
                break
        else:
            return None
    return arguments.device


class Collectives:
    """The calls of a process group.

    Attributes:
        mesh: the SDK's group that carries them out.
    """

    mesh: MeshGroup

    @_call("all_reduce")
    def allreduce(self, tensors: Any, opts: Any = None) -> Done:
        """Reduce a tensor over all ranks, in place; sparse ones can be summed."""
        tensors = _listed(tensors)
        op, timeout, is_async = _reducing(opts)
        if tensors[0].layout is not torch.strided:
            return self._sparse(tensors, op, timeout, is_async)
        if len(tensors) > 1:
            return self.allreduce_coalesced(tensors, opts)
        return _work(tensors, _collectives.all_reduce(tensors[0], op, self.mesh, is_async, timeout=timeout))

    @_call("all_reduce_coalesced")
    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Done:
        """Reduce several tensors over all ranks, together."""
        op, timeout, is_async = _reducing(opts)
        made = _batch.all_reduce_coalesced(tensors, op, self.mesh, is_async, timeout=timeout)
        return _works(tensors, made)

    @_call("reduce")
    def reduce(self, tensors: Any, opts: Any = None) -> Done:
        """Reduce a tensor over all ranks into the root's."""
        tensors = _listed(tensors)
        op, timeout, is_async = _reducing(opts)
        root = 0 if opts is None else opts.rootRank
        done = _collectives.reduce(tensors[0], None, op, self.mesh, is_async, root, timeout=timeout)
        return _work(tensors, done)

    @_call("broadcast")
    def broadcast(self, tensors: Any, opts: Any = None) -> Done:
        """Copy the root's tensor to all ranks."""
        tensors = _listed(tensors)
        timeout, is_async = _how(opts)
        root = 0 if opts is None else opts.rootRank
        done = _collectives.broadcast(tensors[0], None, self.mesh, is_async, root, timeout=timeout)
        return _work(tensors, done)

    @_call("all_gather")
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Done:
        """Copy every rank's tensor into a list on all ranks."""
        inputs = _listed(inputs)
        outs = outputs[0] if isinstance(outputs[0], list | tuple) else outputs
        timeout, is_async = _how(opts)
        done = _gather_scatter.all_gather(outs, inputs[0], self.mesh, is_async, timeout=timeout)
        return _work(list(outs), done)

    @_call("all_gather_into_tensor")
    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> Done:
        """Copy every rank's tensor into one on all ranks, behind one another."""
        timeout, is_async = _how(opts)
        done = _gather_scatter.all_gather_single(output, input, self.mesh, is_async, timeout=timeout)
        return _work([output], done)

    @_call("all_gather_coalesced")
    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Done:
        """Gather several tensors: ``outputs`` has for each rank a list of that rank's."""
        timeout, is_async = _how(opts)
        made = _batch.all_gather_coalesced(outputs, inputs, self.mesh, is_async, timeout=timeout)
        return _works([out for outs in outputs for out in outs], made)

    @_call("all_gather_into_tensor_coalesced")
    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Done:
        """Gather several tensors, each into one."""
        timeout, is_async = _how(opts)
        with _batch.batch(self.mesh, is_async, timeout=timeout) as made:
            for output, input in zip(outputs, inputs, strict=True):
                _gather_scatter.all_gather_single(output, input, self.mesh)
        return _works(outputs, made)

    @_call("gather")
    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Done:
        """Copy every rank's tensor into a list on the root."""
        inputs = _listed(inputs)
        timeout, is_async = _how(opts)
        root = 0 if opts is None else opts.rootRank
        outs = list(outputs[0]) if outputs else None
        done = _gather_scatter.gather(inputs[0], outs, None, self.mesh, is_async, root, timeout=timeout)
        return _work(outs or [], done)

    @_call("scatter")
    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Done:
        """Give every rank its tensor of the root's list."""
        outputs = _listed(outputs)
        timeout, is_async = _how(opts)
        root = 0 if opts is None else opts.rootRank
        ins = list(inputs[0]) if inputs else None
        done = _gather_scatter.scatter(outputs[0], ins, None, self.mesh, is_async, root, timeout=timeout)
        return _work(outputs, done)

    @_call("reduce_scatter")
    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Done:
        """Reduce the tensors that all ranks have for each rank into that rank's."""
        outputs = _listed(outputs)
        ins = inputs[0] if isinstance(inputs[0], list | tuple) else inputs
        op, timeout, is_async = _reducing(opts)
        done = _gather_scatter.reduce_scatter(outputs[0], ins, op, self.mesh, is_async, timeout=timeout)
        return _work(outputs, done)

    @_call("reduce_scatter_tensor")
    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> Done:
        """Reduce a tensor over all ranks; each gets its share."""
        op, timeout, is_async = _reducing(opts)
        done = _gather_scatter.reduce_scatter_single(output, input, op, self.mesh, is_async, timeout=timeout)
        return _work([output], done)

    @_call("reduce_scatter_tensor_coalesced")
    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Done:
        """Reduce several tensors; each rank gets its share of each."""
        op, timeout, is_async = _reducing(opts)
        with _batch.batch(self.mesh, is_async, timeout=timeout) as made:
            for output, input in zip(outputs, inputs, strict=True):
                _gather_scatter.reduce_scatter_single(output, input, op, self.mesh)
        return _works(outputs, made)

    @_call("all_to_all_single")
    def all_to_all_single(
        self, output: Any, input: Any, output_splits: Sequence[int], input_splits: Sequence[int], opts: Any = None
    ) -> Done:
        """Give every rank its rows of a tensor; without splits all get as many."""
        timeout, is_async = _how(opts)
        done = _gather_scatter.all_to_all_single(
            output, input, output_splits, input_splits, self.mesh, is_async, timeout=timeout
        )
        return _work([output], done)

    @_call("all_to_all")
    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Done:
        """Give every rank the tensor that this rank has for it."""
        timeout, is_async = _how(opts)
        done = _gather_scatter.all_to_all(outputs, inputs, self.mesh, is_async, timeout=timeout)
        return _work(list(outputs), done)

    @_call("barrier")
    def barrier(self, opts: Any = None) -> Done:
        """Wait until all ranks have come."""
        timeout, is_async = _how(opts)
        return _work([], _collectives.barrier(self.mesh, is_async, timeout=timeout))

    @_call("monitored_barrier")
    def monitored_barrier(self, timeout: Timeout = None, wait_all_ranks: bool = False) -> None:
        """Wait until all ranks have come, and say which did not; see rankmesh.torch.monitored_barrier."""
        try:
            _collectives.monitored_barrier(self.mesh, timeout, wait_all_ranks)
        except CollectiveTimeoutError as error:
            # in gloo's words, which people search their logs for
            late = f"Rank{'s' if len(error.ranks) > 1 else ''} {', '.join(map(str, error.ranks))}"
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
    def send(self, tensors: Any, dst: int, tag: int = 0) -> Done:
        """Begin to send a tensor to a group rank."""
        tensors = _listed(tensors)
        return self._message(tensors, _p2p.isend(tensors[0], None, self.mesh, tag, dst))

    @_call("recv")
    def recv(self, tensors: Any, src: int, tag: int = 0) -> Done:
        """Begin to receive a tensor from a group rank."""
        tensors = _listed(tensors)
        return self._message(tensors, _p2p.irecv(tensors[0], None, self.mesh, tag, src))

    @_call("recv")
    def recv_anysource(self, tensors: Any, tag: int = 0) -> Done:
        """Begin to receive a tensor from any rank; the Work's ``_source_rank()`` says from which."""
        tensors = _listed(tensors)
        return self._message(tensors, _p2p.irecv(tensors[0], None, self.mesh, tag))

    def _message(self, tensors: list[Any], work: Work | None) -> Done:
        assert work is not None  # only members have the group
        return Message(tensors, work, self.mesh._communicator.numbers)

    # Batches, by torch's coalescing manager

    def _start_coalescing(self, device: Any = None) -> None:
        self.mesh._communicator.open_batch()

    def _end_coalescing(self, device: Any = None) -> Done:
        members = self.mesh._communicator
        try:
            return Pending([], members.close_batch(Options(members.timeout, True)))
        except DistError as error:
            raise as_torchs(error) from error.__cause__

    # What is special

    def _sparse(self, tensors: list[Any], op: Any, timeout: timedelta | None, is_async: bool) -> Done:
        # Several calls one after the other, of which each needs the result of the one before: made here and now, also
        # where a Work is wanted.
        all_reduce_sparse(tensors[0], op, self.mesh, timeout)
        return Done(tensors)


def _listed(tensors: Any) -> list[Any]:
    return list(tensors) if isinstance(tensors, list | tuple) else [tensors]


def _said(timeout: timedelta | None) -> timedelta | None:
    return None if timeout == _UNSET else timeout


def _how(opts: Any) -> tuple[timedelta | None, bool]:
    """Return what torch's options say: how long it may take, and whether the call returns at once."""
    return (None, True) if opts is None else (_said(opts.timeout), opts.asyncOp)


def _reducing(opts: Any) -> tuple[ReduceOp | PremulSum, timedelta | None, bool]:
    """Return the same of a reduction's options, and the reduction."""
    if opts is None:
        return ReduceOp.SUM, None, True
    if not hasattr(opts, "reduceOp"):  # the form without options: allreduce(tensor, op)
        return _op(opts), None, True
    timeout, is_async = _how(opts)
    return _op(opts.reduceOp), timeout, is_async


def _op(op: Any) -> ReduceOp | PremulSum:
    kind = getattr(op, "op", op)
    found = _OPS.get(kind)
    if found is not None:
        return found
    if kind == c10d.ReduceOp.RedOpType.PREMUL_SUM:
        return ReduceOp.PREMUL_SUM(op.__getstate__()[1])
    raise TypeError(f"op must be a torch.distributed.ReduceOp, got {op!r}")


def _work(tensors: list[Any], work: Work | None) -> Done:
    return Done(tensors) if work is None else Pending(tensors, [work])


def _works(tensors: Sequence[Any], made: _batch.Batch | None) -> Done:
    return Pending(list(tensors), made.works) if made is not None and made.works else Done(list(tensors))
