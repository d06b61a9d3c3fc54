"""The launcher's command line: torchrun's options and the launcher's own, in one table."""

from __future__ import annotations

import argparse
import ctypes
import functools
import math
import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from urllib.parse import urlsplit

from rankmesh._launcher.output import LogOptions
from rankmesh._launcher.torchrun import UNUSED, Formatter, Option, Parser
from rankmesh_agent.config.tls import client_scheme
from rankmesh_agent.wire.schemas.launchers import NO_NODE

AUTO = 0
"""``--nnodes auto``, as a number of nodes; ``plan.resolve_nodes`` replaces it."""
DEFAULT_PORT = 29500
"""Default MASTER_PORT of a job on several nodes, as in torchrun."""

JOIN_WINDOW_SECONDS = 5.0
"""Default of ``--join-window``; torchrun's ``last_call_timeout`` is 30 seconds."""

_EPILOG = """\
Options may have underscores, as torchrun's (--nproc_per_node). Everything after the script goes to the script. Each
rank finds RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR and MASTER_PORT in its environment,
so 'rankmesh.init_process_group()' needs no arguments. On several nodes, start the launcher once on each, with
RANKMESH_TOKEN set to the same secret.

The launcher exits with 0 when all ranks did, else with the exit code of the rank whose failure caused the others'
(128 + N if signal N ended it), 128 + N when signal N ended the launcher, 2 when it could not start, 120 when all
ranks ended with 0 but their output could not be written (a full disk). Local rank 0 reads the launcher's stdin, and so
do all ranks if that is a terminal; with --pdb RANK, that rank alone.
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
        external_gateway: whether no launcher hosts the gateway.
        master_port: the gateway's port; 0 for any free one.
        job: name of the job; empty if none was given.
        logs: where the ranks' output goes.
        remarks: notes about the given arguments, for the user.
        variables: the PET_ variables with options of this launcher.

    The others are options of the same name.
    """

    program: tuple[str, ...]
    arguments: tuple[str, ...]
    use_env: bool
    name: str
    nproc: int
    nnodes: int
    min_nodes: int
    node_rank: int
    join_window: float
    external_gateway: bool
    master_addr: str
    master_port: int
    local_addr: str
    job: str
    logs: LogOptions
    role: str
    max_restarts: int
    replace: bool
    as_gloo: bool
    pdb: int | None
    failure_grace: float
    stop_grace: float
    output_grace: float
    remarks: tuple[str, ...]
    variables: tuple[str, ...]


def parse(
    argv: list[str] | None,
    *,
    prog: str = "rankmesh run",
    use_env: bool = True,
    environ: Mapping[str, str] = os.environ,
) -> Options:
    """Parse a command line.

    Args:
        argv: arguments without the program's name; None for this process's.
        prog: the program's name.
        use_env: default of ``--use-env``.
        environ: has torchrun's variables, PET_….

    Raises:
        SystemExit: with code 2 after a message on stderr if an argument is invalid, with 0 after ``--help``.
    """
    parser = _parser(prog, use_env)
    given = parser.parse_args(parser.complete(sys.argv[1:] if argv is None else argv, environ))
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
        parser.error("--nnodes N needs the --node-rank of each node; node 0 is the one that the others reach")
    if min_nodes == nnodes > 1 and given.gateway and given.node_rank is None:
        parser.error("--nnodes N needs the --node-rank of each node")
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
    if nnodes == 1 and given.pdb is not None and given.pdb >= given.nproc_per_node:
        parser.error(f"--pdb {given.pdb}: the ranks are 0 to {given.nproc_per_node - 1}")
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
    logs = LogOptions(given.log_dir, given.redirects, given.tee, given.local_ranks_filter)
    if logs.directory and not logs.has_files:
        remarks += ("--log-dir: without --redirects or --tee no files are written",)
    own = {each.name: getattr(given, each.name) for each in fields(Options) if hasattr(given, each.name)}
    derived = {
        "program": _program(parser, words[0], module=given.module, no_python=given.no_python),
        "arguments": tuple(words[1:]),
        "name": os.path.basename(words[0]),
        "nproc": given.nproc_per_node,
        "nnodes": nnodes,
        "min_nodes": min_nodes,
        "node_rank": node_rank,
        "external_gateway": bool(given.gateway),
        "master_addr": address,
        "master_port": port,
        "job": given.rdzv_id,
        "logs": logs,
        "remarks": remarks,
        "variables": tuple(parser.variables),
    }
    return Options(**(own | derived))


def _parser(prog: str, use_env: bool) -> Parser:
    parser = Parser(
        prog=prog,
        usage="%(prog)s [options] script.py [argument ...]",
        description="Start a script on several ranks, host their gateway, and supervise them until they end.",
        epilog=_EPILOG,
        formatter_class=Formatter,
        allow_abbrev=False,
    )
    parser.add_options(_options())
    parser.add_argument(
        *("--use-env", "--use_env", "--use-env=True", "--use_env=True"),  # torch's documentation gives it a value
        action="store_true",
        default=use_env,
        help="do not pass --local-rank=LOCAL_RANK to the script" + (" (the default)" if use_env else ""),
    )
    parser.add_options(UNUSED, "torchrun's options without effect here, and the reason")
    # PARSER is 'one or more, options included'; REMAINDER after a positional drops a '--' meant for the script.
    parser.add_argument("program", nargs=argparse.PARSER, metavar="script.py", help="the script and its arguments")
    return parser


def _options() -> tuple[Option, ...]:
    """Return the options that have an effect."""
    nproc = (
        "ranks on this node; 'cpu': one for each core, 'gpu': one for each GPU, 'auto': gpu if there is one, else cpu"
    )
    nnodes = (
        "nodes of the job (default: 1); MIN:MAX if nodes may be lost and join; or 'auto': those on which Slurm, mpirun "
        "or Kubernetes has started a launcher each"
    )
    node_rank = (
        "number of this node, from 0 (default); node 0 hosts the gateway. Not needed with --nnodes MIN:MAX: the node "
        "with the address --master-addr hosts it"
    )
    window = f"how long to wait for more nodes once MIN are there (default: {JOIN_WINDOW_SECONDS:g})"
    port = f"port of the gateway (default: any free one on one node, {DEFAULT_PORT} on several)"
    restarts = "how many times all ranks of the job start again after a failure (default: 0); the same on all nodes"
    replace = (
        "after a failure, start only the rank that failed again, at most --max-restarts times on each node; the others "
        "go on, and call grow_group() to let it join"
    )
    pdb = (
        "this rank alone reads the launcher's stdin, for pdb: an uncaught exception starts it there, and so does "
        "breakpoint() in the script. Meanwhile the others wait, a day unless RANKMESH_TIMEOUT is set"
    )
    redirects = "write output to files only: 1 stdout, 2 stderr, 3 both; by local rank: 0:1,1:3"
    stop_grace = "how long a rank may take to end after a signal, before it is killed (default: 30)"
    output_grace = (
        "when all ranks have ended with 0: how long processes that they started, and that still hold their output, may "
        "go on, before they are killed (default: 30)"
    )
    any_port = functools.partial(_number, 0, 65535)
    return (
        Option("nproc-per-node", nproc, "N", _nproc, 1),
        Option("nnodes", nnodes, "N", _nodes, (1, 1)),
        Option("node-rank", node_rank, "N", _whole, None),
        Option("join-window last-call", window, "SECONDS", _seconds, JOIN_WINDOW_SECONDS),
        Option("master-addr", "address of node 0 (default: 127.0.0.1)", "HOST"),
        Option("master-port", port, "PORT", any_port, None),
        Option("gateway", "URL of a running gateway ('rankmesh gateway'), instead of node 0's", "URL", _gateway, None),
        Option("rdzv-endpoint", "--master-addr and --master-port in one", "HOST[:PORT]", _endpoint, None),
        Option(
            "rdzv-backend", "'static' or 'c10d'; ignored: the ranks meet at the gateway", "NAME", _backend, "static"
        ),
        Option("rdzv-id", "the job's name", "NAME"),
        Option("local-addr", "address of this node's ranks (default: one that node 0 sees)", "HOST"),
        Option("role", "value of ROLE_NAME in the environment of the ranks", "NAME", default="default"),
        Option("-m module", "the script is a module: run it with 'python -m'"),
        Option("no-python", "the script is a program: run it without Python"),
        Option("max-restarts", restarts, "N", _whole, 0),
        Option("replace", replace),
        Option("as-gloo", "torch's backend 'gloo' is RankMesh in the ranks (RANKMESH_AS=gloo)"),
        Option("pdb", pdb, "RANK", _whole, None),
        Option("log-dir", "directory for the files of -r and -t (default: a new one in $TMPDIR)", "PATH"),
        Option("-r redirects", redirects, "STREAMS", _streams, "0"),
        Option("-t tee", "write output to files, too; values as of -r", "STREAMS", _streams, "0"),
        Option("local-ranks-filter", "print the output of these local ranks only", "N,N...", _local_ranks, ()),
        Option(
            "failure-grace", "how long the other ranks may go on after a failure (default: 5)", "SECONDS", _seconds, 5.0
        ),
        Option("stop-grace shutdown-timeout", stop_grace, "SECONDS", _seconds, 30.0),
        Option("output-grace", output_grace, "SECONDS", _seconds, 30.0),
    )


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


def _backend(text: str) -> str:
    if text not in ("static", "c10d"):
        raise argparse.ArgumentTypeError(f"invalid choice: {text!r} (choose static or c10d)")
    return text


def _streams(text: str) -> str:
    """Check a value of --redirects or --tee; LogOptions reads it."""
    if not re.fullmatch(r"[0-3]|\d+:[0-3](,\d+:[0-3])*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not 0 to 3, nor such numbers by local rank: 0:1,1:3")
    return text


def _local_ranks(text: str) -> tuple[int, ...]:
    return tuple(_whole(each) for each in text.split(","))


def cores() -> int:
    """Return the number of cores available to this process."""
    return len(os.sched_getaffinity(0))


def gpus() -> int:
    """Return the number of GPUs that CUDA's driver offers, after CUDA_VISIBLE_DEVICES; 0 without a driver."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if cuda.cuInit(0) != 0 or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value
