"""GPUs whose memory is the host's: tests that ask for GPUs only to have their tensors there run on the CPU.

Most of torch's tests of DistributedDataParallel are such tests. In a process that is prepared, what they ask of a GPU
is done in host memory: ``.cuda()``, ``.to(rank)`` and ``device=rank`` give tensors of the CPU, models too, and
DistributedDataParallel is not told devices. What needs CUDA itself, a stream or its profiler say, fails, whatever the
backend.
"""

from __future__ import annotations

from typing import Any

GPUS = 8


def prepare() -> None:
    """Prepare this process; call it before torch's tests are imported."""
    import torch
    from torch.nn.parallel import DistributedDataParallel
    from torch.overrides import TorchFunctionMode
    from torch.testing._internal import common_distributed

    cpu = torch.device("cpu")

    def in_host_memory(value: Any) -> Any:
        kind = value.type if isinstance(value, torch.device) else value
        return cpu if isinstance(kind, str) and kind.startswith("cuda") else value

    class HostMemory(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.Tensor.cuda:
                return args[0].clone()
            named = {name: in_host_memory(value) for name, value in (kwargs or {}).items()}
            if isinstance(named.get("device"), int):
                named["device"] = cpu
            if func is torch.Tensor.to and len(args) > 1 and type(args[1]) is int:
                args = (args[0], cpu, *args[2:])
            return func(*map(in_host_memory, args), **named)

    to, made = torch.nn.Module.to, DistributedDataParallel.__init__

    def model_to(self: Any, *args: Any, **kwargs: Any) -> Any:
        return to(self, *(cpu if type(value) is int else in_host_memory(value) for value in args), **kwargs)

    def make(self: Any, module: Any, device_ids: Any = None, output_device: Any = None, **kwargs: Any) -> None:
        made(self, module, **kwargs)

    torch.nn.Module.to = model_to
    DistributedDataParallel.__init__ = make
    torch.cuda.device_count = lambda: GPUS
    torch.cuda.set_device = lambda device: None
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.current_device = lambda: 0
    common_distributed.skip_if_no_gpu = lambda test: test
    common_distributed.skip_if_lt_x_gpu = lambda count, **_: lambda test: test
    HostMemory().__enter__()
