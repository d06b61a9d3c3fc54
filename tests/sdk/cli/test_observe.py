"""``rankmesh observe`` of ranks of no library: tests/mpi and tests/torch have those of mpi4py and gloo."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
from support.command import here
from support.observed import OBSERVE, Stuck, observed_job
from support.processes import Rank, Ranks, wait_until

SCRIPT = """\
import os, signal, time
from types import SimpleNamespace
comm = SimpleNamespace(Allreduce=signal.pause)  # compiled, as mpi4py's is
if os.environ["RANK"] == "2":
    {stuck}
comm.Allreduce()
"""
LAUNCHER = """\
import os, signal, subprocess, sys
environments = [dict(os.environ, RANK=str(rank), WORLD_SIZE="4") for rank in range(4)]
ranks = [subprocess.Popen([sys.executable, sys.argv[1]], env=each) for each in environments]
signal.signal(signal.SIGTERM, lambda *_: [rank.terminate() for rank in ranks])
sys.exit(max(rank.wait() for rank in ranks))
"""
SLEEPS = Stuck("sleep", "time.sleep(3600)")


@pytest.mark.processes
def test_ranks_below_a_launcher_and_by_their_ids(ranks: Ranks):
    launcher = ranks.folder / "launcher.py"
    launcher.write_text(LAUNCHER)

    def observe(ranks: Ranks, script: Path) -> Rank:
        return ranks.launch([*OBSERVE, sys.executable, str(launcher), str(script)], name="observe")

    with observed_job(ranks, SLEEPS.script(SCRIPT), observe) as job:
        found, _ = job.finding(SLEEPS)
        assert "rank 2 has not come to Allreduce" in found["text"]
        assert ":5; ranks 0-1, 3 wait at" in found["text"]
        assert "Allreduce" in job.run("stacks", "1").stdout
        assert job.run("status", "--once").stdout.count("MiB") == 4
        assert job.run("stragglers").stderr.count("its calls are not known") == 4
        pids = [str(each["pid"]) for each in job.run("diagnose", "--json").document["ranks"]]
        beside = ranks.launch([*OBSERVE, "--pid", *pids], name="beside")
        job.launcher, launched = beside, job.launcher
        job.finding(SLEEPS)
        job.launcher = launched
    ranks.wait([beside])
    assert beside.code == 0


@pytest.mark.processes
def test_the_exit_code_is_the_programs(ranks: Ranks):
    done = ranks.launch([*OBSERVE, sys.executable, "-c", "raise SystemExit(7)"], name="observe")
    ranks.wait([done])
    assert (done.code, done.stderr) == (7, "")


@pytest.mark.processes
def test_the_program_gets_each_signal_once(ranks: Ranks):
    script = ranks.folder / "waits.py"
    script.write_text(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGUSR1, lambda *_: print('usr1', flush=True))\n"
        "signal.signal(signal.SIGINT, lambda *_: print('int', flush=True))\n"
        "print('ready', flush=True)\n"
        "while True: time.sleep(0.1)\n"
    )
    started = ranks.launch([*OBSERVE, sys.executable, str(script)], name="observe")
    for number, printed in ((0, "ready\n"), (signal.SIGUSR1, "ready\nusr1\n"), (signal.SIGINT, "ready\nusr1\nint\n")):
        started.kill(number)
        wait_until(lambda printed=printed: started.stdout == printed, f"{printed!r}: {started!r}")
    started.kill(signal.SIGTERM)
    ranks.wait([started])
    assert started.code == -signal.SIGTERM


@pytest.mark.parametrize(
    ("arguments", "text"),
    [((), "give a command"), (("--pid",), "process ids"), (("--gateway", "ftp://x", "true"), "not an address")],
)
def test_arguments_that_make_no_sense(arguments, text):
    done = here("observe", *arguments)
    assert done.code == 2
    assert text in done.stderr
