"""Plain data and arrays as bytes: what goes in comes out, and hostile bytes do nothing but raise."""

from __future__ import annotations

import collections
import contextlib
import enum
import math
import sys
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta, timezone
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rankmesh._collectives import plain
from rankmesh_agent.wire import dtypes
from rankmesh_agent.wire.errors import ProtocolError

GOLDEN: list[tuple[Any, bytes]] = [
    (None, b"\xc0"),
    ("\ud800", b"\xa3\xed\xa0\x80"),
    ({"b": 1, "a": [True]}, b"\x82\xa1b\x01\xa1a\x91\xc3"),
    ((True, "a"), b"\x93\xc7\x00\x00\xc3\xa1a"),
    ({5}, b"\x92\xc7\x00\x01\x05"),
    (frozenset({b""}), b"\x92\xc7\x00\x02\xc4\x00"),
    (1.5 - 2j, b"\x93\xc7\x00\x03\xcb\x3f\xf8" + bytes(6) + b"\xcb\xc0" + bytes(7)),
    (1 << 64, b"\x92\xc7\x00\x04\xc4\x09\x01" + bytes(8)),
    ((1 << 72) - 1, b"\x92\xc7\x00\x04\xc4\x0a\x00" + b"\xff" * 9),
    (range(1, 9, 2), b"\x94\xc7\x00\x05\x01\x09\x02"),
    (timedelta(1, 2, 3), b"\x94\xc7\x00\x06\x01\x02\x03"),
    (date(2024, 2, 29), b"\x94\xc7\x00\x07\xcd\x07\xe8\x02\x1d"),
    (datetime(2024, 2, 29, 1, 2, fold=1), b"\x93\xc7\x00\x08\xb32024-02-29T01:02:00\x01"),
    (datetime(2024, 1, 1, tzinfo=UTC), b"\x93\xc7\x00\x08\xb92024-01-01T00:00:00+00:00\x00"),
    (np.str_("a\x00"), b"\x92\xc7\x00\x09\xa2a\x00"),
    (np.bytes_(b"a\x00"), b"\x92\xc7\x00\x0a\xc4\x02a\x00"),
    (np.array([1, 2], "<i2"), b"\x95\xc7\x00\x0b\xa3<i2\x91\x02\xc2\xc4\x04\x01\x00\x02\x00"),
    (np.array([[1, 2], [3, 4]], "|u1", order="F"), b"\x95\xc7\x00\x0b\xa3|u1\x92\x02\x02\xc3\xc4\x04\x01\x03\x02\x04"),
    (np.array([1], dtypes.FROM_NAME["bfloat16"]), b"\x95\xc7\x00\x0b\xa8bfloat16\x91\x01\xc2\xc4\x02\x80\x3f"),
    (np.float32(1), b"\x93\xc7\x00\x0c\xa3<f4\xc4\x04\x00\x00\x80\x3f"),
    (np.datetime64(1, "s"), b"\x93\xc7\x00\x0c\xa6<M8[s]\xc4\x08\x01" + bytes(7)),
]


def in_message(octets: Any) -> None:
    """No array travels apart."""


def encode(obj: Any) -> bytes:
    return plain.encode(obj, in_message)


def decode(data: bytes) -> Any:
    return plain.decode(data, [])


def same(one: Any, other: Any) -> bool:
    """Whether two values are alike, types, order of keys, NaNs and signs of zero included."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray | np.generic):
        return one.dtype == other.dtype and one.shape == other.shape and elements(one) == elements(other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return same(list(one.items()), list(other.items()))
    if isinstance(one, set | frozenset):
        return len(one) == len(other) and all(any(same(a, b) for b in other) for a in one)
    if isinstance(one, float | complex):
        return encode(one) == encode(other)
    return bool(one == other) and getattr(one, "fold", 0) == getattr(other, "fold", 0)


def elements(array: Any) -> bytes:
    return dtypes.zero_padding(np.array(array).reshape(-1)).tobytes()


def again(obj: Any) -> Any:
    return decode(encode(obj))


# The format


@pytest.mark.skipif(sys.byteorder == "big", reason="these golden bytes have NumPy scalars of little-endian machines")
@pytest.mark.parametrize(("value", "golden"), GOLDEN, ids=[repr(value)[:30] for value, _ in GOLDEN])
def test_golden_bytes_both_ways(value: Any, golden: bytes) -> None:
    assert encode(value) == golden
    assert same(decode(golden), value)


# Round trips

plain_keys = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(st.characters(exclude_categories=())),
    st.binary(),
    st.dates(),
    st.datetimes(timezones=st.sampled_from([None, UTC])),
    st.timedeltas(),
    st.builds(range, st.integers(), st.integers(), st.integers(1)),
    st.builds(np.float32, st.floats(width=32)),
    st.builds(np.int8, st.integers(-128, 127)),
    st.builds(np.str_, st.text()),
)
hashable = st.recursive(
    plain_keys, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=4), max_leaves=4
)
NUMBERS = [dtype for dtype in dtypes.FROM_CODE.values() if dtype.isbuiltin == 1]


@st.composite
def arrays(draw: Callable[..., Any]) -> np.ndarray:
    dtype = draw(st.sampled_from(NUMBERS)).newbyteorder(draw(st.sampled_from("<>")))
    shape = draw(st.lists(st.integers(0, 3), max_size=4))
    count = math.prod(shape) * dtype.itemsize
    data = draw(st.binary(min_size=count, max_size=count))
    if dtype.kind == "b":
        data = bytes(byte & 1 for byte in data)
    array = np.frombuffer(data, dtype).reshape(shape)
    return array.T if draw(st.booleans()) else array


values = st.recursive(
    plain_keys | arrays(),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(hashable, inner, max_size=4),
        st.sets(hashable, max_size=4),
        st.frozensets(hashable, max_size=4),
    ),
    max_leaves=20,
)
checked = settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@checked
@given(values)
@example({"order": 1, "of": 2, "keys": 3})
@example([math.nan, -0.0, math.inf, complex(math.nan, -0.0)])
@example({math.nan: 1, math.inf: 2, (math.nan,): 3})
def test_everything_plain_comes_back(value: Any) -> None:
    assert same(again(value), value)


@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 0, 3), (2, 3, 4), (1,) * 32], ids=str)
def test_arrays_of_every_dtype_that_collectives_take(shape: tuple[int, ...]) -> None:
    for name, dtype in dtypes.FROM_NAME.items():
        count = math.prod(shape) * dtype.itemsize
        data = np.random.default_rng(1).integers(0, 2 if name == "bool" else 256, count, np.uint8)
        array = data.view(dtype).reshape(shape) if count else np.empty(shape, dtype)
        assert same(again(array), array), name


def test_scalars_of_every_dtype() -> None:
    for dtype in [dtype for name, dtype in dtypes.FROM_NAME.items() if dtype.kind in "biufc" or name == "bfloat16"]:
        scalar = np.ones(1, dtype)[0]
        assert isinstance(scalar, np.generic)
        assert same(again([scalar]), [scalar]), dtype


@pytest.mark.parametrize("kind", "SUmM")
def test_arrays_of_strings_and_times(kind: str) -> None:
    array = np.arange(6).astype({"m": "m8[25s]", "M": "M8[D]"}.get(kind, f"{kind}5")).reshape(2, 3)
    assert same(again(array), array)
    swapped = array.astype(array.dtype.newbyteorder())
    assert same(again(swapped), swapped)


@pytest.mark.parametrize(
    "view",
    [
        lambda a: a[::2],
        lambda a: a[::-1],
        lambda a: a.transpose(0, 2, 1),
        lambda a: a[1:, :2],
        lambda a: np.broadcast_to(a[0], (7, *a.shape[1:])),
        lambda a: a[:1, :, :1].T,
    ],
)
def test_strided_arrays_come_back_contiguous(view: Callable[[Any], np.ndarray]) -> None:
    array = view(np.arange(60.0).reshape(3, 4, 5))
    got = again(array)
    assert same(got, array)
    assert got.flags.c_contiguous


@pytest.mark.parametrize("view", [np.asfortranarray, lambda a: a.T, lambda a: a[:, :, 1].T])
def test_arrays_in_fortran_order_keep_it(view: Callable[[Any], np.ndarray]) -> None:
    array = view(np.arange(600.0).reshape(30, 4, 5))
    got = again(array)
    assert same(got, array)
    assert got.flags.fnc == array.flags.fnc
    assert got.flags.writeable


def test_large_data_between_small() -> None:
    value = [1, bytes(5000), "a" * 9999, np.arange(3000.0), np.arange(7, dtype=np.int8), "end"]
    assert same(again(value), value)


def test_a_bytearray_becomes_bytes() -> None:
    assert same(again([bytearray(b"xyz")]), [b"xyz"])


# Arrays and memory


def test_every_array_can_be_written_to() -> None:
    for array in again([np.arange(3), np.arange(1000.0), np.zeros((2, 0)), np.array(3), np.broadcast_to(1.0, 5)]):
        assert array.flags.writeable
        assert array.flags.aligned
        array[...] = 1


def test_arrays_that_travel_apart_are_not_copied() -> None:
    apart: list[Any] = []

    def put_apart(octets: Any) -> int | None:
        if octets.size < 100:
            return None
        apart.append(octets)
        return len(apart) - 1

    value = [np.arange(100.0), {"small": np.arange(3)}, np.ones((20, 30), order="F")]
    data = plain.encode(value, put_apart)
    assert len(data) < 150
    assert len(apart) == 2
    assert np.shares_memory(apart[0], value[0])
    arrived = [octets.copy() for octets in apart]
    got = plain.decode(data, arrived)
    assert same(got, value)
    assert np.shares_memory(got[0], arrived[0])
    with pytest.raises(ProtocolError, match="plain data is damaged"):
        plain.decode(data, arrived[:1])
    with pytest.raises(ProtocolError, match="plain data is damaged"):
        plain.decode(data, [octets[1:] for octets in arrived])


# What is not plain data


class Colour(enum.IntEnum):
    RED = 1


class Text(str):
    pass


@pytest.mark.parametrize(
    "obj",
    [
        object(),
        print,
        int,
        Colour.RED,
        Text("x"),
        collections.OrderedDict(a=1),
        slice(3),
        datetime(2024, 1, 1, tzinfo=timezone(timedelta(hours=1), "CET")),
        np.array([None]),
        np.zeros(2, [("x", "f4"), ("y", "i4")]),
        np.zeros(2, [("x", "f4"), ("y", "i4")])[0],
        np.zeros(2, "V3"),
        np.ma.array([1], mask=[True]),
        np.dtype("f4"),
    ],
    ids=lambda obj: type(obj).__name__,
)
def test_what_is_not_plain_is_refused(obj: Any) -> None:
    with pytest.raises(TypeError, match=f"a {type(obj).__qualname__} is not plain data"):
        encode([obj])


def nested(depth: int) -> Any:
    value: Any = None
    for number in range(depth):
        value = [[value], (value,), {"k": value}][number % 3]
    return value


def test_nesting_has_a_limit_in_both_directions() -> None:
    assert repr(again(nested(500))) == repr(nested(500))
    with pytest.raises(ValueError, match="recursion limit exceeded"):
        encode(nested(1100))
    for opening in (b"\x91", b"\x92\xc7\x00\x00", b"\x81\xc0", b"\x81"):
        with pytest.raises(ProtocolError, match="plain data is damaged: StackError"):
            decode(opening * 100_000)


# Hostile bytes


def kind(code: int, *parts: Any) -> Any:
    return [msgpack.ExtType(code, b""), *parts]


TUPLE, SET, COMPLEX, INT, RANGE, TIMEDELTA, DATE, DATETIME = 0, 1, 3, 4, 5, 6, 7, 8
BYTES, ARRAY, SCALAR, TENSOR = 10, 11, 12, 13


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (kind(14), "a value of kind 14, which is not known here"),
        ([msgpack.ExtType(TUPLE, b"x")], "kind 0, which is not known here"),
        (msgpack.ExtType(TUPLE, b""), "a kind of a value without the value"),
        ([1, msgpack.ExtType(TUPLE, b"")], "a kind of a value without the value"),
        (kind(TUPLE, msgpack.ExtType(TUPLE, b"")), "a kind of a value without the value"),
        (kind(SET, []), "unhashable type: 'list'"),
        (kind(SET, kind(ARRAY, "|b1", [], False, b"\x00")), "unhashable type: 'numpy.ndarray'"),
        (kind(COMPLEX, "1", 2), "TypeError"),
        (kind(INT, 3), "TypeError"),
        (kind(RANGE, 1, 1, 0), "ValueError"),
        (kind(RANGE, 1, 1, 1.0), "TypeError"),
        (kind(TIMEDELTA, 1 << 63, 0, 0), "OverflowError"),
        (kind(DATE, 2023, 2, 29), "ValueError"),
        (kind(DATETIME, "2024-02-29T01:02:00", 2), "ValueError"),
        (kind(DATETIME, 5, 0), "TypeError"),
        (kind(BYTES, 2147483647), "TypeError"),
        (kind(SCALAR, "|O8", bytes(8)), r"unknown dtype '\|O8'"),
        (kind(SCALAR, "V4", bytes(4)), "unknown dtype 'V4'"),
        (kind(SCALAR, "opaque8", b"\x00"), "NumPy scalar of dtype"),
        (kind(SCALAR, "complex32", bytes(4)), "NumPy scalar of dtype"),
        (kind(SCALAR, "<f4", bytes(8)), "ValueError"),
        (kind(SCALAR, "<f7", bytes(7)), "TypeError"),
        (kind(SCALAR, "<S0", b"xx"), "unknown dtype"),
        (kind(SCALAR, "<M8[q]", bytes(8)), "TypeError"),
        (kind(SCALAR, "[('x', '<f4')]", bytes(4)), "unknown dtype"),
        (kind(ARRAY, "|b1", [3], False, b"\x00\x01\x02"), "neither True nor False"),
        (kind(ARRAY, "<f4", [3], False, bytes(11)), "ValueError"),
        (kind(ARRAY, "<f4", [2], False, bytes(12)), "ValueError"),
        (kind(ARRAY, "|S999999999", [1], False, b"x"), "ValueError"),
        (kind(ARRAY, "|u1", [1] * 255, False, b"x"), "ValueError"),
        (kind(ARRAY, "|u1", [1], False, 0), "IndexError"),
        (kind(ARRAY, "<f8", [0, 1 << 62, 4], False, b""), "ValueError"),
        (kind(TENSOR, "torch.float32"), "TypeError"),
    ],
)
def test_damage_is_named(value: Any, says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        decode(msgpack.packb(value))


@pytest.mark.parametrize(
    "head", [b"\xdb", b"\xc6", b"\xdd", b"\xdf", b"\xc9"], ids=["str", "bin", "array", "map", "ext"]
)
def test_a_size_that_cannot_be_is_refused(head: bytes) -> None:
    with pytest.raises(ProtocolError, match=r"exceeds max|incomplete input"):
        decode(head + b"\xff" * 4 + bytes(64))


def test_keys_that_collide_by_design_are_refused() -> None:
    many = 1_000  # of 100 000, comparing each with each would take minutes
    keys = [number * ((1 << 61) - 1) for number in range(1, many + 1)]  # all of these ints hash to 0
    assert len(set(map(hash, keys[:100]))) == 1
    for value in (kind(SET, *map(kind_of_int, keys)), kind(2, *map(kind_of_int, keys))):
        with pytest.raises(ProtocolError, match="more than 64 of 1000 keys of a set or dict have the hash of another"):
            decode(msgpack.packb(value))
    with pytest.raises(ProtocolError, match="more than 64 of 1000 keys"):
        decode(b"\xde\x03\xe8" + b"".join(msgpack.packb(kind_of_int(key)) + b"\xc0" for key in keys))
    few = dict.fromkeys(keys[:64])
    assert again(few) == few


def kind_of_int(value: int) -> Any:
    return kind(INT, value.to_bytes(9, "big"))


@checked
@given(st.binary(max_size=200))
def test_random_bytes_raise_nothing_else(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        decode(data)


@checked
@given(values, st.data())
def test_damaged_messages_raise_nothing_else(value: Any, data: Any) -> None:
    message = bytearray(encode(value))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(0, len(message) - 1)))
        match data.draw(st.integers(0, 2)):
            case 0 if message:
                message[at] = data.draw(st.integers(0, 255))
            case 1:
                del message[at:]
            case _:
                message[at:at] = data.draw(st.binary(max_size=5))
    with contextlib.suppress(ProtocolError):
        decode(message)


@pytest.mark.parametrize("value", [value for value, _ in GOLDEN], ids=[repr(value)[:30] for value, _ in GOLDEN])
def test_every_truncation_is_noticed(value: Any) -> None:
    message = encode(value)
    for length in range(len(message)):
        with pytest.raises(ProtocolError):
            decode(message[:length])


@pytest.mark.skipif(np.finfo(np.longdouble).nmant != 63, reason="longdouble has no padding here")
@pytest.mark.parametrize("take", [lambda array: array, lambda array: array[0]], ids=["array", "scalar"])
def test_the_padding_of_a_longdouble_is_zeroed(take):
    array = np.full(16 * 64, 0xFF, np.uint8).view(np.longdouble)
    array[:] = 1.5
    array.view(np.uint8).reshape(-1, 16)[:, 10:] = 0xFF
    assert b"\xff" * 6 in array.tobytes()
    assert b"\xff" * 6 not in encode(take(array))
