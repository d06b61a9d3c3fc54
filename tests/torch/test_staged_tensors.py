"""CUDA tensors that go through host memory, by a stand-in that says it is on a GPU: only torch itself reads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rankmesh._tensors.buffers import buffer_of, flat_in, flat_out


class OnGpu(torch.Tensor):
    """Elements that are only to be had by a copy to what empty_like() makes in pinned memory."""

    def __new__(cls, elements: torch.Tensor) -> OnGpu:
        return elements.as_subclass(cls)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name == "__get__":  # of a property
            name = function.__self__.__name__
        if name == "is_cuda":
            return True
        if name in ("numpy", "data_ptr", "__array__", "__dlpack__"):
            raise AssertionError(f"{name}() of what is on a GPU")
        if name == "empty_like":
            assert options.pop("pin_memory")  # which a torch without CUDA lacks
        with torch._C.DisableTorchFunctionSubclass():
            made = function(*arguments, **(options or {}))
        if not isinstance(made, torch.Tensor):
            return made
        return made.as_subclass(torch.Tensor if name == "empty_like" else cls)


class Synchronized:
    """The current stream."""

    def __init__(self) -> None:
        self.times = 0

    def synchronize(self) -> None:
        self.times += 1


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Synchronized:
    made = Synchronized()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: made)
    return made


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": lambda whole: whole,
    "every other": lambda whole: whole[:, ::2],
    "transposed": lambda whole: whole.t(),
    "conjugated": lambda whole: whole.conj(),
    "negated": lambda whole: whole.conj().imag,
    "for gradients": lambda whole: whole.requires_grad_(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tensor_comes_and_goes_by_way_of_torch(layout: str, stream: Synchronized) -> None:
    within = LAYOUTS[layout](torch.tensor([[1 + 2j, 3 - 4j, 5], [7j, 8, 9 - 1j]]))
    meant = within.detach().resolve_conj().resolve_neg().numpy().ravel().tolist()
    tensor = OnGpu(within)
    assert tensor.requires_grad == (layout == "for gradients")
    assert flat_in(tensor, "tensor").tolist() == meant
    array, store = flat_out(tensor, "tensor")
    assert array.tolist() == meant
    array[:] = np.arange(array.size) + (1j if array.dtype.kind == "c" else 0)
    assert store is not None
    store()
    assert stream.times == 1
    assert within.detach().resolve_conj().resolve_neg().numpy().ravel().tolist() == array.tolist()


@pytest.mark.parametrize("kind", ["expanded", "overlapping"])
def test_elements_that_share_memory_are_sent_only(kind: str) -> None:
    whole = torch.arange(6.0)
    tensor = OnGpu(whole[:2].reshape(2, 1).expand(2, 3) if kind == "expanded" else whole.as_strided((4, 3), (1, 1)))
    assert flat_in(tensor, "mean").size in (6, 12)
    with pytest.raises(ValueError, match="mean has elements that share memory"):
        flat_out(tensor, "mean")


def device_array(tensor: Any, name: str) -> Any:
    return buffer_of(tensor, name).device_array()


def test_what_has_no_memory_is_refused() -> None:
    whole = torch.ones(4)
    view = OnGpu(whole)
    whole.untyped_storage().resize_(0)
    for read in (flat_in, flat_out, device_array):
        with pytest.raises(ValueError, match="storage was freed"):
            read(view, "parameter")


class Sparse(OnGpu):
    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if getattr(function, "__self__", None) is torch.Tensor.layout:
            return torch.sparse_coo
        return super().__torch_function__(function, types, arguments, options)


def test_what_is_not_dense_is_refused() -> None:
    for read in (flat_in, flat_out, device_array):
        with pytest.raises(TypeError, match=r"layout torch.sparse_coo, not dense"):
            read(torch.ones(4).as_subclass(Sparse), "gradient")
