"""Pages of docs/ that are written from the code are current; those beside the code name all of it."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

from rankmesh_agent.config.settings import Settings
from rankmesh_agent.config.tls import TlsSettings
from rankmesh_agent.wire.version import PROTOCOL_VERSION

DOCS = Path(__file__).parents[2] / "docs"
VARIABLE = re.compile(r"RANKMESH_[A-Z_]*[A-Z]")


def generator(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tree_of_errors_is_that_of_the_classes() -> None:
    text = (DOCS / "errors.md").read_text()
    assert generator("errors").page(text) == text, "run 'make docs'"


def test_the_algorithms_are_those_of_the_table() -> None:
    text = (DOCS / "algorithms.md").read_text()
    assert generator("algorithms").page(text) == text, "run 'make docs'"


def test_the_settings_are_those_that_are_read() -> None:
    read = set(VARIABLE.findall(f"{Settings.__doc__}{TlsSettings.__doc__}")) | {"RANKMESH_AS"}
    assert set(VARIABLE.findall((DOCS / "settings.md").read_text())) == read


def test_the_limits_of_the_settings_are_the_defaults() -> None:
    rows = dict(
        re.findall(r"^\| `(RANKMESH_\w+)`[ *]*\| ([^|]*?) \|", (DOCS / "settings.md").read_text(), re.MULTILINE)
    )
    units = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
    checked = 0
    for name in (
        "timeout",
        "max_body",
        "store_keys",
        "store_bytes",
        "flight_recorder",
        "slot_bytes",
        "eager_bytes",
        "full_mesh",
    ):
        number, unit = re.fullmatch(r"([\d ]+?) ?([KMG]iB|)", rows[f"RANKMESH_{name.upper()}"]).groups()
        assert int(number.replace(" ", "")) * units[unit] == getattr(Settings, name), name
        checked += 1
    assert checked == 8


def test_the_version_of_the_wire() -> None:
    assert f"| wire | protocol version {PROTOCOL_VERSION} |" in (DOCS / "install.md").read_text()


def test_urls_with_a_query_are_quoted() -> None:
    """In zsh, a word with a question mark is a pattern, which matches no file."""
    found = []
    for page in [*DOCS.glob("*.md"), DOCS.parent / "README.md"]:
        for block in re.findall(r"^```(?:console|bash|sh)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
            for line in block.splitlines():
                words = re.sub(r"'[^']*'|\"[^\"]*\"", "", line.partition(" #")[0])
                found += [(page.name, line)] if re.search(r"(^\S*\$ |^curl ).*/\S*\?\w+=", words) else []
    assert not found
