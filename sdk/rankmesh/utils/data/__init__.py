"""Data loading on several ranks, laid out like torch.utils.data."""

from __future__ import annotations

from rankmesh.utils.data._sampler import DistributedSampler

__all__ = ["DistributedSampler"]

DistributedSampler.__module__ = __name__
