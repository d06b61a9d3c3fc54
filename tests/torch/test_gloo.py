"""The same calls on torch.distributed with gloo and on rankmesh: they give the same, to the last bit.

The calls are the cells of tests/support/cells. The tables here list all those where rankmesh does not do what gloo
does, and why: NOT_GLOOS where it gives an answer, NumPy's (tests/support/model.py), and BOTH_REFUSE where it does not.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import pytest
from support import model
from support.cells import RESULTS
from support.sides import Cell, Worlds, cells_of, plain

SIZES = (1, 2, 3)


class Row(NamedTuple):
    """Calls where rankmesh is not as gloo is.

    Attributes:
        cells: regular expression for their names.
        gloo: how gloo refuses them, as it says ``Class: text``; None if it gives an answer, which is not NumPy's.
        why: the reason that rankmesh does otherwise.
        sizes: world sizes in which it makes a difference.
    """

    cells: str
    gloo: str | None
    why: str
    sizes: tuple[int, ...] = SIZES


FEW = r"(u?int16|uint32|uint64|float8_\w+)"
NOT_GLOOS = [
    Row(
        rf"(reductions|moves)\.\w+\[((?!B\w+-float8)\w+-)?{FEW}\]",
        "RuntimeError: Invalid scalar type",
        "gloo has no such element type",
    ),
    Row(
        r"moves\.gather\[complex\d+\]",
        "RuntimeError: Invalid scalar type",
        "gloo has no complex numbers in gather, as it has everywhere else",
    ),
    Row(
        r"reductions\.\w+\[AVG-(uint8|int8|int32|int64)\]",
        "RuntimeError: result type Float can't be cast",
        "gloo divides the sum as floats; here the mean of integers is rounded towards zero, as NCCL does",
    ),
    Row(
        r"reductions\.\w+\[PRODUCT-complex\d+\]",
        r"(ValueError|RuntimeError): (all_)?reduce does not support",
        "gloo takes complex numbers for pairs of real ones, which is no product",
    ),
    Row(
        r"reductions\.reduce_scatter_of_a_stack.*",
        "RuntimeError: .*Check failed",
        "gloo has concatenations only; torch documents stacks too",
    ),
    Row(
        r"reductions\.all_reduce_coalesced_of_several_dtypes",
        "ValueError: Invalid usage of tensors with different dtypes",
        "arrays of one batch need not be alike here",
    ),
    Row(
        r"moves\.(all_gather_into_one\[.*-stack\]|all_gather_into_tensor_of_its_own_part)"
        r"|tensors\.all_gather_of_numbers_into_one",
        "RuntimeError: .*invalid tensor size",
        "gloo has concatenations only; torch documents stacks too",
    ),
    Row(
        r"moves\.all_gather_of_another_shape",
        "RuntimeError: .*invalid tensor size",
        "only the number of elements matters here",
    ),
    Row(
        r"moves\.(all_gather|all_to_all)_of_uneven_sizes",
        "RuntimeError: .*invalid tensor size",
        "gloo has no uneven sizes; NCCL has",
        (2, 3),
    ),
    Row(
        r"tensors\.(isend|irecv_into_such)\[.*\]",
        "RuntimeError: input tensor has to be contiguous",
        "every layout works here",
    ),
    Row(
        r"tensors\.conjugated_views",
        "RuntimeError: view_as_real doesn't work on unresolved conjugated tensors",
        "every layout works here",
    ),
    Row(
        r"tensors\.(all_reduce|broadcast)\[(every other|a column|a slice)\]",
        None,
        "gloo takes as many elements as the tensor has from where it begins, and not those of the view",
        (2, 3),
    ),
    Row(
        r"tensors\.negated_views",
        None,
        "gloo does not see the bit that makes a view the negative of its memory",
        (2, 3),
    ),
    Row(
        r"reductions\.premultiplied\[.*\]",
        "(TypeError|RuntimeError|ValueError): ",
        "torch has PREMUL_SUM for NCCL alone",
    ),
    Row(
        r"moves\.all_gather_into_a_tuple",
        "TypeError: Invalid function argument",
        "a tuple is as good as a list here",
    ),
    Row(
        r"reductions\.nan_has_none.*",
        None,
        "with gloo the order of the ranks decides whether MIN and MAX see a NaN; NumPy's pass it on",
        (2, 3),
    ),
    Row(
        r"reductions\.half_types_are_rounded\[(SUM|AVG|PRODUCT)-bfloat16\]",
        None,
        "gloo rounds after every rank; here half types are accumulated in float32 and rounded once",
        (3,),
    ),
    Row(
        r"works\.(result|the_futures_value)\[reduce_scatter(_tensor)?\]",
        "RuntimeError: .* not implemented",
        "every Work has both here",
    ),
    Row(
        r"works\.wait\[reduce_scatter(_tensor)?\]",
        None,
        "with gloo it is not complete after wait()",
    ),
    Row(
        r"works\.(result|the_futures_value)\[all_gather_into_tensor\]",
        None,
        "gloo gives the views it made for itself; here, as with NCCL, it is the tensor that was passed",
        (2, 3),
    ),
]
"""Where rankmesh gives NumPy's answer, and gloo none or another."""

BOTH_REFUSE = [
    Row(r"reductions\.\w+\[AVG-bool\]", "RuntimeError", "there is no mean of truth values"),
    Row(r"reductions\.\w+\[(MIN|MAX)-complex\d+\]", "ValueError|RuntimeError", "complex numbers have no order"),
    Row(r"reductions\.\w+\[(BAND|BOR|BXOR)-complex\d+\]", "ValueError|RuntimeError", "they have no bits to combine"),
    Row(r"reductions\.\w+\[(BAND|BOR|BXOR)-b?float\w+\]", "RuntimeError", "they have no bits to combine"),
]
"""Operations without a meaning for the dtype: a TypeError here, whichever error gloo has for the collective."""


def in_table(table: list[Row], name: str, size: int) -> Row | None:
    found = [row for row in table if size in row.sizes and re.fullmatch(row.cells, name)]
    assert len(found) < 2, f"{name} is in two rows: {found}"
    return found[0] if found else None


CASES = [(name, size) for size in SIZES for name in cells_of(RESULTS, size)]
ALIKE = [case for case in CASES if not in_table([*NOT_GLOOS, *BOTH_REFUSE], *case)]
ANSWERED = [case for case in CASES if in_table(NOT_GLOOS, *case)]
REFUSED = [case for case in CASES if in_table(BOTH_REFUSE, *case)]


def answers(cell: Cell, size: int) -> list[str]:
    """Return what NumPy gives for a cell at each rank."""
    return [repr(plain(value)) for value in model.run(size, cell)]


@pytest.mark.processes
@pytest.mark.parametrize(("name", "size"), ALIKE)
def test_it_is_the_same(worlds: Worlds, name: str, size: int) -> None:
    for rank, told in enumerate(worlds[size][name]):
        assert told["gloo"].error is None, f"rank {rank}: gloo raised {told['gloo']}"
        assert told["rankmesh"].error is None, f"rank {rank}: rankmesh raised {told['rankmesh']}"
        assert told["rankmesh"].value == told["gloo"].value, f"rank {rank}"


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize(("name", "size"), ANSWERED)
def test_where_gloo_has_no_answer_or_another_it_is_numpys(worlds: Worlds, name: str, size: int) -> None:
    row: Any = in_table(NOT_GLOOS, name, size)
    told = worlds[size][name]
    wanted = answers(cells_of(RESULTS, size)[name], size)
    assert [one["rankmesh"].value for one in told] == wanted, told
    if row.gloo is None:
        assert [one["gloo"].value for one in told] != wanted, "gloo is right: drop the row"
    else:
        assert all(re.match(row.gloo, str(one["gloo"])) for one in told), told


@pytest.mark.processes
@pytest.mark.parametrize(("name", "size"), REFUSED)
def test_what_makes_no_sense_both_refuse(worlds: Worlds, name: str, size: int) -> None:
    row: Any = in_table(BOTH_REFUSE, name, size)
    for told in worlds[size][name]:
        assert re.match(row.gloo, str(told["gloo"])), told
        assert told["rankmesh"].error is not None, told
        assert told["rankmesh"].error[0] == "TypeError", told


def test_every_row_is_about_something() -> None:
    for row in [*NOT_GLOOS, *BOTH_REFUSE]:
        assert any(re.fullmatch(row.cells, name) for name, size in CASES if size in row.sizes), row
