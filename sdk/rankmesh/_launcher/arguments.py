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
from rankmesh._launcher.torchrun import Parser, spellings
from rankmesh._launcher.torchrun import add_arguments as take_theirs
from rankmesh_agent.config.tls import client_scheme
from rankmesh_agent.wire.schemas.launchers import NO_NODE

AUTO = 0
"""``--nnodes auto``, as a number of nodes; rankmesh._launcher.nodes resolves it."""
DEFAULT_PORT = 29500
"""Default MASTER_PORT of a job on several nodes, as in torchrun."""

LAST_CALL_SECONDS = 5.0
"""Default of ``--last-call``; torchrun waits 30 seconds."""

_EPILOG = """\
Everything after the script goes to the script untouched. Each rank finds RANK, LOCAL_RANK, WORLD_SIZE,
LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR and MASTER_PORT in its environment, so 'rankmesh.init_process_group()' needs
no arguments. On several nodes, start the launcher once on each, with RANKMESH_TOKEN set to the same secret.

The launcher exits with 0 when all ranks did, else with the exit code of the rank whose failure caused the others'
(128 + N if signal N ended it), 128 + N when signal N ended the launcher, 2 when it could not start, 120 when all
ranks ended with 0 but their output could not be written (a full disk). Local rank 0 reads the launcher's stdin, and so
do all ranks if that is a terminal: for pdb, see 'rankmesh.breakpoint(rank)'.
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
        nnodes: nodes of the job, at most; AUTO if the environment defines them.
        min_nodes: the least number of nodes with which the job runs.
        node_rank: this node's number; NO_NODE if the gateway assigns one.
        last_call: seconds to wait for more nodes once the least number is there.
        external_gateway: whether no launcher hosts the gateway.
        master_addr: host of the gateway.
        master_port: its port; 0 for any free one.
        local_addr: address of this node's ranks; empty for the one that faces the gateway.
        job: name of the job; empty if none was given.
        role: ROLE_NAME of the ranks.
        max_restarts: how often all ranks start again after a failure, or when a node is lost; with ``replace``, how
            often a process of this node is started in place of one that has failed.
        replace: whether the other ranks go on when one fails, and another process takes its place.
        as_gloo: whether torch's backend gloo is RankMesh.
        failure_grace: seconds for the other ranks to end by themselves after a failure.
        stop_grace: seconds for a rank to end after a signal, before SIGKILL.
        output_grace: seconds for the processes that hold the output of the ranks, once these have all ended with 0.
        remarks: notes about the given arguments, for the user.
        variables: the PET_ variables with options of this launcher.
    """

    program: tuple[str, ...]
    arguments: tuple[str, ...]
    use_env: bool
    name: str
    nproc: int
    nnodes: int
    min_nodes: int
    node_rank: int
    last_call: float
    external_gateway: bool
    master_addr: str
    master_port: int
    local_addr: str
    job: str
    role: str
    max_restarts: int
    replace: bool
    as_gloo: bool
    failure_grace: float
    stop_grace: float
    output_grace: float
    remarks: tuple[str, ...]
    variables: tuple[str, ...]


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
    given = parser.parse_args(parser.complete(sys.argv[1:] if argv is None else argv, os.environ))
    min_nodes, nnodes = given.nnodes
    if given.standalone and nnodes != 1:
        parser.error("--standalone means one node; leave it out, or leave out --nnodes")
    if given.module and given.no_python:
        parser.error("--module and --no-python exclude each other")
    if given.no_python and not given.use_env:
        parser.error("--no-python needs --use-env: a program need not understand --local-rank")
    if nnodes == AUTO and (given.node_rank is not None or given.master_addr or given.rdzv_endpoint or given.gateway):
        parser.error(
            "--nnodes auto finds --node-rank and --master-addr as well: leave them out (MASTER_ADDR overrides)"
        )
    if given.gateway and (given.master_addr or given.master_port or given.rdzv_endpoint or given.standalone):
        parser.error("--gateway is the address of a running gateway: leave out --master-addr and the like")
    if min_nodes == nnodes > 1 and given.rdzv_backend == "c10d" and given.node_rank is None:
        parser.error("nodes do not number themselves: give each its --node-rank, and 0 to the one that others reach")
    if min_nodes == nnodes > 1 and given.gateway and given.node_rank is None:
        parser.error("give each node its --node-rank")
    node_rank = given.node_rank
    if node_rank is None:
        node_rank = NO_NODE if min_nodes < nnodes else 0
    if node_rank >= max(nnodes, 1):
        parser.error(f"--node-rank {node_rank}: with --nnodes {nnodes} it is 0 to {nnodes - 1}")
    address, port = given.master_addr.strip("[]") or "127.0.0.1", given.master_port
    if given.rdzv_endpoint and not given.standalone:
        address, port = given.rdzv_endpoint
    if given.gateway:
        address, port = given.gateway
    if nnodes > 1 and port == 0:
        parser.error("port 0 takes any free port, which the other nodes cannot know; choose one")
    if port is None:
        port = DEFAULT_PORT if nnodes > 1 else 0
    if given.replace and not given.max_restarts:
        parser.error("--replace needs --max-restarts N: how many processes may be started in place of failed ones")
    if given.replace and min_nodes < nnodes:
        parser.error("--replace keeps the world's size: give one number of --nnodes, or leave out --replace")
    remarks = given.remarks
    if parser.used:
        remarks += (f"options from the environment: {', '.join(parser.used)}",)
    if min_nodes < nnodes and not given.max_restarts:
        remarks += ("no --max-restarts: the job ends when a node is lost; nodes that join need none",)
    if min_nodes < nnodes and not (given.master_addr or given.rdzv_endpoint or given.gateway):
        remarks += ("no --master-addr: only launchers on this host can join",)
    words = given.program[1:] if given.program[0] == "--" else given.program
    return Options(
        program=_program(parser, words[0], module=given.module, no_python=given.no_python),
        arguments=tuple(words[1:]),
        use_env=given.use_env,
        name=os.path.basename(words[0]),
        nproc=given.nproc_per_node,
        nnodes=nnodes,
        min_nodes=min_nodes,
        node_rank=node_rank,
        last_call=given.last_call,
        external_gateway=bool(given.gateway),
        master_addr=address,
        master_port=port,
        local_addr=given.local_addr,
        job=given.rdzv_id,
        role=given.role,
        max_restarts=given.max_restarts,
        replace=given.replace,
        as_gloo=given.as_gloo,
        failure_grace=given.failure_grace,
        stop_grace=given.stop_grace,
        output_grace=given.output_grace,
        remarks=remarks,
        variables=tuple(parser.variables),
    )


def _parser(prog: str, use_env: bool) -> Parser:
    parser = Parser(
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
        default=(1, 1),
        metavar="N",
        help="nodes of the job (default: 1); MIN:MAX if nodes may be lost and join; or 'auto': what Slurm, mpirun or "
        "Kubernetes started, one launcher a node",
    )
    add(
        "node-rank",
        type=_whole,
        metavar="N",
        help="which node this is, from 0 (default); node 0 hosts the gateway. With --nnodes MIN:MAX nodes need none: "
        "the one with the address --master-addr hosts the gateway",
    )
    add(
        "last-call",
        type=_seconds,
        default=LAST_CALL_SECONDS,
        metavar="SECONDS",
        help=f"how long to wait for more nodes once MIN are there (default: {LAST_CALL_SECONDS:g})",
    )
    add("master-addr", default="", metavar="HOST", help="address of node 0 (default: 127.0.0.1)")
    add(
        "master-port",
        type=functools.partial(_number, 0, 65535),
        metavar="PORT",
        help=f"port of the gateway (default: any free one on one node, {DEFAULT_PORT} on several)",
    )
    add("gateway", type=_gateway, metavar="URL", help="a running gateway ('rankmesh gateway'), instead of node 0's")
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
        "replace",
        action="store_true",
        help="after a failure start that rank alone again, which joins when the others call grow_group(); they go on "
        "meanwhile. At most N times on each node, with --max-restarts N",
    )
    add(
        "as-gloo",
        action="store_true",
        help="torch's backend gloo is RankMesh at the ranks (RANKMESH_AS=gloo): for libraries that know no other name",
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
    add(
        "output-grace",
        type=_seconds,
        default=30.0,
        metavar="SECONDS",
        help="how long processes that the ranks have started may still write to their output once all ranks have "
        "ended with 0, before SIGKILL (default: 30). Those with an output of their own are left alone",
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
        try:
            where = f"in {os.getcwd()}"
        except FileNotFoundError:
            where = "the working directory does not exist any more"
        parser.error(f"no such script: {script} ({where}); use -m for a module, --no-python for a program")
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


def _nodes(text: str) -> tuple[int, int]:
    """Return the minimum and the maximum of a job's nodes."""
    if text == "auto":
        return AUTO, AUTO
    least, _, most = text.partition(":")
    low, high = _count(least), _count(most or least)
    if low > high:
        raise argparse.ArgumentTypeError(f"{text!r}: the first number is the minimum, {low} is more than {high}")
    return low, high


def _gateway(text: str) -> tuple[str, int]:
    scheme, _, place = text.rpartition("://")
    host, port = _endpoint(place.rstrip("/"))
    if scheme not in ("", client_scheme()) or port is None:
        example = f"{client_scheme()}://host:8700"
        raise argparse.ArgumentTypeError(f"{text!r} is not the URL of a gateway, such as {example}")
    return host, port


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
