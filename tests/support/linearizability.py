"""Histories of calls to a store by several clients, and whether one store could have answered so.

A history is linearizable if each call can be given a moment between its invocation and its response, such that the
results are those of the calls one after the other. A call without a response may have taken effect at any time after
its invocation, or never. Keys are independent, so each is checked alone: Wing and Gong's search, with a memory of the
states that have been tried.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

UNKNOWN = "unknown"
Value = str | None


class Call(NamedTuple):
    """One call of one client; ``result`` is UNKNOWN, and ``responded`` infinite, if it did not respond."""

    client: str
    name: str
    key: str
    arguments: tuple[Any, ...]
    invoked: float
    responded: float
    result: Any


def read(files: Iterable[Path]) -> list[Call]:
    """Return the calls that clients recorded, one file each: a line before each call, and one after it."""
    calls = []
    for file in files:
        invoked: dict[str, Any] | None = None
        for line in file.read_text().splitlines(keepends=True):
            if not line.endswith("\n"):  # it was killed in the middle
                break
            entry = json.loads(line)
            if "name" in entry:
                if invoked is not None:
                    calls.append(_call(file.name, invoked, math.inf, UNKNOWN))
                invoked = entry
            elif invoked is not None:
                known = "result" in entry
                calls.append(
                    _call(file.name, invoked, entry["at"] if known else math.inf, entry.get("result", UNKNOWN))
                )
                invoked = None
        if invoked is not None:
            calls.append(_call(file.name, invoked, math.inf, UNKNOWN))
    return calls


def _call(client: str, entry: dict[str, Any], responded: float, result: Any) -> Call:
    return Call(client, entry["name"], entry["key"], tuple(entry["arguments"]), entry["at"], responded, result)


def step(value: Value, call: Call) -> tuple[bool, Value]:
    """Return whether a store that holds ``value`` answers a call like this, and the value afterwards."""
    result: Any
    if call.name == "set":
        result, after = None, call.arguments[0]
    elif call.name == "get":
        result = after = value
    elif call.name == "add":
        result = int(value or "0") + call.arguments[0]
        after = str(result)
    elif call.name == "delete_key":
        result, after = value is not None, None
    else:
        assert call.name == "compare_set"
        expected, desired = call.arguments
        matches = (value or "") == expected
        after = desired if matches else value
        result = desired if matches else expected if value is None else value
    return call.result in (UNKNOWN, result), after


def anomaly(calls: Sequence[Call]) -> str:
    """Return '' if a history is linearizable, else a description of the first key for which it is not."""
    by_key: defaultdict[str, list[Call]] = defaultdict(list)
    for call in calls:
        by_key[call.key].append(call)
    for key, of_key in sorted(by_key.items()):
        stuck = _stuck(sorted(of_key, key=lambda call: call.invoked))
        if stuck is not None:
            return f"key {key!r}: no order of the calls explains {stuck}"
    return ""


def _stuck(calls: list[Call]) -> Call | None:
    """Return None if there is an order that explains the calls, else one that no order reaches or passes."""
    # A read without a response changes nothing.
    calls = [call for call in calls if not (call.result == UNKNOWN and call.name == "get")]
    required = sum(1 << index for index, call in enumerate(calls) if call.result != UNKNOWN)
    tried: set[tuple[int, Value]] = set()
    pending: list[tuple[int, Value]] = [(0, None)]
    best = 0
    while pending:
        done, value = pending.pop()
        if done & required == required:
            return None
        if (done, value) in tried:
            continue
        tried.add((done, value))
        if (done & required).bit_count() > (best & required).bit_count():
            best = done
        first = _first_zero(done)
        deadline = math.inf
        candidates = []
        for index in range(first, len(calls)):
            call = calls[index]
            if call.invoked > deadline:
                break
            if not done >> index & 1:
                deadline = min(deadline, call.responded)
                candidates.append(index)
        for index in reversed(candidates):
            if calls[index].invoked <= deadline:
                possible, after = step(value, calls[index])
                if possible:
                    pending.append((done | 1 << index, after))
    return next(call for index, call in enumerate(calls) if (required & ~best) >> index & 1)


def _first_zero(bits: int) -> int:
    return (~bits & bits + 1).bit_length() - 1
