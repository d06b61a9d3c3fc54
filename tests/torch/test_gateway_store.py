"""torch's TCPStore at the gateway of ``rankmesh run``: the same outcomes as at torch's own server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as theirs
from support import torch_port
from support.processes import Ranks, free_port, wait_until
from support.store_calls import CALLS, outcome
from support.torch_port import served

LONG = timedelta(seconds=60)
ENDS = {"DistNetworkError"}
DIFFERENCES = {
    "add to nothing": ((None, 5, b"5"), "torch's TCPStore ends the connection; its HashStore and FileStore count so"),
    "add to digits and text": (ENDS, "torch takes the digits and drops the rest"),
    "add over the end": (ENDS, "torch goes on at the other end"),
}


def client_of(port: int, world_size: int | None = None) -> theirs.TCPStore:
    return theirs.TCPStore("127.0.0.1", port, world_size, False, LONG)


@pytest.fixture(scope="module")
def gateway() -> Iterator[subprocess.Popen[str]]:
    """A gateway in a process of its own: some of torch's calls keep Python's interpreter lock while they wait."""
    command = [sys.executable, torch_port.__file__]
    folder = str(Path(torch_port.__file__).parents[1])
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": folder}, **pipes) as process:
        assert process.stdout is not None
        process.port = int(process.stdout.readline())
        yield process
        process.communicate(timeout=60)


@pytest.fixture
def port(gateway: subprocess.Popen[str]) -> int:
    """The port of a gateway with an empty store."""
    gateway.stdin.write("clear\n")
    gateway.stdin.flush()
    assert gateway.stdout.readline() == "cleared\n"
    return gateway.port


class TestCalls:
    @pytest.mark.parametrize("call", CALLS)
    def test_the_same_call(self, port: int, call: str) -> None:
        server = theirs.TCPStore("127.0.0.1", 0, None, True, LONG)
        expected = outcome(CALLS[call], client_of(server.port, 1), theirs)
        expected, why = DIFFERENCES.get(call, (expected, "as torch's"))
        assert outcome(CALLS[call], client_of(port, 1), theirs) == expected, why

    def test_behind_prefixes(self, port: int) -> None:
        store = client_of(port)
        inner = theirs.PrefixStore("a", theirs.PrefixStore("b", store))
        inner.set("k", "v")
        inner.queue_push("q", "w") if hasattr(inner, "queue_push") else None
        assert (inner.get("k"), store.get("b/a/k"), inner.num_keys()) == (b"v", b"v", 1)

    def test_many_clients(self, port: int) -> None:
        def work(number: int) -> int:
            store = client_of(port)
            for _ in range(20):
                store.add("n", 1)
            store.set(f"k{number}", "v")
            store.wait([f"k{each}" for each in range(24)])
            store.barrier("b", 24, LONG)
            store.queue_push("q", str(number))
            return int(store.queue_pop("q"))

        with ThreadPoolExecutor(24) as pool:
            assert sorted(pool.map(work, range(24))) == list(range(24))
        assert client_of(port).add("n", 0) == 480


def test_a_wait_that_times_out_and_one_that_ends(port: int) -> None:
    store, other = client_of(port), client_of(port)
    with pytest.raises(theirs.DistStoreError, match=r"wait timeout after 50ms, keys: /missing"):
        store.wait(["missing"], timedelta(seconds=0.05))
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(store.get, "late")
        other.set("late", "v")
        assert got.result(60) == b"v"


def test_a_client_that_is_killed_while_it_waits() -> None:
    program = "import sys, torch.distributed as d; d.TCPStore('127.0.0.1', int(sys.argv[1]), is_master=False).get('k')"
    with served() as at, subprocess.Popen([sys.executable, "-c", program, str(at.port)]) as waiter:
        try:
            wait_until(lambda: at.store.waiting, "the client waits", 120)
        finally:
            waiter.kill()
        wait_until(lambda: not at.store.waiting, "the client is forgotten")
        client_of(at.port).set("k", "v")


def test_a_client_that_is_refused_fails_at_its_first_call_and_not_at_its_timeout() -> None:
    with served(closed="it has several jobs") as at:
        begun = time.monotonic()
        with pytest.raises(theirs.DistNetworkError, match="closed"):
            theirs.TCPStore("127.0.0.1", at.port, 1, False, timedelta(seconds=600))
        assert time.monotonic() - begun < 300


# Under the launcher

AT_THE_MASTER = """\
import datetime, json, os
import torch.distributed as dist
rank = int(os.environ["RANK"])
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
old = store.num_keys()
store.set(f"k{rank}", "v")
store.wait(["k0", "k1"], datetime.timedelta(seconds=100))
print(json.dumps([old, store.get(f"k{1 - rank}").decode()]), flush=True)
store.barrier("end", 2, datetime.timedelta(seconds=100))
if rank == 0 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and FAILS:
    raise SystemExit(1)
"""
SUM = """\
import json, os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo", INIT)
total = torch.ones(1)
dist.all_reduce(total)
print(json.dumps([type(dist.group.WORLD).__module__, total.item()]), flush=True)
dist.destroy_process_group()
"""
TORCHS, MESHS = "torch.distributed.distributed_c10d", "rankmesh.torch._group"
NO_EFFECT = "--as-gloo has no effect"


def run(ranks: Ranks, program: str, *options: str, **variables: str) -> tuple[list[Any], str]:
    """Run a program of two ranks under ``rankmesh run``; return what they print as JSON, and the standard error."""
    script = ranks.folder / "program.py"
    script.write_text(program)
    started = ranks.command(
        "-m", "rankmesh.run", *options, "--nproc-per-node", "2", str(script), name="run", **variables
    )
    ranks.wait([started])
    assert started.code == 0, ranks.transcript()
    return [json.loads(line[line.index("] ") + 2 :]) for line in started.stdout.splitlines()], started.stderr


@pytest.mark.processes
class TestUnderTheLauncher:
    def test_a_client_of_the_master_port(self, ranks: Ranks) -> None:
        found, _ = run(ranks, AT_THE_MASTER.replace("FAILS", "False"))
        assert [value for _, value in found] == ["v", "v"]

    def test_the_second_attempt_meets_no_key_of_the_first(self, ranks: Ranks) -> None:
        program = AT_THE_MASTER.replace("FAILS", "True").replace('"v")\n', '"v")\nstore.set("extra", "v")\n')
        found, _ = run(ranks, program, "--max-restarts", "1")
        assert len(found) == 4
        assert all(old <= 2 for old, _ in found), found

    @pytest.mark.parametrize("as_gloo", [False, True])
    def test_torch_that_does_not_load_rankmesh(self, ranks: Ranks, as_gloo: bool) -> None:
        options = ["--as-gloo"] * as_gloo
        program = SUM.replace(", INIT", "")
        found, stderr = run(ranks, program, *options, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
        assert found == [[TORCHS, 2.0]] * 2
        assert stderr.count(NO_EFFECT) == as_gloo

    def test_an_address_of_its_own_has_a_store_of_its_own(self, ranks: Ranks) -> None:
        init = f'"tcp://127.0.0.1:{free_port()}", rank=int(os.environ["RANK"]), world_size=2'
        found, _ = run(ranks, SUM.replace("INIT", init))
        assert found == [[TORCHS, 2.0]] * 2
