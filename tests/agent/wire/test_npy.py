"""The .npy format in memory: what NumPy writes is read, what is written NumPy reads, and nothing else gets in."""

from __future__ import annotations

import io
import random
import struct

import ml_dtypes
import numpy as np
import pytest

from rankmesh_agent.wire import npy
from rankmesh_agent.wire.dtypes import FROM_NAME

SHAPES = [(), (3,), (2, 0, 4), (1, 1, 1, 2)]


def octets(text: bytes) -> npy.Array:
    return np.frombuffer(bytearray(text), np.uint8)


def saved(array: npy.Array) -> npy.Array:
    out = io.BytesIO()
    np.save(out, array)
    return octets(out.getvalue())


def file_of(header: str, version: int = 1, elements: bytes = b"") -> npy.Array:
    length = struct.pack("<H" if version == 1 else "<I", len(header))
    return octets(npy.MAGIC + bytes([version, 0]) + length + header.encode() + elements)


def drawn(shape: tuple[int, ...], dtype: np.dtype) -> npy.Array:
    count = int(np.prod(shape)) * dtype.itemsize
    return np.random.default_rng(7).integers(0, 2, count, np.uint8).view(dtype).reshape(shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_is_written_is_read(shape):
    for name in FROM_NAME:
        check_round_trip(name, shape)


def check_round_trip(name, shape):
    array = drawn(shape, FROM_NAME[name])
    body = octets(npy.header_of(array) + array.tobytes())
    found = npy.read(body, FROM_NAME[name])
    assert (found.dtype, found.shape) == (array.dtype, shape)
    assert found.tobytes() == array.tobytes()
    assert not found.size or np.shares_memory(found, body)
    read_by_numpy = np.load(io.BytesIO(body.tobytes()), allow_pickle=False)
    assert read_by_numpy.shape == shape
    assert read_by_numpy.tobytes() == array.tobytes()


def test_what_numpy_writes_is_read():
    for name in FROM_NAME.keys() - {"float8_e5m2"}:  # NumPy itself cannot read what it saves
        array = drawn((2, 3), FROM_NAME[name])
        assert npy.read(saved(array), FROM_NAME[name]).tobytes() == array.tobytes()


@pytest.mark.parametrize("dtype", [">f4", ">i2", ">c16"])
def test_the_other_byte_order_becomes_this_machine_s(dtype):
    array = np.arange(6).reshape(2, 3).astype(dtype)
    found = npy.read(saved(array))
    assert found.dtype == array.dtype.newbyteorder("=")
    assert (found == array).all()


def test_fortran_order_becomes_c_order():
    array = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    found = npy.read(saved(array))
    assert found.flags.c_contiguous
    assert (found == array).all()


@pytest.mark.parametrize("version", [1, 2])
def test_versions_of_the_format(version):
    body = file_of("{'descr': '<i2', 'fortran_order': False, 'shape': (2,), }\n", version, b"\1\0\2\0")
    assert npy.read(body).tolist() == [1, 2]


def test_elements_that_are_not_aligned_are_copied():
    body = file_of("{'shape': (2,), 'fortran_order': False, 'descr': '<f8'}", 1, np.arange(2.0).tobytes())
    found = npy.read(body)
    assert found.flags.aligned
    assert found.tolist() == [0.0, 1.0]


def test_bytes_are_read_as_the_type_that_is_named():
    array = np.arange(3).astype(ml_dtypes.bfloat16)
    assert (npy.read(saved(array), array.dtype) == array).all()
    assert npy.read(saved(array)).dtype == np.dtype("V2")
    with pytest.raises(ValueError, match="holds float32, which cannot be read as bfloat16"):
        npy.read(saved(np.zeros(2, np.float32)), array.dtype)
    with pytest.raises(ValueError, match="holds opaque16, which cannot be read as float8_e4m3fn"):
        npy.read(saved(array), FROM_NAME["float8_e4m3fn"])


@pytest.mark.parametrize(
    "array", [np.array([None]), np.array(["a"]), np.zeros(1, "M8[s]"), np.zeros(1, [("a", "i4")])], ids=str
)
def test_what_cannot_be_communicated_is_refused(array):
    out = io.BytesIO()
    np.save(out, array, allow_pickle=True)
    with pytest.raises(TypeError, match="cannot be communicated"):
        npy.read(octets(out.getvalue()))


GOOD = "{'descr': '<f4', 'fortran_order': False, 'shape': (2,)}"
BAD = {
    "nothing": octets(b""),
    "magic alone": octets(npy.MAGIC),
    "something else": octets(b"PK\x03\x04 and so on and so forth"),
    "version 0": file_of(GOOD, 0),
    "version 3": file_of(GOOD, 3),
    "a header longer than the file": octets(npy.MAGIC + b"\1\0\xff\x0f{}"),
    "a header longer than the limit": octets(npy.MAGIC + b"\2\0\xff\xff\xff\x7f" + b" " * 5000),
    "no literal": file_of("__import__('os').system('true')"),
    "no dictionary": file_of("[1, 2]"),
    "deep": file_of("(" * 4000),
    "a key too many": file_of(GOOD[:-1] + ", 'more': 1}"),
    "a key too few": file_of("{'descr': '<f4', 'shape': (2,)}"),
    "no dtype": file_of(GOOD.replace("<f4", "nonsense")),
    "a negative length": file_of(GOOD.replace("(2,)", "(-2,)")),
    "a length that is none": file_of(GOOD.replace("(2,)", "(True,)")),
    "no shape": file_of(GOOD.replace("(2,)", "2")),
    "order": file_of(GOOD.replace("False", "0")),
    "too few elements": file_of(GOOD, 1, b"1234567"),
    "too many elements": file_of(GOOD, 1, b"123456789"),
    "more than an array can have": file_of(GOOD.replace("(2,)", f"(0, {1 << 62}, {1 << 62})")),
    "more dimensions": file_of(GOOD.replace("(2,)", f"({'1,' * 70})"), 1, b"1234"),
    "no text": octets(npy.MAGIC + b"\1\0\x04\0\xff\xff\xff\xff----"),
}


@pytest.mark.parametrize("body", BAD.values(), ids=BAD)
def test_what_is_no_npy_file_is_refused(body):
    with pytest.raises(ValueError, match=r"\w"):
        npy.read(body)


def test_nothing_else_comes_of_a_damaged_header():
    whole = saved(np.arange(6.0).reshape(2, 3)).tobytes()
    dice = random.Random(5)
    read = 0
    for _ in range(1500):
        body = bytearray(whole)
        for _ in range(dice.randint(1, 6)):
            body[dice.randrange(6, 100)] = dice.choice(b"'(){}[],0123456789:<>fiuOSUVTrue -\x00\xff")
        try:
            npy.read(octets(bytes(body)))
            read += 1
        except (ValueError, TypeError):
            pass
    assert 0 < read < 150
