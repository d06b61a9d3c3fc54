"""Commands as HTTP requests, and HTTP responses as their results. Pure: no I/O happens here."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple, TypeVar, cast
from urllib.parse import quote

from rankmesh_agent.store import commands
from rankmesh_agent.store.command import Command
from rankmesh_agent.store.keys import check_values
from rankmesh_agent.wire import json_text
from rankmesh_agent.wire.errors import DistStoreError, InvalidValueError, KeyNotFoundError
from rankmesh_agent.wire.schemas import (
    StoreAdd,
    StoreCompareSet,
    StoreKeys,
    StorePop,
    StoreQueue,
    StoreValues,
    StoreWait,
)

T = TypeVar("T")


class Request(NamedTuple):
    """An HTTP request, in plain data.

    Attributes:
        method: the verb.
        path: path without query.
        params: the query.
        headers: headers besides those of every request.
        json: the JSON body.
        content: the body itself, if it is raw bytes.
    """

    method: str
    path: str
    params: Mapping[str, str | float] = {}
    headers: Mapping[str, str] = {}
    json: Any = None
    content: bytes | None = None


def encode_command(command: Command[Any]) -> Request:
    """Return the HTTP request for a command."""
    return _FORMATS[type(command)][0](command)


def decode_result(command: Command[T], body: bytes) -> T:
    """Return a command's result from the body of a successful response.

    Raises:
        ValueError, KeyError, TypeError, DistStoreError: the body is not a result.
    """
    return cast(T, _FORMATS[type(command)][1](command, body))


def decode_error(command: Command[T], error: DistStoreError) -> T:
    """Return the result that the server expresses as an error; raise any other error."""
    if isinstance(command, commands.Delete) and isinstance(error, KeyNotFoundError):
        return cast(T, False)
    raise error


def to_base64(value: bytes) -> str:
    """Return a value in its JSON form."""
    return base64.b64encode(value).decode()


def from_base64(text: str) -> bytes:
    """Return the value of the JSON form ``text``.

    Raises:
        InvalidValueError: it is not base64, or too large.
    """
    try:
        value = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidValueError(f"{text[:32]!r} is not a value in base64") from None
    check_values(value)
    return value


def _path(key: str) -> str:
    # Dots too: clients resolve the path segments '.' and '..', which are valid keys.
    return "/v1/store/" + quote(key, safe="").replace(".", "%2E")


def _post(call: str, body: Any) -> Request:
    return Request("POST", f"/v1/store/{call}", json=asdict(body))


def _raw(call: str) -> Callable[[Any], Request]:
    return lambda command: Request("POST", f"/v1/store/{call}", {"key": command.key}, content=command.value)


def _none(command: Command[None], body: bytes) -> None:
    return None


def _bytes(command: Command[bytes], body: bytes) -> bytes:
    return body


def _number(command: Command[int], body: bytes) -> Any:
    return json_text.loads(body)["value"]


def _values(command: commands.MultiGet, body: bytes) -> list[bytes]:
    values = json_text.loads(body)["values"]
    return [from_base64(values[key]) for key in command.keys]


_FORMATS: dict[type[Command[Any]], tuple[Callable[[Any], Request], Callable[[Any, bytes], Any]]] = {
    commands.Get: (lambda get: Request("GET", _path(get.key), {"wait": get.seconds}), _bytes),
    commands.Set: (
        lambda put: Request("PUT", _path(put.key), headers=put.condition.headers(), content=put.value),
        _none,
    ),
    commands.Delete: (
        lambda delete: Request("DELETE", _path(delete.key), headers=delete.condition.headers()),
        lambda command, body: True,
    ),
    commands.Add: (lambda add: _post("add", StoreAdd(add.key, add.amount)), _number),
    commands.CompareSet: (
        lambda swap: _post("compare_set", StoreCompareSet(swap.key, to_base64(swap.expected), to_base64(swap.desired))),
        _bytes,
    ),
    commands.Append: (_raw("append"), _none),
    commands.MultiGet: (lambda get: _post("multi_get", StoreWait(list(get.unique), get.seconds)), _values),
    commands.MultiSet: (
        lambda put: _post("multi_set", StoreValues({key: to_base64(value) for key, value in put.values})),
        _none,
    ),
    commands.Wait: (lambda wait: _post("wait", StoreWait(list(wait.keys), wait.seconds)), _none),
    commands.Check: (
        lambda check: _post("check", StoreKeys(list(check.keys))),
        lambda command, body: json_text.loads(body)["found"],
    ),
    commands.Keys: (
        lambda keys: Request("GET", "/v1/store", {"prefix": keys.prefix}),
        lambda command, body: json_text.loads(body),
    ),
    commands.Count: (lambda count: Request("POST", "/v1/store/count", {"prefix": count.prefix}), _number),
    commands.QueuePush: (_raw("queue_push"), _none),
    commands.QueuePop: (lambda pop: _post("queue_pop", StorePop(pop.key, pop.seconds)), _bytes),
    commands.QueueLen: (lambda length: _post("queue_len", StoreQueue(length.key)), _number),
}
