"""The list of planted faults fits the source: a fault that cannot be planted shows nothing."""

from __future__ import annotations

import mutants


def test_every_fault_can_be_planted() -> None:
    assert not [fault for fault in mutants.FAULTS if fault.is_stale()]
