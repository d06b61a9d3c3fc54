"""The functions of _multigpu where each array of a list is on a GPU of its own, and NCCL carries the call out.

Roots and indices are checked by then; ``comm`` is what ``members_over`` returned, ``how`` how the call is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rankmesh._collectives.arguments import all_of
from rankmesh._collectives.reduce_broadcast import scaled
from rankmesh._collectives.reduce_op import reduction
from rankmesh._session.session import Group
from rankmesh._tensors import cuda
from rankmesh._tensors.arrays import destination, source
from rankmesh._tensors.containers import Array, device_of
from rankmesh_agent.collectives.reduction import premultiplied
from rankmesh_agent.gpu import nccl
from rankmesh_agent.gpu.communicator import GpuCommunicator
from rankmesh_agent.group.call_queue import Options
from rankmesh_agent.group.pending import OnComplete
from rankmesh_agent.group.work import Work
from rankmesh_agent.wire.ops import OpType, PremulSum, ReduceOp

Tensors = Sequence[Any]


def members_over(group: Group, tensors: Any, op: ReduceOp | PremulSum | None = None) -> GpuCommunicator | None:
    """Return who makes calls on arrays that are each on a GPU of their own; None where they go through host memory.

    Args:
        group: the group.
        tensors: the arrays.
        op: how they are to be reduced, None if they are not.
    """
    if not isinstance(tensors, list | tuple) or not tensors:
        return None
    devices = [device_of(tensor) for tensor in tensors]
    if devices[0] is None or None in devices or len(set(devices)) < len(devices):
        return None
    if op is not None:
        dtype = cuda.array_of(tensors[0], "an array")[0].dtype
        if not nccl.reduces(dtype, reduction(op, dtype).op):
            return None
    return cuda.over_several(group, devices[0])


def broadcast(comm: GpuCommunicator, tensors: Tensors, root: int, index: int, how: Options) -> Work | None:
    """See broadcast_multigpu."""
    arrays, afters = _destinations(comm, tensors, "tensor_list")
    key = OpType.BROADCAST, arrays[0].dtype, arrays[0].size, None, comm.global_ranks[root]
    place = root * len(arrays) + index
    return comm.submit_multigpu(key, [(array, place) for array in arrays], afters, how)


def all_reduce(comm: GpuCommunicator, tensors: Tensors, op: ReduceOp | PremulSum, how: Options) -> Work | None:
    """See all_reduce_multigpu."""
    arrays, afters, reduce_op = _scaled(comm, tensors, op)
    key = OpType.ALL_REDUCE, arrays[0].dtype, arrays[0].size, reduce_op
    return comm.submit_multigpu(key, [(array, reduce_op) for array in arrays], afters, how)


def reduce(
    comm: GpuCommunicator, tensors: Tensors, root: int, index: int, op: ReduceOp | PremulSum, how: Options
) -> Work | None:
    """See reduce_multigpu."""
    arrays, afters, reduce_op = _scaled(comm, tensors, op)
    key = OpType.REDUCE, arrays[0].dtype, arrays[0].size, reduce_op, comm.global_ranks[root]
    place = root * len(arrays) + index
    if comm.rank != root:
        afters = [None] * len(arrays)
    else:
        afters = [after if number == index else None for number, after in enumerate(afters)]
    return comm.submit_multigpu(key, [(array, reduce_op, place) for array in arrays], afters, how)


def all_gather(comm: GpuCommunicator, outputs: Sequence[Tensors], inputs: Tensors, how: Options) -> Work | None:
    """See all_gather_multigpu."""
    arrays = [source(tensor, f"input_tensor_list[{number}]", comm) for number, tensor in enumerate(inputs)]
    given = [_destinations(comm, tensors, f"output_tensor_lists[{number}]") for number, tensors in enumerate(outputs)]
    key = OpType.ALL_GATHER, arrays[0].dtype, arrays[0].size
    each = [(into, array) for (into, _), array in zip(given, arrays, strict=True)]
    return comm.submit_multigpu(key, each, [all_of(afters) for _, afters in given], how)


def reduce_scatter(
    comm: GpuCommunicator, outputs: Tensors, inputs: Sequence[Tensors], op: ReduceOp | PremulSum, how: Options
) -> Work | None:
    """See reduce_scatter_multigpu."""
    into, afters = _destinations(comm, outputs, "output_tensor_list")
    reduce_op, factor = reduction(op, into[0].dtype)
    given = [
        [source(tensor, f"input_tensor_lists[{row}][{number}]", comm) for number, tensor in enumerate(tensors)]
        for row, tensors in enumerate(inputs)
    ]
    if factor is not None:
        given = [[premultiplied(factor, array) for array in arrays] for arrays in given]
    key = OpType.REDUCE_SCATTER, into[0].dtype, into[0].size, reduce_op
    each = [(output, arrays, reduce_op) for output, arrays in zip(into, given, strict=True)]
    return comm.submit_multigpu(key, each, afters, how)


def _destinations(comm: GpuCommunicator, tensors: Tensors, name: str) -> tuple[list[Array], list[OnComplete]]:
    found = [destination(tensor, f"{name}[{number}]", comm) for number, tensor in enumerate(tensors)]
    return [array for array, _ in found], [after for _, after in found]


def _scaled(
    comm: GpuCommunicator, tensors: Tensors, op: ReduceOp | PremulSum
) -> tuple[list[Array], list[OnComplete], ReduceOp]:
    """Return the arrays, multiplied if the operation says so, what brings the results back, and the operation."""
    arrays, afters = _destinations(comm, tensors, "tensor_list")
    reduce_op, factor = reduction(op, arrays[0].dtype)
    if factor is None:
        return arrays, afters, reduce_op
    found = [scaled(array, after, factor) for array, after in zip(arrays, afters, strict=True)]
    return [array for array, _ in found], [after for _, after in found], reduce_op
