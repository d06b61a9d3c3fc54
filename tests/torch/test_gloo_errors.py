"""The same wrong calls on torch.distributed with gloo and on rankmesh: both raise, rankmesh an error of the same kind.

The calls are the cells of tests/support/cells that are in MISTAKES and STARTS. Of the same kind means: who catches
the builtin exception that torch raises, ValueError say, catches rankmesh's too. OTHER_KINDS lists the differences.
"""

from __future__ import annotations

import builtins
import re
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from support.cells import MISTAKES, STARTS
from support.processes import Ranks
from support.sides import Outcome, Told, Worlds, cells_of, run_cells

PATIENCE = 60.0
"""Seconds within which every wrong call has failed: nobody waits for the default timeout."""


class Row(NamedTuple):
    """Wrong calls to which rankmesh answers otherwise than gloo.

    Attributes:
        calls: regular expression for them.
        gloo: the builtin exception that torch or gloo raises; None if it makes the call.
        rankmesh: what rankmesh raises; None if it makes the call.
        why: the reason.
    """

    calls: str
    gloo: str | None
    rankmesh: str | None
    why: str


OTHER_KINDS = [
    Row(
        r"(broadcast|reduce|gather|scatter|\w+_object_list) (from|to|at) (a|rank) .*(high|-1)",
        "RuntimeError",
        "ValueError",
        "gloo's own checks know RuntimeError alone; a wrong argument is a ValueError here",
    ),
    Row(
        r"(isend to|irecv from|recv from) oneself",
        "RuntimeError",
        "ValueError",
        "gloo has no connection to itself; here no rank sends to itself",
    ),
    Row(
        r"(all_gather|gather|scatter|reduce_scatter|all_to_all) (of|into) (a list too (short|long)|other sizes)"
        r"|all_gather into an empty list"
        r"|\w+ of another size"
        r"|(all_gather_into|reduce_scatter)_tensor of another dtype"
        r"|all_to_all_single with .*(few|many|sum|negative).*"
        r"|new_group with a negative timeout"
        r"|broadcast_object_list through a device",
        "RuntimeError",
        "ValueError",
        "gloo's own checks know RuntimeError alone; a wrong argument is a ValueError here",
    ),
    Row(
        r"all_reduce of a sparse tensor",
        "NotImplementedError",
        "TypeError",
        "a tensor of a kind that cannot be communicated is a TypeError here",
    ),
    Row(
        r"group as a (string|number)|(get_rank|get_backend|destroy_process_group) of a string"
        r"|get_group_rank in a string",
        "ValueError",
        "TypeError",
        "torch looks the group up; what is no group is a TypeError here",
    ),
    Row(
        r"get_world_size of a number|is_backend_available of no string",
        "AttributeError",
        "TypeError|ValueError",
        "torch does not check it",
    ),
    Row(r"get_process_group_ranks of a string", "KeyError", "TypeError", "torch does not check it"),
    Row(r"no messages", "IndexError", "ValueError", "torch does not check it"),
    Row(r"messages that are none", "ValueError", "TypeError", "a list of something else is a TypeError here"),
    Row(
        r"(new_group with )?an unknown backend",
        "AssertionError",
        "ValueError",
        "torch asserts it; a wrong argument is a ValueError here",
    ),
    Row(
        r"a store (without|and) .*",
        "AssertionError",
        "ValueError",
        "torch asserts it; a wrong argument is a ValueError here",
    ),
    Row(
        r"destroy_process_group",
        "AssertionError",
        "ValueError",
        "torch asserts it; every other call before the beginning is a ValueError with torch, too",
    ),
    Row(r"an unknown scheme", "RuntimeError", "ValueError", "a wrong argument is a ValueError here"),
    Row(r"an init_method that is no string", "RuntimeError", "TypeError", "what is no string is a TypeError here"),
    Row(r"(tcp|a file) without a rank", "ValueError", None, "ranks are assigned where none are given"),
    Row(r"no MASTER_ADDR", "ValueError", None, "torch's page: it is required, except for rank 0"),
    Row(
        r"a collective of a destroyed group",
        None,
        "DistBackendError",
        "gloo goes on with it; a destroyed group says that it is",
    ),
    Row(r"destroying a group twice", "ValueError", None, "it does nothing the second time"),
]
"""Wrong calls, by what they do wrong, where the kinds differ."""


def row_of(name: str) -> Row | None:
    found = re.search(r"\[(.*)\]", name)
    rows = [row for row in OTHER_KINDS if found and re.fullmatch(row.calls, found[1])]
    assert len(rows) < 2, f"{name} is in two rows: {rows}"
    return rows[0] if rows else None


def kind(told: Outcome) -> str | None:
    """Return the builtin exception that an error is."""
    return None if told.error is None else next(name for name in told.error if hasattr(builtins, name))


def compare(by_rank: list[dict[str, Outcome]], row: Row | None) -> None:
    """Check that a wrong call fails on both sides, alike or as the table says, and that the other ranks' succeed."""
    for told in by_rank:
        gloo, ours = told["gloo"], told["rankmesh"]
        assert ours.seconds < PATIENCE, told
        if gloo.error is None and ours.error is None:
            assert ours.value == gloo.value, told
        elif row is None:
            assert ours.error is not None, told
            assert kind(gloo) in ours.error, told
        else:
            assert kind(gloo) == row.gloo, told
            assert (row.rankmesh is None) == (ours.error is None), told
            assert row.rankmesh is None or any(re.fullmatch(row.rankmesh, name) for name in ours.error or []), told


IN_A_WORLD = [(name, size) for size in (2, 3) for name in cells_of(MISTAKES, size) if ".without_" not in name]
UNCHECKED = [name for name in cells_of(MISTAKES, 2) if ".without_" in name]
APART = list(cells_of(STARTS, 1))


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Told]:
    """What came of the cells of a process that is in no job."""
    ranks = Ranks(tmp_path_factory.mktemp("apart"))
    try:
        yield run_cells(ranks, STARTS, 1, "both-apart")
    finally:
        ranks.end()


@pytest.mark.processes
@pytest.mark.parametrize(("name", "size"), IN_A_WORLD)
def test_in_a_world(worlds: Worlds, name: str, size: int) -> None:
    compare(worlds[size][name], row_of(name))


@pytest.mark.processes
@pytest.mark.parametrize("name", APART)
def test_in_no_world(apart: Told, name: str) -> None:
    compare(apart[name], row_of(name))


@pytest.mark.processes
@pytest.mark.parametrize("name", UNCHECKED)
def test_what_gloo_or_torch_does_not_check_is_refused(worlds: Worlds, name: str) -> None:
    mistaken, other = (told["rankmesh"] for told in worlds[2][name])
    assert kind(mistaken) in ("TypeError", "ValueError"), mistaken
    assert mistaken.seconds < PATIENCE
    assert other.value == "None", other


@pytest.mark.processes
@pytest.mark.parametrize(("name", "size"), [case for case in IN_A_WORLD if "absences" in case[0]])
def test_who_does_not_come_is_named(worlds: Worlds, name: str, size: int) -> None:
    waiting = worlds[size][name][0]
    if waiting["gloo"].error is None:
        return  # the calls afterwards
    ours = waiting["rankmesh"]
    assert ours.error is not None
    assert ours.error[0] == "CollectiveTimeoutError"
    assert ours.seconds > 0.25
    if "monitored_barrier" in name:
        missing = r"ranks? 1, 2 failed to pass" if (size, "all]") == (3, name[-4:]) else r"ranks? 1 failed to pass"
        assert all(re.search(missing, told.text, re.IGNORECASE) for told in waiting.values()), waiting
    elif "work" not in name:
        assert "rank 1" in ours.text


def test_every_row_is_about_something() -> None:
    names = [name for name, _ in IN_A_WORLD] + APART
    for row in OTHER_KINDS:
        assert any(row_of(name) is row for name in names), row
