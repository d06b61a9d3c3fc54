"""The job's key-value store: raw bytes for values, JSON for the rest."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request, Response
from starlette.convertors import StringConvertor, register_url_convertor

from rankmesh_agent.routes.hang_up import unless_gone
from rankmesh_agent.routes.problems import documented
from rankmesh_agent.routes.view import BEARER, TheStore
from rankmesh_agent.store.keys import MAX_KEY_BYTES
from rankmesh_agent.wire.errors import KeyNotFoundError
from rankmesh_agent.wire.schemas import LONG_POLL_SECONDS, Done, StoreAdd, StoreNumber, StoreWait


class _AnyText(StringConvertor):
    regex = r"[\s\S]*"  # Starlette's own 'path' loses a line break at the end


register_url_convertor("any_text", _AnyText())

router = APIRouter(
    prefix="/v1/store",
    tags=["store"],
    dependencies=[BEARER],
    responses=documented(401, 403, 413, 421, 422, 502),
)

Key = Annotated[str, Path(description=f"1 to {MAX_KEY_BYTES} bytes of UTF-8; may contain slashes.")]
Wait = Annotated[float, Query(description="Seconds to wait for the key to be set; 20 at most, ask again for more.")]
Prefix = Annotated[str, Query(max_length=MAX_KEY_BYTES, description="Only keys that begin with this.")]

_OCTETS: dict[str, Any] = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}


class Octets(Response):
    """A value as it was stored."""

    media_type = "application/octet-stream"


@router.get("")
async def list_keys(store: TheStore, prefix: Prefix = "") -> list[str]:
    """List the keys, sorted."""
    return await store.keys(prefix)


@router.post("/add", responses=documented(400, 409))
async def add(body: StoreAdd, store: TheStore) -> StoreNumber:
    """Add to a number, and say the sum."""
    return StoreNumber(await store.add(body.key, body.amount))


@router.post("/wait", responses=documented(400, 408))
async def wait(body: StoreWait, request: Request, store: TheStore) -> Done:
    """Answer when all keys are set; after 20 s at most, ask again for more."""
    await unless_gone(request, store.wait(body.keys, _slice(body.timeout)))
    return Done()


@router.get("/{key:any_text}", response_class=Octets, responses={200: {"content": _OCTETS}, **documented(404)})
async def get_value(key: Key, request: Request, store: TheStore, wait: Wait = 0.0) -> Octets:
    """Return a value, waiting for it if asked to."""
    return Octets(await unless_gone(request, store.get(key, _slice(wait))))


@router.put(
    "/{key:any_text}",
    status_code=HTTPStatus.NO_CONTENT,
    response_class=Response,
    openapi_extra={"requestBody": {"required": True, "content": _OCTETS}},
)
async def set_value(key: Key, request: Request, store: TheStore) -> None:
    """Store the request's body as the key's value."""
    await store.set(key, await request.body())


@router.delete("/{key:any_text}", status_code=HTTPStatus.NO_CONTENT, response_class=Response, responses=documented(404))
async def delete_value(key: Key, store: TheStore) -> None:
    """Remove a key."""
    if not await store.delete(key):
        raise KeyNotFoundError(f"nobody has set key {key!r}")


def _slice(seconds: float) -> float:
    """Return how long this request may be held: never longer than one long poll, and not at all for NaN."""
    return min(LONG_POLL_SECONDS, max(0.0, seconds))
