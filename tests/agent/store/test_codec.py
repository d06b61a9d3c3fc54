"""Commands and results as frames: golden bytes both ways, and malformed ones."""

from __future__ import annotations

import enum
from typing import Any

import msgspec.msgpack
import numpy as np
import pytest

from rankmesh_agent.store import codec
from rankmesh_agent.store.command import Command
from rankmesh_agent.store.commands import (
    Add,
    Append,
    Check,
    CompareSet,
    Count,
    Delete,
    Get,
    Keys,
    MultiGet,
    MultiSet,
    QueueLen,
    QueuePop,
    QueuePush,
    Set,
    Wait,
)
from rankmesh_agent.store.keys import MAX_KEYS, Condition
from rankmesh_agent.wire.errors import (
    DistStoreError,
    InvalidKeyError,
    InvalidValueError,
    KeyNotFoundError,
    NotANumberError,
    ProtocolError,
    RankFailedError,
)
from rankmesh_agent.wire.store_frames import HEADER, MAX_BYTES, RequestId, decode_header

FREE: list[Any] = [None, False, []]
GOLDEN: list[tuple[Command, list[Any]]] = [
    (Get("grüße", 1.5), [1, "grüße", 1.5]),
    (Set("k", b"\x00v"), [2, "k", b"\x00v", FREE]),
    (Set("k", b"v", Condition((), True, ('"a"',))), [2, "k", b"v", [[], True, ['"a"']]]),
    (Delete("k", Condition(("*",))), [3, "k", [["*"], False, []]]),
    (Add("k", -12), [4, "k", -12]),
    (CompareSet("k", b"", b"2"), [5, "k", b"", b"2"]),
    (Append("k", b"v"), [6, "k", b"v"]),
    (MultiGet(("a", "b\0", "a"), 2.0), [7, ["a", "b\0", "a"], 2.0]),
    (MultiGet(()), [7, [], 0.0]),
    (MultiSet((("a", b"1"), ("b", b""))), [8, [["a", b"1"], ["b", b""]]]),
    (Wait(("a",), 3.0), [9, ["a"], 3.0]),
    (Check(("a", "b")), [10, ["a", "b"]]),
    (Keys("p/"), [11, "p/"]),
    (Count(), [12, ""]),
    (QueuePush("q", b"v"), [13, "q", b"v"]),
    (QueuePop("q", 1e300), [14, "q", 1e300]),
    (QueueLen("q"), [15, "q"]),
]


def framed(body: Any, seq: int = 1) -> bytes:
    encoded = msgspec.msgpack.encode(body)
    return HEADER.pack(len(encoded), seq) + encoded


@pytest.mark.parametrize(("command", "body"), GOLDEN, ids=lambda value: "")
def test_commands(command, body):
    frame = codec.encode_command(command, 9)
    assert frame == framed([body, None, 0.0], 9)
    assert codec.decode_request(frame) == codec.decode_request(bytes(frame)) == codec.Request(command)


@pytest.mark.parametrize("keyed", [True, False])
def test_a_retry_identifies_its_request(keyed):
    request_id = RequestId(b"n" * 64, 5, keyed)
    frame = codec.encode_command(Add("k", 1), 2, request_id, 1.5)
    assert frame == framed([[4, "k", 1], [b"n" * 64, 5, keyed], 1.5], 2)
    assert codec.decode_request(frame) == codec.Request(Add("k", 1), request_id, 1.5)


def test_types_that_are_derived():
    class Name(enum.StrEnum):
        RED = "red"

    for key in (np.str_("red"), Name.RED):
        assert codec.encode_command(Get(key), 1) == codec.encode_command(Get("red"), 1)


@pytest.mark.parametrize(
    "body",
    [
        [],
        [None],
        [[200, "k"]],
        [[4]],
        [[4, "k", b"1"]],
        [[1, b"k", 0.0]],
        *([[1, "k", seconds]] for seconds in (float("nan"), float("inf"), -1.0)),
        [[7, ["k"] * (MAX_KEYS + 1), 0.0]],
        *([[4, "k", 1], request_id] for request_id in ([b"n"], [b"n" * 65, 1, False], [b"n", 1 << 32, False])),
    ],
    ids=range(13),
)
def test_malformed_requests(body):
    with pytest.raises(ProtocolError, match="malformed"):
        codec.decode_request(framed(body))


def test_invalid_commands():
    """Their errors are their clients'."""
    for body in ([1, "", 0.0], [10, ["k", ""]], [11, "p" * 10_000]):
        with pytest.raises(InvalidKeyError):
            codec.decode_request(framed([body]))
    for amount in (1 << 63, -(1 << 63) - 1):
        with pytest.raises(NotANumberError, match="64 bits"):
            Add("k", amount)


@pytest.mark.parametrize(
    ("command", "result"),
    [
        (Set("k", b""), None),
        (Delete("k"), True),
        (Check(("k",)), False),
        (Add("k"), -(1 << 63)),
        (Get("k"), b""),
        (Get("k"), b"\x00\xff"),
        (MultiGet(("a", "b", "a")), [b"1", b"", b"1"]),
        (MultiGet(()), []),
        (Keys(), ["a", "grüße"]),
        (Keys(), []),
    ],
)
def test_results(command, result):
    frame = codec.encode_result(3, result)
    assert frame == framed([None, result], 3)
    assert codec.decode_result(command, frame) == codec.decode_result(command, bytes(frame)) == result


@pytest.mark.parametrize(
    ("command", "body"),
    [
        (Get("k"), []),
        (Get("k"), [None, 7]),
        (Check(("k",)), [None, 1]),
        (MultiGet(("a", "b")), [None, [b"1"]]),
        (MultiGet(("a",)), [None, None]),
        (MultiGet(("a",)), [None, [b""] * (MAX_KEYS + 1)]),
        (Get("k"), [["key-not-found", "text"], None]),
        (Get("k"), [{"code": "key-not-found"}, None]),
    ],
)
def test_malformed_results(command, body):
    with pytest.raises(ProtocolError, match="malformed"):
        codec.decode_result(command, framed(body))


@pytest.mark.parametrize(
    ("code", "kind"),
    [("key-not-found", KeyNotFoundError), ("from-the-future", DistStoreError), ("network-error", DistStoreError)],
)
def test_errors_are_store_errors(code, kind):
    frame = framed([{"code": code, "message": "what ü"}, None])
    with pytest.raises(kind, match="what ü") as caught:
        codec.decode_result(Get("k"), frame)
    assert type(caught.value) is kind
    if kind is KeyNotFoundError:
        assert codec.encode_error(1, caught.value) == frame


def test_an_error_that_names_ranks():
    failure = RankFailedError("rank 2 failed", ranks=[2], group="world")
    with pytest.raises(RankFailedError, match="rank 2 failed") as caught:
        codec.decode_result(Get("k"), codec.encode_error(1, failure))
    assert (caught.value.ranks, caught.value.group) == ((2,), "world")


def test_a_served_request():
    frame, asked = codec.encode_command(Get("k", 2.0), 7), []
    assert codec.serve(frame, lambda request: asked.append(request) or b"v") == codec.encode_result(7, b"v")
    assert asked == [codec.Request(Get("k", 2.0))]
    failure = KeyNotFoundError("no")

    def fail(_: Any) -> None:
        raise failure

    assert codec.serve(frame, fail) == codec.encode_error(7, failure)
    for broken in (framed([[99, "k"]]), frame[:-1], frame + b"\0", b"\xff" * 20):
        with pytest.raises(ProtocolError):
            codec.serve(broken, asked.append)


def test_frames_that_would_be_too_large(monkeypatch):
    monkeypatch.setattr(codec, "MAX_BYTES", 100)
    for result in ([b"x" * 60, b"x" * 60], [b"x"] * 60, b"x" * 100):
        with pytest.raises(InvalidValueError, match="the response would be over 100 bytes"):
            codec.decode_result(MultiGet(("a", "b")), codec.encode_result(1, result))
    with pytest.raises(InvalidValueError, match="at most 100 are allowed"):
        codec.encode_command(Set("k", bytes(100)), 1)
    assert decode_header(codec.encode_command(Set("k", bytes(70)), 1))[0] <= 100
    assert MAX_BYTES > 2 * (64 << 20)
