"""Errors of calls that differ: the ranks that they name."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rankmesh_agent.backends.fingerprint import mismatch_error
from rankmesh_agent.wire.ops import Call, OpType

CALL = Call(OpType.ALL_TO_ALL)
OTHER = "barrier()"


@pytest.mark.parametrize(
    ("me", "calls", "named"),
    [
        (0, [("", "3"), ("", "2")], [1]),
        (1, [("", "3"), ("", "2")], [0]),
        (0, [("", "3"), ("", "2"), ("", "3")], [1]),
        (0, [("", "1, 2"), ("", "2, 1"), ("", "2, 2")], []),  # each rank has lengths of its own
        (0, [("", "3"), ("", "2"), (OTHER, "")], [2]),
    ],
)
def test_a_mismatch_names_the_ranks_whose_calls_differ(me: int, calls: list[tuple[str, str]], named: list[int]) -> None:
    ranked = [(call or str(CALL), "", details) for call, details in calls]
    context = SimpleNamespace(call=CALL, seq=7, global_ranks=range(len(calls)), describe=lambda: calls[me][1])
    error = mismatch_error(context, ranked)
    assert list(error.ranks) == named
    assert error.message.endswith("whose array has another shape or dtype")
    assert all(f"rank {rank}: " in error.message for rank in range(len(calls)))


def test_a_mismatch_names_the_lines_that_are_known() -> None:
    here = str(CALL), "a.py:3 in f", ""
    calls = [here, (str(CALL), "", ""), (OTHER, "b.py:4 in g", ""), here]
    error = mismatch_error(SimpleNamespace(call=CALL, seq=7, global_ranks=range(4), describe=str), calls)
    lines = f"rank 2 calls {OTHER} at b.py:4 in g; ranks 0, 3 call {CALL} at a.py:3 in f"
    assert error.message.endswith(f"whose array has another shape or dtype: {lines}")
