"""Commands and results in the binary protocol: golden frames, and back."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

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
from rankmesh_agent.store.condition import Condition, etag
from rankmesh_agent.wire.errors import (
    DistStoreError,
    InvalidKeyError,
    KeyNotFoundError,
    NotANumberError,
    ProtocolError,
)
from rankmesh_agent.wire.store_frames import (
    MAX_BYTES,
    Kind,
    RequestId,
    decode_parts,
    decode_request,
    decode_request_id,
    decode_response,
    encode_request,
    encode_response,
)

GOLDEN: list[tuple[Command, int, int, float, list[bytes]]] = [
    (Get("grüße", 1.5), 1, 0, 1.5, ["grüße".encode()]),
    (Set("k", b"\x00v"), 2, 0, 0.0, [b"k", b"\x00v"]),
    (Set("k", b"v", Condition(if_absent=True)), 2, 1, 0.0, [b"k", b"v"]),
    (Set("k", b"v", Condition((etag(b"1"), "*"))), 2, 2, 0.0, [b"k", b"v", etag(b"1").encode(), b"*"]),
    (Set("k", b"v", Condition((), True)), 2, 3, 0.0, [b"k", b"v"]),
    (Delete("k"), 3, 0, 0.0, [b"k"]),
    (Delete("k", Condition(("*",))), 3, 2, 0.0, [b"k", b"*"]),
    (Add("k", -12), 4, 0, 0.0, [b"k", b"-12"]),
    (Add("k", 1 << 70), 4, 0, 0.0, [b"k", b"1180591620717411303424"]),
    (CompareSet("k", b"", b"2"), 5, 0, 0.0, [b"k", b"", b"2"]),
    (Append("k", b"v"), 6, 0, 0.0, [b"k", b"v"]),
    (MultiGet(("a", "b", "a"), 2.0), 7, 4, 2.0, [b"a\0b"]),
    (MultiGet(("a\0", "b")), 7, 0, 0.0, [b"a\0", b"b"]),
    (MultiGet(()), 7, 0, 0.0, []),
    (MultiSet((("a", b"1"), ("b", b""))), 8, 0, 0.0, [b"a", b"1", b"b", b""]),
    (Wait(("a",), 3.0), 9, 4, 3.0, [b"a"]),
    (Check(("a", "b")), 10, 4, 0.0, [b"a\0b"]),
    (Keys("p/"), 11, 0, 0.0, [b"p/"]),
    (Count(), 12, 0, 0.0, [b""]),
    (QueuePush("q", b"v"), 13, 0, 0.0, [b"q", b"v"]),
    (QueuePop("q", 4.0), 14, 0, 4.0, [b"q"]),
    (QueueLen("q"), 15, 0, 0.0, [b"q"]),
]


@pytest.mark.parametrize(("command", "opcode", "flags", "seconds", "parts"), GOLDEN, ids=lambda value: "")
def test_commands(command, opcode, flags, seconds, parts):
    frame = codec.encode_command(command, 9)
    assert decode_request(frame) == (opcode, flags, 9, len(parts), len(frame) - 24, seconds)
    assert decode_parts(frame, len(parts)) == parts
    found = codec.decode_command(opcode, flags, seconds, parts)
    expected = MultiGet(command.unique, seconds) if isinstance(command, MultiGet) else command
    assert found == expected
    assert getattr(found, "seconds", 0.0) == seconds


@pytest.mark.parametrize("keyed", [True, False])
def test_a_retry_identifies_its_request(keyed):
    frame = codec.encode_command(Add("k", 1), 2, RequestId(b"n" * 64, 5, keyed))
    _, flags, _, count, _, _ = decode_request(frame)
    parts = decode_parts(frame, count)
    assert (flags, parts[0][-4:]) == (0xC0 if keyed else 0x80, b"\0\0\0\5")
    assert decode_request_id(flags, parts) == RequestId(b"n" * 64, 5, keyed)
    assert parts == [b"k", b"1"]
    assert decode_request_id(0, parts) is None
    for malformed in ([], [b"n"]):
        with pytest.raises(ProtocolError, match="does not identify"):
            decode_request_id(flags, malformed)


def test_an_endless_wait_is_a_finite_number():
    assert decode_request(codec.encode_command(Get("k", 1e300), 1))[5] == 1e9


def decoded(command: Command, frame: bytes) -> Any:
    return codec.decode_result(command, decode_response(frame), frame)


@pytest.mark.parametrize(
    ("command", "result", "kind"),
    [
        (Set("k", b""), None, Kind.NONE),
        (Delete("k"), True, Kind.BOOLEAN),
        (Check(("k",)), False, Kind.BOOLEAN),
        (Add("k"), -(1 << 63), Kind.NUMBER),
        (Get("k"), b"", Kind.VALUE),
        (Get("k"), b"\x00\xff", Kind.VALUE),
        (MultiGet(("a", "b")), [b"1", b""], Kind.JOINED),
        (MultiGet(("a", "b")), [b"\x00", b"2"], Kind.EQUAL),
        (MultiGet(("a",)), [b"\x00"], Kind.EQUAL),
        (MultiGet(("a", "b")), [b"\x00", b"22"], Kind.VALUES),
        (MultiGet(("a", "b")), [b"", b""], Kind.JOINED),
        (MultiGet(tuple(map(str, range(2000)))), [b"12", b"34"] * 1000, Kind.EQUAL),
        (MultiGet(()), [], Kind.VALUES),
        (Keys(), ["a", "grüße"], Kind.TEXTS),
        (Keys(), [], Kind.VALUES),
    ],
)
def test_results(command, result, kind):
    frame = codec.encode_result(3, result)
    assert decode_response(frame)[:2] == (kind, 3)
    assert decoded(command, frame) == decoded(command, bytearray(frame)) == result


def test_a_duplicate_key():
    command = MultiGet(("a", "b", "a"))
    assert decoded(command, codec.encode_result(1, [b"1", b"2"])) == [b"1", b"2", b"1"]
    with pytest.raises(ProtocolError):
        decoded(command, codec.encode_result(1, [b"1"]))


def test_multi_gets_of_few_keys_are_cached():
    first, again, other = (codec.decode_command(7, 4, seconds, [b"a\0b"]) for seconds in (1.0, 1.0, 2.0))
    assert first is again
    assert other is not first
    many = ["k" * 1000] * 5
    first, again = (codec.decode_command(7, 4, 1.0, ["\0".join(many).encode()]) for _ in range(2))
    assert first is not again  # that would take too much memory


@pytest.mark.parametrize(
    ("code", "kind"),
    [(b"key-not-found", KeyNotFoundError), (b"from-the-future", DistStoreError), (b"network-error", DistStoreError)],
)
def test_errors_are_store_errors(code, kind):
    with pytest.raises(kind, match="what ü") as caught:
        decoded(Get("k"), encode_response(Kind.ERROR, 1, 0, [code, "what ü".encode()]))
    assert type(caught.value) is kind
    if kind is KeyNotFoundError:
        assert codec.encode_error(1, caught.value) == encode_response(Kind.ERROR, 1, 0, [code, "what ü".encode()])


def test_a_served_request():
    request, asked = codec.encode_command(Get("k", 2.0), 7), []
    assert codec.serve(bytearray(request), lambda command: asked.append(command) or b"v") == codec.encode_result(
        7, b"v"
    )
    assert (asked, asked[0].seconds) == ([Get("k")], 2.0)
    failure = KeyNotFoundError("no")
    assert codec.serve(request, Mock(side_effect=failure)) == codec.encode_error(7, failure)
    for broken in (encode_request(99, 0, 1, 0.0, [b"k"]), request[:-1]):
        with pytest.raises(ProtocolError):
            codec.serve(broken, asked.append)


def test_frames_that_would_be_too_large(monkeypatch):
    monkeypatch.setattr(codec, "MAX_BYTES", 100)
    with pytest.raises(DistStoreError, match="the response would be over 100 bytes"):
        decoded(MultiGet(("a", "b")), codec.encode_result(1, [b"\x00" * 60, b"x" * 60]))
    with pytest.raises(DistStoreError, match="at most 100 are allowed"):
        codec.encode_command(Set("k", bytes(100)), 1)
    assert MAX_BYTES > 2 * (64 << 20)


@pytest.mark.parametrize(
    ("opcode", "flags", "parts", "error"),
    [
        *((0, 0, [], ProtocolError), (16, 0, [b"k"], ProtocolError), (99, 0, [], ProtocolError)),
        *((1, 0, [], ProtocolError), (2, 0, [b"k"], ProtocolError), (4, 0, [b"k"], ProtocolError)),
        *((5, 0, [b"k", b""], ProtocolError), (8, 0, [b"k"], ProtocolError), (14, 0, [], ProtocolError)),
        *((1, 0, [b"\xff"], InvalidKeyError), (1, 0, [b""], InvalidKeyError)),
        *((9, 4, [b"a\0"], InvalidKeyError), (10, 4, [b"\xff"], InvalidKeyError)),
        *(
            (4, 0, [b"k", digits], NotANumberError)
            for digits in (b"", b"-", b"1.5", b"+1", b" 1", b"\xd9\xa1", b"9" * 41, b"1_0")
        ),
    ],
)
def test_invalid_commands(opcode, flags, parts, error):
    with pytest.raises(error):
        codec.decode_command(opcode, flags, 0.0, parts)


@pytest.mark.parametrize(
    ("kind", "parts"), [(3, []), (6, [b"code"]), (5, [b"\xff"]), (7, []), (8, []), (8, [b"1"]), (99, [])]
)
def test_malformed_results(kind, parts):
    with pytest.raises(ProtocolError):
        decoded(Get("k"), encode_response(kind, 1, 0, parts))
