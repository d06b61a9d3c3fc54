"""The examples of the reference pages, with NumPy arrays for tensors, and the output the pages document.

An example is a generator: it yields where its page shows what a tensor holds. Pages: torch.distributed of PyTorch 2.1,
torch.distributed.deprecated, the summary page, and the tutorial 'Writing Distributed Applications with PyTorch'.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import numpy as np

import rankmesh as dist
from rankmesh import ReduceOp, batch_isend_irecv

Array = np.ndarray[Any, Any]
Run = Callable[[int, int], Generator[Any, None, None]]


class Example(NamedTuple):
    """An example.

    Attributes:
        run: called with rank and world size.
        shows: what the page shows, by rank.
    """

    run: Run
    shows: list[list[Any]]


EXAMPLES: dict[str, Example] = {}


def example(*shows: list[Any]) -> Callable[[Run], Run]:
    """Add an example for as many ranks as there are arguments: what the page shows at each."""

    def add(run: Run) -> Run:
        EXAMPLES[run.__name__] = Example(run, list(shows))
        return run

    return add


def shown(value: Any) -> str:
    """Return how values are compared: as Python prints them, with their types."""
    return repr(_plain(value))


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.tolist() if isinstance(value, np.ndarray) else value


# torch.distributed: point-to-point


@example([[2, 3]], [[0, 1]])
def batch_isend_irecv_with_the_neighbours(rank: int, world_size: int) -> Generator[Any, None, None]:
    send_tensor = np.arange(2) + 2 * rank
    recv_tensor = np.zeros(2, dtype=np.int64)  # the page has torch.randn(2), floats, for integers
    send_op = dist.P2POp(dist.isend, send_tensor, (rank + 1) % world_size)
    recv_op = dist.P2POp(dist.irecv, recv_tensor, (rank - 1 + world_size) % world_size)
    reqs = batch_isend_irecv([send_op, recv_op])
    for req in reqs:
        req.wait()
    yield recv_tensor


# torch.distributed: synchronous and asynchronous operations


@example([[101]], [[101]])
def asynchronous_all_reduce(rank: int, world_size: int) -> Generator[Any, None, None]:
    output = np.array([rank])
    handle = dist.all_reduce(output, async_op=True)
    assert handle is not None
    handle.wait()
    assert handle.is_completed()
    output += 100
    yield output  # of CPU collectives never 1: after wait() the operation is complete


# torch.distributed: collective functions


@example([["foo", 12, {1: 2}]], [["foo", 12, {1: 2}]], [["foo", 12, {1: 2}]])
def broadcast_object_list(rank: int, world_size: int) -> Generator[Any, None, None]:
    objects = ["foo", 12, {1: 2}] if dist.get_rank() == 0 else [None, None, None]
    dist.broadcast_object_list(objects, src=0, device="cpu")
    yield objects


@example([[1, 2], [4, 6]], [[3, 4], [4, 6]])
def all_reduce_of_int64(rank: int, world_size: int) -> Generator[Any, None, None]:
    tensor = np.arange(2, dtype=np.int64) + 1 + 2 * rank
    yield tensor
    dist.all_reduce(tensor, op=ReduceOp.SUM)
    yield tensor


@example([[[0, 0], [0, 0]], [1, 2], [[1, 2], [3, 4]]], [[[0, 0], [0, 0]], [3, 4], [[1, 2], [3, 4]]])
def all_gather_of_int64(rank: int, world_size: int) -> Generator[Any, None, None]:
    tensor_list = [np.zeros(2, dtype=np.int64) for _ in range(2)]
    yield tensor_list
    tensor = np.arange(2, dtype=np.int64) + 1 + 2 * rank
    yield tensor
    dist.all_gather(tensor_list, tensor)
    yield tensor_list


@example([[1, 2], [1, 2, 3, 4], [[1, 2], [3, 4]]], [[3, 4], [1, 2, 3, 4], [[1, 2], [3, 4]]])
def all_gather_into_tensor(rank: int, world_size: int) -> Generator[Any, None, None]:
    tensor_in = np.arange(2, dtype=np.int64) + 1 + 2 * rank
    yield tensor_in
    tensor_out = np.zeros(world_size * 2, dtype=np.int64)  # concatenation form
    dist.all_gather_into_tensor(tensor_out, tensor_in)
    yield tensor_out
    tensor_out2 = np.zeros((world_size, 2), dtype=np.int64)  # stack form
    dist.all_gather_into_tensor(tensor_out2, tensor_in)
    yield tensor_out2


@example([["foo", 12, {1: 2}]], [["foo", 12, {1: 2}]], [["foo", 12, {1: 2}]])
def all_gather_object(rank: int, world_size: int) -> Generator[Any, None, None]:
    gather_objects = ["foo", 12, {1: 2}]
    output: list[Any] = [None for _ in gather_objects]
    dist.all_gather_object(output, gather_objects[dist.get_rank()])
    yield output


@example([["foo", 12, {1: 2}]], [[None, None, None]], [[None, None, None]])
def gather_object(rank: int, world_size: int) -> Generator[Any, None, None]:
    gather_objects = ["foo", 12, {1: 2}]
    output: list[Any] = [None for _ in gather_objects]
    dist.gather_object(gather_objects[dist.get_rank()], output if dist.get_rank() == 0 else None, dst=0)
    yield output  # shown on rank 0


@example([[1.0, 1.0]], [[5.0, 5.0]])
def scatter(rank: int, world_size: int) -> Generator[Any, None, None]:
    tensor_size = 2
    t_ones = np.ones(tensor_size)
    t_fives = np.ones(tensor_size) * 5
    output_tensor = np.zeros(tensor_size)
    scatter_list = [t_ones, t_fives] if dist.get_rank() == 0 else None
    dist.scatter(output_tensor, scatter_list, src=0)
    yield output_tensor  # rank i gets scatter_list[i]; shown on rank 1


@example([["foo"]], [[12]], [[{1: 2}]])
def scatter_object_list(rank: int, world_size: int) -> Generator[Any, None, None]:
    objects = ["foo", 12, {1: 2}] if dist.get_rank() == 0 else [None, None, None]
    output_list: list[Any] = [None]
    dist.scatter_object_list(output_list, objects, src=0)
    yield output_list  # rank i gets objects[i]; shown on rank 2


@example([[0, 1, 2, 3], [0, 2], [[0, 1], [2, 3]], [0, 2]], [[0, 1, 2, 3], [4, 6], [[0, 1], [2, 3]], [4, 6]])
def reduce_scatter_tensor(rank: int, world_size: int) -> Generator[Any, None, None]:
    tensor_out = np.zeros(2, dtype=np.int64)
    tensor_in = np.arange(world_size * 2, dtype=np.int64)  # concatenation form
    yield tensor_in
    dist.reduce_scatter_tensor(tensor_out, tensor_in)
    yield tensor_out
    tensor_in = np.reshape(tensor_in, (world_size, 2))  # stack form
    yield tensor_in
    dist.reduce_scatter_tensor(tensor_out, tensor_in)
    yield tensor_out


@example(
    [[0, 1, 2, 3], [0, 4, 8, 12], [0, 4, 8, 12]],
    [[4, 5, 6, 7], [1, 5, 9, 13], [1, 5, 9, 13]],
    [[8, 9, 10, 11], [2, 6, 10, 14], [2, 6, 10, 14]],
    [[12, 13, 14, 15], [3, 7, 11, 15], [3, 7, 11, 15]],
)
def all_to_all_single(rank: int, world_size: int) -> Generator[Any, None, None]:
    input = np.arange(4) + rank * 4
    yield input
    output = np.empty([4], dtype=np.int64)
    dist.all_to_all_single(output, input)
    yield output
    # 'Essentially, it is similar to following operation'
    output[:] = 0
    scatter_list = list(np.array_split(input, world_size))
    gather_list = list(np.array_split(output, world_size))
    for i in range(world_size):
        dist.scatter(gather_list[i], scatter_list if i == rank else [], src=i)
    yield output


INPUTS = [[0, 1, 2, 3, 4, 5], list(range(10, 19)), list(range(20, 25)), list(range(30, 37))]
INPUT_SPLITS = [[2, 2, 1, 1], [3, 2, 2, 2], [2, 1, 1, 1], [2, 2, 2, 1]]
OUTPUT_SPLITS = [[2, 3, 2, 2], [2, 2, 1, 2], [1, 2, 1, 2], [1, 2, 1, 1]]


@example(
    [[0, 1, 10, 11, 12, 20, 21, 30, 31]], [[2, 3, 13, 14, 22, 32, 33]], [[4, 15, 16, 23, 34, 35]], [[5, 17, 18, 24, 36]]
)
def all_to_all_single_with_an_uneven_split(rank: int, world_size: int) -> Generator[Any, None, None]:
    input, input_splits, output_splits = np.array(INPUTS[rank]), INPUT_SPLITS[rank], OUTPUT_SPLITS[rank]
    output = np.empty(sum(output_splits), dtype=np.int64)
    dist.all_to_all_single(output, input, output_splits, input_splits)
    yield output


@example(
    [[[0], [1], [2], [3]], [[0], [4], [8], [12]], [[0], [4], [8], [12]]],
    [[[4], [5], [6], [7]], [[1], [5], [9], [13]], [[1], [5], [9], [13]]],
    [[[8], [9], [10], [11]], [[2], [6], [10], [14]], [[2], [6], [10], [14]]],
    [[[12], [13], [14], [15]], [[3], [7], [11], [15]], [[3], [7], [11], [15]]],
)
def all_to_all(rank: int, world_size: int) -> Generator[Any, None, None]:
    input = list(np.array_split(np.arange(4) + rank * 4, 4))
    yield input
    output = list(np.array_split(np.empty([4], dtype=np.int64), 4))
    dist.all_to_all(output, input)
    yield output
    # 'Essentially, it is similar to following operation'
    scatter_list = input
    gather_list = [np.zeros_like(tensor) for tensor in output]
    for i in range(world_size):
        dist.scatter(gather_list[i], scatter_list if i == rank else [], src=i)
    yield gather_list


@example(
    [[[0, 1], [2, 3], [4], [5]], [[0, 1], [10, 11, 12], [20, 21], [30, 31]]],
    [[[10, 11, 12], [13, 14], [15, 16], [17, 18]], [[2, 3], [13, 14], [22], [32, 33]]],
    [[[20, 21], [22], [23], [24]], [[4], [15, 16], [23], [34, 35]]],
    [[[30, 31], [32, 33], [34, 35], [36]], [[5], [17, 18], [24], [36]]],
)
def all_to_all_with_an_uneven_split(rank: int, world_size: int) -> Generator[Any, None, None]:
    input = np.split(np.array(INPUTS[rank]), np.cumsum(INPUT_SPLITS[rank])[:-1])
    yield input
    output = [np.empty(length, dtype=np.int64) for length in OUTPUT_SPLITS[rank]]
    dist.all_to_all(output, input)
    yield output


# torch.distributed and torch.distributed.deprecated: multi-GPU collective functions


@example([[[16.0]] * 8], [[[16.0]] * 8])
def all_reduce_multigpu(rank: int, world_size: int) -> Generator[Any, None, None]:
    tensor_list = [np.array([1], dtype=np.float32) for _ in range(8)]  # two nodes with 8 GPUs each
    dist.all_reduce_multigpu(tensor_list)
    yield tensor_list


# torch.distributed.deprecated: what it says of receives, requests and groups


@example([[20.0, 10.0], 1, True], [[20.0, 10.0], 0, True])
def recv_from_any_process_returns_the_sender(rank: int, world_size: int) -> Generator[Any, None, None]:
    mine, tensor = np.array([20.0, 10.0]), np.zeros(2)
    request = dist.isend(mine, 1 - rank)
    sender = dist.recv(tensor)
    assert request is not None
    request.wait()
    yield tensor
    yield sender
    yield request.is_completed()


@example([[6], [2]], [[6], [7]], [[6], [2]])
def new_group_of_all_and_of_some(rank: int, world_size: int) -> Generator[Any, None, None]:
    tensor = np.array([rank + 1])
    dist.all_reduce(tensor, group=dist.new_group(ranks=None))
    yield tensor
    tensor = np.array([7])
    group = dist.new_group([0, 2])
    if rank != 1:
        dist.broadcast(tensor := np.array([rank]), 2, group)
    yield tensor
    assert dist.get_rank(group) == [0, -1, 1][rank]


# The tutorial


class Parameter:
    """As much of a torch Parameter as the tutorial's average_gradients uses."""

    def __init__(self, grad: Array) -> None:
        self.grad = grad


def average_gradients(parameters: list[Parameter]) -> None:
    size = float(dist.get_world_size())
    for param in parameters:
        dist.all_reduce(param.grad.data, op=dist.ReduceOp.SUM)
        param.grad /= size


@example([[[1.5, 1.5], [[3.0]]]], [[[1.5, 1.5], [[3.0]]]], [[[1.5, 1.5], [[3.0]]]], [[[1.5, 1.5], [[3.0]]]])
def gradient_averaging(rank: int, world_size: int) -> Generator[Any, None, None]:
    model = [Parameter(np.full(2, float(rank))), Parameter(np.full((1, 1), 2.0 * rank))]
    average_gradients(model)
    yield [param.grad for param in model]


def allreduce(send: Array, recv: Array) -> None:
    rank = dist.get_rank()
    size = dist.get_world_size()
    send_buff = send.copy()
    recv_buff = send.copy()
    accum = send.copy()

    left = ((rank - 1) + size) % size
    right = (rank + 1) % size

    for i in range(size - 1):
        if i % 2 == 0:
            send_req = dist.isend(send_buff, right)
            dist.recv(recv_buff, left)
            accum[:] += recv_buff[:]
        else:
            send_req = dist.isend(recv_buff, right)
            dist.recv(send_buff, left)
            accum[:] += send_buff[:]
        assert send_req is not None
        send_req.wait()
    recv[:] = accum[:]


@example([[10.0, 1111.0]], [[10.0, 1111.0]], [[10.0, 1111.0]], [[10.0, 1111.0]])
def custom_ring_allreduce(rank: int, world_size: int) -> Generator[Any, None, None]:
    recv = np.zeros(2)
    allreduce(np.array([rank + 1.0, 10.0**rank]), recv)
    yield recv  # 'stores the sum of all send tensors in recv'
