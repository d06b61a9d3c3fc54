"""docs/architecture.md: its chart is the code's, and the files in it exist."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "architecture.md"


def test_the_chart_shows_the_imports_of_today() -> None:
    spec = importlib.util.spec_from_file_location("docs_imports", ROOT / "docs" / "imports.py")
    assert spec is not None
    assert spec.loader is not None
    imports = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(imports)
    text = PAGE.read_text(encoding="utf-8")
    assert imports.page(text) == text, "run 'make docs'"
    assert "rankmesh_agent.progress --> rankmesh_agent.collectives" in text


def test_every_file_and_function_on_the_page_exists() -> None:
    text = PAGE.read_text(encoding="utf-8")
    paths = set(re.findall(r"`((?:agent|gateway|sdk)/[\w/]+\.py)`", text))
    assert len(paths) > 20
    assert [path for path in sorted(paths) if not (ROOT / path).is_file()] == []
    sources = "\n".join((ROOT / path).read_text() for path in paths)
    names = set(re.findall(r"`(?:\w+\.)?(\w+)`", " ".join(re.findall(r"`[A-Z]\w+\.\w+`", text))))
    assert [name for name in sorted(names) if f"def {name}(" not in sources] == []
