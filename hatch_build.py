"""The project's address in the metadata of a build: ``REPOSITORY=https://… make wheel``; without it, there is none."""

from __future__ import annotations

import os
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class ProjectUrls(MetadataHookInterface):
    """Adds the URLs of the repository to the metadata."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Fill in ``urls``, which pyproject.toml declares as dynamic."""
        repository = os.environ.get("REPOSITORY", "").rstrip("/")
        metadata["urls"] = {"Repository": repository, "Issues": f"{repository}/issues"} if repository else {}
