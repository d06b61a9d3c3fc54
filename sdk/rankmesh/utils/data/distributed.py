"""DistributedSampler under torch's path, torch.utils.data.distributed."""

from __future__ import annotations

from rankmesh.utils.data._sampler import DistributedSampler

__all__ = ["DistributedSampler"]
