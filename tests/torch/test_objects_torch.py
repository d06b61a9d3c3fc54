"""Objects with torch tensors in them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rankmesh as dist
from rankmesh._collectives.plain import tensor_of
from rankmesh._collectives.serialize import Message, dumps, loads

DTYPES = [
    found
    for found in {getattr(torch, name) for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)}
    if not str(found).startswith(("torch.q", "torch.bits"))
]


@pytest.fixture(scope="class")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A world of one rank that must not pickle."""
    path = tmp_path_factory.mktemp("plain") / "meet"
    dist.init_process_group(init_method=f"file://{path}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def again(obj: Any) -> Any:
    data, apart, pickled = dumps(obj, "obj")
    return loads(Message(data, [octets.copy() for octets in apart], pickled))


def octets(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


@pytest.mark.usefixtures("plain")
@pytest.mark.filterwarnings("ignore:B?Complex(Half|32) support is experimental", "ignore:torch.quantize_per_tensor")
class TestTensors:
    @pytest.mark.parametrize("dtype", sorted(DTYPES, key=str), ids=str)
    @pytest.mark.parametrize("shape", [(), (0,), (6,), (2, 0, 3), (2, 3)], ids=str)
    def test_every_dtype(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        data = np.random.default_rng(1).integers(0, 2 if dtype is torch.bool else 256, 96 * dtype.itemsize, np.uint8)
        count = int(np.prod(shape)) * dtype.itemsize
        octet = torch.from_numpy(data[: count or dtype.itemsize].copy())
        tensor = octet.view(dtype)[: count or 0].reshape(shape)
        (got,) = again([tensor])
        assert type(got) is torch.Tensor
        assert (got.dtype, got.shape) == (dtype, tensor.shape)
        assert octets(got) == octets(tensor)
        assert not got.requires_grad

    @pytest.mark.parametrize(
        "view",
        [
            lambda t: t.T,
            lambda t: t[::2, 1:],
            lambda t: t[0].expand(5, 4),
            lambda t: t.to(torch.complex64).conj(),
            lambda t: t.to(torch.complex64).conj().imag,
        ],
    )
    def test_views(self, view: Any) -> None:
        tensor = view(torch.arange(12.0).reshape(3, 4))
        got = again({"t": tensor})["t"]
        assert torch.equal(got, tensor)
        got.fill_(1)

    def test_what_needs_a_gradient_needs_one_there_too(self) -> None:
        leaf = torch.ones(3, requires_grad=True)
        for tensor in (leaf, leaf * 2):
            got = again(tensor)
            assert got.requires_grad
            assert got.is_leaf
            assert torch.equal(got, tensor)

    def test_a_large_tensor_is_not_copied(self) -> None:
        tensor = torch.arange(100_000.0)
        data, apart, pickled = dumps([tensor], "obj")
        assert np.shares_memory(apart[0], tensor.numpy())
        (got,) = loads(Message(data, apart, pickled))
        assert np.shares_memory(got.numpy(), apart[0])

    def test_what_is_no_plain_tensor_needs_pickle(self) -> None:
        for other in (
            torch.nn.Parameter(torch.ones(2)),
            torch.ones(2).to_sparse(),
            torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8),
            torch.ones(2, device="meta"),
            torch.float32,
        ):
            with pytest.raises(TypeError, match=r"^obj\[0\] is a torch.* set RANKMESH_TOKEN"):
                dumps([other], "obj")

    @pytest.mark.parametrize(
        "parts",
        [
            ("torch.float32", False, [1], [1.0]),
            ("torch.nothing", False, [3], np.zeros(12, np.uint8)),
            ("torch.load", False, [3], np.zeros(12, np.uint8)),
            ("float64", False, [3], np.zeros(12, np.uint8)),
            (b"torch.float32", False, [3], np.zeros(12, np.uint8)),
            ("torch.float32", False, [4], np.zeros(12, np.uint8)),
            ("torch.int32", True, [3], np.zeros(12, np.uint8)),
            ("torch.float32", "yes", [3], np.zeros(12, np.uint8)),
        ],
        ids=repr,
    )
    def test_a_damaged_tensor_is_refused(self, parts: Any) -> None:
        with pytest.raises(dist.errors.ProtocolError, match="a torch tensor is damaged"):
            tensor_of(*parts)

    @pytest.mark.parametrize("device", ["cpu", "cuda:0"])
    def test_any_device_is_accepted(self, device: str) -> None:
        objects = [torch.ones(2)]
        dist.broadcast_object_list(objects, device=torch.device(device))
        assert objects[0].tolist() == [1, 1]


def test_with_a_token_the_others_are_pickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKMESH_TOKEN", "secret")
    dist.init_process_group(init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        model = torch.nn.Linear(2, 1)
        out = [None]
        dist.all_gather_object(out, {"state": model.state_dict(), "dtype": torch.float32, "weight": model.weight})
        got = out[0]
        assert got["dtype"] is torch.float32
        assert type(got["weight"]) is torch.nn.Parameter
        assert torch.equal(got["weight"], model.weight)
        torch.nn.Linear(2, 1).load_state_dict(got["state"])
    finally:
        dist.destroy_process_group()
