"""Element types on the wire."""

from __future__ import annotations

import numpy as np
import pytest

from rankmesh_agent.wire import dtypes

CODES = {
    "bool": 1,
    "int8": 2,
    "int16": 3,
    "int32": 4,
    "int64": 5,
    "uint8": 6,
    "uint16": 7,
    "uint32": 8,
    "uint64": 9,
    "float16": 10,
    "float32": 11,
    "float64": 12,
    "longdouble": 13,
    "complex64": 14,
    "complex128": 15,
    "clongdouble": 16,
}


@pytest.mark.parametrize(("name", "code"), CODES.items())
def test_codes_are_stable(name, code):
    dtype = np.dtype(name)
    assert dtypes.code_of(dtype) == code
    assert dtypes.FROM_CODE[code] == dtype
    assert dtypes.name_of(code) == str(dtype)


def test_there_are_no_others():
    assert set(dtypes.FROM_CODE) == set(CODES.values())
    assert dtypes.NONE not in dtypes.FROM_CODE


@pytest.mark.parametrize("character", np.typecodes["AllInteger"] + np.typecodes["AllFloat"] + "?")
def test_every_number_has_a_code(character):
    dtype = np.dtype(character)
    assert dtypes.FROM_CODE[dtypes.code_of(dtype)] == dtype


@pytest.mark.parametrize(("alias", "code"), [("longlong", 5), ("ulonglong", 9), ("long", 5), ("intp", 5), ("byte", 2)])
def test_another_name_of_the_same_bytes_has_the_same_code(alias, code):
    assert dtypes.code_of(np.dtype(alias)) == code


@pytest.mark.parametrize(
    "dtype", ["O", "S5", "U5", "M8[ns]", "m8[s]", "V8", [("x", "f4"), ("y", "i4")], (np.float32, (2,))], ids=str
)
def test_what_is_not_a_number_is_refused(dtype):
    with pytest.raises(TypeError, match=r"cannot be communicated; supported are bool, int8, .*, complex128"):
        dtypes.code_of(np.dtype(dtype))


@pytest.mark.parametrize("name", ["int16", "float32", "complex128"])
def test_the_other_byte_order_is_refused(name):
    with pytest.raises(TypeError, match="cannot be communicated"):
        dtypes.code_of(np.dtype(name).newbyteorder())


def test_an_unknown_code_has_a_name_too():
    assert dtypes.name_of(999) == "dtype #999"
