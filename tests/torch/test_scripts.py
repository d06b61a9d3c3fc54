"""A script written for torch.distributed prints the same when only its import says rankmesh."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.processes import Rank, Ranks, free_port, wait_until

SCRIPTS = Path(__file__).parent.parent / "support" / "scripts"
IMPORT = "import torch.distributed as dist"
SIZE = 3


def command_of(script: Path, library: str) -> list[str]:
    """Return the command line of the library's launcher for a script."""
    logs = ["--redirects", "1", "--log-dir", str(script.parent)]  # torchrun does not keep lines whole
    launchers = {
        "torch": ["torch.distributed.run", "--master-port", str(free_port()), *logs],
        "rankmesh": ["rankmesh.run"],
    }
    return ["-m", *launchers[library], "--nproc-per-node", str(SIZE), str(script), str(script.parent)]


def copy_for(library: str, folder: Path) -> Path:
    """Write the script as it is for torch, or with its import replaced."""
    source = (SCRIPTS / "everything.py").read_text()
    assert source.count("torch.distributed") == source.count(IMPORT) == 1
    path = folder / library / "everything.py"
    path.parent.mkdir()
    path.write_text(source if library == "torch" else source.replace(IMPORT, "import rankmesh as dist"))
    return path


def printed(rank: Rank, folder: Path) -> list[str]:
    """Return the lines of a script, without what the launcher says; sorted, as the ranks' lines mix."""
    logged = [log.read_text() for log in folder.rglob("stdout.log")]
    lines = [line for text in [rank.stdout, *logged] for line in text.splitlines()]
    return sorted(re.sub(r"^\[rank \d+\] ", "", line) for line in lines if not line.startswith("[rankmesh]"))


@pytest.mark.processes
def test_a_script_prints_the_same(ranks: Ranks) -> None:
    scripts = {library: copy_for(library, ranks.folder) for library in ("torch", "rankmesh")}
    both = [
        ranks.command(*command_of(script, library), name=library, PYTHONUNBUFFERED="")
        for library, script in scripts.items()
    ]
    ranks.wait(both, seconds=90.0)
    assert [rank.code for rank in both] == [0, 0], ranks.transcript()
    torchs, ours = (printed(rank, scripts[library].parent) for library, rank in zip(scripts, both, strict=True))
    assert ours == torchs
    assert len(ours) == 20 * SIZE, ours
    wait_until(lambda: not ranks.left(), "multiprocessing's resource trackers, which end after the program")
