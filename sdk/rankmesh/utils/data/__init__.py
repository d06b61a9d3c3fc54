"""Loading data on several ranks, after torch.utils.data."""

from __future__ import annotations

from rankmesh.utils.data._sampler import DistributedSampler

__all__ = ["DistributedSampler"]
