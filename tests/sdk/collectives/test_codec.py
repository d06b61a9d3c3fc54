"""Plain data and arrays as bytes: what goes in comes out, and hostile bytes do nothing but raise."""

from __future__ import annotations

import collections
import contextlib
import enum
import math
import re
import sys
import tracemalloc
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta, timezone
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rankmesh._collectives.codec import MAX_DEPTH, decode, encode
from rankmesh_agent.wire import dtypes
from rankmesh_agent.wire.errors import ProtocolError

START = b"RMO\x01"

KEY_LIST: list[Any] = []
GOLDEN: list[tuple[Any, bytes]] = [
    (None, b"N"),
    (True, b"T"),
    (False, b"F"),
    (0, b"i\x01\x00"),
    (-1, b"i\x01\xff"),
    (127, b"i\x01\x7f"),
    (128, b"i\x02\x00\x80"),
    (-129, b"i\x02\xff\x7f"),
    (1 << 64, b"i\x09\x01\x00\x00\x00\x00\x00\x00\x00\x00"),
    (1.5, b"d\x3f\xf8\x00\x00\x00\x00\x00\x00"),
    (1.5 - 2j, b"c\x3f\xf8\x00\x00\x00\x00\x00\x00\xc0\x00\x00\x00\x00\x00\x00\x00"),
    ("", b"s\x00"),
    ("aä€", b"s\x06a\xc3\xa4\xe2\x82\xac"),
    ("\ud800", b"s\x03\xed\xa0\x80"),
    (b"\x00\xff", b"b\x02\x00\xff"),
    (bytearray(b"xyz"), b"B\x03xyz"),
    (bytes(300), b"b\xac\x02" + bytes(300)),
    ([], b"l\x00"),
    ([1, [None]], b"l\x02i\x01\x01l\x01N"),
    ((True, "a"), b"t\x02Ts\x01a"),
    ({5}, b"S\x01i\x01\x05"),
    (frozenset({b""}), b"Z\x01b\x00"),
    ({"b": 1, "a": {}}, b"m\x02s\x01bi\x01\x01s\x01am\x00"),
    (range(1, 9, 2), b"x\x05ranget\x03i\x01\x01i\x01\x09i\x01\x02"),
    (timedelta(1, 2, 3), b"x\x09timedeltat\x03i\x01\x01i\x01\x02i\x01\x03"),
    (date(2024, 2, 29), b"x\x04datet\x01s\x0a2024-02-29"),
    (datetime(2024, 2, 29, 1, 2, fold=1), b"x\x08datetimet\x02s\x132024-02-29T01:02:00i\x01\x01"),
    (datetime(2024, 1, 1, tzinfo=UTC), b"x\x08datetimet\x02s\x192024-01-01T00:00:00+00:00i\x01\x00"),
    (np.str_("a\x00"), b"x\x0anumpy.str_t\x01s\x02a\x00"),
    (np.bytes_(b"a\x00"), b"x\x0cnumpy.bytes_t\x01b\x02a\x00"),
    (np.bool_(True), b"n\x03|b1\x01"),
    (np.float32(1), b"n\x03<f4\x00\x00\x80\x3f"),
    (np.int64(-2), b"n\x03<i8" + b"\xfe" + b"\xff" * 7),
    (np.datetime64(1, "s"), b"n\x06<M8[s]\x01" + bytes(7)),
    # 4 bytes before the value; elements begin at a multiple of 16
    (np.array([1, 2], "<i2"), b"a\x03<i2\x01\x02" + bytes(5) + b"\x01\x00\x02\x00"),
    (np.array([[1], [2]], ">i2"), b"a\x03>i2\x02\x02\x01" + bytes(4) + b"\x00\x01\x00\x02"),
    (np.array(7, "u1"), b"a\x03|u1\x00" + bytes(6) + b"\x07"),
    (np.zeros((0, 200), "<f8"), b"a\x03<f8\x02\x00\xc8\x01" + bytes(3)),
    (np.array(["ab", ""], "S2"), b"a\x03|S2\x01\x02" + bytes(5) + b"ab\x00\x00"),
    (np.array(["ä"], "<U1"), b"a\x03<U1\x01\x01" + bytes(5) + b"\xe4\x00\x00\x00"),
    (np.array([[1, 2], [3, 4]], "|u1", order="F"), b"f\x03|u1\x02\x02\x02" + bytes(4) + b"\x01\x03\x02\x04"),
    ([KEY_LIST, KEY_LIST], b"l\x02l\x00r\x00"),
    (np.array([1], dtypes.FROM_NAME["bfloat16"]), b"a\x08bfloat16\x01\x01" + b"\x80\x3f"),
]


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
    start = b"RMO\x02" if golden[:1] == b"f" or golden[-2:-1] == b"r" else START
    assert encode(value) == start + golden
    assert same(decode(start + golden), value)


@pytest.mark.parametrize("version", [0, 3])
def test_another_version_is_refused(version: int) -> None:
    with pytest.raises(ProtocolError, match=f"version {version}, we speak 2: upgrade the older"):
        decode(b"RMO" + bytes([version]) + b"N")


@pytest.mark.parametrize("data", [b"\x80\x05N.", b"HTTP/1.1 200 OK", b"rmo\x01N"])
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match=f"begin with {re.escape(repr(data[:4]))}"):
        decode(data)


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
    plain_keys | arrays() | st.binary().map(bytearray),
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
    for data in (encode(value), bytearray(encode(value))):
        assert same(decode(data), value)


@pytest.mark.parametrize("name", dtypes.FROM_NAME)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 0, 3), (2, 3, 4), (1,) * 32], ids=str)
def test_arrays_of_every_dtype_that_collectives_take(name: str, shape: tuple[int, ...]) -> None:
    dtype = dtypes.FROM_NAME[name]
    count = math.prod(shape) * dtype.itemsize
    data = np.random.default_rng(1).integers(0, 2 if name == "bool" else 256, count, np.uint8)
    array = data.view(dtype).reshape(shape) if count else np.empty(shape, dtype)
    assert same(again(array), array)


@pytest.mark.parametrize(
    "name", [name for name, dtype in dtypes.FROM_NAME.items() if dtype.kind in "biufc" or name == "bfloat16"]
)
def test_scalars_of_every_dtype(name: str) -> None:
    scalar = np.ones(1, dtypes.FROM_NAME[name])[0]
    assert isinstance(scalar, np.generic)
    assert same(again([scalar]), [scalar])


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
@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_arrays_in_fortran_order_keep_it(view: Callable[[Any], np.ndarray], kind: Callable[[bytes], Any]) -> None:
    array = view(np.arange(600.0).reshape(30, 4, 5))
    got = decode(kind(encode(array)))
    assert same(got, array)
    assert got.flags.fnc == array.flags.fnc
    assert got.flags.writeable


def test_large_data_between_small() -> None:
    value = [1, bytes(5000), "a" * 9999, np.arange(3000.0), bytearray(70_000), np.arange(7, dtype=np.int8), "end"]
    assert same(again(value), value)


LONG, KEY = "x" * 16, (1, 2)
SHARED = [[1], (1,), {2}, frozenset({3}), {4: 5}, bytearray(b"6"), np.arange(7), np.ones((2, 3), order="F"), LONG,
          LONG.encode(), "ä" * 8, date(2024, 2, 29), range(8), np.str_("9")]  # fmt: skip


@pytest.mark.parametrize("shared", SHARED, ids=lambda value: type(value).__name__)
def test_an_object_that_occurs_twice_is_one_object(shared: Any) -> None:
    one, two, other, after = again([shared, {"in": shared}, 0, LONG])
    assert one is two["in"]
    assert same(one, shared)
    assert (other, after) == (0, LONG)
    assert len(encode([shared] * 100)) < len(encode(shared)) + 400


def test_sharing_takes_linear_time_and_size() -> None:
    value: list[Any] = [1]
    for _ in range(MAX_DEPTH - 1):
        value = [value, value]
    assert len(encode(value)) < 10 * MAX_DEPTH
    got = again(value)
    while len(got) == 2:
        assert got[0] is got[1]
        got = got[0]


def test_keys_that_are_tuples_are_sent_in_full() -> None:
    value = [KEY, {KEY: KEY}, {KEY}, frozenset({(KEY, frozenset({KEY}))}), LONG, {LONG: {LONG}}]
    got = again(value)
    assert same(got, value)
    assert got[1][KEY] is got[0]
    assert next(iter(got[5])) is got[4]


def test_temporaries_of_extensions_are_not_taken_for_each_other() -> None:
    data = encode([object() for _ in range(100)], extend=lambda obj, where: ("kind", [where, [where]]))
    got = decode(data, revive=lambda name, plain: plain)
    assert got == [[f"obj[{number}]", [f"obj[{number}]"]] for number in range(100)]


# Arrays and memory


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_everything_returned_can_be_written_to(kind: Callable[[bytes], Any]) -> None:
    for value in (np.arange(100.0), [np.arange(3), np.arange(1000)], np.zeros((2, 0)), np.array(3)):
        got = decode(kind(encode(value)))
        for array in got if isinstance(got, list) else [got]:
            assert array.flags.writeable
            assert array.flags.aligned
            array[...] = 1


def test_an_array_that_is_most_of_the_message_is_not_copied() -> None:
    big, small = np.arange(1000.0), np.arange(10.0)
    data = np.frombuffer(encode([big, small]), np.uint8).copy()
    got_big, got_small = decode(data.data)
    assert np.shares_memory(got_big, data)
    assert not np.shares_memory(got_small, data), "a small array must not keep a large message alive"


def test_an_array_takes_its_own_size() -> None:
    array = np.zeros(1 << 20, np.uint8)
    assert len(encode(array)) < array.nbytes + 64
    assert len(encode({"loss": 0.25, "step": 12})) < 40


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
        memoryview(b"x"),
    ],
    ids=lambda obj: type(obj).__name__,
)
def test_what_is_not_plain_is_refused(obj: Any) -> None:
    with pytest.raises(
        TypeError, match=re.escape(f"is a {type(obj).__module__}.{type(obj).__qualname__}, which is not")
    ):
        encode(obj)


@pytest.mark.parametrize(
    ("obj", "where"),
    [
        (object(), "objects is a"),
        ([0, 0, {"model": object()}], "objects[2]['model'] is a"),
        ({"a": (1, [object()])}, "objects['a'][1][0] is a"),
        ([1, {(1, 2): {3: object()}}], "objects[1][<tuple>][3] is a"),
        ({b"k": {Colour.RED}}, "objects[b'k']{<Colour>} is a"),
        ({1 << 99: {None: {"x" * 99: object()}}}, f"objects[<int>][None]['{'x' * 37}'...] is a"),
        ([[[1], [2]], [[3], object()]], "objects[1][1] is a"),
    ],
)
def test_the_error_says_where(obj: Any, where: str) -> None:
    with pytest.raises(TypeError, match=f"^{re.escape(where)} "):
        encode(obj, name="objects")


def test_a_cycle_is_refused() -> None:
    one: dict[str, Any] = {}
    one["self"] = [(one,)]
    with pytest.raises(ValueError, match=re.escape("obj['self'][0][0] contains itself")):
        encode(one)
    own: list[Any] = [0]
    own.append(own)
    with pytest.raises(ValueError, match=re.escape("obj[1] contains itself")):
        encode(own)


def nested(depth: int) -> Any:
    value: Any = None
    for number in range(depth):
        value = [[value], (value,), {"k": value}][number % 3]
    return value


def test_nesting_has_a_limit_in_both_directions() -> None:
    assert same(again(nested(MAX_DEPTH)), nested(MAX_DEPTH))
    with pytest.raises(ValueError, match=r"obj(\[0\]|\['k'\])+ is nested too deep: only 100 levels"):
        encode(nested(MAX_DEPTH + 1))
    for opening in (b"l\x01", b"t\x01", b"m\x01N", b"S\x01", b"x\x01n", b"m\x01"):
        with pytest.raises(ProtocolError, match="nested deeper than 100 levels"):
            decode(START + opening * 100_000)


# Extensions


def as_text(obj: Any, where: str) -> tuple[str, Any]:
    return "text", {"is": repr(obj), "at": where}


def test_the_caller_can_add_kinds() -> None:
    data = encode([1, {"c": Colour.RED}], name="x", extend=as_text)
    assert data == START + b"l\x02i\x01\x01m\x01s\x01cx\x04textm\x02s\x02iss\x0f<Colour.RED: 1>s\x02ats\x09x[1]['c']"
    assert decode(data, revive=lambda name, plain: (name, plain["at"])) == [1, {"c": ("text", "x[1]['c']")}]


def test_a_kind_nobody_knows_is_refused() -> None:
    with pytest.raises(ProtocolError, match="kind 'text' arrived, which is not known here"):
        decode(encode(print, extend=as_text))


def test_kinds_that_are_built_in_cannot_be_replaced() -> None:
    assert decode(encode(range(3)), revive=lambda name, plain: None) == range(3)


# Hostile bytes


def number(value: int) -> bytes:
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


HUGE = [1 << 20, 1 << 40, (1 << 63) - 1]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "a value is missing"),
        (b"NN", "1 bytes too many"),
        (b"?", "no value begins with b'?'"),
        (b"i", "a length is missing"),
        (b"i\x02\x01", "2 bytes cannot be in 1"),
        (b"d\x00", "a float of 8 bytes"),
        (b"c" + bytes(15), "a complex number of 16 bytes"),
        (b"s\x01\xff", "not UTF-8"),
        (b"s" + b"\x80" * 9 + b"\x01", "more than 63 bits"),
        (b"s" + b"\xff" * 100, "more than 63 bits"),
        (b"l\x02N", "2 values cannot be in 1 bytes"),
        (b"m\x01N", "2 values cannot be in 1 bytes"),
        (b"S\x01l\x00", "unhashable type: 'list'"),
        (b"m\x01a\x03|b1\x00" + bytes(4) + b"\x00N", "unhashable type: 'numpy.ndarray'"),
        (b"n\x03|O8" + bytes(8), r"unknown dtype '\|O8'"),
        (b"n\x02V4" + bytes(4), "unknown dtype 'V4'"),
        (b"n\x07opaque8\x00", "NumPy scalar of dtype"),
        (b"n\x09complex32\x00\x00\x00\x00", "NumPy scalar of dtype"),
        (b"n\x03<f7" + bytes(7), "unknown dtype '<f7'"),
        (b"n\x05<S0xx", "unknown dtype"),
        (b"n\x06<M8[q]" + bytes(8), "unknown dtype"),
        (b"n\x07<M8[0s]" + bytes(8), "unknown dtype"),
        (b"n\x0c|S9999999999", "unknown dtype"),
        (b"n\x0b|S999999999", "999999999 bytes cannot be in 0"),
        (b"n\x10[('x', '<f4')]  ", "unknown dtype"),
        (b"a\x03|b1\x01\x03" + bytes(5) + b"\x00\x01\x02", "neither True nor False"),
        (b"a\x03<f4\x01\x03" + bytes(5) + bytes(11), "an array of 12 bytes cannot be in 11 bytes"),
        (b"a\x03<f4\x01\x03", "the space before an array"),
        (b"a\x03<f4\xff" + b"\x01" * 255 + bytes(20), "255"),
        (b"x\x05rangei\x01\x01", "a range is made from other values"),
        (b"x\x05ranget\x03i\x01\x01i\x01\x01i\x01\x00", "no range"),
        (b"x\x05ranget\x03i\x01\x01i\x01\x01d" + bytes(8), "made from other values"),
        (b"x\x05ranget\x03i\x01\x01i\x01\x01T", "made from other values"),
        (b"x\x09timedeltat\x03i\x09\x01" + bytes(8) + b"i\x00i\x00", "no timedelta"),
        (b"x\x04datet\x01s\x0a2023-02-29", "no date"),
        (b"x\x08datetimet\x02s\x132024-02-29T01:02:00i\x01\x02", "no datetime"),
        (b"x\x0cnumpy.bytes_t\x01i\x04\x7f\xff\xff\xff", "made from other values"),
        (b"x\x04nameN", "kind 'name' arrived"),
        (b"x\x01\xffN", "not UTF-8"),
        (b"r\x00", "object 0 is referred to, but there are 0 before it"),
        (b"l\x02l\x00r\x01", "object 1 is referred to, but there are 1 before it"),
        (b"l\x02t\x00S\x01r\x00", "a key refers to a tuple"),
        (b"l\x02Z\x00m\x01t\x01r\x00N", "a key refers to a frozenset"),
        (b"l\x02l\x00S\x01r\x00", "unhashable type: 'list'"),
    ],
)
def test_damage_is_named(data: bytes, says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        decode(START + data)


@pytest.mark.parametrize("size", HUGE)
@pytest.mark.parametrize(
    "tag", [b"i", b"s", b"b", b"B", b"l", b"t", b"S", b"Z", b"m", b"x", b"a\x03|u1\x01", b"a\x03<f8\x02\x02"]
)
def test_a_size_that_cannot_be_is_refused_before_memory_is_taken(tag: bytes, size: int) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match="cannot be in"):
            decode(START + tag + number(size) + bytes(64))
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("shape", [(0, (1 << 63) - 1, (1 << 63) - 1), (0, 1 << 62, 4), (0,) + (1,) * 200])
def test_an_empty_array_of_an_impossible_shape_is_refused(shape: tuple[int, ...]) -> None:
    data = START + b"a\x03<f8" + bytes([len(shape)]) + b"".join(map(number, shape))
    with pytest.raises(ProtocolError, match="an array of shape"):
        decode(data + bytes(-len(data) % 16))


@pytest.mark.parametrize("tag", ["S", "Z", "m"])
def test_keys_that_collide_by_design_are_refused(tag: str) -> None:
    many = 1_000  # of 100 000, comparing each with each would take minutes
    keys = [number * ((1 << 61) - 1) for number in range(1, many + 1)]  # all of these ints hash to 0
    assert len(set(map(hash, keys[:100]))) == 1
    one = b"".join(encode(key)[len(START) :] + (b"N" if tag == "m" else b"") for key in keys)
    with pytest.raises(ProtocolError, match="999 keys of a set or dict have the hash of another"):
        decode(START + tag.encode() + number(many) + one)
    few = dict.fromkeys(keys[:64])
    assert again(few) == few


@checked
@given(st.binary(max_size=200))
def test_random_bytes_raise_nothing_else(data: bytes) -> None:
    for message in (data, START + data):
        with contextlib.suppress(ProtocolError):
            decode(message)


@checked
@given(values, st.data())
def test_damaged_messages_raise_nothing_else(value: Any, data: Any) -> None:
    message = bytearray(encode(value))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(len(START), len(message) - 1))
        match data.draw(st.integers(0, 2)):
            case 0:
                message[at] = data.draw(st.integers(0, 255))
            case 1 if at > len(START):
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


def test_a_pickle_is_only_bytes() -> None:
    assert "pickle" not in sys.modules[decode.__module__].__dict__
    assert decode(encode(b"cos\nsystem\n(S'exit'\ntR.")) == b"cos\nsystem\n(S'exit'\ntR."


@pytest.mark.skipif(np.finfo(np.longdouble).nmant != 63, reason="longdouble has no padding here")
@pytest.mark.parametrize("take", [lambda array: array, lambda array: array[0]], ids=["array", "scalar"])
def test_the_padding_of_a_longdouble_is_zeroed(take):
    array = np.full(16 * 64, 0xFF, np.uint8).view(np.longdouble)
    array[:] = 1.5
    array.view(np.uint8).reshape(-1, 16)[:, 10:] = 0xFF
    assert b"\xff" * 6 in array.tobytes()
    assert b"\xff" * 6 not in encode(take(array))
