"""``rankmesh doctor`` at real jobs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.command import COMMAND, Double, Job, environment, here, until_it_fits
from support.network_hosts import Host, network_hosts
from support.processes import Ranks

from rankmesh._cli import doctor
from rankmesh_agent import native
from rankmesh_agent.wire.version import __version__

pytestmark = pytest.mark.processes


def test_a_job_that_is_well(job: Job):
    done = job.here("doctor", "--json", "--mib", "1", "--patience", "20")
    assert (done.code, done.stderr) == (0, ""), done
    found = done.document
    assert found["ok"]
    # A rank that has no processor for a moment is suspect, or slow.
    assert {(each["level"], each["about"]) for each in found["findings"]} <= {("warning", "agent"), ("warning", "pair")}
    assert [each["rank"] for each in found["agents"]] == [0, 1, 2]
    assert len(found["pairs"]) == 6
    for pair in found["pairs"]:
        assert pair["reached"]
        assert pair["bytes"] == 1 << 20
        assert 0 < pair["connect"] < 60
        assert 0 < pair["round_trip"] < 60
        assert pair["seconds"] > 0
        assert pair["job_uses"] in ("shared memory", "tcp")
    for agent in found["agents"]:
        assert abs(agent["clock"]["offset"]) <= agent["clock"]["uncertainty"] + 0.01
        assert agent["report"]["token"]


def test_a_rank_that_is_stopped_is_named(job: Job, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "_FIRST_SECONDS", 1.0)
    rank = job.all_alive()[1]["member"]
    os.kill(rank["pid"], signal.SIGSTOP)
    try:
        code, stdout, stderr = job.here("doctor", "--patience", "1")
    finally:
        os.kill(rank["pid"], signal.SIGCONT)
    assert (code, stderr) == (1, "")
    line = next(line for line in stdout.splitlines() if "problem  rank 1 (" in line)
    # Another one that has no processor for a second does not answer either.
    others = "(nor does any of [12] others reach it|and there is no other agent to try)"
    assert re.search(rf"pid {rank['pid']}\) cannot be asked from here, {others}", line)
    assert "accepts connections, but does not answer" in line
    assert f"the process is stopped (state T): kill -CONT {rank['pid']} lets it go on" in line
    job.all_alive()


def test_the_wrong_token(job: Job, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(native, "reason", "there is no compiler")
    code, stdout, stderr = job.here("doctor", RANKMESH_TOKEN="another")
    assert code == 4
    assert stderr.count("\n") == 1
    assert stdout.startswith("This host\n")  # what is known without the gateway
    assert "\n  compiled core  does not run: there is no compiler\n" in stdout


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    with ExitStack() as stack:
        try:
            if os.geteuid():
                raise PermissionError
            found = stack.enter_context(network_hosts(3))
        except (OSError, SystemExit):
            pytest.skip("making test hosts takes root and iproute2")
        yield found


def problems(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("  problem  ")]


def test_a_pair_of_hosts_that_is_cut_is_named(hosts: list[Host], ranks: Ranks, tmp_path: Path):
    """Three ranks on three hosts; packets between the last two are dropped without an error."""
    script = tmp_path / "script.py"
    script.write_text(
        "import pathlib, rankmesh, sys, time; rankmesh.init_process_group()\n"
        "pathlib.Path(f'{sys.argv[1]}/joined-{rankmesh.get_rank()}').touch(); time.sleep(1000)"
    )
    common = {"RANKMESH_GATEWAY": f"http://{hosts[0].address}:8700", "RANKMESH_TOKEN": "the secret of all"}

    def start(host: Host, *arguments: str, **variables: str) -> None:
        inside = ["-c", "import os, sys; os.execvp('ip', ['ip', 'netns', 'exec', *sys.argv[1:]])", host.namespace]
        own = {"RANKMESH_BIND": host.address, "RANKMESH_SHM_DIR": str(host.shm), **common, **variables}
        ranks.command(*inside, sys.executable, *arguments, name="on-a-host", **own)

    def run_doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["ip", "netns", "exec", hosts[0].namespace, *COMMAND, "doctor", "--mib", "0", *arguments]
        return subprocess.run(command, env=environment(**common), capture_output=True, text=True, timeout=180)

    try:
        start(hosts[0], "-m", "rankmesh_gateway", "--host", hosts[0].address)
        for rank, host in enumerate(hosts):
            start(host, str(script), str(tmp_path), RANK=str(rank), WORLD_SIZE="3")
        ranks.wait_for(*(f"joined-{rank}" for rank in range(3)))
        well = run_doctor("--patience", "20")
        assert (well.returncode, well.stdout.count(" ok ")) == (0, 6), well
        for host, other in ((hosts[1], hosts[2]), (hosts[2], hosts[1])):
            lost = ["neigh", "replace", other.address, "lladdr", "02:00:00:00:00:99", "dev", "eth0", "nud", "permanent"]
            subprocess.run(["ip", "-n", host.namespace, *lost], check=True)
        found = until_it_fits(
            lambda: run_doctor("--patience", "1", "--timeout", "30"), lambda done: len(problems(done.stdout)) == 1
        )
    finally:
        for each in ranks.started:
            each.kill()
        ranks.wait(ranks.started)
    assert found.returncode == 1, found
    (line,) = problems(found.stdout)
    assert "rank 1 (" in line
    assert "and rank 2 (" in line
    assert "do not reach each other: no answer to a connection to 10.99.0.12 port" in line
    assert "packets are dropped on the way" in line


def test_no_rank_is_there(double: Double, overview: Any):
    double.answers = {"/health": {"version": __version__}, "/v1/overview": overview(ranks=[], agents=[])}
    code, stdout, _ = here("doctor", "--gateway", double.url)
    assert code == 0
    assert "none; 'rankmesh run' starts ranks" in stdout
