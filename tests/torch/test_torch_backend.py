"""The cells that gloo and rankmesh are compared by, a third way: on torch.distributed whose backend is the mesh.

They give what rankmesh's functions give, which test_gloo.py holds to gloo and to NumPy, and fail as these or as gloo
does, which test_gloo_errors.py compares: but for TORCHS_OWN, where torch.distributed's functions say no before any
backend is asked. All cells are run at all world sizes.
"""

from __future__ import annotations

import builtins
import re

import pytest
from support.cells import MISTAKES, RESULTS, STARTS
from support.processes import Ranks
from support.sides import Outcome, Told, Worlds, cells_of, run_cells

PATIENCE = 60.0
"""Seconds within which every wrong call has failed: nobody waits for the default timeout."""

TORCHS_OWN = [
    r"reductions\.all_reduce\[(PRODUCT|MIN|MAX|BAND|BOR|BXOR)-complex\d+\]",
    r"reductions\.all_reduce_coalesced_of_several_dtypes",
    r"reductions\.premultiplied\[.*\]",  # a whole number as factor: it has to be a float or a tensor
    r"moves\.all_gather_into_a_tuple",
    r"tensors\.conjugated_views",
]
"""Calls that torch.distributed's functions refuse for every backend."""

DESTROYED = "starts.in_a_job_of_one[a collective of a destroyed group]"
"""torch asks for the backend of a group whose call has failed, to log it, and does not find that of a destroyed one."""


def kind(told: Outcome) -> str | None:
    """Return the builtin exception that an error is."""
    return None if told.error is None else next(name for name in told.error if hasattr(builtins, name))


CASES = [(name, size) for size in (1, 2, 3) for name in cells_of(RESULTS, size)]
WRONG = [(name, size) for size in (2, 3) for name in cells_of(MISTAKES, size) if ".without_" not in name]
UNCHECKED = [name for name in cells_of(MISTAKES, 2) if ".without_gloo" in name]


@pytest.fixture(scope="module")
def over(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    return Worlds(tmp_path_factory.mktemp("over"), [*RESULTS, *MISTAKES], "over")


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Told]:
    """What came of the cells of a process that is in no job, on all sides."""
    told: dict[str, Told] = {}
    for each in ("both-apart", "over-apart"):
        ranks = Ranks(tmp_path_factory.mktemp(each))
        try:
            told[each] = run_cells(ranks, STARTS, 1, each)
        finally:
            ranks.end()
    return told


@pytest.mark.processes
@pytest.mark.parametrize(("name", "size"), CASES)
def test_results(worlds: Worlds, over: Worlds, name: str, size: int) -> None:
    refused = any(re.fullmatch(cells, name) for cells in TORCHS_OWN)
    for rank, (both, told) in enumerate(zip(worlds[size][name], over[size][name], strict=True)):
        found, ours, gloos = told["over"], both["rankmesh"], both["gloo"]
        if refused:
            assert (found.error, found.text) == (gloos.error, gloos.text), f"rank {rank}"
        elif ours.error is None:
            assert found.error is None, f"rank {rank}: {found}"
            assert found.value == ours.value, f"rank {rank}"
        else:
            assert (found.error, kind(found)) != (None, None)
            assert kind(found) == kind(ours), f"rank {rank}: {found}"


def compare(found: Outcome, ours: Outcome, gloos: Outcome) -> None:
    """Check that a wrong call fails as the mesh does, or torch's check, or gloo; and that a right one is made."""
    assert found.seconds < PATIENCE
    if ours.error is None and gloos.error is None:
        assert found.error is None, found
        assert found.value == ours.value
    else:
        assert kind(found) in (kind(ours), kind(gloos)), (found, ours, gloos)


@pytest.mark.processes
@pytest.mark.parametrize(("name", "size"), WRONG)
def test_wrong_calls(worlds: Worlds, over: Worlds, name: str, size: int) -> None:
    for both, told in zip(worlds[size][name], over[size][name], strict=True):
        compare(told["over"], both["rankmesh"], both["gloo"])


@pytest.mark.processes
@pytest.mark.parametrize("name", UNCHECKED)
def test_what_gloo_does_not_check_is_refused(over: Worlds, name: str) -> None:
    mistaken, other = (told["over"] for told in over[2][name])
    assert kind(mistaken) in ("TypeError", "ValueError"), mistaken
    assert mistaken.seconds < PATIENCE
    assert other.value == "None", other


@pytest.mark.processes
@pytest.mark.parametrize(("name", "size"), [case for case in WRONG if "absences" in case[0]])
def test_who_does_not_come_is_named(worlds: Worlds, over: Worlds, name: str, size: int) -> None:
    ours, found = worlds[size][name][0]["rankmesh"], over[size][name][0]["over"]
    assert re.findall(r"ranks? \d+(?:, \d+)*", found.text) == re.findall(r"ranks? \d+(?:, \d+)*", ours.text)
    assert (found.error or [None])[0] == (ours.error or [None])[0]


@pytest.mark.processes
@pytest.mark.parametrize("name", cells_of(STARTS, 1))
def test_in_no_world(apart: dict[str, Told], name: str) -> None:
    both, found = apart["both-apart"][name][0], apart["over-apart"][name][0]["over"]
    if name == DESTROYED:
        assert kind(found) == "ValueError", found
    else:
        compare(found, both["rankmesh"], both["gloo"])


def test_every_row_is_about_something() -> None:
    for row in TORCHS_OWN:
        assert any(re.fullmatch(row, name) for name, _ in CASES), row
