"""docs/cli.md: its commands work, and print what it says.

Lines without digits must be there as they are, but for the spaces; those with digits vary from run to run, except under
``rankmesh store``.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from support.command import Done, Job, environment, here, until_it_fits

from rankmesh._cli import exit_codes

pytestmark = pytest.mark.processes

PAGE = Path(__file__).parents[3] / "docs/cli.md"
NOT_HERE = (
    "rankmesh --install-completion",  # it writes to the home folder
    "rankmesh run --nproc-per-node 3 --max-restarts 2 train.py",  # the reader's own script; launcher/test_restart.py
    "rankmesh run --nproc-per-node 4 --max-restarts 3 --replace train.py",  # launcher/test_replace.py
)


def sections() -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield the title of each section with commands, and its commands with what they print."""
    for section in PAGE.read_text().split("\n## ")[1:]:
        found = []
        for block in re.findall(r"```console\n(.*?)```", section, re.DOTALL):
            for part in block.split("$ ")[1:] if block.startswith("$ ") else []:
                command, _, output = part.partition("\n")
                if command not in NOT_HERE:
                    found.append((command, output))
        if found:
            yield section.partition("\n")[0], found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the command, for the PATH."""
    script = tmp_path / "rankmesh"
    script.write_text(f"#!{sys.executable}\nfrom rankmesh.cli import main\nmain()\n")
    script.chmod(0o755)
    return tmp_path


SECTIONS = dict(sections())


@pytest.mark.parametrize("title", SECTIONS)
def test_commands(job: Job, folder: Path, title: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(folder)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    variables = environment(RANKMESH_GATEWAY=job.url, RANKMESH_TOKEN=job.token, PATH=path)

    def run(command: str) -> Done:
        if re.fullmatch(r"rankmesh [^|;$]+", command):
            return job.here(*shlex.split(command)[1:])
        shell = subprocess.run(["bash", "-c", command], env=variables, capture_output=True, text=True, timeout=120)
        return Done(shell.returncode, shell.stdout, shell.stderr)

    for command, expected in SECTIONS[title]:
        if title == "store":
            done = run(command)
            assert done.code == 0, done
            # On a terminal a line break follows a value that has none.
            assert (done.stdout.rstrip("\n") + "\n" + done.stderr).split() == expected.split() or sorted(
                (done.stderr + done.stdout).split()
            ) == sorted(expected.split()), command
            continue
        lines = [line.split() for line in expected.splitlines() if not re.search(r"\d|compiled core", line)]
        wanted = {" ".join(line) for line in lines if line}
        until_it_fits(partial(run, command), partial(fits, wanted))


def fits(wanted: set[str], done: Done) -> bool:
    """Whether a command has succeeded, and printed these lines."""
    return done.code == 0 and wanted <= {" ".join(line.split()) for line in done.stdout.splitlines()}


def test_every_command_is_on_the_page():
    from rankmesh.cli import app

    names = {info.name or info.callback.__name__ for info in app.registered_commands if info.callback}
    names |= {info.typer_instance.info.name for info in app.registered_groups if info.typer_instance}
    assert {f"`rankmesh {name}`" for name in names} <= set(re.findall(r"`rankmesh \w+`", PAGE.read_text()))


def test_every_exit_code_is_on_the_page():
    codes = {value for name, value in vars(exit_codes).items() if name.isupper() and isinstance(value, int)}
    rows = re.findall(r"^\| (\d+) \|", PAGE.read_text(), re.MULTILINE)
    assert {int(row) for row in rows} == codes


@pytest.mark.parametrize("words", [[], ["status"], ["store"], ["store", "set"], ["doctor"]], ids=" ".join)
def test_h_shows_the_help_in_the_users_words(words: list[str]):
    short, long = (here(*words, flag) for flag in ("-h", "--help"))
    assert (short.code, short.stderr) == (0, "")
    assert short == long
    assert not re.search(r"<(float|bool|int|list|dir)|\[\[|\.\.\.$", short.stdout)
