"""Why a target is missed, by its row in ``targets``: what a profile says limits it. Completes "missed, because ..."."""

from __future__ import annotations

REASONS: dict[str, str] = {}
