"""The launcher's command line: torchrun's arguments, each long option in both spellings."""

from __future__ import annotations

import argparse
import functools
import math
import os
import shutil
import sys
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from rankmesh._launcher.devices import cores, gpus
from rankmesh._launcher.torchrun import add_arguments as take_theirs
from rankmesh._launcher.torchrun import spellings

AUTO = 0
"""``--nnodes auto``, as a number of nodes; rankmesh._launcher.nodes resolves it."""
DEFAULT_PORT = 29500
"""Default MASTER_PORT of a job on several nodes, as in torchrun."""

_EPILOG = """\
Everything after the script goes to the script untouched. Each rank finds RANK, LOCAL_RANK, WORLD_SIZE,
LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR and MASTER_PORT in its environment, so 'rankmesh.init_process_group()' needs
no arguments. On several nodes, start the launcher once on each, with RANKMESH_TOKEN set to the same secret.

The launcher exits with 0 when all ranks did, else with the exit code of the rank whose failure caused the others'
(128 + N if signal N ended it), 128 + N when signal N ended the launcher, 2 when it could not start. Local rank 0 reads
the launcher's stdin.
"""


@dataclass(frozen=True)
class Options:
    """The parsed command line.

    Attributes:
        program: command of each rank: the interpreter and the script, or the program.
        arguments: the script's arguments.
        use_env: whether LOCAL_RANK is passed in the environment only, not as the first argument too.
        name: the program's display name.
        nproc: ranks on this node.
        nnodes: nodes of the job, AUTO if the environment defines them.
        node_rank: this node's number.
        master_addr: host of the gateway.
        master_port: its port; 0 for any free one.
        local_addr: address of this node's ranks; empty for the one that faces the gateway.
        job: name of the job; empty if none was given.
        role: ROLE_NAME of the ranks.
        max_restarts: how often all ranks start again after a failure.
        failure_grace: seconds for the other ranks to end by themselves after a failure.
        stop_grace: seconds for a rank to end after a signal, before SIGKILL.
        remarks: notes about the given arguments, for the user.
    """

    program: tuple[str, ...]
    arguments: tuple[str, ...]
    use_env: bool
    name: str
    nproc: int
    nnodes: int
    node_rank: int
    master_addr: str
    master_port: int
    local_addr: str
    job: str
    role: str
    max_restarts: int
    failure_grace: float
    stop_grace: float
    remarks: tuple[str, ...]


def parse(argv: list[str] | None, *, prog: str = "rankmesh run", use_env: bool = True) -> Options:
    """Parse a command line.

    Args:
        argv: arguments without the program's name; None for this process's.
        prog: the program's name.
        use_env: default of ``--use-env``.

    Raises:
        SystemExit: with code 2 after a message on stderr if an argument is invalid, with 0 after ``--help``.
    """
    parser = _parser(prog, use_env)
    given = parser.parse_args(argv)
    if given.standalone and given.nnodes != 1:
        parser.error("--standalone means one node; leave it out, or leave out --nnodes")
    if given.module and given.no_python:
        parser.error("--module and --no-python exclude each other")
    if given.no_python and not given.use_env:
        parser.error("--no-python needs --use-env: a program need not understand --local-rank")
    if given.nnodes == AUTO and (given.node_rank is not None or given.master_addr or given.rdzv_endpoint):
        parser.error(
            "--nnodes auto finds --node-rank and --master-addr as well: leave them out (MASTER_ADDR overrides)"
        )
    if given.nnodes > 1 and given.rdzv_backend == "c10d" and given.node_rank is None:
        parser.error("nodes do not number themselves: give each its --node-rank, and 0 to the one that others reach")
    node_rank = given.node_rank or 0
    if node_rank >= max(given.nnodes, 1):
        parser.error(f"--node-rank {node_rank}: with --nnodes {given.nnodes} it is 0 to {given.nnodes - 1}")
    address, port = given.master_addr.strip("[]") or "127.0.0.1", given.master_port
    if given.rdzv_endpoint and not given.standalone:
        address, port = given.rdzv_endpoint
    if given.nnodes > 1 and port == 0:
        parser.error("port 0 takes any free port, which the other nodes cannot know; choose one")
    if port is None:
        port = DEFAULT_PORT if given.nnodes > 1 else 0
    words = given.program[1:] if given.program[0] == "--" else given.program
    return Options(
        program=_program(parser, words[0], module=given.module, no_python=given.no_python),
        arguments=tuple(words[1:]),
        use_env=given.use_env,
        name=os.path.basename(words[0]),
        nproc=given.nproc_per_node,
        nnodes=given.nnodes,
        node_rank=node_rank,
        master_addr=address,
        master_port=port,
        local_addr=given.local_addr,
        job=given.rdzv_id,
        role=given.role,
        max_restarts=given.max_restarts,
        failure_grace=given.failure_grace,
        stop_grace=given.stop_grace,
        remarks=given.remarks,
    )


def _parser(prog: str, use_env: bool) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        usage="%(prog)s [options] script.py [argument ...]",
        description="Start a script as several ranks, host their gateway, and watch over them until they end.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )

    def add(*names: str, **how: Any) -> None:
        parser.add_argument(*spellings(*names), **how)

    ranks = "ranks on this node, or 'cpu': one a core, 'gpu': one a GPU, 'auto': gpu if there is one, else cpu"
    add("nproc-per-node", type=_nproc, default=1, metavar="N", help=ranks)
    add(
        "nnodes",
        type=_nodes,
        default=1,
        metavar="N",
        help="nodes of the job (default: 1), or 'auto': what Slurm, mpirun or Kubernetes started, one launcher a node",
    )
    add("node-rank", type=_whole, metavar="N", help="which node this is, from 0 (default); node 0 hosts the gateway")
    add("master-addr", default="", metavar="HOST", help="address of node 0 (default: 127.0.0.1)")
    add(
        "master-port",
        type=functools.partial(_number, 0, 65535),
        metavar="PORT",
        help=f"port of the gateway (default: any free one on one node, {DEFAULT_PORT} on several)",
    )
    add("rdzv-endpoint", type=_endpoint, metavar="HOST[:PORT]", help="--master-addr and --master-port in one")
    add("rdzv-backend", choices=["static", "c10d"], default="static", help="either way the ranks meet at the gateway")
    add("rdzv-id", default="", metavar="NAME", help="the job's name")
    add("local-addr", default="", metavar="HOST", help="address of this node's ranks (default: one that node 0 sees)")
    add("role", default="default", metavar="NAME", help="ROLE_NAME of the ranks")
    parser.add_argument("-m", "--module", action="store_true", help="the script is a module: run it with 'python -m'")
    add("no-python", action="store_true", help="the script is a program: run it without Python")
    parser.add_argument(
        *("--use-env", "--use_env", "--use-env=True", "--use_env=True"),  # torch's documentation gives it a value
        action="store_true",
        default=use_env,
        help="no --local-rank=LOCAL_RANK as the script's first argument" + (" (it is always so)" if use_env else ""),
    )
    add(
        "max-restarts",
        type=_whole,
        default=0,
        metavar="N",
        help="how often all ranks of the job start again after one has failed (default: 0); the same on all nodes",
    )
    add(
        "failure-grace",
        type=_seconds,
        default=5.0,
        metavar="SECONDS",
        help="how long the others may go on once a rank has failed (default: 5)",
    )
    add(
        "stop-grace",
        "shutdown-timeout",
        type=_seconds,
        default=30.0,
        metavar="SECONDS",
        help="how long a rank may take to end after a signal, before SIGKILL (default: 30)",
    )
    take_theirs(parser)
    # PARSER is 'one or more, options included'; REMAINDER after a positional drops a '--' meant for the script.
    parser.add_argument("program", nargs=argparse.PARSER, metavar="script.py", help="the script and its arguments")
    return parser


def _program(parser: argparse.ArgumentParser, script: str, *, module: bool, no_python: bool) -> tuple[str, ...]:
    if module:
        return (sys.executable, "-m", script)
    if no_python:
        if shutil.which(script) is None:
            parser.error(f"no such program: {script}")
        return (script,)
    if not os.path.exists(script):
        parser.error(f"no such script: {script} (in {os.getcwd()}); use -m for a module, --no-python for a program")
    return (sys.executable, script)


def _nproc(text: str) -> int:
    match text:
        case "cpu":
            return cores()
        case "gpu":
            if not (found := gpus()):
                raise argparse.ArgumentTypeError("this node has no GPU that CUDA finds")
            return found
        case "auto":
            return gpus() or cores()
    return _count(text)


def _nodes(text: str) -> int:
    if text == "auto":
        return AUTO
    least, _, most = text.partition(":")
    if most and most != least:
        raise argparse.ArgumentTypeError(f"{text!r}: a job's nodes do not come and go, give their number")
    return _count(least)


def _endpoint(text: str) -> tuple[str, int | None]:
    try:
        url = urlsplit(f"//{text}")
        host, port = url.hostname, url.port
    except ValueError:
        host = None
    if not host:
        raise argparse.ArgumentTypeError(f"{text!r} is not a host, or host:port")
    return host, port


def _number(least: int, most: float, text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if not least <= value <= most:
        raise argparse.ArgumentTypeError(f"{value} is out of range")
    return value


_count = functools.partial(_number, 1, math.inf)
_whole = functools.partial(_number, 0, math.inf)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return value
