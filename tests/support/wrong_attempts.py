"""Makes the calls of the table of wrong calls (wrong.py), and checks their outcomes.

The driver of a medium calls ``try_invalid`` and ``try_mismatched`` at every rank, and passes the outcomes of all ranks
to ``check_invalid`` and ``check_mismatched``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from support.wrong import LARGE, MISMATCHED, SIZE, WRONG, Call, Caller

Outcome = dict[str, Any]
Attempts = dict[str, list[Outcome]]
"""Outcomes of the calls of a rank, by name."""


def try_invalid(api: Any, rank: int, names: Iterable[str] = WRONG) -> Attempts:
    """Make every invalid call at rank 1 alone, then at all ranks; return the outcomes.

    After each, all ranks sum up: had anything of it been sent, that would not match.
    """
    return {
        name: [attempt(api, rank, WRONG[name].call, makes_it=rank == 1), attempt(api, rank, WRONG[name].call)]
        for name in names
    }


def try_mismatched(api: Any, rank: int, names: Iterable[str] = MISMATCHED, *, queued: bool = True) -> Attempts:
    """Make the calls that differ, by the caller's thread and, if ``queued``, by the worker's; return the outcomes."""
    hows = [lambda call: call, _behind_a_barrier][: 1 + queued]
    return {name: [attempt(api, rank, how(MISMATCHED[name])) for how in hows] for name in names}


def attempt(api: Any, rank: int, call: Call, *, makes_it: bool = True) -> Outcome:
    """Make a wrong call; return its error, and whether arrays and group are as they were."""
    caller, found = Caller(rank), {}
    if makes_it:
        found = {"error": "none", "text": "", "op": None, "problem": None}
        try:
            call(api, caller)
        except Exception as error:
            found = {"error": type(error).__name__, "text": str(error)}
            found |= {name: getattr(error, name, None) for name in ("op", "problem")}
    return {**found, "unchanged": caller.unchanged(), "usable": usable(api, rank)}


def usable(api: Any, rank: int) -> bool:
    """Reduce over all ranks; return whether the results are right."""
    totals = np.full(4, rank + 1), np.full(LARGE, rank + 1)
    try:
        for total in totals:
            api.all_reduce(total)
    except Exception:  # a wrong call was made after all, and the others' sums met it
        api.all_reduce(np.ones(4, int))
    return all((total == 6).all() for total in totals)


def _behind_a_barrier(call: Call) -> Call:
    """Return a call behind an asynchronous one, so that the worker thread executes it."""

    def make(api: Any, caller: Caller) -> None:
        work = api.barrier(async_op=True)
        call(api, caller)
        work.wait()

    return make


def check_invalid(name: str, of_ranks: Sequence[Attempts], *, http: bool = False) -> None:
    """Fail unless an invalid call raised what the table has, at every rank that made it, and did nothing else."""
    wrong = WRONG[name]
    status, code, says = wrong.http if http else (None, None, wrong.says)
    attempts = [attempt for found in of_ranks for attempt in found[name]]
    made = [attempt for attempt in attempts if "error" in attempt]
    assert len(made) == 1 + SIZE, "rank 1 made it alone, then with the others"
    for attempt in made:
        assert attempt["problem"] == [status, code] if http else attempt["error"] == wrong.error.__name__, (
            name,
            attempt,
        )
        assert re.search(says, attempt["text"]), (name, attempt)
    assert all(attempt["unchanged"] and attempt["usable"] for attempt in attempts), (name, attempts)


def check_mismatched(name: str, of_ranks: Sequence[Attempts]) -> None:
    """Fail unless calls that differ raised the same at every rank, with each rank's call, and changed nothing."""
    for attempts in zip(*(found[name] for found in of_ranks), strict=True):
        assert len({attempt["text"] for attempt in attempts}) == 1, (name, attempts)
        for rank, attempt in enumerate(attempts):
            over_http = attempt["problem"] == [409, "collective-mismatch"]
            assert over_http or attempt["error"] == "CollectiveMismatchError", (name, attempt)
            assert "the ranks did not make the same call" in attempt["text"], (name, attempt)
            assert f"rank {rank}: {attempt['op']}(" in attempt["text"], (name, attempt)
            assert all((attempt["unchanged"], attempt["usable"])), (name, attempt)
