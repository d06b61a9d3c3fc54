"""Backends of torch for tensors on other devices, as named by the user: ``"cpu:rankmesh,cuda:nccl"``."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as c10d


def new_device_backend(group: Any, store: Any, device: str, timeout: timedelta) -> Any:
    """Create the backend that the user named for a device, with the same ranks.

    torch creates none beside a process group written in Python; so it is created at the first tensor of the device.
    """
    name = backend_names(group).get(device)
    if name in (None, "rankmesh"):
        other = "rankmesh" if device == "cuda" else "gloo"
        raise ValueError(
            f"the group has no backend for tensors on {device!r}: pass one in host memory, tensor.cpu() say, or name "
            f'one when the group is made: init_process_group("cpu:rankmesh,{device}:{other}")'
        )
    private = c10d.PrefixStore(f"{device}/", store)
    kinds = c10d.ProcessGroup.BackendType
    match name:
        case "gloo":
            kind, backend = kinds.GLOO, c10d.ProcessGroupGloo(private, group.rank(), group.size(), timeout=timeout)
        case "nccl" if c10d.is_nccl_available():
            options = c10d.ProcessGroupNCCL.Options()
            options._timeout = timeout
            kind, backend = kinds.NCCL, c10d.ProcessGroupNCCL(private, group.rank(), group.size(), options)
        case _:
            raise ValueError(f"backend {name!r} for tensors on {device!r} is not available in this build of torch")
    wrapper = c10d.ProcessGroup(private, group.rank(), group.size())  # a backend lacks some of its methods
    wrapper._register_backend(torch.device(device), kind, backend)
    return wrapper


def backend_names(group: Any) -> dict[str, str]:
    """Return the backends the user named, by device type."""
    config = str(c10d.get_backend_config(group))
    return dict(pair.split(":", 1) for pair in config.split(",") if ":" in pair)
