"""tests/security/README.md: every test that it names exists, and it names every test of its folder."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_names_the_tests_of_all_promises() -> None:
    page = ROOT / "tests" / "security" / "README.md"
    rows = [line for line in page.read_text().splitlines() if line.startswith("| ")]
    named = re.findall(r"`(test_\w+\.py::test_\w+)`", "\n".join(rows))
    existing = {
        f"{path.name}::{name}"
        for path in (ROOT / "tests" / "security").glob("test_*.py")
        for name in re.findall(r"^ *(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    assert sorted(set(named)) == sorted(named), "a test is named twice"
    assert set(named) - existing == set(), "no such tests"
    assert existing - set(named) == set(), "tests without a promise in tests/security/README.md"
