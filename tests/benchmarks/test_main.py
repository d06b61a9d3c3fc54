"""The command line, and the small tables it prints."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

import pytest
from support.made_up_run import run

from benchmarks import peers
from benchmarks.__main__ import main, parse, part
from benchmarks.compact import compact
from benchmarks.options import names_of, number, numbers
from benchmarks.plan import RANKS, SIZES, Case
from benchmarks.quick import as_json


def test_a_part_is_what_was_asked_for() -> None:
    options = parse(
        ["--only", "all_reduce,stores", "--ranks", "2", "--sizes", "4,65536", "--peers", "gloo", "--rounds", "2"]
    )
    session = part(options)
    assert session.cases == [Case("all_reduce", 2, 4), Case("all_reduce", 2, 65536)]
    assert (session.store_rounds, session.join_rounds) == (2, 0)
    assert session.effort(session.cases[0]).least == 2
    assert options.peers == ["gloo"]


def test_what_is_left_out_is_as_for_everything() -> None:
    options = parse(["--only", "join"])
    assert (options.ranks, options.sizes, options.rounds, options.peers) == (RANKS, SIZES, 7, tuple(peers.PEERS))
    assert parse([]).only is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ranks", "2", "--peers", "gloo"], "--ranks, --peers: a part of what? --only says it"),
        (["--only", "everything"], "'everything' is none of all_reduce, "),
        (["--only", "join", "--ranks", "two"], "'two': whole numbers above 0 are wanted, separated by commas"),
        (["--only", "join", "--rounds", "0"], "'0': whole numbers above 0"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(arguments)
    assert said in capsys.readouterr().err


def test_with_nobody_to_measure_it_says_why(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(peers.PEERS, "gloo", replace(peers.PEERS["gloo"], module="not_a_package"))
    assert main(["--only", "all_reduce", "--peers", "gloo"]) == 1
    said = "There is nobody to measure. gloo is left out: the Python package not_a_package is not installed."
    assert said in capsys.readouterr().err


def test_numbers() -> None:
    assert numbers("4,65536") == [4, 65536]
    assert number("4") == 4
    with pytest.raises(argparse.ArgumentTypeError, match="one number"):
        number("4,5")


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="'c' is none of a, b"):
        names_of({"a": 1, "b": 2})("a,c")


def test_the_compact_table_is_of_ratios_to_the_first_peer() -> None:
    lines = compact(run().results).splitlines()
    assert "gloo/rankmesh-shm" in lines[0]
    assert "60x" in lines[2]


def test_the_quick_form_says_what_is_met() -> None:
    read = json.loads(json.dumps(as_json(run())))
    targets = {(one["row"], one["against"]): one for one in read["targets"]}
    small = "shared memory, 2 ranks, all_reduce to 4 KiB"
    assert targets[small, "gloo"] == {"row": small, "wanted": "≥ 40x", "worst": 60, "met": True, "against": "gloo"}
    assert targets[small, "Open MPI"]["met"] is False
    assert {
        "operation": "all_reduce",
        "ranks": 2,
        "nbytes": 4,
        "theirs": "gloo",
        "ours": "rankmesh-shm",
        "ratio": 60,
    } in (read["ratios"])
