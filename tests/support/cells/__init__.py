"""What is run on torch.distributed with gloo and on rankmesh alike, by subject; tests/torch/test_gloo.py compares."""

_IN_TORCH = ("calls", "functional", "groups", "sparse", "works")
RESULTS = [*(f"support.cells.in_torch.{each}" for each in _IN_TORCH), "support.cells.groups"]
"""The modules of calls that are to succeed; all but the last get groups, and are made by ranks in as many."""

MISTAKES = ["support.cells.mistakes"]
"""The module of calls that are not, after which gloo's world is not always usable."""
