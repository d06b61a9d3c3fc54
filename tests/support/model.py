"""torch.distributed modelled in NumPy: the answers where gloo has none.

Ranks are threads of this process that put what they have on a table, where all see it. A Model stands in for the
``dist`` of one of them.
"""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import ml_dtypes
import numpy as np
import torch

from rankmesh_agent.wire.ops import PremulSum, ReduceOp
from support import oracle
from support.threads import in_threads

Array = np.ndarray[Any, Any]
Tensor = torch.Tensor

_CARRIERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
_FOREIGN = {
    torch.bfloat16: np.dtype(ml_dtypes.bfloat16),
    torch.float8_e4m3fn: np.dtype(ml_dtypes.float8_e4m3fn),
    torch.float8_e5m2: np.dtype(ml_dtypes.float8_e5m2),
    torch.complex32: oracle.COMPLEX32,
}
"""Element types that torch does not pass to NumPy itself."""


def run(size: int, function: Callable[[Any, int, int], Any]) -> list[Any]:
    """Return what ``function(dist, rank, size)`` gives at each rank of a model."""
    table = Table(size)
    return in_threads(size, lambda rank: function(Model(rank, table), rank, size))


class Table:
    """Where the ranks of a model put things."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._places: list[Any] = [None] * size
        self._all_here = threading.Barrier(size, timeout=20.0)
        self.messages: defaultdict[tuple[int, int, int], queue.Queue[Array]] = defaultdict(queue.Queue)

    def put(self, rank: int, what: Any) -> list[Any]:
        """Put something on the table; return what all have put there."""
        self._places[rank] = what
        self._all_here.wait()
        found = list(self._places)
        self._all_here.wait()
        return found


class Done:
    """The Work of a model; a call is made at the latest when somebody waits for it."""

    def __init__(self, filled: list[Tensor], make: Callable[[], None] = lambda: None) -> None:
        self._filled = filled
        self._make = make

    def wait(self, timeout: timedelta | None = None) -> bool:
        make, self._make = self._make, lambda: None
        make()
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def result(self) -> list[Tensor]:
        return self._filled

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(self._filled)
        return future


class Model:
    """One rank's ``dist``, with the functions that the cells need it for."""

    ReduceOp = ReduceOp

    def __init__(self, rank: int, table: Table) -> None:
        self._rank = rank
        self._table = table

    def _everyones(self, *tensors: Tensor) -> list[list[Array]]:
        """Return the elements of all ranks' tensors, by rank."""
        return self._table.put(self._rank, [_elements(tensor) for tensor in tensors])

    def _make_nccl_premul_sum(self, factor: float) -> PremulSum:
        return PremulSum(factor)

    def all_reduce(self, tensor: Tensor, op: ReduceOp | PremulSum = ReduceOp.SUM) -> None:
        if isinstance(op, PremulSum):
            self.all_reduce(tensor.mul_(op.factor))
        else:
            _fill([tensor], [oracle.expected(op, [own for (own,) in self._everyones(tensor)])])

    def all_reduce_coalesced(self, tensors: Sequence[Tensor], op: ReduceOp = ReduceOp.SUM) -> None:
        for tensor in tensors:
            self.all_reduce(tensor, op)

    def reduce(self, tensor: Tensor, dst: int, op: ReduceOp = ReduceOp.SUM) -> None:
        everyones = self._everyones(tensor)
        if self._rank == dst:
            _fill([tensor], [oracle.expected(op, [own for (own,) in everyones])])

    def reduce_scatter(
        self, output: Tensor, input_list: Sequence[Tensor], op: ReduceOp = ReduceOp.SUM, async_op: bool = False
    ) -> Done | None:
        _fill([output], [oracle.expected(op, [parts[self._rank] for parts in self._everyones(*input_list)])])
        return Done([output]) if async_op else None

    def reduce_scatter_tensor(
        self, output: Tensor, input: Tensor, op: ReduceOp = ReduceOp.SUM, async_op: bool = False
    ) -> Done | None:
        return self.reduce_scatter(output, input.reshape(self._table.size, -1).unbind(), op, async_op)

    reduce_scatter_single = reduce_scatter_tensor

    def broadcast(self, tensor: Tensor, src: int) -> None:
        _fill([tensor], self._everyones(tensor)[src])

    def all_gather(self, tensor_list: Sequence[Tensor], tensor: Tensor) -> None:
        _fill(tensor_list, [own for (own,) in self._everyones(tensor)])

    def all_gather_into_tensor(self, output: Tensor, input: Tensor, async_op: bool = False) -> Done | None:
        _fill([output], [np.concatenate([own for (own,) in self._everyones(input)])])
        return Done([output]) if async_op else None

    all_gather_single = all_gather_into_tensor

    def gather(self, tensor: Tensor, gather_list: Sequence[Tensor] | None, dst: int) -> None:
        everyones = self._everyones(tensor)
        if gather_list is not None:
            _fill(gather_list, [own for (own,) in everyones])

    def scatter(self, tensor: Tensor, scatter_list: Sequence[Tensor] | None, src: int) -> None:
        _fill([tensor], [self._everyones(*scatter_list or [])[src][self._rank]])

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        _fill(outputs, [parts[self._rank] for parts in self._everyones(*inputs)])

    def all_to_all_single(self, output: Tensor, input: Tensor) -> None:
        self.all_to_all(output.chunk(self._table.size), input.chunk(self._table.size))

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Done:
        self._table.messages[self._rank, dst, tag].put(_elements(tensor))
        return Done([tensor])

    def irecv(self, tensor: Tensor, src: int, tag: int = 0) -> Done:
        message = self._table.messages[src, self._rank, tag]
        return Done([tensor], lambda: _fill([tensor], [message.get(timeout=20.0)]))

    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> None:
        self.isend(tensor, dst, tag)

    def recv(self, tensor: Tensor, src: int, tag: int = 0) -> int:
        self.irecv(tensor, src, tag).wait()
        return src


def _elements(tensor: Tensor) -> Array:
    """Return a copy of a tensor's elements, in order."""
    plain = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).reshape(-1)
    foreign = _FOREIGN.get(plain.dtype)
    return plain.numpy() if foreign is None else plain.view(_CARRIERS[plain.itemsize]).numpy().view(foreign)


def _fill(tensors: Sequence[Tensor], arrays: Sequence[Array]) -> None:
    """Store elements in tensors, of whatever shape and layout."""
    for tensor, array in zip(tensors, arrays, strict=True):
        if tensor.dtype in _FOREIGN:
            bits = array.view(f"i{array.itemsize}")
            elements = torch.from_numpy(bits).view(tensor.dtype)
        else:
            elements = torch.from_numpy(array)
        with torch.no_grad():
            tensor.copy_(elements.reshape(tensor.shape))
