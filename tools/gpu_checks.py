"""Checks of arrays on GPUs, each a program for the ranks of one job; tools/gpu_session.py runs them all.

    rankmesh run --nproc-per-node 2 -m tools.gpu_checks results

A line ``result: ...`` has what was found; a wrong result is an error.
"""

from __future__ import annotations

import copy
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import time
from datetime import timedelta
from typing import Any

import numpy as np

import rankmesh as dist
from tools.gpu_report import all_reduce_async, join, result, run

_LATE_SECONDS = 2.0
_PACKAGES = (
    *("numpy", "ml-dtypes", "cupy-cuda12x", "cupy-cuda13x", "cuda-pathfinder"),
    *("nccl4py", "nvidia-nccl-cu12", "nvidia-nccl-cu13"),
    *("nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc", "nvidia-cuda-runtime-cu12", "nvidia-cuda-runtime", "torch"),
    *("mpi4py", "fastapi", "starlette", "pydantic", "uvicorn", "anyio", "httpx", "typer", "rich", "prometheus-client"),
    *("msgspec", "typing-extensions", "pytest", "pytest-xdist", "hypothesis"),
)


def environment(small: bool) -> None:
    """Print the machine and the versions."""
    print(f"Python {sys.version}\n{platform.platform()}, {os.cpu_count()} processors")
    for command in (["nvidia-smi"], ["nvcc", "--version"]):
        print(f"$ {' '.join(command)}", flush=True)
        if shutil.which(command[0]) is None:
            print(f"{command[0]} is not on the PATH")
        else:
            subprocess.run(command, stderr=subprocess.STDOUT, timeout=20, check=False)
    for name in _PACKAGES:
        try:
            print(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            print(f"{name} is not installed")
    import cupy

    from rankmesh_agent.device import runtime

    if hasattr(cupy, "show_config"):
        sys.stdout.flush()
        cupy.show_config()
    reasons = runtime.unavailable_reason(), runtime.nccl_unavailable_reason()
    name = bytes(cupy.cuda.runtime.getDeviceProperties(0)["name"]).decode()
    nccl = reasons[1] or f"{runtime.nccl().get_version()} of {runtime.nccl().get_library_path()}"
    result(f"{name}; GPU: {reasons[0] or 'available'}; NCCL: {nccl}")


def doctor(small: bool) -> None:
    """Run ``rankmesh doctor`` on a job of ranks that wait."""
    dist.init_process_group()
    code = 0
    if dist.get_rank() == 0:
        gateway = f"http://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        program = "from rankmesh.cli import main; main()"
        code = subprocess.run([sys.executable, "-c", program, "doctor", "--gateway", gateway], check=False).returncode
        result(f"rankmesh doctor ended with exit code {code}")
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(code)


def results(small: bool) -> None:
    """Compare all_reduce with NumPy."""
    import cupy

    engine, ranks = join()
    calls = 0
    for dtype in ("float32", "float64", "float16", "int32", "uint8", "complex64"):
        for op, reduce in ((dist.ReduceOp.SUM, np.sum), (dist.ReduceOp.PRODUCT, np.prod), (dist.ReduceOp.AVG, np.mean)):
            for count in (0, 1, 1003, 100_003 if small else 5_000_001):
                given = [np.random.default_rng([rank, count]).integers(0, 3, count).astype(dtype) for rank in ranks]
                expected = reduce(np.stack(given).astype("complex128" if dtype == "complex64" else "float64"), axis=0)
                array = cupy.asarray(given[dist.get_rank()])
                work = dist.all_reduce(array, op, async_op=bool(calls % 2))
                if work is not None:
                    work.wait()
                found = array.get()
                if dtype[0] in "iu" and op == dist.ReduceOp.AVG:
                    expected = np.trunc(expected)
                np.testing.assert_allclose(found, expected.astype(dtype), rtol=2e-3 if dtype == "float16" else 1e-6)
                calls += 1
    result(f"{calls} all_reduce over {engine}, {len(ranks)} ranks, equal NumPy's")
    dist.destroy_process_group()


def late(small: bool) -> None:
    """Wait for a rank that does not come: the watchdog names it, and ends the kernel that waits for it."""
    import cupy

    join()
    array = cupy.ones(1000, "float32")
    dist.all_reduce(array)
    cupy.cuda.get_current_stream().synchronize()
    if dist.get_rank():
        try:
            dist.barrier(timeout=30)  # which rank 0 never makes
        except dist.DistBackendError as error:
            print(error, flush=True)
        os._exit(0)
    began = time.monotonic()
    try:
        all_reduce_async(array, timeout=_LATE_SECONDS).wait(timedelta(seconds=30))
    except dist.CollectiveTimeoutError as error:
        print(error, flush=True)
        ranks, ended = error.ranks, time.monotonic() - began
    after = int(cupy.arange(10).sum().get())
    result(f"rank 1 does not come: rank 0 names {list(ranks)} after {ended:.2f} s; the stream goes on: {after == 45}")
    os._exit(0 if ranks == (1,) and after == 45 else 1)  # without a synchronization with the GPU


def torch_tensors(small: bool) -> None:
    """All-reduce torch tensors, on the GPU if torch has CUDA, by RankMesh's own function."""
    import torch

    dist.init_process_group(timeout=60)
    device, size, rank = _torch_device(torch), dist.get_world_size(), dist.get_rank()
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        tensor = torch.arange(100_003, device=device).remainder(7).to(dtype) * (rank + 1)
        expected = (torch.arange(100_003).remainder(7) * (size * (size + 1) // 2)).to(dtype)
        dist.all_reduce(tensor)
        assert torch.equal(tensor.cpu(), expected), dtype
        all_reduce_async(tensor[::2]).wait()
        assert torch.equal(tensor[::2].cpu(), expected[::2] * size), dtype
        assert torch.equal(tensor[1::2].cpu(), expected[1::2]), dtype
    result(f"all_reduce of torch tensors on {device}: equal; {dist.get_backend_config()}")
    dist.destroy_process_group()


def ddp(small: bool) -> None:
    """Train with DistributedDataParallel on one GPU, and compare with the gradients of the whole batch."""
    import torch
    import torch.distributed as c10d

    import rankmesh.torch

    rankmesh.torch.register()
    device = _torch_device(torch)
    c10d.init_process_group("rankmesh" if device == "cpu" else "cpu:rankmesh,cuda:rankmesh")
    rank, size = c10d.get_rank(), c10d.get_world_size()
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 8)]
    alone = torch.nn.Sequential(*layers).to(device)
    model = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(alone))
    inputs, wanted = torch.randn(32 * size, 64, device=device), torch.randn(32 * size, 8, device=device)
    mine = slice(32 * rank, 32 * (rank + 1))
    optimizers = [torch.optim.SGD(one.parameters(), 0.1) for one in (alone, model)]
    for _ in range(5):
        for one, optimizer, part in zip((alone, model), optimizers, (slice(None), mine), strict=True):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(one(inputs[part]), wanted[part]).backward()
            optimizer.step()
    pairs = zip(alone.parameters(), model.module.parameters(), strict=True)
    difference = max(float((one - other).abs().max()) for one, other in pairs)
    if difference > 1e-5:
        raise RuntimeError(f"the parameters differ by {difference:.1e} from those of one process")
    if rank == 0:
        print(f"result: DDP, {size} ranks on {device}: parameters of one process, within {difference:.1e}", flush=True)
    c10d.destroy_process_group()


def _torch_device(torch: Any) -> str:
    return "cuda:0" if torch.cuda.is_available() else "cpu"


if __name__ == "__main__":
    run((environment, doctor, results, late, torch_tensors, ddp), __doc__)
