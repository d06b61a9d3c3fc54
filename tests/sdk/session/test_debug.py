"""Debug levels, and what DETAIL adds to the errors of calls that do not fit together."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from support.processes import Me, Ranks

import rankmesh as dist
from rankmesh._session import debug

VARIABLES = ("RANKMESH_DEBUG", "TORCH_DISTRIBUTED_DEBUG")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has been reported about the level, here or in the environment."""
    monkeypatch.setattr(debug, "_level", None)
    monkeypatch.setattr(debug, "below_detail", False)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


# Levels


def test_levels_have_torchs_numbers() -> None:
    assert {level.name: level.value for level in dist.DebugLevel} == {"OFF": 0, "INFO": 1, "DETAIL": 2}


def test_the_level_is_off_unless_said_otherwise() -> None:
    assert dist.get_debug_level() is dist.DebugLevel.OFF


@pytest.mark.parametrize(
    ("ours", "torchs", "level"),
    [
        (None, "INFO", "INFO"),
        (None, "detail", "DETAIL"),
        ("Info", None, "INFO"),
        ("DETAIL", "OFF", "DETAIL"),
        ("OFF", "DETAIL", "OFF"),
        ("", "INFO", "INFO"),
        ("", "", "OFF"),
    ],
)
def test_the_environment_says_the_level(
    monkeypatch: pytest.MonkeyPatch, ours: str | None, torchs: str | None, level: str
) -> None:
    for name, value in zip(VARIABLES, (ours, torchs), strict=True):
        if value is not None:
            monkeypatch.setenv(name, value)
    assert dist.get_debug_level() is dist.DebugLevel[level]


def test_what_was_set_holds_until_the_environment_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKMESH_DEBUG", "INFO")
    assert dist.set_debug_level(dist.DebugLevel.DETAIL) is dist.DebugLevel.DETAIL
    assert dist.get_debug_level() is dist.DebugLevel.DETAIL
    assert dist.set_debug_level_from_env() is dist.DebugLevel.INFO
    assert dist.get_debug_level() is dist.DebugLevel.INFO
    monkeypatch.setenv("RANKMESH_DEBUG", "OFF")
    assert dist.get_debug_level() is dist.DebugLevel.INFO, "only when asked"


def test_a_level_may_be_given_by_name_or_number() -> None:
    for level in ("detail", "DETAIL", 2, dist.DebugLevel.DETAIL):
        assert dist.set_debug_level(level) is dist.DebugLevel.DETAIL  # type: ignore[arg-type]


@pytest.mark.parametrize("level", ["LOUD", "", "2", 3, -1, None, 1.5])
def test_what_is_no_level_is_refused_and_changes_nothing(level: Any) -> None:
    dist.set_debug_level("INFO")
    with pytest.raises(ValueError, match=r"debug level .* is none of OFF, INFO, DETAIL"):
        dist.set_debug_level(level)
    assert dist.get_debug_level() is dist.DebugLevel.INFO


@pytest.mark.parametrize("name", VARIABLES)
def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "verbose")
    for ask in (dist.get_debug_level, dist.set_debug_level_from_env):
        with pytest.raises(ValueError, match=rf"{name}.*VERBOSE|{name}.*verbose"):
            ask()


# What is noted of a call


@pytest.mark.parametrize("level", ["OFF", "INFO"])
def test_below_detail_nothing_is_noted_or_looked_for(monkeypatch: pytest.MonkeyPatch, level: str) -> None:
    dist.set_debug_level(level)
    for name in ("describe", "_call_site"):
        monkeypatch.delattr(debug, name)
    assert debug.details_of([np.ones(3)]) is None


def test_at_detail_a_note_has_the_shapes_of_that_moment_and_the_callers_line() -> None:
    dist.set_debug_level("DETAIL")
    tensors: list[Any] = [np.ones((2, 3), np.float32), np.int8(1), bytearray(4), object()]
    note = debug.details_of(tensors)
    tensors[0].resize((6,), refcheck=False)
    assert note is not None
    reported = note()
    assert reported.startswith(f"called at {__file__}:")
    assert "in test_at_detail_a_note_has_the_shapes" in reported
    assert reported.endswith("float32 (2, 3), int8 (), uint8 (4,), builtins.object")


# Mismatches


def differ(me: Me) -> None:
    me.init()
    four, more = np.ones(4), 3 + me.rank
    calls = {
        "all_reduce": lambda: dist.all_reduce(np.ones((2, more), np.float32)),
        "op": lambda: dist.all_reduce(four, dist.ReduceOp.MAX if me.rank else dist.ReduceOp.SUM),
        "root": lambda: dist.broadcast(np.ones((4, 1)), src=me.rank),
        "kind": lambda: dist.barrier() if me.rank else dist.all_reduce(np.zeros((5, 5))),
        "splits": lambda: dist.all_to_all_single(np.zeros(6), np.zeros(6), None, [1, 5] if me.rank else [2, 4]),
        "all_gather": lambda: dist.all_gather([np.zeros(more), np.zeros(more)], np.zeros(more)),
        "single": lambda: dist.all_gather_single(np.zeros((2, more)), np.zeros(more)),
        "batch": lambda: in_a_batch(np.ones(more)),
        "coalesced": lambda: dist.all_reduce_coalesced([np.ones(2), np.ones((3, more))]),
        "later": lambda: dist.all_reduce(np.ones(more), async_op=True).wait(),
    }
    for level in ("OFF", "DETAIL"):
        dist.set_debug_level(level)
        texts = {}
        for name, call in calls.items():
            reported = me.attempt(call)
            assert reported["error"] == "CollectiveMismatchError", reported
            texts[name] = reported["text"]
            array = np.ones(3)
            dist.all_reduce(array)
            assert array[0] == 2, "the group goes on"
        me.report(**{level: texts})
    dist.destroy_process_group()


def in_a_batch(array: np.ndarray[Any, Any]) -> None:
    with dist.batch():
        dist.all_reduce(array)


@pytest.mark.processes
def test_mismatches_always_raise_and_detail_adds_every_ranks_shapes_and_lines(ranks: Ranks) -> None:
    zero, one = ranks.run(differ, 2)
    assert zero.reported == one.reported, "every rank is told the same"
    off, detail = zero.reported["OFF"], zero.reported["DETAIL"]
    for name, text in off.items():
        assert "rank 0: " in text, name
        assert "rank 1: " in text, name
        assert "called at" not in text, name
        calls = r"(?:shape or dtype: |; )(rank \d|ranks 0-1) calls? \S.*? at test_debug\.py:\d+ in"
        lines = re.findall(calls, text)
        known = [] if name == "later" else ["rank 0", "rank 1"]  # another thread executes a call that is queued
        assert lines in (known, ["ranks 0-1"]), text
    for name, text in detail.items():
        first, second = text.split("rank 1: ")
        for reported, rank in ((first, 0), (second, 1)):
            assert re.search(
                r"called at \S+/test_debug\.py:\d+ in (differ\.<locals>\.<lambda>|in_a_batch)", reported
            ), name
            if name in ("all_reduce", "all_gather", "single", "batch", "coalesced", "later"):
                assert re.search(rf"\((2, |3, )?{3 + rank},?\)", reported), f"{name}: the shape of rank {rank}"
    assert "float32 (2, 3)" in detail["all_reduce"]
    assert "float64 (4, 1)" in detail["root"]
    assert "sends [2, 4] elements to the ranks and expects [3, 3]" in off["splits"]
    assert "sends [1, 5] elements to the ranks and expects [3, 3]" in detail["splits"]
