"""The list of planted faults fits the source: a fault that cannot be planted shows nothing."""

from __future__ import annotations

import mutants


def test_every_fault_can_be_planted() -> None:
    texts = {fault.file: (mutants.ROOT / fault.file).read_text() for fault in mutants.FAULTS}
    stale = [(fault.file, fault.old) for fault in mutants.FAULTS if texts[fault.file].count(fault.old) != 1]
    assert not stale
