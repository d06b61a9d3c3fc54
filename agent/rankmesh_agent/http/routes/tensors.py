"""Collectives and messages of a rank for an HTTP client: the same calls that the SDK's functions make."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from inspect import signature
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Depends, Query, Request, Response

from rankmesh_agent.collectives.reduction import check_op, premultiplied
from rankmesh_agent.http.routes.dependencies import BEARER
from rankmesh_agent.http.routes.group_calls import CallerDep
from rankmesh_agent.http.routes.problems import problems
from rankmesh_agent.http.routes.tensor_io import BODY, Array, InvalidCallError, TensorDep, receive_empty_body
from rankmesh_agent.progress.message_queues import ANY
from rankmesh_agent.wire.object_records import MIN_TAG
from rankmesh_agent.wire.ops import PremulSum, ReduceOp

router = APIRouter(
    prefix="/v1/groups/{group_id}",
    tags=["tensors"],
    dependencies=[BEARER],
    responses=problems(404, 409, 410, 422, 500, 503, 504),
)

Op = Annotated[
    Literal["sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum"],
    Query(alias="op", description="How elements are combined, as torch.distributed.ReduceOp names it."),
]
Factor = Annotated[
    float | None,
    Query(alias="factor", allow_inf_nan=False, description="Factor of this rank's elements, for premul_sum."),
]
Src = Annotated[int | None, Query(alias="src", ge=0, description="Global rank that the data comes from.")]
Dst = Annotated[int | None, Query(alias="dst", ge=0, description="Global rank that the data goes to.")]
Tag = Annotated[
    int, Query(alias="tag", ge=MIN_TAG, lt=1 << 63, description="A receive matches messages of its tag only.")
]

_HEADERS = {
    "RankMesh-Dtype": {"description": "Element type.", "schema": {"type": "string"}},
    "RankMesh-Shape": {"description": "Lengths of the dimensions: `2,3`.", "schema": {"type": "string"}},
}
_SOURCE = {"RankMesh-Source": {"description": "Global rank of the sender.", "schema": {"type": "integer"}}}
_NOTHING: dict[str, Any] = {"description": "The call has completed; this rank gets no array."}


def _call(
    takes: Literal["array", "example", "nothing"] = "array", gives: Literal["array", "sometimes", "nothing"] = "array"
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the decorator of a call's endpoint, which has the call's name.

    ``example`` is an array from the source and one like it from the others.
    """

    def register(endpoint: Callable[..., Any]) -> Callable[..., Any]:
        responses: dict[int | str, dict[str, Any]] = {}
        if gives != "nothing":
            headers = _HEADERS | (_SOURCE if endpoint.__name__ == "recv" else {})
            responses[200] = {"description": "The array that this rank gets.", "content": BODY, "headers": headers}
        if gives == "sometimes":
            responses[204] = _NOTHING
        if takes != "nothing":
            responses |= problems(415)
        own = [name for name in signature(endpoint).parameters if name not in ("caller", "request", "tensors")]
        known = [*own, "timeout", *(("dtype", "shape") if takes != "nothing" else ())]

        async def reject_unknown(request: Request) -> None:
            unknown = sorted(set(request.query_params) - set(known))
            if unknown:
                raise InvalidCallError(f"this call has no parameter {unknown[0]!r}; it has {', '.join(known)}")

        return router.post(
            f"/{endpoint.__name__}",
            response_class=Response,
            status_code=HTTPStatus.NO_CONTENT if gives == "nothing" else HTTPStatus.OK,
            responses=responses,
            openapi_extra={"requestBody": {"required": takes == "array", "content": BODY}}
            if takes != "nothing"
            else {},
            dependencies=[Depends(reject_unknown)],
        )(endpoint)

    return register


@_call()
async def all_reduce(caller: CallerDep, tensors: TensorDep, op: Op = "sum", factor: Factor = None) -> Response:
    """Reduce an array over all ranks; each gets the result."""
    array = await tensors.receive()
    reduce_op, flat = _reduction(op, factor, array)
    await caller.collective(lambda options: caller.group.all_reduce(flat, reduce_op, options), _shape(array))
    return tensors.respond(flat.reshape(array.shape))


@_call(gives="sometimes")
async def reduce(
    caller: CallerDep, tensors: TensorDep, dst: Dst = None, op: Op = "sum", factor: Factor = None
) -> Response:
    """Reduce an array over all ranks; the rank ``dst`` gets the result, the others get 204."""
    root = caller.group_rank(dst, "dst")
    array = await tensors.receive()
    reduce_op, flat = _reduction(op, factor, array)
    await caller.collective(lambda options: caller.group.reduce(flat, reduce_op, root, options), _shape(array))
    return tensors.respond(flat.reshape(array.shape)) if caller.group.rank == root else _nothing()


@_call(takes="example", gives="sometimes")
async def broadcast(caller: CallerDep, tensors: TensorDep, src: Src = None) -> Response:
    """Copy the array that the rank ``src`` sends to all ranks; it gets 204 itself.

    The others give dtype and shape, or send an array like it.
    """
    root = caller.group_rank(src, "src")
    sends = caller.group.rank == root
    array = await (tensors.receive() if sends else tensors.receive_or_allocate())
    flat = array.reshape(-1)
    await caller.collective(lambda options: caller.group.broadcast(flat, root, options), _shape(array))
    return _nothing() if sends else tensors.respond(array)


@_call()
async def all_gather(caller: CallerDep, tensors: TensorDep) -> Response:
    """Collect the arrays of all ranks, alike in dtype and shape: each gets them stacked, by rank in the group."""
    array = await tensors.receive()
    stack = tensors.allocate((caller.group.size, *array.shape), array.dtype)
    await caller.collective(
        lambda options: caller.group.all_gather(_parts(stack), array.reshape(-1), options), _shape(array)
    )
    return tensors.respond(stack)


@_call(gives="sometimes")
async def gather(caller: CallerDep, tensors: TensorDep, dst: Dst = 0) -> Response:
    """Collect the arrays of all ranks, alike in dtype and shape: ``dst`` gets them stacked, the others 204."""
    root = caller.group_rank(dst, "dst")
    receives = caller.group.rank == root
    array = await tensors.receive()
    stack = tensors.allocate((caller.group.size, *array.shape), array.dtype) if receives else array[:0]
    outputs = _parts(stack) if receives else []
    await caller.collective(
        lambda options: caller.group.gather(outputs, array.reshape(-1), root, options), _shape(array)
    )
    return tensors.respond(stack) if receives else _nothing()


@_call(takes="example")
async def scatter(caller: CallerDep, tensors: TensorDep, src: Src = 0) -> Response:
    """Distribute the arrays that ``src`` sends stacked, one per rank; each rank gets its own.

    The others give dtype and shape of one, or send an array like it.
    """
    root = caller.group_rank(src, "src")
    if caller.group.rank == root:
        stack = _stacked(await tensors.receive(), caller.group.size)
        inputs, output = _parts(stack), tensors.allocate(stack.shape[1:], stack.dtype)
    else:
        inputs, output = [], await tensors.receive_or_allocate()
    await caller.collective(
        lambda options: caller.group.scatter(output.reshape(-1), inputs, root, options), _shape(output)
    )
    return tensors.respond(output)


@_call()
async def reduce_scatter(caller: CallerDep, tensors: TensorDep, op: Op = "sum", factor: Factor = None) -> Response:
    """Reduce the stacks of all ranks, one array per rank; each rank gets the reduction of its own."""
    stack = _stacked(await tensors.receive(), caller.group.size)
    reduce_op, flat = _reduction(op, factor, stack)
    output = tensors.allocate(stack.shape[1:], stack.dtype)
    inputs = _parts(flat.reshape(stack.shape))
    await caller.collective(
        lambda options: caller.group.reduce_scatter(output.reshape(-1), inputs, reduce_op, options), _shape(stack)
    )
    return tensors.respond(output)


@_call()
async def all_to_all(caller: CallerDep, tensors: TensorDep) -> Response:
    """Send every rank its part of this rank's stack; get the parts that they have for this rank, stacked."""
    stack = _stacked(await tensors.receive(), caller.group.size)
    received = tensors.allocate(stack.shape, stack.dtype)
    await caller.collective(
        lambda options: caller.group.all_to_all(_parts(received), _parts(stack), options),
        f"{stack[0].size} elements for and from each rank",
    )
    return tensors.respond(received)


@_call(takes="nothing", gives="nothing")
async def barrier(request: Request, caller: CallerDep) -> Response:
    """Wait until all ranks have arrived."""
    await receive_empty_body(request)
    await caller.collective(caller.group.barrier)
    return _nothing()


@_call(gives="nothing")
async def send(caller: CallerDep, tensors: TensorDep, dst: Dst = None, tag: Tag = 0) -> Response:
    """Send an array to another rank. A small one may be in transit when the response comes."""
    rank = caller.peer_rank(dst, "dst")
    array = (await tensors.receive()).reshape(-1)
    await caller.message(lambda options: caller.group.send(array, rank, tag, options))
    return _nothing()


@_call(takes="example")
async def recv(caller: CallerDep, tensors: TensorDep, src: Src = None, tag: Tag = 0) -> Response:
    """Receive an array of the dtype and shape that the client gives, or sends an array of.

    It comes from the rank ``src``, or without it from any rank; the header RankMesh-Source has the sender's.
    """
    rank = ANY if src is None else caller.peer_rank(src, "src")
    array = await tensors.receive_or_allocate()
    work = await caller.message(lambda options: caller.group.receive(array.reshape(-1), rank, tag, options))
    return tensors.respond(array, {"RankMesh-Source": str(work.source_rank())})


def _reduction(op: str, factor: float | None, array: Array) -> tuple[ReduceOp, Array]:
    """Return the operation, and the elements to be reduced: the array's own memory, or a copy times the factor."""
    reduce_op, flat = ReduceOp[op.upper()], array.reshape(-1)
    if (factor is not None) != (reduce_op is ReduceOp.PREMUL_SUM):
        raise InvalidCallError("factor belongs to op=premul_sum, and to it alone: ?op=premul_sum&factor=0.5")
    try:
        if factor is None:
            check_op(reduce_op, array.dtype)
            return reduce_op, flat
        whole = int(factor) if factor.is_integer() else factor
        check_op(PremulSum(whole), array.dtype)
        return reduce_op, premultiplied(whole, flat)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidCallError(str(error)) from None


def _stacked(array: Array, size: int) -> Array:
    """Return the array; raise InvalidCallError unless its first dimension is the group's size."""
    if not array.ndim or array.shape[0] != size:
        raise InvalidCallError(
            f"the array must be a stack of {size}, one for each rank of the group: its first dimension is {size}, but "
            f"its shape is {list(array.shape)}"
        )
    return array


def _parts(stack: Array) -> list[np.ndarray[Any, Any]]:
    return [part.reshape(-1) for part in stack]


def _shape(array: Array) -> str:
    return f"shape {list(array.shape)}"


def _nothing() -> Response:
    return Response(status_code=HTTPStatus.NO_CONTENT)
