"""The job's key-value store: raw bytes for values, JSON for the rest."""

from __future__ import annotations

import base64
import binascii
import re
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response
from pydantic import StringConstraints, WithJsonSchema
from starlette.convertors import StringConvertor, register_url_convertor

from rankmesh_agent.http.routes.dependencies import BEARER, StoreDep
from rankmesh_agent.http.routes.group_calls import until_disconnect
from rankmesh_agent.http.routes.problems import problems
from rankmesh_agent.store import commands
from rankmesh_agent.store.keys import MAX_KEYS, Condition, check_values, etag
from rankmesh_agent.wire.errors import InvalidValueError, KeyNotFoundError
from rankmesh_agent.wire.schemas import (
    KEY_SIZE,
    LONG_POLL_SECONDS,
    MAX_KEY_BYTES,
    Done,
    StoreAdd,
    StoreCompareSet,
    StoreFound,
    StoreKeys,
    StoreNumber,
    StorePop,
    StoreQueue,
    StoreValues,
    StoreWait,
)


class _AnyText(StringConvertor):
    regex = r"[\s\S]*"  # Starlette's own 'path' drops a line break at the end


register_url_convertor("any_text", _AnyText())

router = APIRouter(prefix="/v1/store", tags=["store"], dependencies=[BEARER], responses=problems(422, 502, 503))

_KEY_FORM = f"1 to {MAX_KEY_BYTES} bytes of UTF-8"
Key = Annotated[str, Path(description=f"{_KEY_FORM}; may contain slashes.", json_schema_extra=KEY_SIZE)]
KeyAsked = Annotated[str, Query(alias="key", description=_KEY_FORM, json_schema_extra=KEY_SIZE)]
Seconds = Annotated[
    float,
    Query(
        alias="wait",
        description="Seconds to wait for the key to be set, at most 20; repeat the request to wait longer.",
    ),
]
Prefix = Annotated[str, Query(max_length=MAX_KEY_BYTES, description="Only keys that begin with this.")]
Limit = Annotated[int | None, Query(ge=0, le=MAX_KEYS, description="Only the first keys, at most this many.")]
Once = Annotated[
    str,
    Header(
        alias="Idempotency-Key",
        max_length=255,
        description="A name for this request. If it is repeated under the same name within a minute, it is not "
        "executed again but gets the same response: so it is safe to repeat after a lost response.",
    ),
]
_A_TAG = r'(?:W/)?"[!#-~]*"'
_A_LIST = rf"^(?:|\*|{_A_TAG}(?:[ \t]*,[ \t]*(?:{_A_TAG})?)*)$"
_AN_EXAMPLE = '"cae66941d9efbd404e4d88758ea67670"'
_Tags = Annotated[
    Annotated[str, StringConstraints(pattern=_A_LIST)] | None,
    WithJsonSchema({"type": "string", "pattern": _A_LIST, "examples": ["*", _AN_EXAMPLE]}),
]
IfMatch = Annotated[
    _Tags, Header(alias="If-Match", description="Only if the value has one of these ETags; * is any value's.")
]
IfNoneMatch = Annotated[
    _Tags,
    Header(
        alias="If-None-Match", description="Only if the value has none of these ETags; *: only if the key has no value."
    ),
]

_OCTETS: dict[str, Any] = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
_OCTETS_IN = {"requestBody": {"description": "The value; none is an empty one.", "content": _OCTETS}}
_OCTETS_OUT: dict[int | str, dict[str, Any]] = {200: {"content": _OCTETS}}
_ETAG = {"ETag": {"description": "Equal for equal values.", "schema": {"type": "string"}}}
_TAGS = re.compile(r'(W/)?("[^"]*"|\*)')
_NO_CONTENT: dict[str, Any] = {"status_code": HTTPStatus.NO_CONTENT, "response_class": Response}
_NOT_MODIFIED: dict[int | str, dict[str, Any]] = {
    304: {"headers": _ETAG, "description": "The value has one of the ETags of If-None-Match."}
}


async def _condition(request: Request, if_match: IfMatch = None, if_none_match: IfNoneMatch = None) -> Condition:
    """Return what the request's headers ask for (RFC 9110, section 13.1); each may come in several lines."""
    wanted, unwanted = (
        [tag for line in request.headers.getlist(name) for tag in _TAGS.findall(line)]
        for name in ("if-match", "if-none-match")
    )
    # If-Match compares strongly, and no value's tag is weak, W/"…"; If-None-Match takes weak ones for their values'.
    tags = tuple(tag for weak, tag in wanted if not weak) if "if-match" in request.headers else None
    others = tuple(tag for _, tag in unwanted)
    return Condition(tags, "*" in others, tuple(tag for tag in others if tag != "*"))


ConditionDep = Annotated[Condition, Depends(_condition)]


class Octets(Response):
    """A value's bytes."""

    media_type = "application/octet-stream"


@router.get("")
async def list_keys(store: StoreDep, prefix: Prefix = "", limit: Limit = None) -> list[str]:
    """List the keys, sorted."""
    return (await store.submit(commands.Keys(prefix)))[:limit]


@router.post("/count")
async def count(store: StoreDep, prefix: Prefix = "") -> StoreNumber:
    """Return the number of keys."""
    return StoreNumber(await store.submit(commands.Count(prefix)))


@router.post("/check")
async def check(body: StoreKeys, store: StoreDep) -> StoreFound:
    """Return whether all of the keys exist; a queue with values does, too."""
    return StoreFound(await store.submit(commands.Check(tuple(body.keys))))


@router.post("/wait")
async def wait(body: StoreWait, request: Request, store: StoreDep) -> Done:
    """Return when all keys are set; waits at most 20 s, repeat the request to wait longer.

    If a rank of the job fails meanwhile, the wait ends with a 503 response, `rank-failed`.
    """
    await until_disconnect(request, store.submit(commands.Wait(tuple(body.keys), _slice(body.timeout))))
    return Done()


@router.post("/add", responses=problems(409))
async def add(body: StoreAdd, store: StoreDep, once: Once = "") -> StoreNumber:
    """Add to a number, and return the sum."""
    return StoreNumber(await store.submit(commands.Add(body.key, body.amount), once))


@router.post("/compare_set", response_class=Octets, responses=_OCTETS_OUT)
async def compare_set(body: StoreCompareSet, store: StoreDep, once: Once = "") -> Octets:
    """Replace a value if it is the expected one; return the value now, the expected one if there is none."""
    expected, desired = _from_base64(body.expected), _from_base64(body.desired)
    return Octets(await store.submit(commands.CompareSet(body.key, expected, desired), once))


@router.post("/append", **_NO_CONTENT, openapi_extra=_OCTETS_IN)
async def append(key: KeyAsked, request: Request, store: StoreDep, once: Once = "") -> None:
    """Append the request's body to the key's value, or set it if there is none."""
    await store.submit(commands.Append(key, await request.body()), once)


@router.post("/multi_get")
async def multi_get(body: StoreWait, request: Request, store: StoreDep) -> StoreValues:
    """Return several values, waiting for the keys as ``wait`` does."""
    command = commands.MultiGet(tuple(body.keys), _slice(body.timeout))
    values = await until_disconnect(request, store.submit(command))
    check_values(*values)
    return StoreValues({key: base64.b64encode(value).decode() for key, value in zip(body.keys, values, strict=True)})


@router.post("/multi_set", **_NO_CONTENT)
async def multi_set(body: StoreValues, store: StoreDep, once: Once = "") -> None:
    """Set several values in one step."""
    await store.submit(commands.MultiSet(tuple((key, _from_base64(value)) for key, value in body.values.items())), once)


@router.post("/queue_push", **_NO_CONTENT, openapi_extra=_OCTETS_IN)
async def queue_push(key: KeyAsked, request: Request, store: StoreDep, once: Once = "") -> None:
    """Append the request's body to a queue as one value."""
    await store.submit(commands.QueuePush(key, await request.body()), once)


@router.post("/queue_pop", response_class=Octets, responses=_OCTETS_OUT | problems(404))
async def queue_pop(body: StorePop, request: Request, store: StoreDep, once: Once = "") -> Octets:
    """Remove the first value of a queue, after a wait for one if requested.

    A value leaves the queue only for a connected client. If the response is lost, the same request with the same
    Idempotency-Key gets it again.
    """
    return Octets(
        await until_disconnect(request, store.submit(commands.QueuePop(body.key, _slice(body.timeout)), once))
    )


@router.post("/queue_len")
async def queue_len(body: StoreQueue, store: StoreDep) -> StoreNumber:
    """Return the number of values in a queue."""
    return StoreNumber(await store.submit(commands.QueueLen(body.key)))


@router.get(
    "/{key:any_text}",
    response_class=Octets,
    responses={200: {"content": _OCTETS, "headers": _ETAG}, **_NOT_MODIFIED, **problems(404, 412)},
)
async def get_value(
    key: Key, request: Request, store: StoreDep, condition: ConditionDep, seconds: Seconds = 0.0
) -> Response:
    """Return a value, after a wait for it if requested.

    If a rank of the job fails meanwhile, the wait ends with a 503 response, `rank-failed`.
    """
    await request.body()
    value = await until_disconnect(request, store.submit(commands.Get(key, _slice(seconds))))
    Condition(condition.if_match).check(key, value)
    tag = etag(value)
    if condition.if_absent or tag in condition.if_none_match:
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers={"ETag": tag})
    return Octets(value, headers={"ETag": tag})


@router.put(
    "/{key:any_text}", **_NO_CONTENT, responses={204: {"headers": _ETAG}, **problems(412)}, openapi_extra=_OCTETS_IN
)
async def set_value(key: Key, request: Request, store: StoreDep, condition: ConditionDep, once: Once = "") -> Response:
    """Store the request's body as the key's value."""
    value = await request.body()
    await store.submit(commands.Set(key, value, condition), once)
    return Response(status_code=HTTPStatus.NO_CONTENT, headers={"ETag": etag(value)})


@router.delete("/{key:any_text}", **_NO_CONTENT, responses=problems(404, 412))
async def delete_value(key: Key, store: StoreDep, condition: ConditionDep, once: Once = "") -> None:
    """Remove a key."""
    if not await store.submit(commands.Delete(key, condition), once):
        raise KeyNotFoundError(f"key {key!r} is not set")


def _from_base64(text: str) -> bytes:
    """Return the value of its JSON form; raise InvalidValueError if it is not base64, or too large."""
    try:
        value = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidValueError(f"{text[:32]!r} is not a value in base64") from None
    check_values(value)
    return value


def _slice(seconds: float) -> float:
    """Return how long this request may be held: never longer than one long poll, and not at all for NaN."""
    return min(LONG_POLL_SECONDS, max(0.0, seconds))
