"""Platforms: ranks, gateways and agents are refused elsewhere than on Linux; the commands that inspect a job run."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.command import SECONDS, Done, Job, environment
from support.elsewhere import prelude

INSPECT = [
    ["status"],
    ["status", "world"],
    ["stacks", "0"],
    ["diagnose"],
    ["doctor", "--mib", "1"],
    ["store", "set", "key", "value"],
    ["store", "get", "key"],
    ["token", "--role", "read"],
    ["dashboard"],
    ["get", "/v1/ranks"],
]
SERVE = [["run", "train.py"], ["gateway"], ["agent"], ["bench"]]


def elsewhere(platform: str, program: str, *arguments: str, **variables: str) -> Done:
    command = [sys.executable, "-c", f"{prelude(platform)}\n{program}", *arguments]
    done = subprocess.run(command, env=environment(**variables), capture_output=True, text=True, timeout=SECONDS)
    return Done(done.returncode, done.stdout, done.stderr)


def commands(platform: str, lines: list[list[str]], **variables: str) -> list[Done]:
    """Run commands one after the other in one process, which prints the exit code of each."""
    program = f"""
from rankmesh.cli import main
for line in {lines!r}:
    sys.argv = ["rankmesh", *line]
    try:
        main()
    except SystemExit as end:
        sys.stdout.flush()
        print("\\nexit code", end.code)
"""
    done = elsewhere(platform, program, **variables)
    assert done.code == 0, done
    *outputs, rest = done.stdout.split("\nexit code ")
    codes = [int(each.partition("\n")[0]) for each in [*outputs[1:], rest]]
    return [Done(code, output, done.stderr) for code, output in zip(codes, outputs, strict=True)]


@pytest.mark.parametrize(("platform", "name"), [("darwin", "init_process_group"), ("win32", "multiprocessing")])
def test_ranks_are_refused_by_name(platform: str, name: str) -> None:
    done = elsewhere(platform, f"from rankmesh import {name}")
    assert done.code == 1
    assert f"run on Linux, and this is {platform}:" in done.stderr.splitlines()[-1]


def test_commands_that_serve_are_refused_in_words() -> None:
    platform = "darwin"
    found = commands(platform, SERVE)
    assert [done.code for done in found] == [2] * len(SERVE)
    assert (
        found[0].stderr.count(f"rankmesh: RankMesh's ranks, gateways and agents run on Linux, and this is {platform}")
        == 4
    )
    assert found[0].stderr.count("\n") == 4


@pytest.mark.processes
def test_commands_inspect_a_job(job: Job) -> None:
    found = commands("win32", INSPECT, RANKMESH_GATEWAY=job.url, RANKMESH_TOKEN=job.token)
    # A rank that has no processor for a second is a problem, and rightly reported.
    assert all(done.code in (0, 1) for done in found), found
    assert "Traceback" not in found[0].stderr
    assert "Ranks of" in found[0].stdout
    assert found[6].stdout.endswith("\nvalue")
