"""Element types on the wire."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest

from rankmesh_agent.collectives import float16
from rankmesh_agent.wire import dtypes

# fmt: off
NAMES = [
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
    "longdouble", "complex64", "complex128", "clongdouble", "bfloat16", "float8_e4m3fn", "float8_e5m2",
    "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "complex32", "opaque8", "opaque16", "opaque32", "opaque64",
    "opaque128",
]
# fmt: on
"""In the order of their codes: 1, 2, …"""
SPECIAL = {f"opaque{8 * size}": f"V{size}" for size in (1, 2, 4, 8, 16)}
SPECIAL["complex32"] = [("real", "f2"), ("imag", "f2")]
FAMILIES = {"bool": "bool", "u?int": "int", "b?float|longdouble": "float", "c": "complex", "opaque": "opaque"}
NARROW = pytest.mark.parametrize("dtype", dtypes.WIDE, ids=dtypes.display)


def test_codes_are_stable():
    for code, name in enumerate(NAMES, 1):
        dtype = np.dtype(SPECIAL.get(name) or getattr(ml_dtypes, name, name))
        assert dtypes.code_of(dtype) == code
        assert dtypes.FROM_CODE[code] == dtypes.FROM_NAME[name] == dtype
        assert dtypes.name_of(code) == dtypes.display(dtype) == name
        assert [dtypes.family(dtype)] == [family for start, family in FAMILIES.items() if re.match(start, name)]
    assert list(dtypes.FROM_CODE) == list(range(1, len(NAMES) + 1))
    assert len(set(dtypes.FROM_CODE.values())) == len(NAMES), "no two types are taken for each other"


@pytest.mark.parametrize(("alias", "code"), [("longlong", 5), ("ulonglong", 9), ("long", 5), ("intp", 5), ("byte", 2)])
def test_another_name_of_the_same_bytes_has_the_same_code(alias, code):
    assert dtypes.code_of(np.dtype(alias)) == code


REFUSED = [
    "O", "S5", "S1", "U5", "M8[ns]", "m8[s]", "V3", "V0", (np.float32, (2,)), ml_dtypes.int4, ml_dtypes.float4_e2m1fn,
    [("x", "f4"), ("y", "i4")], [("re", "f2"), ("im", "f2")],
]  # fmt: skip


@pytest.mark.parametrize("dtype", REFUSED, ids=str)
def test_what_is_not_supported_is_refused(dtype):
    with pytest.raises(TypeError, match=r"cannot be communicated; supported are bool, int8, .*, complex32, opaque8"):
        dtypes.code_of(np.dtype(dtype))


@pytest.mark.parametrize("name", ["int16", "float32", "complex128", "bfloat16", "complex32"])
def test_the_other_byte_order_is_refused(name):
    with pytest.raises(TypeError, match="cannot be communicated"):
        dtypes.code_of(dtypes.FROM_NAME[name].newbyteorder())


def test_what_is_not_known_has_a_name_too():
    assert dtypes.name_of(999) == "dtype #999"
    assert dtypes.display(np.dtype("datetime64[s]")) == "datetime64[s]"


def test_what_is_accumulated_in_a_wider_type():
    wide = {dtypes.display(dtype): dtypes.display(wide) for dtype, wide in dtypes.WIDE.items()}
    assert wide.pop("complex32") == "complex64"
    assert set(wide.values()) == {"float32"}
    assert set(wide) == {"float16", "bfloat16", *(name for name in NAMES if name.startswith("float8"))}


@NARROW
def test_widening_loses_nothing(dtype):
    patterns = np.arange(1 << 16, dtype=np.uint16) if dtype.itemsize > 1 else np.arange(256, dtype=np.uint8)
    array = np.repeat(patterns, 2).view(dtype) if dtypes.family(dtype) == "complex" else patterns.view(dtype)
    wide = float16.widen(array)
    back = np.empty_like(array)
    with np.errstate(all="ignore"):
        float16.narrow(wide.copy(), back)
    assert wide.dtype == dtypes.WIDE[dtype]
    assert wide.shape == array.shape
    number = ~np.isnan(wide)
    np.testing.assert_array_equal(back[number].view(patterns.dtype), array[number].view(patterns.dtype))
    assert np.isnan(float16.widen(back)[~number]).all()


ROUNDED = [
    ("float16", 2049, 2048),
    ("bfloat16", 257, 256),
    ("float8_e4m3fn", 17, 16),
    ("complex32", 2049 - 2051j, 2048 - 2052j),
]


@pytest.mark.parametrize(("name", "value", "rounded"), ROUNDED)
def test_narrowing_rounds_to_even(name, value, rounded):
    dtype = dtypes.FROM_NAME[name]
    out = np.empty(1, dtype)
    float16.narrow(np.array([value], dtypes.WIDE[dtype]), out)
    assert float16.widen(out)[0] == rounded


@pytest.mark.skipif(np.finfo(np.longdouble).nmant != 63, reason="longdouble has no padding here")
@pytest.mark.parametrize("dtype", [np.longdouble, np.clongdouble])
@pytest.mark.parametrize("writable", [True, False])
def test_padding_is_zeroed_and_the_numbers_stay(dtype, writable):
    array = np.frombuffer(b"\xff" * 4 * np.dtype(dtype).itemsize, np.uint8).copy().view(dtype)
    array[:] = [1.5, -2, 0, 1e300]
    array.flags.writeable = writable
    before = array.tobytes()
    sent = dtypes.zero_padding(array)
    assert not sent.view(np.uint8).reshape(-1, 16)[:, 10:].any()
    assert (sent == array).all()
    assert (sent is array) == writable
    assert writable or array.tobytes() == before, "a read-only array is not written to"


@pytest.mark.parametrize("dtype", [np.float32, np.complex128, np.dtype("V16")])
def test_other_dtypes_have_no_padding(dtype):
    array = np.ones(32, np.uint8).view(dtype)
    assert dtypes.zero_padding(array) is array
    assert array.view(np.uint8).all()
