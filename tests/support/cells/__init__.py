"""What is run on torch.distributed with gloo and on rankmesh alike, by subject; tests/torch compares."""

RESULTS = [
    f"support.cells.{subject}"
    for subject in ("reductions", "moves", "messages", "objects", "groups", "works", "tensors")
]  # fmt: skip
"""The modules of calls that are to succeed."""

MISTAKES = ["support.cells.absences", "support.cells.mistakes"]
"""Those of calls that are not; last the ones after which gloo's world is not always usable."""

STARTS = ["support.cells.starts"]
"""Those of calls of a process that is in no job."""

IN_TORCH = [f"support.cells.in_torch.{subject}" for subject in ("calls", "functional", "groups", "sparse", "works")]
"""Those of calls that only torch.distributed has, in two groups of one job: over the mesh, and gloo's."""
