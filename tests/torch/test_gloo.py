"""The same calls on torch.distributed with gloo, on rankmesh, and on torch.distributed with the mesh as its backend.

Right calls give the same on every side, to the last bit; wrong ones raise on every side, errors of the same kind: code
that catches torch's builtin exception catches rankmesh's too. OTHER_KINDS lists the differences. Functions of
torch.distributed run first where the mesh is their backend, so an error there may be of gloo's kind as well.
"""

from __future__ import annotations

import builtins
import re
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from support.cells import MISTAKES, RESULTS, mistakes
from support.processes import Ranks
from support.sides import SIZES, Outcome, Outcomes, cells_of, run_cells
from support.wrong import WRONG

pytestmark = pytest.mark.processes
PATIENCE = 60.0
"""Limit of a wrong call in seconds: none waits for the default timeout."""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcomes]:
    ranks = Ranks(tmp_path_factory.mktemp("worlds"))
    try:
        yield run_cells(ranks, [*RESULTS, *MISTAKES])
    finally:
        ranks.end()


def cases(modules: list[str], *sizes: int) -> list[tuple[str, int]]:
    return [(name, size) for size in sizes for name in cells_of(modules, size)]


@pytest.mark.parametrize("name", list(dict.fromkeys(name for name, _ in cases(RESULTS, *sorted(SIZES)))))
def test_every_side_gives_the_same(outcomes: Outcomes, name: str) -> None:
    for size in SIZES:
        for rank, by_side in enumerate(outcomes[size].get(name, [])):
            for side, found in by_side.items():
                assert found.error is None, f"{side}, rank {rank} of {size}: {found}"
            values = {side: found.value for side, found in by_side.items()}
            assert len(set(values.values())) == 1, f"rank {rank} of {size}: {values}"


class Row(NamedTuple):
    """Wrong calls that fail otherwise on rankmesh than on gloo.

    Attributes:
        calls: regular expression for them.
        gloo: the builtin exception that torch or gloo raises.
        rankmesh: what rankmesh raises.
        why: the reason.
    """

    calls: str
    gloo: str
    rankmesh: str
    why: str


OTHER_KINDS = [
    Row(
        r"\w+_with_(group_)?rank_(3|minus_1)|(isend_to|irecv_from|recv_from|messages_to)_itself"
        r"|\w+_(too_few|too_many|smaller_ones|a_smaller_one)|all_gather_into_no_arrays"
        r"|all_to_all_single_.*(rows|splits)|(all_gather|reduce_scatter)_single_of_another_dtype"
        r"|all_gather_coalesced_into_(no|too_many)_lists"
        "|new_group with a negative timeout",
        "RuntimeError",
        "ValueError",
        "gloo's own checks know RuntimeError alone; a wrong argument is a ValueError here",
    ),
    Row(
        r"\w+_bits_of_floats|reduce_scatter_min_of_complex",
        "RuntimeError",
        "TypeError",
        "gloo's own checks know RuntimeError alone; an operation that a dtype does not have is a TypeError here",
    ),
    Row(r"all_reduce_max_of_complex", "ValueError", "TypeError", "torch's own check; the other operations as above"),
    Row(r"recv_with_a_tag_of_65_bits", "TypeError", "ValueError", "a number out of bounds is a ValueError here"),
    Row(
        r"all_to_all_single of a sparse tensor",
        "NotImplementedError",
        "TypeError",
        "a tensor of a kind that cannot be communicated is a TypeError here",
    ),
    Row(
        r"(?!get_(world_size|backend_config|process_group_ranks))\w+_in_(a_named_group|group_1)",
        "ValueError",
        "TypeError",
        "torch looks the group up; what is no group is a TypeError here",
    ),
    Row(
        r"get_world_size_in_a_named_group|is_backend_available of no string",
        "AttributeError",
        "TypeError|ValueError",
        "torch does not check it",
    ),
    Row(r"get_process_group_ranks_in_a_named_group", "KeyError", "TypeError", "torch does not check it"),
    Row(r"no_messages", "IndexError", "ValueError", "torch does not check it"),
    Row(r"messages_that_are_\w+", "ValueError", "TypeError", "a list of something else is a TypeError here"),
    Row(r"(gather_into|scatter_of)_an_array", "RuntimeError", "TypeError", "torch asks whether the array is true"),
    Row(
        r"new_(group|subgroups)_with_an_unknown_backend",
        "AssertionError",
        "ValueError",
        "torch asserts it; a wrong argument is a ValueError here",
    ),
]
"""Wrong calls, by what they do wrong, where the kinds differ."""


def row_of(name: str) -> Row | None:
    found = re.search(r"\[(.*)\]", name)
    rows = [row for row in OTHER_KINDS if found and re.fullmatch(row.calls, found[1])]
    assert len(rows) < 2, f"{name} is in two rows: {rows}"
    return rows[0] if rows else None


def kind(found: Outcome) -> str | None:
    """Return the builtin exception that an error is."""
    return None if found.error is None else next(name for name in found.error if hasattr(builtins, name))


COMPARED = [(name, size) for size in (2, 3) for name, cell in cells_of(MISTAKES, size).items() if cell.sides is None]


@pytest.mark.parametrize(("name", "size"), COMPARED)
def test_wrong_calls_fail_alike(outcomes: Outcomes, name: str, size: int) -> None:
    """A wrong call fails as gloo's, or as the table has it; the other ranks' calls succeed."""
    row = row_of(name)
    for by_side in outcomes[size][name]:
        gloo, ours, over = by_side["gloo"], by_side["rankmesh"], by_side["over"]
        assert max(ours.seconds, over.seconds) < PATIENCE, by_side
        if gloo.error is None and ours.error is None:
            assert ours.value == gloo.value == over.value, by_side
            continue
        assert ours.error is not None, by_side
        assert kind(gloo) in ours.error if row is None else kind(gloo) == row.gloo, by_side
        assert row is None or any(re.fullmatch(row.rankmesh, each) for each in ours.error), by_side
        assert kind(over) in (kind(ours), kind(gloo)), by_side


@pytest.mark.parametrize("call", mistakes.WITHOUT_GLOO)
def test_what_gloo_does_not_check_is_refused(outcomes: Outcomes, call: str) -> None:
    for side in ("rankmesh", "over"):
        mistaken, other = (by_side[side] for by_side in outcomes[2][f"mistakes.without_gloo[{call}]"])
        assert kind(mistaken) in ("TypeError", "ValueError"), mistaken
        assert mistaken.seconds < PATIENCE
        assert other.value == "None", other


@pytest.mark.parametrize("call", mistakes.INVALID)
def test_invalid_calls_of_the_table(outcomes: Outcomes, call: str) -> None:
    """Tensors are refused as arrays are; torch.distributed makes some checks of its own before."""
    wrong, by_rank = WRONG[call], outcomes[3][f"mistakes.in_the_table[{call}]"]
    ours, over = by_rank[1]["rankmesh"], by_rank[1]["over"]
    assert kind(ours) == wrong.error.__name__, ours
    assert re.search(wrong.says, ours.text), ours
    gloo = by_rank[1].get("gloo", ours)
    assert kind(over) == wrong.error.__name__ or over.text == gloo.text, over
    assert all(found.value == "None" for rank in (0, 2) for found in by_rank[rank].values()), by_rank


@pytest.mark.parametrize("call", mistakes.MISMATCHES)
@pytest.mark.parametrize("side", ["rankmesh", "over"])
def test_calls_of_the_table_that_differ(outcomes: Outcomes, side: str, call: str) -> None:
    found = [by_side[side] for by_side in outcomes[3][f"mistakes.mismatched[{call}]"]]
    assert len({each.text for each in found}) == 1, found
    for rank, each in enumerate(found):
        assert each.error is not None
        assert each.error[0] == "CollectiveMismatchError", each
        assert f"rank {rank}: " in each.text


def test_every_row_is_about_some_call() -> None:
    for row in OTHER_KINDS:
        assert any(row_of(name) is row for name, _ in COMPARED), row
