"""The launcher's command line and the plan made from it."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rankmesh._launcher import arguments
from rankmesh._launcher.arguments import DEFAULT_PORT, parse
from rankmesh._launcher.output import LogOptions
from rankmesh._launcher.plan import plan
from rankmesh_agent.config.settings import Settings
from rankmesh_agent.wire.credentials import for_job
from rankmesh_agent.wire.schemas import NO_NODE


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.touch()
    return str(path)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--nproc-per-node=3"], {"nproc": 3}),
        (["--nproc_per_node", "3"], {"nproc": 3}),
        (["--stop-grace=3"], {"stop_grace": 3}),
        (["--shutdown-timeout=3"], {"stop_grace": 3}),
        (["--shutdown_timeout=3"], {"stop_grace": 3}),
        ([], {"nnodes": 1, "master_addr": "127.0.0.1", "master_port": 0, "failure_grace": 5, "stop_grace": 30}),
        (["--nnodes=2"], {"nnodes": 2, "master_port": DEFAULT_PORT}),
        (["--nnodes=2", "--master-port=1234"], {"master_port": 1234}),
        (["--nnodes=2:2", "--rdzv_endpoint=node0:1234"], {"master_addr": "node0", "master_port": 1234, "nnodes": 2}),
        (["--nnodes=2", "--rdzv-endpoint=node0"], {"master_addr": "node0", "master_port": DEFAULT_PORT}),
        (["--nnodes=1:3"], {"min_nodes": 1, "nnodes": 3, "node_rank": NO_NODE, "join_window": 5}),
        (["--nnodes=1:3", "--rdzv-backend=c10d", "--node-rank=1"], {"node_rank": 1}),
        (["--nnodes=3"], {"min_nodes": 3, "nnodes": 3, "node_rank": 0, "external_gateway": False}),
        (
            ["--nnodes=1:3", "--gateway=http://host1:1234/", "--last-call=2"],
            {"master_addr": "host1", "master_port": 1234, "external_gateway": True, "join_window": 2},
        ),
        (["--rdzv-endpoint=[::1]:1234"], {"master_addr": "::1", "master_port": 1234}),
        (["--nnodes=2", "--rdzv-backend=c10d", "--node-rank=1"], {"node_rank": 1}),
        (["--standalone", "--rdzv-endpoint=node0:1234"], {"master_addr": "127.0.0.1", "master_port": 0}),
        (["--standalone", "--use_env", "--run_path", "--monitor-interval=5", "--start_method=spawn"], {"remarks": ()}),
    ],
)
def test_options(argv: list[str], expected: dict[str, object], script: str) -> None:
    options = parse([*argv, script])
    assert {name: getattr(options, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--nproc=3"], {"nproc": 3}),
        (["--nproc", "3", "--no", "--max", "2"], None),  # --node-rank, --no-python or --nnodes
        (
            ["--nproc_per", "3", "--max=2", "--rdzv-end=node0:1"],
            {"nproc": 3, "max_restarts": 2, "master_addr": "node0"},
        ),
        (["-r", "3", "-t0:1,12:2", "--nproc", "3"], {"nproc": 3, "logs": LogOptions("", "3", "0:1,12:2")}),
        (
            ["--log-d=x", "--redir=0:1", "--local-r", "0,2"],
            {"logs": LogOptions("x", "0:1", shown=(0, 2)), "remarks": ()},
        ),
    ],
)
def test_options_may_be_abbreviated_where_they_are_unambiguous(
    argv: list[str], expected: dict[str, object] | None, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if expected is None:
        with pytest.raises(SystemExit):
            parse([*argv, script])
        assert "ambiguous option: --no could match --no-python, --node-rank" in capsys.readouterr().err
    else:
        options = parse([*argv, script, "--no", "--nproc=7"])
        assert {name: getattr(options, name) for name in expected} == expected
        assert options.arguments == ("--no", "--nproc=7")


POD = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "node0", "PET_MASTER_PORT": "1234"}


@pytest.mark.parametrize(
    ("variables", "argv", "expected"),
    [
        ({"PET_NPROC_PER_NODE": "3", "PET_MAX_RESTARTS": "2"}, [], {"nproc": 3, "max_restarts": 2}),
        ({"PET_NPROC_PER_NODE": "3"}, ["--nproc_per_node", "4"], {"nproc": 4, "remarks": ()}),
        (POD, [], {"nnodes": 2, "node_rank": 1, "master_addr": "node0", "master_port": 1234}),
        (POD, ["--master-port=1"], {"nnodes": 2, "master_addr": "node0", "master_port": 1}),
        (POD, ["--standalone"], {"nnodes": 1, "node_rank": 0, "master_addr": "127.0.0.1", "master_port": 0}),
        (POD, ["--gateway=node7:1"], {"nnodes": 2, "node_rank": 1, "master_addr": "node7", "external_gateway": True}),
        (POD, ["--nnodes", "auto"], {"nnodes": arguments.AUTO, "master_addr": "127.0.0.1", "node_rank": 0}),
        (
            {"PET_NNODES": "1:3", "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "node0:1", "PET_RDZV_ID": "job"},
            [],
            {"min_nodes": 1, "nnodes": 3, "master_addr": "node0", "job": "job"},
        ),
        ({"PET_STANDALONE": "0", "PET_SHUTDOWN_TIMEOUT": "3"}, [], {"stop_grace": 3}),
        ({"PET_STANDALONE": "1", "PET_NNODES": "1", "PET_ROLE": ""}, [], {"nnodes": 1, "role": "default"}),
        ({"PET_NAME": "Rex"}, [], {"remarks": (), "variables": ()}),
    ],
)
def test_options_from_the_environment(
    variables: dict[str, str],
    argv: list[str],
    expected: dict[str, object],
    script: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    options = parse([*argv, script])
    assert {name: getattr(options, name) for name in expected} == expected
    assert not any(name.startswith("PET_N") and name != "PET_NAME" for name in environment_of(options, variables))


def environment_of(options: arguments.Options, base: dict[str, str]) -> dict[str, str]:
    return plan(replace(options, job="job", nnodes=1), Settings()).environment(0, base)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"PET_NNODES": "many"}, "'many' is not a whole number (from the environment: PET_NNODES=many)"),
        ({"PET_STANDALONE": "yes"}, "PET_STANDALONE='yes' is not 0 or 1"),
        ({"PET_RDZV_BACKEND": "etcd"}, "invalid choice: 'etcd'"),
        ({"PET_NNODES": "2", "PET_RDZV_BACKEND": "c10d"}, "needs the --node-rank of each node"),
    ],
)
def test_an_option_of_the_environment_that_is_refused_is_named(
    variables: dict[str, str],
    message: str,
    script: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        parse([script])
    printed = " ".join(capsys.readouterr().err.split())
    assert message in printed
    assert f"from the environment: {next(iter(variables))}=" in printed


@pytest.mark.parametrize(("word", "gpus", "expected"), [("cpu", 3, 5), ("gpu", 3, 3), ("auto", 3, 3), ("auto", 0, 5)])
def test_one_rank_a_core_or_gpu(
    word: str, gpus: int, expected: int, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arguments, "cores", lambda: 5)
    monkeypatch.setattr(arguments, "gpus", lambda: gpus)
    assert parse(["--nproc-per-node", word, script]).nproc == expected


def test_cores_are_those_this_process_may_use() -> None:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert arguments.cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)


@pytest.mark.parametrize(("driver_starts", "expected"), [(True, 3), (False, 0)])
def test_the_driver_counts_the_gpus(driver_starts: bool, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Driver:
        def cuInit(self, flags: int) -> int:  # noqa: N802
            return 0 if driver_starts else 100  # CUDA_ERROR_NO_DEVICE

        def cuDeviceGetCount(self, count: object) -> int:  # noqa: N802
            count._obj.value = 3  # type: ignore[attr-defined]
            return 0

    monkeypatch.setattr(arguments.ctypes, "CDLL", lambda name: Driver())
    assert arguments.gpus() == expected


def test_no_driver_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(arguments.ctypes, "CDLL", missing)
    assert arguments.gpus() == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["--nproc-per-node", "7", "-m", "--help"],
        ["--", "--nnodes=2"],
        ["--", "--", "-x"],
        ["--standalone", "--", "", "--no-such=option", "-mfoo"],
    ],
)
@pytest.mark.parametrize("dashes", [[], ["--"]])
def test_arguments_of_the_script_stay_untouched(arguments: list[str], dashes: list[str], script: str) -> None:
    options = parse(["--nproc-per-node", "2", *dashes, script, *arguments])
    assert (options.program, options.arguments) == ((sys.executable, script), tuple(arguments))
    assert options.nproc == 2


def command(argv: list[str], *, use_env: bool = True, rank: int = 0) -> tuple[str, ...]:
    return plan(parse(argv, use_env=use_env), Settings(token="secret")).command(rank)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["-m", "json.tool", "-h"], (sys.executable, "-m", "json.tool", "-h")),
        (["--module", "json.tool"], (sys.executable, "-m", "json.tool")),
        (["--no-python", "true", "-m"], ("true", "-m")),
    ],
)
def test_kinds_of_program(argv: list[str], words: tuple[str, ...]) -> None:
    assert command(argv) == words


def test_the_local_rank_counts_the_ranks_of_a_node(script: str) -> None:
    argv = ["--nnodes=2", "--node_rank=1", "--nproc_per_node=2", "--master_addr=::1", script, "x"]
    assert command(argv, use_env=False, rank=3) == (sys.executable, script, "--local-rank=1", "x")
    for option in ("--use_env", "--use-env", "--use-env=True"):
        assert command([option, *argv], use_env=False, rank=3) == (sys.executable, script, "x")
    assert command(["-m", "json.tool", "-x"], use_env=False)[2:] == ("json.tool", "--local-rank=0", "-x")


def test_arguments_that_change_nothing_are_remarked_on(script: str) -> None:
    given = ["--rdzv_conf", "2", "--virtual-local-rank", "--numa-binding=0", "--log-dir=logs", "-r=0"]
    assert [remark.partition(":")[0] for remark in parse([*given, script]).remarks] == [
        "--rdzv_conf",
        "--virtual-local-rank",
        "--log-dir",
    ]


def test_changing_nodes_are_remarked_on(script: str) -> None:
    assert [remark.partition(":")[0] for remark in parse(["--nnodes=1:2", script]).remarks] == [
        "no --max-restarts",
        "no --master-addr",
    ]
    assert parse(["--nnodes=1:2", "--max-restarts=1", "--master-addr=::1", script]).remarks == ()


def test_a_job_at_a_gateway_of_its_own_needs_a_name(script: str) -> None:
    given = ["--nnodes=1:2", "--gateway=host1:8700", script]
    with pytest.raises(ValueError, match="--rdzv-id"):
        plan(parse(given), Settings(token="secret"))
    named = plan(parse(["--rdzv-id=mine", *given]), Settings(token="secret"))
    assert (named.job, named.url) == ("mine", "http://host1:8700")


def test_the_rendezvous_id_names_the_job(script: str) -> None:
    assert plan(parse(["--rdzv-id=my job", script]), Settings(job="theirs")).job == "my-job"
    assert plan(parse([script]), Settings(job="theirs")).job == "theirs"
    several = plan(parse(["--nnodes=2", "--rdzv-id=my job", script]), Settings(token="secret", job="theirs"))
    assert several.job == "my-job"


def test_role_and_address_of_a_node(script: str) -> None:
    environment = plan(parse(["--role=trainer", "--local-addr=10.0.0.7", script]), Settings()).environment(0, {})
    assert (environment["ROLE_NAME"], environment["RANKMESH_BIND"]) == ("trainer", "10.0.0.7")
    assert "RANKMESH_BIND" not in plan(parse([script]), Settings()).environment(0, {})


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
        (["--nnodes", "3:2"], "3 is more than 2"),
        (["--nnodes", "0:2"], "out of range"),
        (["--nnodes", "1:many"], "'many' is not a whole number"),
        (["--nnodes", "1:2", "--node-rank", "2"], "0 to 1"),
        (["--nnodes", "1:2", "--standalone"], "one node"),
        (["--nnodes", "1:2", "--gateway", "host1"], "not the URL of a gateway"),
        (["--nnodes", "1:2", "--gateway", "https://host1:1"], "not the URL of a gateway"),
        (["--nnodes", "1:2", "--gateway", "host1:1", "--master-addr", "host1"], "leave out --master-addr"),
        (["--nnodes", "2", "--gateway", "host1:1"], "needs the --node-rank of each node"),
        (["--nnodes", "2", "--rdzv-backend", "c10d"], "needs the --node-rank of each node"),
        (["--nnodes", "2", "--rdzv-endpoint", "node0:0"], "cannot know"),
        (["--redirects", "4"], "'4' is not 0 to 3"),
        (["--replace"], "--replace needs --max-restarts N"),
        (["--replace", "--max-restarts=1", "--nnodes=1:2"], "--replace keeps the world's size"),
        (["--tee", "0:1,1"], "'0:1,1' is not 0 to 3"),
        (["--local-ranks-filter", "0,x"], "'x' is not a whole number"),
        (["--rdzv-backend", "etcd"], "invalid choice: 'etcd'"),
        (["--rdzv-endpoint", "node0:port"], "'node0:port' is not a host, or host:port"),
    ],
)
def test_senseless_arguments(
    arguments: list[str], reason: str, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        parse([*arguments, script] if arguments else [])
    assert raised.value.code == 2
    assert reason in capsys.readouterr().err


def test_no_gpu_is_no_rank(script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(arguments, "gpus", lambda: 0)
    with pytest.raises(SystemExit):
        parse(["--nproc-per-node=gpu", script])
    assert "no GPU that CUDA finds" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["no/such.py"], "no such script: no/such.py"),
        (["--no-python", "--use-env", "no-such-program"], "no such program: no-such-program"),
        (["--no-python", "true"], "--no-python needs --use-env"),
    ],
)
def test_a_program_that_cannot_run(arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(arguments, use_env=False)
    assert reason in capsys.readouterr().err


def test_a_missing_program_without_a_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    with pytest.raises(SystemExit):
        parse(["train.py"])
    assert "no such script: train.py (the working directory does not exist any more)" in capsys.readouterr().err


@pytest.mark.parametrize("nodes", ["1", "2"])
def test_the_credential_of_a_job_names_it(script: str, nodes: str) -> None:
    token = for_job("secret", "my job")
    settings = Settings.from_env({"RANKMESH_TOKEN": token})
    for argv in ([], ["--rdzv-id=my job"]):
        made = plan(parse([f"--nnodes={nodes}", *argv, script]), settings)
        assert (made.job, made.token) == ("my job", token)
    with pytest.raises(ValueError, match="is the credential of job 'my job', and --rdzv-id names job 'other'"):
        plan(parse([f"--nnodes={nodes}", "--rdzv-id=other", script]), settings)


def test_a_job_on_one_node_is_its_own(script: str) -> None:
    one, other = (plan(parse([script]), Settings()) for _ in range(2))
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
