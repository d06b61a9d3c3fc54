"""What users may pass as a tensor, and what becomes of it on the way in and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rankmesh._arrays import destination, source

DTYPES = [
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64", "longdouble", "complex64", "complex128", "clongdouble",
    "longlong", "ulonglong",
]  # fmt: skip
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


# FAILS for strided, backwards and the columns: ndarray.reshape(-1) of an array with a single stride is a view, so
# source() hands the engine memory that is not contiguous. numpy.ascontiguousarray(array).reshape(-1) would copy it.
@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_what_is_sent_is_flat_contiguous_and_in_order(make: Any) -> None:
    array = make()
    flat = source(array, "tensor")
    assert type(flat) is np.ndarray
    assert flat.shape == (array.size,)
    assert flat.flags.c_contiguous
    assert flat.dtype.isnative
    np.testing.assert_array_equal(flat, np.asarray(array).ravel())


@pytest.mark.parametrize("make", [lambda: np.broadcast_to(np.float32(3), (5,)), lambda: np.broadcast_to(1.5, (2, 3))])
def test_an_array_of_one_element_repeated_can_be_sent(make: Any) -> None:
    flat = source(make(), "tensor")  # FAILS as above
    assert flat.flags.c_contiguous
    assert flat.shape == (make().size,)


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_what_is_received_ends_in_the_users_array(make: Any) -> None:
    array = make()
    before = np.array(array)
    flat, after = destination(array, "tensor")
    assert type(flat) is np.ndarray
    assert flat.shape == (array.size,)
    assert flat.flags.c_contiguous
    assert flat.flags.writeable
    assert flat.dtype.isnative
    np.testing.assert_array_equal(flat, before.ravel(), err_msg="it holds what the array does")
    flat[...] = np.arange(array.size) + 100
    if after is not None:
        after()
    np.testing.assert_array_equal(np.asarray(array).ravel(), np.arange(array.size) + 100)


@pytest.mark.parametrize("name", KINDS)
def test_only_what_does_not_lie_in_order_is_copied(name: str) -> None:
    array = KINDS[name]()
    flat, after = destination(array, "tensor")
    assert (after is not None) == (name in STAGED)
    if name not in STAGED:
        assert array.size == 0 or np.shares_memory(flat, array)
        assert array.size == 0 or np.shares_memory(source(array, "tensor"), array)


def test_what_lies_around_a_strided_array_stays_as_it_is() -> None:
    whole = np.zeros(12)
    flat, after = destination(whole[1::3], "tensor")
    flat[:] = 5
    assert not whole.any(), "only when the data is there"
    assert after is not None
    after()
    np.testing.assert_array_equal(whole, [0, 5, 0] * 4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_of_every_kind_are_taken(dtype: str) -> None:
    array = np.ones((2, 3), dtype)
    assert source(array, "tensor").dtype == dtype
    assert destination(array, "tensor")[0].dtype == dtype


UNUSABLE = {
    "object": np.array([{}, None]),
    "text": np.array(["a", "b"]),
    "bytes": np.array([b"a"]),
    "date": np.array(["2026-01-01"], "datetime64[D]"),
    "duration": np.array([1], "timedelta64[s]"),
    "record": np.zeros(2, [("a", "f4")]),
    "void": np.zeros(2, "V3"),
}


@pytest.mark.parametrize("array", UNUSABLE.values(), ids=UNUSABLE)
def test_other_dtypes_are_refused_by_name(array: Any) -> None:
    for take in (source, destination):
        with pytest.raises(TypeError, match=r"pictures has dtype .* cannot be communicated"):
            take(array, "pictures")


@pytest.mark.parametrize(
    "thing", [[1.0, 2.0], (1,), 3, 3.5, None, "text", b"bytes", np.float32(1), memoryview(b"x"), object()], ids=repr
)
def test_what_is_no_array_is_refused_with_its_type(thing: object) -> None:
    for take in (source, destination):
        with pytest.raises(TypeError, match=rf"loss must be a NumPy array, got .*{type(thing).__qualname__}"):
            take(thing, "loss")


def test_a_torch_tensor_is_refused_with_what_to_do() -> None:
    torch = pytest.importorskip("torch")
    for take in (source, destination):
        with pytest.raises(TypeError, match=r"got torch\.Tensor; convert it with numpy.asarray"):
            take(torch.ones(3), "tensor")


def test_a_masked_array_is_refused_as_its_mask_would_be_lost() -> None:
    for take in (source, destination):
        with pytest.raises(TypeError, match="mask"):
            take(np.ma.array([1.0, 2.0], mask=[True, False]), "tensor")


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_a_read_only_array_can_be_sent_but_not_received_into(make: Any) -> None:
    array = make()
    array.flags.writeable = False
    assert source(array, "tensor").size == array.size
    with pytest.raises(ValueError, match=r"weights is read-only.*weights\.copy\(\)"):
        destination(array, "weights")
