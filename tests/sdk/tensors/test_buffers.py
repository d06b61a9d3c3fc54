"""What users may pass as a tensor, and what becomes of it on the way in and back."""

from __future__ import annotations

import array
import ctypes
import enum
import itertools
import mmap
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import rankmesh as dist
from rankmesh._tensors.buffers import flat_in, flat_out
from rankmesh._tensors.layout import describe, shape_of
from rankmesh_agent.wire.dtypes import FROM_NAME

DTYPES = {**FROM_NAME, "longlong": np.dtype("longlong"), "ulonglong": np.dtype("ulonglong")}
KINDS = {
    "contiguous": lambda: np.arange(6.0),
    "matrix": lambda: np.arange(6.0).reshape(2, 3),
    "slice": lambda: np.arange(12.0)[3:9],
    "strided": lambda: np.arange(12.0)[::2],
    "backwards": lambda: np.arange(6.0)[::-1],
    "column": lambda: np.arange(12.0).reshape(6, 2)[:, 1],
    "column that stays a matrix": lambda: np.arange(12.0).reshape(6, 2)[:, 1:],
    "transposed": lambda: np.arange(6.0).reshape(2, 3).T,
    "Fortran order": lambda: np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "inner block": lambda: np.arange(36.0).reshape(6, 6)[1:3, 1:4],
    "0-d": lambda: np.array(3.0),
    "empty": lambda: np.zeros(0),
    "empty matrix": lambda: np.zeros((3, 0, 2)),
    "empty strided": lambda: np.zeros(4)[4::2],
    "one element": lambda: np.ones((1, 1, 1)),
    "foreign byte order": lambda: np.arange(6.0).astype(np.dtype(float).newbyteorder("S")),
    "foreign byte order, strided": lambda: np.arange(12.0).astype(np.dtype(float).newbyteorder("S"))[::2],
    "unaligned": lambda: np.frombuffer(bytearray(49), np.uint8)[1:].view(np.float64),
    "np.matrix": lambda: np.arange(6.0).reshape(2, 3).view(np.matrix),
}
STAGED = {
    "strided", "backwards", "column", "column that stays a matrix", "transposed", "Fortran order", "inner block",
    "foreign byte order", "foreign byte order, strided",
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_sent_and_received_is_flat_and_in_order_and_copied_only_where_it_lies_apart(kind: str) -> None:
    tensor = KINDS[kind]()
    before = np.array(tensor)
    sent = flat_in(tensor, "tensor")
    flat, after = flat_out(tensor, "tensor")
    for elements in (sent, flat):
        assert type(elements) is np.ndarray
        assert elements.shape == (tensor.size,)
        assert elements.flags.c_contiguous
        assert elements.dtype.isnative
        np.testing.assert_array_equal(elements, before.ravel(), err_msg="it holds what the array does")
        assert kind in STAGED or tensor.size == 0 or np.shares_memory(elements, tensor)
    assert (after is not None) == (kind in STAGED)
    flat[...] = np.arange(tensor.size) + 100
    if after is not None:
        np.testing.assert_array_equal(tensor, before, err_msg="only when the data is there")
        after()
    np.testing.assert_array_equal(np.asarray(tensor).ravel(), np.arange(tensor.size) + 100)
    tensor.flags.writeable = False
    assert flat_in(tensor, "tensor").size == tensor.size
    with pytest.raises(ValueError, match=r"weights is read-only.*numpy\.array\(weights\)"):
        flat_out(tensor, "weights")


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_elements_of_every_supported_kind_are_taken_and_staged_where_they_are_apart(dtype: np.dtype[Any]) -> None:
    tensor = np.zeros((2, 3), dtype)
    assert flat_in(tensor, "tensor").dtype == dtype
    flat, after = flat_out(tensor, "tensor")
    assert (flat.dtype, after) == (dtype, None)
    flat.view(np.uint8)[:] = 1
    assert tensor.tobytes() == b"\1" * tensor.nbytes
    whole = np.zeros(6, dtype)
    flat, after = flat_out(whole[::2], "tensor")
    flat.view(np.uint8)[:] = 1
    assert after is not None
    after()
    assert whole[::2].tobytes() == b"\1" * flat.nbytes
    assert whole[1::2].tobytes() == bytes(flat.nbytes)


@pytest.mark.parametrize("name", ["bfloat16", "complex32"])
def test_numbers_that_numpy_lacks_are_swapped_to_this_machines_byte_order_too(name: str) -> None:
    tensor = np.ones(3, FROM_NAME[name]).astype(FROM_NAME[name].newbyteorder("S"))
    assert flat_in(tensor, "tensor").tobytes() == np.ones(3, FROM_NAME[name]).tobytes()
    flat, after = flat_out(tensor, "tensor")
    flat[1] = 0
    assert after is not None
    after()
    assert tensor.astype(FROM_NAME[name]).tobytes() == flat.tobytes()


UNUSABLE = {
    "object": np.array([{}, None]),
    "text": np.array(["a", "b"]),
    "bytes": np.array([b"a"]),
    "text of any length": np.array(["a"], np.dtypes.StringDType()),
    "date": np.array(["2026-01-01"], "datetime64[D]"),
    "duration": np.array([1], "timedelta64[s]"),
    "record": np.zeros(2, [("a", "f4")]),
    "void": np.zeros(2, "V3"),
    "wide characters": array.array("u", "ab"),
    "single characters": (ctypes.c_char * 2)(),
}


@pytest.mark.parametrize("tensor", UNUSABLE.values(), ids=UNUSABLE)
def test_other_dtypes_are_refused_by_name(tensor: Any) -> None:
    for take in (flat_in, flat_out):
        with pytest.raises(TypeError, match=r"pictures has dtype .* cannot be communicated"):
            take(tensor, "pictures")


@pytest.mark.parametrize(
    "thing",
    [[1.0, 2.0], (1,), 3, 3.5, None, "text", {}, object(), np.ndarray, mmap],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_array_is_refused_with_its_type(thing: object) -> None:
    for take in (flat_in, flat_out):
        with pytest.raises(
            TypeError, match=rf"loss must be a NumPy array, .*, got .*{type(thing).__qualname__}; .*numpy\.asarray"
        ):
            take(thing, "loss")


def test_a_masked_array_is_refused_as_its_mask_would_be_lost() -> None:
    for take in (flat_in, flat_out):
        with pytest.raises(TypeError, match="mask"):
            take(np.ma.array([1.0, 2.0], mask=[True, False]), "tensor")


# Elements that share memory


@pytest.mark.parametrize(("shape", "strides"), [((3,), (0,)), ((2, 3), (0, 8)), ((2, 2), (8, 8)), ((3,), (4,))])
def test_elements_that_share_memory_can_be_sent_but_not_received_into(
    shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    tensor = as_strided(np.arange(12.0), shape, strides)
    np.testing.assert_array_equal(flat_in(tensor, "tensor"), tensor.ravel())
    with pytest.raises(ValueError, match=r"grid has elements that share memory.*numpy\.array\(grid\)"):
        flat_out(tensor, "grid")
    flat_out(np.array(tensor), "grid")


def test_exactly_the_arrays_whose_elements_share_bytes_are_refused() -> None:
    memory = np.zeros(400, np.uint8)
    generator = np.random.default_rng(3)
    refused = []
    for _ in range(300):
        dtype = generator.choice([np.uint8, np.int16, np.float32])
        shape = generator.integers(0, 5, generator.integers(1, 4))
        strides = generator.integers(-12, 13, shape.size)
        addresses = [
            np.dot(index, strides) + byte
            for index in itertools.product(*map(range, shape))
            for byte in range(np.dtype(dtype).itemsize)
        ]
        tensor = np.ndarray(shape, dtype, memory, 200, strides)
        try:
            flat_out(tensor, "tensor")
        except ValueError:
            refused.append(True)
        else:
            refused.append(False)
        assert refused[-1] == (len(set(addresses)) < len(addresses)), (dtype, shape, strides)
    assert 50 < sum(refused) < 250, "both kinds were among them"


# What is no array, but exports one


def _mapped() -> mmap.mmap:
    mapped = mmap.mmap(-1, 6)
    mapped[:] = b"\0\1\2\3\4\5"
    return mapped


BUFFERS: dict[str, Callable[[], Any]] = {
    "bytearray": lambda: bytearray(range(6)),
    "array.array": lambda: array.array("d", range(6)),
    "mmap": _mapped,
    "ctypes": lambda: (ctypes.c_int * 6)(*range(6)),
    "ctypes, two dimensions": lambda: ((ctypes.c_int * 3) * 2)((0, 1, 2), (3, 4, 5)),
    "ctypes, foreign byte order": lambda: (ctypes.c_int.__ctype_be__ * 6)(*range(6)),
    "memoryview": lambda: memoryview(bytearray(range(6))),
    "memoryview, two dimensions": lambda: memoryview(bytearray(range(6))).cast("B", (2, 3)),
    "memoryview, strided": lambda: memoryview(array.array("f", np.repeat(np.arange(6.0), 2)))[::2],
    "memoryview, backwards": lambda: memoryview(bytearray(range(5, -1, -1)))[::-1],
}


@pytest.mark.parametrize("make", BUFFERS.values(), ids=BUFFERS)
def test_a_buffer_is_sent_and_received_into(make: Callable[[], Any]) -> None:
    tensor = make()
    np.testing.assert_array_equal(flat_in(tensor, "tensor"), np.arange(6))
    flat, after = flat_out(tensor, "tensor")
    np.testing.assert_array_equal(flat, np.arange(6), err_msg="it holds what the buffer does")
    flat += 10
    if after is not None:
        after()
    np.testing.assert_array_equal(np.asarray(memoryview(tensor)).ravel(), np.arange(6) + 10)


@pytest.mark.parametrize("name", ["bytearray", "array.array", "mmap", "ctypes", "memoryview"])
def test_a_contiguous_buffer_is_not_copied(name: str) -> None:
    tensor = BUFFERS[name]()
    memory = np.frombuffer(tensor, np.uint8)
    assert np.shares_memory(flat_in(tensor, "tensor"), memory)
    assert np.shares_memory(flat_out(tensor, "tensor")[0], memory)


def test_a_buffer_that_was_closed_or_has_no_elements_numpy_knows_is_refused() -> None:
    closed = mmap.mmap(-1, 6)
    closed.close()
    released = memoryview(b"ab")
    released.release()
    for tensor in (closed, released, (ctypes.c_void_p * 2)()):
        for take in (flat_in, flat_out):
            with pytest.raises(ValueError, match=rf"frame, a .*{type(tensor).__qualname__}, cannot be read: "):
                take(tensor, "frame")


@pytest.mark.usefixtures("alone")
def test_after_a_collective_a_buffer_is_its_owners_again() -> None:
    grows = bytearray(b"abc")
    dist.all_reduce(grows)
    grows.append(1)  # BufferError as long as anybody holds on to it
    closes = mmap.mmap(-1, 16)
    dist.broadcast(closes, 0)
    closes.close()


# DLPack and __array__


class Exporter:
    """An array of a library that speaks DLPack 1.0: it says whether it is read-only."""

    def __init__(self, elements: Any) -> None:
        self.elements = elements

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __dlpack__(self, **options: Any) -> Any:
        return self.elements.__dlpack__(**options)


class Immutable:
    """What a JAX array on the CPU does: a read-only buffer, DLPack before 1.0, and neither for bfloat16."""

    def __init__(self, elements: Any) -> None:
        self._elements = elements
        self.dtype, self.shape = elements.dtype, elements.shape

    def __buffer__(self, flags: int) -> memoryview:  # called from Python 3.12 on
        if self.dtype == FROM_NAME["bfloat16"]:
            raise BufferError("INVALID_ARGUMENT: Buffers of type BF16 are not supported by the Python buffer protocol.")
        return memoryview(self._elements).toreadonly()

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __dlpack__(
        self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: bool | None = None
    ) -> Any:
        if self.dtype == FROM_NAME["bfloat16"]:
            raise RuntimeError("Unsupported dtype in DLTensor.")  # NumPy says so of the capsule JAX makes
        return self._elements.__dlpack__()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        elements = self._elements.copy() if copy else self._elements.view()
        elements.flags.writeable = bool(copy)
        return elements


class Device(enum.IntEnum):
    kDLROCM = 10  # noqa: N815  (the name in dlpack.h)


class DeviceGuard:
    """What a CuPy array does, or a JAX array on a GPU."""

    def __init__(self, device: int) -> None:
        self.device = device

    def __dlpack_device__(self) -> tuple[int, int]:
        return (self.device, 0)

    def __dlpack__(self, **options: Any) -> Any:
        raise AssertionError("nobody may ask for its memory")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        raise TypeError("Implicit conversion to a NumPy array is not allowed.")


class Series:
    """What NumPy can read by a copy only."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.ones(3)


@pytest.mark.parametrize("kind", ["contiguous", "matrix", "strided", "transposed", "0-d", "empty", "empty matrix"])
def test_what_exports_dlpack_is_sent_and_received_into_as_its_memory_is(kind: str) -> None:
    elements = KINDS[kind]()
    np.testing.assert_array_equal(flat_in(Exporter(elements), "tensor"), elements.ravel())
    flat, after = flat_out(Exporter(elements), "tensor")
    assert (after is not None) == (kind in STAGED)
    flat[...] = np.arange(elements.size) + 100
    if after is not None:
        after()
    np.testing.assert_array_equal(elements.ravel(), np.arange(elements.size) + 100)


def _read_only(elements: Any) -> Any:
    elements.flags.writeable = False
    return elements


@pytest.mark.parametrize(
    "tensor",
    [b"\1\2", memoryview(b"\1\2"), np.float32(1), np.complex64(1), Exporter(_read_only(np.ones(3))), Series()],
    ids=lambda value: type(value).__name__,
)
def test_what_is_read_only_or_read_by_a_copy_can_be_sent_but_not_received_into(tensor: Any) -> None:
    assert flat_in(tensor, "tensor")[0] == 1
    with pytest.raises(ValueError, match="loss is read-only"):
        flat_out(tensor, "loss")


@pytest.mark.parametrize("name", ["float32", "int64", "bool", "complex64", "bfloat16"])
def test_an_immutable_array_can_be_sent_but_not_received_into(name: str) -> None:
    elements = np.ones((2, 3), FROM_NAME[name])
    flat = flat_in(Immutable(elements), "tensor")
    assert flat.dtype == elements.dtype
    assert np.shares_memory(flat, elements)
    with pytest.raises(ValueError, match=r"weights is read-only.*numpy\.array\(weights\)"):
        flat_out(Immutable(elements), "weights")
    flat_out(np.array(Immutable(elements)), "weights")


@pytest.mark.parametrize(("device", "reported"), [(Device.kDLROCM, "kDLROCM"), (10, "10"), (14, "14")])
def test_an_array_on_a_device_is_refused(device: int, reported: str) -> None:
    for take in (flat_in, flat_out):
        with pytest.raises(TypeError, match=rf"loss is a .*DeviceGuard on DLPack device {reported}: .*copy on the CPU"):
            take(DeviceGuard(device), "loss")


def test_why_an_exporter_cannot_be_read_is_said() -> None:
    for take in (flat_in, flat_out):
        with pytest.raises(TypeError, match=r"loss must be .*, got .*Exporter \(DLPack only supports .*\); convert it"):
            take(Exporter(np.ones(3, FROM_NAME["bfloat16"])), "loss")


def test_nothing_of_this_imports_torch() -> None:
    program = (
        "import sys; import numpy as np\n"
        "from rankmesh._tensors.buffers import *; from rankmesh._tensors.layout import describe\n"
        "for thing in (np.ones(3), bytearray(3), [1.0]):\n"
        "    describe(thing)\n"
        "    try: flat_in(thing, 'thing'), flat_out(thing, 'thing')\n"
        "    except TypeError: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=40)


# In words


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (np.zeros((3, 4), np.float32), "float32 (3, 4)"),
        (np.zeros((), ">i2"), ">i2 ()"),
        (np.zeros((0, 2), FROM_NAME["complex32"]), "complex32 (0, 2)"),
        (np.zeros(2, FROM_NAME["bfloat16"]), "bfloat16 (2,)"),
        (np.zeros(2, "V4"), "opaque32 (2,)"),
        (bytearray(5), "uint8 (5,)"),
        (array.array("d", [1, 2]), "float64 (2,)"),
        (memoryview(bytes(6)).cast("B", (2, 3)), "uint8 (2, 3)"),
        (np.float32(1), "float32 ()"),
        (Immutable(np.zeros((2, 1))), "float64 (2, 1)"),
    ],
)
def test_dtype_and_shape_in_words(tensor: Any, words: str) -> None:
    assert describe(tensor) == words
    assert shape_of(tensor) == np.shape(tensor)


@pytest.mark.parametrize(
    "thing", [None, [np.ones(3)], "text", np.float32, object()], ids=lambda value: type(value).__name__
)
def test_what_has_no_shape_is_described_by_its_type(thing: object) -> None:
    assert describe(thing) == f"builtins.{type(thing).__name__}"
    if not isinstance(thing, type):
        with pytest.raises(TypeError):
            shape_of(thing)


@pytest.mark.skipif(np.finfo(np.longdouble).nmant != 63, reason="longdouble has no padding here")
@pytest.mark.parametrize("dtype", [np.longdouble, np.clongdouble])
@pytest.mark.parametrize("shape", [(6,), (2, 3)])
@pytest.mark.parametrize(
    "elements",
    [
        lambda array: flat_in(array, "x"),
        lambda array: flat_out(array, "x")[0],
        lambda array: flat_in(array[..., ::2], "x"),
    ],
    ids=["in", "out", "strided"],
)
def test_the_padding_of_a_longdouble_is_zeroed(elements, shape, dtype):
    array = np.full(shape, 1.5, dtype)
    array.reshape(-1).view(np.uint8).reshape(-1, 16)[:, 10:] = 0xFF
    assert not elements(array).view(np.uint8).reshape(-1, 16)[:, 10:].any()
