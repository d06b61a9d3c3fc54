"""The launcher's command line: torchrun's arguments, each long option in both spellings."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from dataclasses import dataclass
from typing import Any

DEFAULT_PORT = 29500
"""MASTER_PORT of a job on several nodes when nobody chooses one: torchrun's."""

_EPILOG = """\
Everything after the script goes to the script untouched. Each rank finds RANK, LOCAL_RANK, WORLD_SIZE,
LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR and MASTER_PORT in its environment, so 'rankmesh.init_process_group()' needs
no arguments. On several nodes, start the launcher once on each, with RANKMESH_TOKEN set to the same secret.

The launcher exits with 0 when all ranks did, else with the exit code of the rank that failed first (128 + N if signal N
ended it), 128 + N when signal N ended the launcher, 2 when it could not start. Local rank 0 reads the launcher's stdin.
"""


@dataclass(frozen=True)
class Options:
    """What the command line says.

    Attributes:
        command: what each rank executes.
        name: the program's name, for people.
        nproc: ranks on this node.
        nnodes: nodes of the job.
        node_rank: which of them this is.
        master_addr: host of the gateway.
        master_port: its port; 0 is any free one.
        failure_grace: seconds the other ranks have to end by themselves once one has failed.
        stop_grace: seconds a rank has to end once it got a signal, before SIGKILL.
    """

    command: tuple[str, ...]
    name: str
    nproc: int
    nnodes: int
    node_rank: int
    master_addr: str
    master_port: int
    failure_grace: float
    stop_grace: float


def parse(argv: list[str] | None) -> Options:
    """Read the command line (None: this process's).

    Raises:
        SystemExit: with code 2 after a message on stderr when it makes no sense, with 0 after ``--help``.
    """
    parser = _parser()
    given = parser.parse_args(argv)
    if given.standalone and given.nnodes != 1:
        parser.error("--standalone means one node; leave it out, or leave out --nnodes")
    if given.node_rank >= given.nnodes:
        parser.error(f"--node-rank {given.node_rank}: with --nnodes {given.nnodes} it is 0 to {given.nnodes - 1}")
    if given.module and given.no_python:
        parser.error("--module and --no-python exclude each other")
    port = given.master_port
    if given.nnodes > 1 and port == 0:
        parser.error("--master-port 0 takes any free port, which the other nodes cannot know; choose one")
    if port is None:
        port = 0 if given.nnodes == 1 else DEFAULT_PORT
    program = given.program[1:] if given.program[0] == "--" else given.program
    return Options(
        command=_command(parser, program, module=given.module, no_python=given.no_python),
        name=os.path.basename(program[0]),
        nproc=given.nproc_per_node,
        nnodes=given.nnodes,
        node_rank=given.node_rank,
        master_addr=given.master_addr.strip("[]"),
        master_port=port,
        failure_grace=given.failure_grace,
        stop_grace=given.stop_grace,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rankmesh run",
        usage="%(prog)s [options] script.py [argument ...]",
        description="Start a script as several ranks, host their gateway, and watch over them until they end.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )

    def add(name: str, **how: Any) -> None:
        parser.add_argument(*dict.fromkeys([f"--{name}", f"--{name.replace('-', '_')}"]), **how)

    add("nproc-per-node", type=_nproc, default=1, metavar="N", help="ranks on this node, or 'auto': one a core")
    add("nnodes", type=_count, default=1, metavar="N", help="nodes of the job (default: 1)")
    add("node-rank", type=_whole, default=0, metavar="N", help="which node this is, from 0; node 0 hosts the gateway")
    add("master-addr", default="127.0.0.1", metavar="HOST", help="address of node 0 (default: 127.0.0.1)")
    add(
        "master-port",
        type=_port,
        metavar="PORT",
        help=f"port of the gateway (default: any free one on one node, {DEFAULT_PORT} on several)",
    )
    parser.add_argument("-m", "--module", action="store_true", help="the script is a module: run it with 'python -m'")
    add("no-python", action="store_true", help="the script is a program: run it without Python")
    add("standalone", action="store_true", help="one node; accepted for torchrun's sake")
    add("use-env", action="store_true", help="ranks are in the environment; accepted, as it is always so")
    add(
        "failure-grace",
        type=_seconds,
        default=5.0,
        metavar="SECONDS",
        help="how long the others may go on once a rank has failed (default: 5)",
    )
    add(
        "stop-grace",
        type=_seconds,
        default=30.0,
        metavar="SECONDS",
        help="how long a rank may take to end after a signal, before SIGKILL (default: 30)",
    )
    # PARSER, 'one or more, whatever they look like': REMAINDER after a positional loses a '--' meant for the script.
    parser.add_argument("program", nargs=argparse.PARSER, metavar="script.py", help="the script and its arguments")
    return parser


def _command(parser: argparse.ArgumentParser, program: list[str], *, module: bool, no_python: bool) -> tuple[str, ...]:
    if module:
        return (sys.executable, "-m", *program)
    if no_python:
        if shutil.which(program[0]) is None:
            parser.error(f"no such program: {program[0]}")
        return tuple(program)
    if not os.path.exists(program[0]):
        parser.error(f"no such script: {program[0]} (in {os.getcwd()}); use -m for a module, --no-python for a program")
    return (sys.executable, *program)


def _nproc(text: str) -> int:
    return len(os.sched_getaffinity(0)) if text in ("auto", "cpu") else _count(text)


def _count(text: str) -> int:
    return _number(text, 1, None)


def _whole(text: str) -> int:
    return _number(text, 0, None)


def _port(text: str) -> int:
    return _number(text, 0, 65535)


def _number(text: str, least: int, most: int | None) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if value < least or (most is not None and value > most):
        raise argparse.ArgumentTypeError(f"{value} is out of range")
    return value


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return value
