"""Mutants of a file: each is one change, in its place, and compiles; and the planted faults fit the source."""

from __future__ import annotations

from pathlib import Path

import mutants
import pytest

from tools import mutate


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("a < b", {"(a >= b)", "(a <= b)"}),
        ("é = 'ä', a is b", {"é = 'ä', (a is not b)"}),
        ("a and b and c", {"(a or b or c)", "(b and c)", "(a and c)", "(a and b)"}),
        ("if f(x): y", {"if (not f(x)): y"}),
        ("x = not y", {"x = (y)"}),
        ("x = True", {"x = False"}),
        ("x: Literal[1] = 2", {"x: Literal[1] = 3"}),
        ("def f():\n    return f", {"def f():\n    return None"}),
        ("f()\nx.y = z", {"pass\nx.y = z", "f()\npass"}),
        ("x = f'{a < b}'", set()),
    ],
)
def test_a_mutant_differs_in_one_place(text: str, changed: set[str]) -> None:
    found = list(mutate.mutants("agent/rankmesh_agent/store/table.py", text))
    assert {text[: each.start] + each.new + text[each.start + len(each.old) :] for each in found} == changed
    assert {each.room for each in found} <= {"agent/store"}


def test_mutants_of_a_module_compile() -> None:
    text = Path(mutate.__file__).read_text()
    for each in mutate.mutants("tools/mutate.py", text):
        compile(text[: each.start] + each.new + text[each.start + len(each.old) :], str(each), "exec")


def test_every_fault_can_be_planted() -> None:
    assert not [fault for fault in mutants.FAULTS if fault.is_stale()]
