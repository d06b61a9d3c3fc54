"""The launcher's command line and the plan made from it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from rankmesh._launcher.arguments import DEFAULT_PORT, parse
from rankmesh._launcher.plan import plan
from rankmesh_agent.wire.settings import Settings


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.touch()
    return str(path)


@pytest.mark.parametrize("spelling", ["--nproc-per-node", "--nproc_per_node"])
@pytest.mark.parametrize("joined", [True, False])
def test_both_spellings_of_an_option(spelling: str, joined: bool, script: str) -> None:
    option = [f"{spelling}=3"] if joined else [spelling, "3"]
    assert parse([*option, script]).nproc == 3


@pytest.mark.parametrize("word", ["auto", "cpu"])
def test_one_rank_a_core(word: str, script: str) -> None:
    assert parse(["--nproc-per-node", word, script]).nproc == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    "arguments",
    [
        ["--nproc-per-node", "7", "-m", "--help"],
        ["--", "--nnodes=2"],
        ["--", "--", "-x"],
        ["--standalone", "--", "", "--no-such=option", "-mfoo"],
    ],
)
def test_arguments_of_the_script_stay_untouched(arguments: list[str], script: str) -> None:
    options = parse(["--nproc-per-node", "2", script, *arguments])
    assert options.command == (sys.executable, script, *arguments)
    assert options.nproc == 2


def test_a_double_dash_may_precede_the_script(script: str) -> None:
    assert parse(["--nproc-per-node=2", "--", script, "--", "x"]).command == (sys.executable, script, "--", "x")


def test_kinds_of_program() -> None:
    assert parse(["-m", "json.tool", "-h"]).command == (sys.executable, "-m", "json.tool", "-h")
    assert parse(["--module", "json.tool"]).command == (sys.executable, "-m", "json.tool")
    assert parse(["--no-python", "true", "-m"]).command == ("true", "-m")


def test_torchrun_arguments_that_are_always_so(script: str) -> None:
    assert parse(["--standalone", "--use_env", script]).nnodes == 1


def test_ports(script: str) -> None:
    assert parse([script]).master_port == 0
    assert parse(["--nnodes=2", script]).master_port == DEFAULT_PORT
    assert parse(["--nnodes=2", "--master-port=1234", script]).master_port == 1234


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "required"),
        (["--nproc-per-node", "0"], "out of range"),
        (["--nproc-per-node", "many"], "'many' is not a whole number"),
        (["--nnodes", "2", "--node-rank", "2"], "0 to 1"),
        (["--nnodes", "2", "--master-port", "0"], "cannot know"),
        (["--nnodes", "2", "--standalone"], "one node"),
        (["--master-port", "65536"], "out of range"),
        (["--failure-grace", "-1"], "not a number of seconds"),
        (["--module", "--no-python"], "exclude each other"),
    ],
)
def test_senseless_arguments(
    arguments: list[str], reason: str, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        parse([*arguments, script] if arguments else [])
    assert raised.value.code == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["no/such.py"], ["--no-python", "no-such-program"]])
def test_a_missing_program(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(arguments)
    assert f"no such {'script' if len(arguments) == 1 else 'program'}: {arguments[-1]}" in capsys.readouterr().err


def test_a_job_on_one_node_is_its_own(script: str) -> None:
    one, other = (plan(parse([script]), Settings(job="inherited")) for _ in range(2))
    assert one.job.startswith("train-")
    assert one.job != other.job
    assert one.token != other.token
    assert plan(parse([script]), Settings(token="given")).token == "given"


def test_a_job_on_several_nodes_is_the_same_everywhere(script: str) -> None:
    settings = Settings(token="secret")
    nodes = [plan(parse(["--nnodes=2", f"--node-rank={n}", "--nproc-per-node=3", script]), settings) for n in (0, 1)]
    assert nodes[0].job == nodes[1].job == f"127.0.0.1-{DEFAULT_PORT}"
    assert [list(node.ranks) for node in nodes] == [[0, 1, 2], [3, 4, 5]]
    assert plan(parse(["--nnodes=2", script]), Settings(token="secret", job="mine")).job == "mine"


def test_a_job_on_several_nodes_needs_a_token(script: str) -> None:
    with pytest.raises(ValueError, match="set RANKMESH_TOKEN"):
        plan(parse(["--nnodes=2", script]), Settings())


def test_an_ipv6_gateway(script: str) -> None:
    job = plan(parse(["--master-addr=[::1]", "--master-port=1234", script]), Settings())
    assert job.url == "http://[::1]:1234"
    assert job.environment(0, {})["MASTER_ADDR"] == "::1"


def test_threads_of_a_rank(script: str) -> None:
    several = plan(parse(["--nproc-per-node=2", script]), Settings())
    assert several.environment(0, {})["OMP_NUM_THREADS"] == "1"
    assert several.environment(0, {"OMP_NUM_THREADS": "4"})["OMP_NUM_THREADS"] == "4"
    assert "OMP_NUM_THREADS" not in plan(parse([script]), Settings()).environment(0, {})
