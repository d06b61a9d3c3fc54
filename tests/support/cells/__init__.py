"""What is run on torch.distributed with gloo and on rankmesh alike, by subject; tests/torch/test_gloo.py compares."""

_IN_TORCH = ("calls", "functional", "groups", "sparse", "works")
_ANYWHERE = ("objects", "groups", "works")
RESULTS = [f"support.cells.{each}" for each in (*(f"in_torch.{each}" for each in _IN_TORCH), *_ANYWHERE)]
"""The modules of calls that are to succeed; the first ones get groups, and are made by ranks in as many."""

MISTAKES = ["support.cells.starts", "support.cells.absences", "support.cells.mistakes"]
"""The modules of calls that are not; last the ones after which gloo's world is not always usable."""
