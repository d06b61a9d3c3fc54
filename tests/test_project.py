"""Files of the project itself: they agree with the code, and name commands that exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rankmesh_agent.wire.version import __version__

yaml = pytest.importorskip("yaml", reason="PyYAML reads these files; it comes with the development dependencies")
ROOT = Path(__file__).parents[1]
TARGETS = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def read(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text())


def test_the_citation_is_of_this_version() -> None:
    citation = read("CITATION.cff")
    assert citation["version"] == __version__
    section = re.search(
        rf"^## \[{re.escape(__version__)}\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    assert section is not None
    assert section[1] == str(citation["date-released"])


def test_workflows_run_targets_that_exist_with_all_supported_pythons() -> None:
    texts = {path.name: path.read_text() for path in (ROOT / ".github" / "workflows").glob("*.yml")}
    commands = [words for text in texts.values() for words in re.findall(r"\bmake ([a-z][^\n}|]*)", text)]
    named = {word for words in commands for word in words.split() if re.fullmatch(r"[a-z][\w-]*", word)}
    assert {"test", "check", "wheel"} <= named <= TARGETS
    classifiers = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text())
    assert yaml.safe_load(texts["ci.yml"])["jobs"]["test"]["strategy"]["matrix"]["python"] == classifiers


@pytest.mark.parametrize("how", ["argument", "variable"])
def test_make_does_not_ignore_another_python(tmp_path: Path, how: str) -> None:
    """The virtual environment that is there is of one Python."""
    other = tmp_path / "python"
    other.write_text("#!/bin/sh\necho another version\n")
    other.chmod(0o755)
    folder = tmp_path / "venv" / "bin"
    folder.mkdir(parents=True)
    (folder / "python").symlink_to(sys.executable)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHON"}

    def make(python: str, *targets: str) -> subprocess.CompletedProcess[str]:
        arguments, variables = ([f"PYTHON={python}"], {}) if how == "argument" else ([], {"PYTHON": python})
        command = ["make", "--dry-run", "--file", str(ROOT / "Makefile"), f"VENV={tmp_path}/venv", *arguments, *targets]
        variables = {**environment, **variables}
        return subprocess.run(
            command, env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
        )

    assert make(str(other), "clean").returncode == 0
    assert make(sys.executable, "clean").returncode == 0
    refused = make(str(other), "test")
    assert refused.returncode == 2
    assert f"venv has another Python than {other}" in refused.stderr
    assert "another Python" not in make(sys.executable, "test").stderr


def test_hooks_are_tools_of_the_environment() -> None:
    for hook in read(".pre-commit-config.yaml")["repos"][0]["hooks"]:
        tool = hook["entry"].split()[0].removeprefix(".venv/bin/")
        assert f'"{tool}>=' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    "form", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.name
)
def test_issue_forms(form: Path) -> None:
    document = yaml.safe_load(form.read_text())
    if form.name == "config.yml":
        return
    assert {"name", "description", "body"} <= document.keys()
    kinds = {"markdown", "textarea", "input", "dropdown", "checkboxes"}
    assert all(element["type"] in kinds and element["attributes"] for element in document["body"])
