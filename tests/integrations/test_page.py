"""docs/integrations.md is true: its commands print what it says, and the weights are those of gloo."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from support.consoles import Step, steps_of
from support.processes import Rank, Ranks, free_port, wait_until

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/integrations.md").read_text()
REQUIREMENTS = (Path(__file__).parent / "requirements.txt").read_text()
LIBRARIES = {
    "PyTorch DDP": "torch",
    "PyTorch FSDP2": "torch",
    "Lightning": "lightning",
    "Hugging Face accelerate": "accelerate",
    "Hugging Face Trainer": "transformers",
    "DeepSpeed": "deepspeed",
    "ignite": "pytorch-ignite",
    "torchft": "torchft",
    "Ray Train": "ray",
    "Dask": "distributed",
    "MONAI": "monai",
}
"""The distribution that a section of the page is about."""
CONSTRUCTS_GLOO = ("torchft",)
"""Sections whose library constructs gloo's own class, which RANKMESH_AS does not replace."""
PORT = "8786"
"""Dask's, in whose place a free one is taken."""
NOTE = """[rankmesh] torch's backend "gloo" is RankMesh in this job"""
SUMMARY = re.compile(r"^(?:\[rank 0\] )?(\S+), (.*: loss \d\.\d{3}), weights ([0-9a-f]{16})$", re.MULTILINE)
SECONDS = 300.0
_AS_GLOO = re.compile(r" --as-gloo\b|\bRANKMESH_AS=gloo ")
_QUIET = {"HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0"}
"""The machine may have no network."""


class Section(NamedTuple):
    """A section of the page.

    Attributes:
        code: its Python.
        before: commands that start services.
        last: the program's command, with what it prints.
    """

    code: str
    before: list[str]
    last: Step


def section_of(title: str) -> Section:
    text = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    (code,) = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    *before, last = steps_of(text)
    return Section(code, [step.command for step in before], last)


def version_of(library: str) -> str:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        found = re.search(rf"^{re.escape(library)}\b.*$", REQUIREMENTS, re.MULTILINE)
        missing = f"{library} is not installed: pip install {shlex.quote(found[0] if found else library)}"
        if os.environ.get("RANKMESH_REQUIRE_INTEGRATIONS") == "1":
            pytest.fail(missing)
        pytest.skip(missing)


def start(ranks: Ranks, name: str, before: list[str], command: str, **variables: str) -> Rank:
    """Run a section's commands in a shell, which ends the services after the program."""
    ending = """trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT"""
    script = "\n".join([ending, *before, command]).replace(PORT, str(free_port()))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    own = {"PATH": path, "HOME": str(ranks.folder), "RANKMESH_JOB": f"{ranks.job}-{name}", "PYTHONUNBUFFERED": ""}
    return ranks.launch(["bash", "-c", script], name=name, **_QUIET, **own, **variables)


def start_all(ranks: Ranks, title: str) -> dict[str, Rank]:
    """Run a section's program over gloo, over the mesh by its own name, and over the mesh by gloo's."""
    _, before, last = section_of(title)
    command = last.command
    if _AS_GLOO.search(command):
        return {
            "gloo": start(ranks, "gloo", before, _AS_GLOO.sub("", command)),
            "as-gloo": start(ranks, "as-gloo", before, command),
        }
    over_gloo = f"{command} --backend gloo"
    started = {
        "gloo": start(ranks, "gloo", before, over_gloo),
        "rankmesh": start(ranks, "rankmesh", before, command),
    }
    if title not in CONSTRUCTS_GLOO:
        started["as-gloo"] = start(ranks, "as-gloo", before, over_gloo, RANKMESH_AS="gloo")
    return started


def summary_of(rank: Rank) -> tuple[str, str, str]:
    """Return the backend, the ranks with the loss, and the digest that a program printed."""
    found = SUMMARY.findall(rank.stdout)
    assert len(found) == 1, rank
    return found[0]


def without_digest(printed: str) -> str:
    return SUMMARY.sub(lambda found: found[0].replace(found[3], "…"), printed)


def test_every_section_of_the_page_is_run() -> None:
    assert re.findall(r"^## (.*)$", PAGE, re.MULTILINE) == list(LIBRARIES)


@pytest.mark.parametrize("title", LIBRARIES)
def test_the_pages_code_is_the_programs(title: str) -> None:
    section = section_of(title)
    (program,) = re.findall(r"examples/integrations/\w+\.py", section.last.command)
    assert section.code in (ROOT / program).read_text()
    assert section.last.command.replace("\n", " ") in " ".join((ROOT / program).read_text().split())


@pytest.mark.processes
@pytest.mark.parametrize("title", LIBRARIES)
def test_the_weights_are_those_of_gloo(title: str, ranks: Ranks, record_property) -> None:
    version = version_of(LIBRARIES[title])
    (ranks.folder / "examples").symlink_to(ROOT / "examples")
    started = start_all(ranks, title)
    ranks.wait(list(started.values()), SECONDS)
    assert {rank.code for rank in started.values()} == {0}, ranks.transcript()
    wait_until(lambda: not ranks.left(), "the library's services to end", 60.0)

    found = {name: summary_of(rank) for name, rank in started.items()}
    digests = {name: digest for name, (_, _, digest) in found.items()}
    equal = len(set(digests.values())) == 1
    cells = [digests.get(name, "—") for name in ("gloo", "rankmesh", "as-gloo")]
    record_property("row", [list(LIBRARIES).index(title), title, version, *cells, "yes" if equal else "NO"])
    assert equal, found
    assert len({losses for _, losses, _ in found.values()}) == 1

    shown = section_of(title).last.printed
    paged = started["rankmesh"] if "rankmesh" in started else started["as-gloo"]
    assert without_digest(shown) in without_digest(paged.stdout), paged
    for name, rank in started.items():
        backend = found[name][0]
        assert backend.endswith("rankmesh" if name == "rankmesh" else "gloo"), rank
        assert (NOTE in rank.stdout + rank.stderr) == (name == "as-gloo"), rank
