"""``rankmesh bench``: times collectives among ranks of this machine."""

from __future__ import annotations

import json as json_module
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import typer

from rankmesh._cli.exit_codes import FAILED, OK, TIMED_OUT, USAGE, CommandError, command, require_linux, write_json
from rankmesh._cli.options import JsonOption
from rankmesh._cli.tables import Table, show
from rankmesh_gateway.humanize import rate, seconds

OPERATIONS = (
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
    "barrier",
)
_RESULT_PREFIX = "[rank 0] {"
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_LAST_LINES = 3


@command
def bench(
    nproc: Annotated[int, typer.Option(min=1, metavar="N", help="Number of ranks.")] = 2,
    sizes: Annotated[
        str, typer.Option(metavar="LIST", help="Sizes in bytes; K is 1024, M 1024 K.")
    ] = "4,4K,64K,1M,16M",
    ops: Annotated[str, typer.Option(metavar="LIST", help="Operations: " + ", ".join(OPERATIONS) + ".")] = "all_reduce",
    transport: Annotated[
        Literal["auto", "shm", "tcp"], typer.Option(help="Transport; auto: shared memory if there is any.")
    ] = "auto",
    budget: Annotated[float, typer.Option(metavar="SECONDS", min=0.01, help="Duration of each measurement.")] = 0.5,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", min=1.0, help="Timeout of the whole run.")] = 300.0,
    json: JsonOption = False,
) -> int:
    """Measure collectives between ranks on this machine, in a job of its own.

    The size is that of a rank's input or output, whichever is larger. Bandwidth is that size divided by the time of a
    call; bus bandwidth is the number of bytes that each rank has to send, divided by that time.
    """
    require_linux()
    wanted = [name.strip() for name in ops.split(",") if name.strip()]
    if unknown := [name for name in wanted if name not in OPERATIONS]:
        raise CommandError(f"there is no operation {unknown[0]!r} to measure: {', '.join(OPERATIONS)}", USAGE)
    plan = {"ops": wanted, "sizes": [_bytes(each) for each in sizes.split(",") if each.strip()], "budget": budget}
    if not json:
        medium = {"auto": "shared memory if there is any", "shm": "shared memory", "tcp": "TCP"}[transport]
        print(f"{nproc} ranks on this machine, {medium}; float32; {budget:g} s for each figure", file=sys.stderr)
    results = list(_measured(plan, nproc, transport, timeout))
    if json:
        write_json({"ranks": nproc, "transport": transport, "dtype": "float32", "results": results})
    else:
        show([_table(results)])
    return OK


def _table(results: list[dict[str, Any]]) -> Table:
    rows = [
        [
            result["op"],
            str(result["bytes"]) if result["bytes"] else "",
            seconds(result["seconds"]),
            seconds(result["least"]),
            rate(result["bandwidth"]) if result["bytes"] else "",
            rate(result["bus_bandwidth"]) if result["bytes"] else "",
            str(result["calls"]),
        ]
        for result in results
    ]
    columns = ["operation", ">bytes", ">median", ">fastest", ">bandwidth", ">bus bandwidth", ">calls"]
    return Table(f"Time of a call, carried by {results[0]['medium']}" if results else "Nothing measured", columns, rows)


def _measured(plan: dict[str, Any], nproc: int, transport: str, timeout: float) -> Iterator[dict[str, Any]]:
    """Run the job and yield the results that its rank 0 prints."""
    from rankmesh._launcher.signals import pdeathsig

    command = [sys.executable, "-m", "rankmesh.run", "--standalone", "--nproc-per-node", str(nproc)]
    command += ["--module", "rankmesh._cli.bench_rank", json_module.dumps(plan)]
    environment = {**os.environ, "RANKMESH_TRANSPORT": transport, "RANKMESH_TIMEOUT": str(timeout)}
    with subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=pdeathsig(),
    ) as job:
        try:
            output, errors = job.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            job.terminate()
            raise CommandError(f"the measurement was not done within {timeout:g} s: fewer sizes?", TIMED_OUT) from None
        except BaseException:
            job.terminate()
            raise
    if job.returncode:
        last = " / ".join(errors.strip().splitlines()[-_LAST_LINES:])
        raise CommandError(f"the measurement failed: {last}", FAILED)
    for line in output.splitlines():
        if line.startswith(_RESULT_PREFIX):
            yield json_module.loads(line.partition("] ")[2])


def _bytes(text: str) -> int:
    """Return the number of bytes of a text such as ``64K``."""
    number, unit = text.strip().upper().removesuffix("B").removesuffix("I"), ""
    if number[-1:] in ("K", "M", "G"):
        number, unit = number[:-1], number[-1]
    if not number.isascii() or not number.isdecimal() or int(number) * _UNITS[unit] > 1 << 36:
        raise CommandError(f"{text!r} is not a size: give bytes, or 4K, 64M, 1G", USAGE)
    return int(number) * _UNITS[unit]
