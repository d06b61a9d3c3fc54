"""Tensors that are not in host memory: the backend of torch's that the user named for their device."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as c10d


def device_backend(group: Any, store: Any, device: str, timeout: timedelta) -> Any:
    """Make the backend that ``"cpu:rankmesh,cuda:nccl"`` names for a device, with the same ranks.

    torch itself makes none beside a process group written in Python; so it is made at the first tensor of the device.

    Args:
        group: the process group.
        store: its store.
        device: the device type.
        timeout: how long a call may take.

    Raises:
        ValueError: no backend was named for the device.
    """
    name = _named(group).get(device)
    if name in (None, "rankmesh"):
        raise ValueError(
            f"the group has no backend for tensors on {device!r}: pass one in host memory, tensor.cpu() say, or name "
            f'one when the group is made: init_process_group("cpu:rankmesh,{device}:nccl")'
        )
    private = c10d.PrefixStore(f"{device}/", store)
    kinds = c10d.ProcessGroup.BackendType
    match name:
        case "gloo":
            kind, made = kinds.GLOO, c10d.ProcessGroupGloo(private, group.rank(), group.size(), timeout=timeout)
        case "nccl" if c10d.is_nccl_available():
            options = c10d.ProcessGroupNCCL.Options()
            options._timeout = timeout
            kind, made = kinds.NCCL, c10d.ProcessGroupNCCL(private, group.rank(), group.size(), options)
        case _:
            raise ValueError(f"backend {name!r} for tensors on {device!r} is not available in this build of torch")
    whole = c10d.ProcessGroup(private, group.rank(), group.size())  # a backend alone has not all of its methods
    whole._register_backend(torch.device(device), kind, made)
    return whole


def _named(group: Any) -> dict[str, str]:
    """Return the backends the user named, by device type."""
    said = str(c10d.get_backend_config(group))
    return dict(pair.split(":", 1) for pair in said.split(",") if ":" in pair)
