"""The documentation's site: built strictly, complete, and without anything from other hosts."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import rankmesh

pytest.importorskip("material", reason="mkdocs-material is not installed; 'make .venv/.docs' installs it")
pytest.importorskip("mkdocstrings", reason="mkdocstrings is not installed; 'make .venv/.docs' installs it")
ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--config-file",
        str(config),
        "--site-dir",
        str(site),
    ]
    variables = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, env=variables, cwd=config.parent, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT / "mkdocs.yml", folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_nothing_is_loaded_from_other_hosts(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        text = page.read_text()
        assert not re.findall(r"<(?:script|link|img|iframe|source)\b[^>]*(?:src|href)=\"?(?:https?:)?//", text), page
        assert 'class="mermaid"' not in text, "the theme would load a renderer from another host"
    for sheet in site.rglob("*.css"):
        assert not re.findall(r"url\(['\"]?(?:https?:)?//|@import", sheet.read_text()), sheet


def test_the_api_has_all_functions_of_the_docstring(site: Path) -> None:
    text = (site / "python-api.html").read_text()
    _, _, topics = (rankmesh.__doc__ or "").partition("Functions, with")
    words = re.findall(r"\b[a-z]\w+\b", topics.partition("All errors")[0])
    names = {word for word in words if callable(getattr(rankmesh, word, None))}
    assert len(names) >= 40
    assert [name for name in sorted(names) if f'id="rankmesh.{name}"' not in text and f".{name}" not in text] == []


def test_http_and_commands_are_there(site: Path) -> None:
    http, commands = ((site / name).read_text() for name in ("reference/http.html", "cli.html"))
    agent, _, gateway = http.partition('<h2 id="the-gateway">')
    assert "POST /v1/groups/{group_id}/all_reduce" in agent
    assert "POST /v1/lease" in agent
    assert "GET /v1/diagnosis" in gateway
    links = set(re.findall(r'href="#((?:agent|gateway)-[^"]+)"', http))
    assert len(links) > 40
    assert [link for link in sorted(links) if f'id="{link}"' not in http] == []
    texts = ("rankmesh run", "--max-restarts", "rankmesh store get", "--request-timeout")
    assert all(text in commands for text in texts)


def test_launchers_and_libraries_are_tabs(site: Path) -> None:
    for page, tab in (("launching", "slurm"), ("torch", "lightning")):
        assert re.search(rf'<input id="{tab}" name="__tabbed_\d+"', (site / f"{page}.html").read_text()), page


def test_files_of_the_repository_are_pages(site: Path) -> None:
    assert "init_process_group" in (site / "source" / "examples" / "average.py.html").read_text()
    assert 'href="source/examples/train_digits.py.html"' in (site / "training-loop.html").read_text()
    assert 'href="../http.html"' in (site / "reference" / "http.html").read_text()


@pytest.mark.parametrize(
    "link", ["[a](no-such-page.md)", "[a](../no-such-file.py)", "[a](settings.md#no-such-heading)"]
)
def test_a_dead_link_fails_the_build(tmp_path: Path, link: str) -> None:
    for path in ROOT.iterdir():
        if path.name == "docs":
            shutil.copytree(path, tmp_path / path.name)
        elif not path.name.startswith(".") and path.name != "out":
            (tmp_path / path.name).symlink_to(path)
    page = tmp_path / "docs" / "training-loop.md"
    page.write_text(f"{page.read_text()}\n{link}\n")
    done = build(tmp_path / "mkdocs.yml", tmp_path / "out")
    assert done.returncode != 0
    assert "training-loop.md" in done.stderr
    assert "no-such" in done.stderr
