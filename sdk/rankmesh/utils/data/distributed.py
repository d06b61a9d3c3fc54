"""The sampler under the path that torch has it at, too: torch.utils.data.distributed."""

from __future__ import annotations

from rankmesh.utils.data._sampler import DistributedSampler

__all__ = ["DistributedSampler"]
