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
    calls = [(call or str(CALL), details) for call, details in calls]
    context = SimpleNamespace(call=CALL, seq=7, global_ranks=range(len(calls)), describe=lambda: calls[me][1])
    error = mismatch_error(context, calls)
    assert list(error.ranks) == named
    assert all(f"rank {rank}: " in error.message for rank in range(len(calls)))
