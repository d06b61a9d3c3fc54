"""torch tensors as arguments: which are taken, and that their memory is used as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode

import rankmesh as dist
from rankmesh._tensors.buffers import flat_in, flat_out
from rankmesh._tensors.layout import describe, shape_of
from rankmesh_agent.wire.dtypes import display

QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and dtype not in QUANTIZED
}
NUMBERS = {
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
    "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
    "complex32", "complex64", "complex128",
}  # fmt: skip
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
EVERY_NUMBER = pytest.mark.parametrize("dtype", [DTYPES[name] for name in sorted(NUMBERS)], ids=sorted(NUMBERS))

# torch says so once, whoever makes the first such tensor; that must not be RankMesh.
COMPLEX32_IS_EXPERIMENTAL = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def of_bytes(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """A tensor of random bits (0 or 1 as bytes, if it is bool)."""
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    count = int(np.prod(shape)) * dtype.itemsize
    highest = 2 if dtype is torch.bool else 256
    octets = np.random.default_rng(seed).integers(0, highest, count, np.uint8)
    return torch.from_numpy(octets).view(dtype).reshape(shape)


def bits(tensor: torch.Tensor) -> bytes:
    """The bits of a tensor's elements in their order."""
    elements = (tensor[index].reshape(1).view(torch.uint8) for index in np.ndindex(*tensor.shape))
    return b"".join(bytes(element.tolist()) for element in elements)


# Every dtype


def test_the_dtypes_of_torch_are_those_this_tests() -> None:
    assert set(DTYPES) > NUMBERS | {"float4_e2m1fn_x2", "int4", "uint7", "bits8", "bits16"}


@EVERY_DTYPE
def test_a_tensor_is_sent_and_received_into_without_a_copy(dtype: torch.dtype) -> None:
    tensor, name = of_bytes(dtype, 2, 3), str(dtype).removeprefix("torch.")
    flat, (output, after) = flat_in(tensor, "tensor"), flat_out(tensor, "tensor")
    assert (flat.shape, output.shape, after) == ((6,), (6,), None)
    assert display(flat.dtype) == (name if name in NUMBERS else f"opaque{8 * dtype.itemsize}")
    assert flat.tobytes() == output.tobytes() == bits(tensor)
    output.view(np.uint8)[:] = 1
    assert flat.tobytes() == bits(tensor) == b"\1" * flat.nbytes, "one memory"


@COMPLEX32_IS_EXPERIMENTAL
@EVERY_NUMBER
def test_numbers_are_the_same_numbers(dtype: torch.dtype) -> None:
    tensor = torch.tensor([1, 2, 0.5, 4]).to(dtype)
    flat = flat_in(tensor, "tensor")
    numbers = flat["real"] + 1j * flat["imag"] if dtype is torch.complex32 else flat
    wide = torch.complex128 if dtype.is_complex else torch.float64
    np.testing.assert_array_equal(numbers.astype(np.complex128), tensor.to(wide).numpy())


# Every layout in memory

KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "matrix": lambda tensor: tensor,
    "transposed": lambda tensor: tensor.T,
    "strided": lambda tensor: tensor[:, ::2],
    "column": lambda tensor: tensor[:, 1],
    "inner block": lambda tensor: tensor[1:3, 1:3],
    "0-d": lambda tensor: tensor[1, 2],
    "empty": lambda tensor: tensor[:0],
    "empty strided": lambda tensor: tensor[:, 4:][::2],
    "another order of dimensions": lambda tensor: tensor.reshape(2, 2, 2, 2).permute(2, 0, 3, 1),
    "channels last": lambda tensor: tensor.reshape(1, 4, 2, 2).contiguous(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2, torch.complex32], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_view_of_any_layout_is_sent_and_received_into(kind: str, dtype: torch.dtype) -> None:
    whole = of_bytes(dtype, 4, 4)
    tensor = KINDS[kind](whole)
    flat, after = flat_out(tensor, "tensor")
    assert flat.tobytes() == flat_in(tensor, "tensor").tobytes() == bits(tensor)
    assert flat.flags.c_contiguous
    assert (after is None) == tensor.is_contiguous()
    new = of_bytes(dtype, *tensor.shape, seed=1)
    flat.view(np.uint8)[:] = np.frombuffer(bits(new), np.uint8)
    if after is not None:
        after()
    assert bits(tensor) == bits(new)


def test_what_lies_around_a_view_stays_as_it_is() -> None:
    whole = torch.zeros(4, 4, dtype=torch.bfloat16)
    flat, after = flat_out(whole[:, 1], "tensor")
    flat[:] = 5
    assert after is not None
    after()
    assert whole.tolist() == [[0, 5, 0, 0]] * 4


def test_an_expanded_tensor_can_be_sent_but_not_received_into() -> None:
    plain, conjugate = torch.tensor([[1.0], [2.0]]).expand(2, 3), torch.tensor([1 + 2j]).expand(3).conj()
    for tensor, sent in ((plain, [1, 1, 1, 2, 2, 2]), (conjugate, [1 - 2j] * 3)):
        assert flat_in(tensor, "tensor").tolist() == sent
        with pytest.raises(ValueError, match=r"mean has elements that share memory \(it is expanded"):
            flat_out(tensor, "mean")


LAZY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "conjugated": lambda tensor: tensor.conj(),
    "conjugated and transposed": lambda tensor: tensor.mH,
    "negated": lambda tensor: tensor.conj().imag,
    "conjugated, of a slice": lambda tensor: tensor[:, ::2].conj(),
}


@COMPLEX32_IS_EXPERIMENTAL
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.complex32], ids=str)
@pytest.mark.parametrize("kind", LAZY)
def test_a_view_whose_numbers_are_not_those_in_memory_is_sent_and_received_into(kind: str, dtype: torch.dtype) -> None:
    whole = torch.tensor([[1 + 2j, 3 - 4j, 5 + 6j], [7 - 8j, 9j, -10]]).to(dtype)
    tensor = LAZY[kind](whole)
    assert tensor.is_conj() or tensor.is_neg()
    meant = tensor.to(torch.complex128).reshape(-1).tolist()
    flat, after = flat_out(tensor, "tensor")
    for array in (flat, flat_in(tensor, "tensor")):
        numbers = array["real"] + 1j * array["imag"] if array.dtype.names else array
        assert numbers.tolist() == meant
    flat.view(np.float16 if array.dtype.names else array.real.dtype)[:] = 3
    assert after is not None
    after()
    assert (tensor == (3 + 3j if tensor.is_complex() else 3)).all()
    physically = tensor.conj().resolve_neg() if kind != "negated" else whole.imag
    assert (physically == (3 - 3j if tensor.is_complex() else -3)).all(), "the view is still one"


# What torch knows besides numbers


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(3, requires_grad=True),
        lambda: torch.ones(3, requires_grad=True) * 1,
        lambda: torch.nn.Parameter(torch.ones(3)),
        lambda: torch.nn.Buffer(torch.ones(3)),
    ],
    ids=["leaf", "result", "parameter", "buffer"],
)
@pytest.mark.usefixtures("alone")
def test_autograd_sees_no_collective(make: Callable[[], torch.Tensor]) -> None:
    """As with torch.distributed: no error, no node in the graph, no new version of the tensor."""
    tensor = make()
    before = (tensor.grad_fn, tensor._version, tensor.data_ptr())
    flat, after = flat_out(tensor, "tensor")
    flat[:] = 5
    assert after is None
    assert tensor.tolist() == [5, 5, 5]
    dist.all_reduce(tensor)
    assert (tensor.grad_fn, tensor._version, tensor.data_ptr()) == before


def test_a_tensor_made_in_inference_mode_is_taken() -> None:
    with torch.inference_mode():
        tensor = torch.ones(3)
    flat, _ = flat_out(tensor, "tensor")
    flat[:] = 5
    assert tensor.tolist() == [5, 5, 5]


def freed(tensor: torch.Tensor | None = None) -> torch.Tensor:
    tensor = torch.ones(3) if tensor is None else tensor
    tensor.untyped_storage().resize_(0)
    return tensor


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(3)


@pytest.mark.parametrize(
    ("make", "error", "reported"),
    [
        (lambda: torch.ones(3, device="meta"), TypeError, "on device meta, which has no data"),
        (lambda: torch.eye(3).to_sparse(), TypeError, r"layout torch\.sparse_coo.*loss\.to_dense\(\)"),
        (lambda: torch.eye(3).to_sparse_csc(), TypeError, r"layout torch\.sparse_csc.*loss\.to_dense\(\)"),
        (lambda: torch.ones(3).to_mkldnn(), TypeError, r"layout torch\._mkldnn.*loss\.to_dense\(\)"),
        (lambda: torch.nested.nested_tensor([torch.ones(2)]), TypeError, r"nested torch tensor.*loss\.unbind\(\)"),
        (fake, TypeError, r"FakeTensor whose memory cannot be shared.*plain torch\.Tensor"),
        (freed, ValueError, "storage was freed"),
        (lambda: freed(torch.ones(9)[2:5]), ValueError, "storage was freed"),
    ],
    ids=["meta", "sparse", "compressed", "mkldnn", "nested", "fake", "freed", "view-of-freed"],
)
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch: sparse and nested tensors are beta
def test_a_tensor_without_plain_host_memory_is_refused(
    make: Callable[[], torch.Tensor], error: type[Exception], reported: str
) -> None:
    tensor = make()
    for take in (flat_in, flat_out):
        with pytest.raises(error, match=f"^loss is a .*{reported}"):
            take(tensor, "loss")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_quantized_tensor_is_refused_as_its_scale_would_be_lost() -> None:
    tensor = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    for take in (flat_in, flat_out):
        with pytest.raises(TypeError, match=r"loss is a quantized torch tensor.*loss\.int_repr\(\)"):
            take(tensor, "loss")


class Exporter:
    """A bfloat16 array of a library that speaks nothing but DLPack."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __dlpack__(self, **options: Any) -> Any:
        return torch.ones(3, dtype=torch.bfloat16).__dlpack__()


def test_a_dtype_that_numpy_does_not_take_from_dlpack_is_refused_with_its_words() -> None:
    for take in (flat_in, flat_out):
        with pytest.raises(TypeError, match=r"got .*Exporter \(Unsupported dtype in DLTensor\.\); convert it"):
            take(Exporter(), "tensor")


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.zeros(3, 4), "float32 (3, 4)"),
        (torch.tensor(1, dtype=torch.bfloat16), "bfloat16 ()"),
        (torch.zeros(0, 2, device="meta"), "float32 (0, 2)"),
        (torch.empty(2, dtype=torch.float4_e2m1fn_x2), "float4_e2m1fn_x2 (2,)"),
    ],
    ids=["matrix", "0-d", "meta", "opaque"],
)
def test_dtype_and_shape_in_words(tensor: torch.Tensor, words: str) -> None:
    assert describe(tensor) == words
    assert shape_of(tensor) == tuple(tensor.shape)


# Through collectives


@pytest.mark.usefixtures("alone")
def test_opaque_elements_are_not_reduced() -> None:
    tensor = of_bytes(torch.float4_e2m1fn_x2, 3)
    with pytest.raises(TypeError, match="not defined for opaque8"):
        dist.all_reduce(tensor)
