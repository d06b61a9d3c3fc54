"""Scripts written for torch.distributed print the same when only their imports say rankmesh."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from support.processes import Rank, Ranks, free_port, wait_until

SCRIPTS = Path(__file__).parent.parent / "support" / "scripts"
IMPORTS = {
    "import torch.distributed as dist": "import rankmesh as dist",
    "import torch.multiprocessing as mp": "import rankmesh.multiprocessing as mp",
}
Command = Callable[[Path, str, int], list[str]]


def by_spawn(script: Path, library: str, size: int) -> list[str]:
    """Return the command line of a script that starts its ranks itself."""
    return [str(script), str(script.parent), str(size), str(free_port())]


def by_launcher(script: Path, library: str, size: int) -> list[str]:
    """Return the command line of the library's launcher for a script."""
    logs = ["--redirects", "1", "--log-dir", str(script.parent)]  # torchrun does not keep lines whole
    launchers = {
        "torch": ["torch.distributed.run", "--master-port", str(free_port()), *logs],
        "rankmesh": ["rankmesh.run"],
    }
    return ["-m", *launchers[library], "--nproc-per-node", str(size), str(script), str(script.parent)]


def copy_for(library: str, name: str, folder: Path) -> Path:
    """Write a script as it is for torch, or with its imports replaced."""
    source = (SCRIPTS / name).read_text()
    assert "import torch.distributed as dist" in source
    if library == "rankmesh":
        for old, new in IMPORTS.items():
            source = source.replace(old, new)
        assert "torch.distributed as" not in source
    path = folder / library / name
    path.parent.mkdir()
    path.write_text(source)
    return path


def printed(rank: Rank, folder: Path) -> list[str]:
    """Return the lines of a script, without what the launcher says; sorted, as the ranks' lines mix."""
    logged = [log.read_text() for log in folder.rglob("stdout.log")]
    lines = [line for text in [rank.stdout, *logged] for line in text.splitlines()]
    return sorted(re.sub(r"^\[rank \d+\] ", "", line) for line in lines if not line.startswith("[rankmesh]"))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "command", "size", "lines"),
    [
        ("tutorial.py", by_spawn, 2, 4 * 2),
        ("everything.py", by_launcher, 3, 20 * 3),
    ],
)
def test_a_script_prints_the_same(ranks: Ranks, name: str, command: Command, size: int, lines: int) -> None:
    scripts = {library: copy_for(library, name, ranks.folder) for library in ("torch", "rankmesh")}
    both = [
        ranks.command(*command(script, library, size), name=library, PYTHONUNBUFFERED="")
        for library, script in scripts.items()
    ]
    ranks.wait(both, seconds=90.0)
    assert [rank.code for rank in both] == [0, 0], ranks.transcript()
    torchs, ours = (printed(rank, scripts[library].parent) for library, rank in zip(scripts, both, strict=True))
    assert ours == torchs
    assert len(ours) == lines, ours
    wait_until(lambda: not ranks.left(), "multiprocessing's resource trackers, which end after the program")
