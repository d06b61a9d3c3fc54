"""The page, from figures made up for the purpose."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest

from benchmarks.peers import PEERS
from benchmarks.plan import MIB, Cell, Effort
from benchmarks.report import Circumstances, as_json, details, medians, page, prototypes
from benchmarks.run import Results

SHM, TCP, GLOO = PEERS[:3]
CIRCUMSTANCES = Circumstances(
    {"processor": "Some CPU, 2 cores"}, datetime(2026, 1, 2, 3, 4, tzinfo=UTC), ["Open MPI is left out: no mpirun."]
)


@pytest.fixture
def results() -> Results:
    made = Results((SHM, TCP, GLOO), Effort(ranks=(2,), sizes=(4, MIB)))
    for peer, *microseconds in [(SHM, 7.0, 100.0), (TCP, 70.0, 1800.0), (GLOO, 350.0, 1650.0)]:
        made.versions[peer.name] = f"{peer.library} 1.0"
        for nbytes, value in zip(made.effort.sizes, microseconds, strict=True):
            cell = Cell(peer.name, 2, nbytes)
            made.calls[cell] = 9
            made.turns[cell] = [[value], [value / 2], [value * 2]]
    return made


def cells(text: str) -> list[list[str]]:
    """Return the cells of a Markdown table, without the line under its headings."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    return [rows[0], *rows[2:]]


def test_medians_and_the_others_ratios_to_each_transport(results: Results) -> None:
    assert cells(medians(results, 2)) == [
        [
            "array",
            *("RankMesh, shared memory", "RankMesh, TCP", "gloo"),
            *("gloo / shared memory", "gloo / TCP"),
        ],
        ["4 B", "7.0", "70", "350", "50x", "5.0x"],
        ["1 MiB", "100", "1 800", "1 650", "16x", "0.92x"],
    ]


def test_ratios_are_of_turns_in_the_same_round(results: Results) -> None:
    ours, theirs = Cell(SHM.name, 2, 4), Cell(GLOO.name, 2, 4)
    results.turns[ours] = [[10, 11, 12], [100], [100]]  # twice as fast as theirs whatever the machine does
    results.turns[theirs] = [[20, 22, 90], [200], [20_000]]
    assert results.ratio(theirs, ours) == 2


def test_prototypes_and_whether_the_median_is_within_twice_their_time(results: Results) -> None:
    assert cells(prototypes(results))[1:] == [
        ["RankMesh, shared memory", "2", "4 B", "3.9", "3.5", "0.90x", "7.0", "1.8x", "yes"],
        ["RankMesh, shared memory", "2", "1 MiB", "83", "50", "0.60x", "100", "1.2x", "yes"],
        ["RankMesh, TCP", "2", "4 B", "21", "35", "1.7x", "70", "3.3x", "at best"],
        ["RankMesh, TCP", "2", "1 MiB", "300 to 500", "900", "2.2x", "1 800", "4.5x", "no"],
    ]


def test_details_have_spread_and_number_of_timings(results: Results) -> None:
    assert cells(details(results))[1] == [*("RankMesh, shared memory", "2", "4 B", "7.0", "3.5", "5.2 to 10", "3 of 9")]


def test_page_says_what_when_where_and_who_is_missing(results: Results) -> None:
    text = page(results, CIRCUMSTANCES)
    for words in (
        "2026-01-02 03:04 UTC",
        "Some CPU, 2 cores",
        "rankmesh 1.0, gloo 1.0 ",
        "Open MPI is left out: no mpirun.",
        "### 2 ranks",
        "## Beside the prototypes",
    ):
        assert words in text
    assert max(len(paragraph.splitlines()) for paragraph in text.split("\n\n")) < 20


def test_json_has_every_timing(results: Results) -> None:
    read = json.loads(json.dumps(as_json(results, CIRCUMSTANCES)))
    assert read["date"] == "2026-01-02T03:04:00+00:00"
    assert len(read["cells"]) == 6
    first = read["cells"][0]
    assert (first["peer"], first["ranks"], first["nbytes"], first["calls"]) == ("rankmesh-shm", 2, 4, 9)
    assert (first["median"], first["turns"]) == (7.0, [[7.0], [3.5], [14.0]])
