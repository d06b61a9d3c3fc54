"""docs/observing.md: what the commands of the page print."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from support.consoles import below, fits, run, steps_of
from support.processes import Ranks, complaints_in

PAGE = Path(__file__).parents[2] / "docs" / "observing.md"

pytestmark = pytest.mark.processes


def test_the_page(ranks: Ranks) -> None:
    page = below(PAGE.read_text(), "A slow job")
    text = re.sub(r"^(\$ .*rankmesh stragglers)", r"\1 --patience 20", page, flags=re.MULTILINE)
    (script,) = re.findall(r"^```python\n(# train.py\n.*?)^```$", text, re.DOTALL | re.MULTILINE)
    (ranks.folder / "train.py").write_text(script)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    steps = steps_of(text)
    printed = run(steps, ranks.folder, ranks.environment(PATH=path), 180.0)
    assert len(printed) == len(steps) == 7
    for step, found in zip(steps, printed, strict=True):
        assert fits(complaints_in(found), step.printed), f"line {step.line}: $ {step.command}\nit printed:\n{found}"
