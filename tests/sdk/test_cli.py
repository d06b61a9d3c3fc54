"""The ``rankmesh`` command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from support.command import environment, here
from typer.testing import CliRunner

from rankmesh import cli, launch
from rankmesh_agent.wire.version import __version__


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--nproc_per_node", "2", "script.py", "--", "--nproc_per_node", "3"],
        ["-m", "--nnodes=1", "package.module", "--help", "-x", ""],
    ],
)
@pytest.mark.parametrize("command", ["run", "gateway", "agent"])
def test_arguments_are_passed_on_untouched(command: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[list[str]] = []

    def main(argv: list[str], prog: str = "rankmesh run") -> int:
        assert prog == f"rankmesh {command}"
        received.append(argv)
        return 7

    for package in ("rankmesh_gateway", "rankmesh_agent"):
        served = ModuleType(f"{package}.__main__")
        served.main = main  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, f"{package}.__main__", served)
    monkeypatch.setattr(launch, "main", main)
    result = CliRunner().invoke(cli.app, [command, *arguments])
    assert result.exit_code == 7
    assert received == [arguments]


def test_help_names_the_commands() -> None:
    result = CliRunner().invoke(cli.app, ["--help"])
    assert result.exit_code == 0
    for command in ("run", "gateway", "agent", "status", "store", "doctor", "bench"):
        assert command in result.stdout


@pytest.mark.processes
def test_the_version():
    assert here("--version") == (0, f"rankmesh {__version__}\n", "")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["statsu"], "rankmesh: No such command 'statsu'"),
        (["status", "--inteval"], "rankmesh: No such option: --inteval"),
        (["store", "get"], "rankmesh: Missing argument 'KEY'; try 'rankmesh store get --help'\n"),
    ],
    ids=["command", "option", "argument"],
)
def test_what_makes_no_sense_is_told_in_a_line(arguments: list[str], message: str):
    code, stdout, stderr = here(*arguments)
    assert (code, stdout, stderr.count("\n")) == (2, "", 1)
    assert stderr.startswith(message)


@pytest.mark.processes
def test_completion():
    script = here("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert script.code == 0
    assert "complete " in script.stdout
    words = {"COMP_WORDS": "rankmesh st", "COMP_CWORD": "1", "_RANKMESH_COMPLETE": "complete_bash"}
    code = "from rankmesh.cli import app; app(prog_name='rankmesh')"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(**words), capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["status", "stacks", "stragglers", "store"]


@pytest.mark.processes
def test_the_installed_command_runs_a_script(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import os, sys; print(os.environ['RANK'], *sys.argv[1:]); sys.exit(4)")
    rankmesh = str(Path(sys.executable).with_name("rankmesh"))
    done = subprocess.run(
        [rankmesh, "run", "script.py", "--", "--nproc-per-node=2"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.stdout == "[rank 0] 0 -- --nproc-per-node=2\n"
    assert done.returncode == 4
