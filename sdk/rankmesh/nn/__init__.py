"""Training helpers, laid out like torch.nn."""

from __future__ import annotations

from rankmesh.nn._bucketer import GradientBucketer

__all__ = ["GradientBucketer"]

GradientBucketer.__module__ = __name__
