"""Our stores beside torch's: the same calls give the same results, and errors of the same kinds.

A wait of no time at all (``timedelta(0)``, or a negative one) is not among the calls: torch waits for ever then; ours
gives up at once, and refuses a negative one.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch.distributed as theirs
from support.store_calls import CALLS, KINDS, LONG, SHORT, opened, outcome

import rankmesh as ours

STORE, TYPE, NOTHING = {"DistStoreError"}, {"TypeError"}, set[str]()
NOT_A_NUMBER = {"DistStoreError", "ValueError"}
UNSUPPORTED = {"DistStoreError", "NotImplementedError"}
GONE = {"DistNetworkError"}

DIFFERENCES: list[tuple[str, str, Any, Any, str]] = [
    # store, call, what torch's does, what ours does, why
    ("", "set under an empty key", (None, b"v"), STORE, "a key is part of a URL here"),
    ("prefix", "set under an empty key", (None, b"v"), (None, b"v"), "behind a prefix it is not empty"),
    ("", "set_timeout in whole seconds", TYPE, (None, timedelta(seconds=2)), "seconds may be whole"),
    *(
        ("file", call, NOTHING, STORE, "torch raises a plain RuntimeError")
        for call in (
            *("get what is missing", "wait for what is missing", "wait a while for what is missing"),
            *("wait some seconds for what is missing", "multi_get what is missing", "barrier that no one else enters"),
        )
    ),
    ("", "add to text", {"ValueError"}, NOT_A_NUMBER, "a ValueError there, that and a store's error here"),
    ("tcp", "add to text", GONE, NOT_A_NUMBER, "torch's server hangs up, and the store is lost"),
    ("tcp", "add to nothing", GONE, (None, 5, b"5"), "torch's other stores begin with 0"),
    ("", "add to digits and text", (None, 42), NOT_A_NUMBER, "torch takes the digits and drops the rest"),
    ("", "add more than 64 bits", TYPE, NOT_A_NUMBER, "the key is named"),
    ("", "add over the end", ((1 << 63) - 1, -(1 << 63)), NOT_A_NUMBER, "torch goes on at the other end"),
    ("", "multi_set more values than keys", None, {"ValueError"}, "torch drops what is too much"),
    ("tcp", "multi_set more values than keys", STORE, {"ValueError"}, "a wrong argument"),
    (
        "file",
        "list_keys",
        (None, None, ["a", "b/c", "efcount/"]),
        (None, None, ["a", "b/c"]),
        "torch lists a key of its own, cut",
    ),
    ("prefix/file", "list_keys", *[(None, None, ["a", "b/c"])] * 2, "behind a prefix torch does not"),
    ("file", "delete_key", (None, True, True, False), UNSUPPORTED, "refused as documented; torch's says True twice"),
    *(
        ("file", call, {"NotImplementedError"}, UNSUPPORTED, "that and a store's error here")
        for call in ("queue", "a queue and a value", "pop what is not there", "wait to pop what is not there")
    ),
    ("file", "clone's timeout", timedelta(seconds=300), LONG, "torch's FileStore forgets it"),
]
"""The documented differences; of several rows for a call, the last whose store is a part of the store's name counts."""


@pytest.mark.parametrize("call", CALLS)
def test_the_same_call(tmp_path: Path, call: str) -> None:
    for kind in KINDS:
        torchs, mine = (outcome(CALLS[call], opened(module, kind, tmp_path), module) for module in (theirs, ours))
        rows = [row for row in DIFFERENCES if row[0] in kind and row[1] == call]
        expected, why = (rows[-1][2:4], rows[-1][4]) if rows else ((torchs, torchs), "as torch's")
        assert (torchs, mine) == expected, f"{kind}: {why}"


def test_each_difference_is_one_of_some_call() -> None:
    assert {row[1] for row in DIFFERENCES} <= CALLS.keys()
    assert all(any(row[0] in kind for kind in KINDS) for row in DIFFERENCES)


def test_there_is_no_method_that_ours_lacks() -> None:
    assert {name for name in dir(theirs.Store) if not name.startswith("_")} <= {*dir(ours.Store)}


def constructed(module: ModuleType, *arguments: Any, **options: Any) -> Any:
    """Return properties of a TCPStore at port 0, or the kinds of its error."""

    def make(_: Any) -> Any:
        store = module.TCPStore("127.0.0.1", 0, *arguments, **options)
        return store.num_keys(), store.list_keys(), store.host, store.port > 0

    return outcome(make, module.HashStore(), module)


@pytest.mark.parametrize(
    ("arguments", "options", "expected"),
    [
        ((None, True), {}, 0),
        ((1, True), {}, 1),
        ((-1, True), {}, 0),
        ((2, True), {"wait_for_workers": False}, 0),
        ((1, True), {"master_listen_fd": 999}, "DistNetworkError"),
        ((2, True, SHORT), {}, "DistStoreError"),
        ((0, True), {}, "ValueError"),
    ],
)
def test_the_same_master(arguments: Any, options: Any, expected: int | str) -> None:
    """tests/sdk has what ours do beyond this."""
    for module in (theirs, ours):
        found = constructed(module, *arguments, **options)
        assert expected in found if isinstance(expected, str) else found == (expected, [], "127.0.0.1", True)


OURS_ALONE = ("prefix", "empty key", "set_timeout", "timeout", "under a", "None", "number", "more values", "list_keys")
SLOW = ("wait a", "wait some", "wait for what", "multi_get what", "no one else")  # torch waits a second in a file


@pytest.mark.parametrize("kind", ["hash", "file"])
def test_our_prefix_over_torchs_stores(tmp_path: Path, kind: str) -> None:
    """Ours adds the prefix, the rest is torch's own, errors included."""
    inner = opened(theirs, kind, tmp_path)
    ours.PrefixStore("", inner).set("k", b"\xff")
    assert inner.get("/k") == b"\xff"
    for name, call in CALLS.items():
        if not any(word in name for word in OURS_ALONE + (SLOW if kind == "file" else ())):
            torchs, mine = (module.PrefixStore("p", opened(theirs, kind, tmp_path)) for module in (theirs, ours))
            assert outcome(call, mine, theirs) == outcome(call, torchs, theirs), name


@pytest.mark.parametrize("kind", ["hash", "tcp", "prefix/file"])
def test_a_world_meets_through_torchs_stores(tmp_path: Path, kind: str) -> None:
    for _ in range(2):
        ours.init_process_group(store=opened(theirs, kind, tmp_path), rank=0, world_size=1)
        try:
            array = np.ones(3)
            ours.all_reduce(array)
            assert array.tolist() == [1.0] * 3
        finally:
            ours.destroy_process_group()
