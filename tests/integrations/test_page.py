"""docs/torch.md is true: its commands print what it says, and the weights are those of gloo."""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from support.consoles import Step, below, steps_of
from support.processes import Rank, Ranks, free_port, wait_until

ROOT = Path(__file__).parents[2]
PAGE = below((ROOT / "docs/torch.md").read_text(), "Libraries")
LIBRARIES = {
    "PyTorch DDP": "torch",
    "PyTorch FSDP2": "torch",
    "Lightning": "lightning",
    "Hugging Face accelerate": "accelerate",
    "Hugging Face Trainer": "transformers",
    "DeepSpeed": "deepspeed",
    "ignite": "pytorch-ignite",
    "torchft": "torchft",
    "torchft-nightly": "torchft-nightly",
    "Ray Train": "ray",
    "Dask": "distributed",
    "MONAI": "monai",
}
"""The distribution that a row of the page's table is about."""
BESIDE = Path(sys.prefix, "beside")
"""Folder of a distribution whose package another one has, too."""
CONSTRUCTS_GLOO = ("torchft", "torchft-nightly")
"""Rows whose library constructs gloo's own class, which RANKMESH_AS does not replace."""
PORT = "8786"
"""Dask's, in whose place a free one is taken."""
NOTE = """[rankmesh] torch's backend "gloo" is RankMesh in this job"""
SUMMARY = re.compile(r"^(?:\[rank 0\] )?(\S+), (.*: loss \d\.\d{3}), weights ([0-9a-f]{16})$", re.MULTILINE)
SECONDS = 600.0
_AS_GLOO = re.compile(r" --as-gloo\b|\bRANKMESH_AS=gloo ")
_QUIET = {"HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0"}
"""The machine may have no network."""


class Section(NamedTuple):
    """A section of the page.

    Attributes:
        code: its Python.
        before: commands that start services.
        last: the program's command, with what it prints.
        program: its path.
    """

    code: str
    before: list[str]
    last: Step
    program: str


def title_of(name: str) -> str:
    return name.removesuffix("-nightly")


def section_of(name: str) -> Section:
    text = below(PAGE, title_of(name))
    (code,) = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    *before, last = steps_of(text)
    (program,) = re.findall(r"examples/integrations/\w+\.py", last.command)
    return Section(code, [step.command for step in before], last, program)


def version_of(library: str) -> str:
    for found in importlib.metadata.distributions(name=library, path=[*sys.path, str(BESIDE)]):
        return found.version.partition("+")[0]
    missing = f"{library} is not installed: see tests/integrations/requirements.txt"
    if os.environ.get("RANKMESH_REQUIRE_INTEGRATIONS") == "1":
        pytest.fail(missing)
    pytest.skip(missing)


def start(ranks: Ranks, name: str, before: list[str], command: str, **variables: str) -> Rank:
    """Run a section's commands in a shell, which ends the services after the program; all end when the time is over."""
    ending = """trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT"""
    script = "\n".join([ending, *before, command]).replace(PORT, str(free_port()))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    own = {"PATH": path, "HOME": str(ranks.folder), "RANKMESH_JOB": f"{ranks.job}-{name}", "PYTHONUNBUFFERED": ""}
    shell = ["timeout", "--kill-after=30", f"{SECONDS:g}", "bash", "-c", script]
    return ranks.launch(shell, name=name, **_QUIET, **own, **variables)


def run_all(ranks: Ranks, name: str) -> dict[str, Rank]:
    """Run a section's program over gloo, then over the mesh by its own name, then over the mesh by gloo's."""
    section = section_of(name)
    command = section.last.command
    over_gloo, as_gloo = f"{command} --backend gloo", {"RANKMESH_AS": "gloo"}
    commands = {"gloo": (over_gloo, {}), "rankmesh": (command, {}), "as-gloo": (over_gloo, as_gloo)}
    if _AS_GLOO.search(command):
        commands = {"gloo": (_AS_GLOO.sub("", command), {}), "as-gloo": (command, {})}
    elif name in CONSTRUCTS_GLOO:
        del commands["as-gloo"]
    beside = {"PYTHONPATH": str(BESIDE)} if title_of(name) != name else {}
    started = {}
    for way, (command, variables) in commands.items():
        started[way] = start(ranks, way, section.before, command, **variables, **beside)
        ranks.wait([started[way]], SECONDS + 60)
        assert started[way].code == 0, ranks.transcript()
        wait_until(lambda: not ranks.left(), "the library's services to end", 60.0)
    return started


def summary_of(rank: Rank) -> tuple[str, str, str]:
    """Return the backend, the ranks with the loss, and the digest that a program printed."""
    found = SUMMARY.findall(rank.stdout)
    assert len(found) == 1, rank
    return found[0]


def without_digest(printed: str) -> str:
    return SUMMARY.sub(lambda found: found[0].replace(found[3], "…"), printed)


def row_of(name: str, version: str, digests: dict[str, str]) -> str:
    """Return a row of the page's table."""
    anchor = title_of(name).lower().replace(" ", "-")
    gloo = digests["gloo"]
    ways = [digests.get(way, "—").replace(gloo, "yes") for way in ("rankmesh", "as-gloo")]
    return f"| [{name}](#{anchor}) | {version} | {' | '.join(ways)} | {gloo} |"


def test_every_program_is_run() -> None:
    sections = {title: section_of(title) for title in map(title_of, LIBRARIES)}
    assert re.findall(r"^### (.*)$", PAGE, re.MULTILINE) == list(sections)
    programs = {str(path.relative_to(ROOT)) for path in ROOT.glob("examples/integrations/*.py")}
    assert programs == {section.program for section in sections.values()} | {"examples/integrations/task.py"}


def test_the_pages_versions_are_the_pinned_ones() -> None:
    texts = [path.read_text() for path in (ROOT / "Makefile", *Path(__file__).parent.glob("*.txt"))]
    pins = dict(re.findall(r"^([\w-]+)\S* *[?=]= *(\S+)", "\n".join(texts).lower(), re.MULTILINE))
    versions = re.findall(r"^\| \[([^]]+)\]\(#\S+\) \| (\S+) \|", PAGE, re.MULTILINE)
    assert versions == [(name, pins[library]) for name, library in LIBRARIES.items()]


@pytest.mark.parametrize("title", dict.fromkeys(map(title_of, LIBRARIES)))
def test_the_pages_code_is_the_programs(title: str) -> None:
    section = section_of(title)
    program = (ROOT / section.program).read_text()
    assert section.code in program
    assert section.last.command.replace("\n", " ") in " ".join(program.split())


@pytest.mark.processes
@pytest.mark.parametrize("name", LIBRARIES)
def test_the_weights_are_those_of_gloo(name: str, ranks: Ranks, record_property) -> None:
    version = version_of(LIBRARIES[name])
    (ranks.folder / "examples").symlink_to(ROOT / "examples")
    started = run_all(ranks, name)
    found = {way: summary_of(rank) for way, rank in started.items()}
    digests = {way: digest for way, (_, _, digest) in found.items()}
    record_property("row", row_of(name, version, digests))
    assert len(set(digests.values())) == 1, found
    assert len({losses for _, losses, _ in found.values()}) == 1

    paged = started["rankmesh"] if "rankmesh" in started else started["as-gloo"]
    assert section_of(name).last.printed in without_digest(paged.stdout), paged
    for way, rank in started.items():
        assert found[way][0].endswith("rankmesh" if way == "rankmesh" else "gloo"), rank
        assert (NOTE in rank.stdout + rank.stderr) == (way == "as-gloo"), rank
