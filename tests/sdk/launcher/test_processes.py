"""The launcher as a process, with scripts that need nothing of RankMesh."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.forked_python import ForkedPopen
from support.launchers import OURS, alive
from support.processes import wait_until

pytestmark = pytest.mark.processes

DEADLINE = 180.0


class Job:
    """A launcher that runs a script; the script finds its folder as the working directory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.launchers: list[subprocess.Popen[bytes]] = []

    def script(self, text: str, name: str = "script.py") -> None:
        prologue = "import os, signal, subprocess, sys, time\nrank = int(os.environ['RANK'])\n"
        (self.folder / name).write_text(prologue + textwrap.dedent(text))

    def start(self, *arguments: str, launcher: str = "rankmesh.run", **environment: str) -> subprocess.Popen[bytes]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
        command = [sys.executable, "-m", launcher, *arguments]
        started = ForkedPopen(command, forks=False, cwd=self.folder, env={**inherited, **environment})
        self.launchers.append(started)
        return started

    def finish(self, launcher: subprocess.Popen[bytes]) -> tuple[int, str, str]:
        stdout, stderr = launcher.communicate(timeout=DEADLINE)
        return launcher.returncode, stdout.decode(errors="replace"), stderr.decode(errors="replace")

    def run(self, *arguments: str, launcher: str = "rankmesh.run", **environment: str) -> tuple[int, str, str]:
        return self.finish(self.start(*arguments, launcher=launcher, **environment))

    def pids(self, count: int) -> list[int]:
        """The process ids the script wrote to ``count`` files named pid.*, once they are there."""

        def written() -> list[str]:
            return [text for path in self.folder.glob("pid.*") if (text := path.read_text()).endswith("\n")]

        wait_until(lambda: len(written()) == count, f"{count} pid files")
        return [int(text) for text in written()]


WRITE_PID = "open(f'pid.{rank}', 'w').write(f'{os.getpid()}\\n')\n"


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path)
    yield job
    for launcher in job.launchers:
        if launcher.poll() is None:
            launcher.kill()
        launcher.communicate()


# What a rank is told


def test_environment_and_prefixes(job: Job) -> None:
    job.script("""
        import json
        print(json.dumps(dict(os.environ)))
        print(sys.argv[1:], file=sys.stderr)
    """)
    code, stdout, stderr = job.run(
        "--nproc_per_node", "3", "--standalone", "--rdzv-conf=timeout=9", "script.py", "--nnodes=7", "--", "-m"
    )
    assert code == 0
    ranks = {}
    for line in stdout.splitlines():
        prefix, told = line.split("] ", 1)
        ranks[prefix] = json.loads(told)
    assert sorted(ranks) == ["[rank 0", "[rank 1", "[rank 2"]
    for rank in range(3):
        told = ranks[f"[rank {rank}"]
        assert told["RANK"] == told["LOCAL_RANK"] == str(rank)
        assert told["WORLD_SIZE"] == told["LOCAL_WORLD_SIZE"] == "3"
        assert (told["GROUP_RANK"], told["GROUP_WORLD_SIZE"]) == ("0", "1")
        assert (told["ROLE_NAME"], told["ROLE_RANK"], told["ROLE_WORLD_SIZE"]) == ("default", str(rank), "3")
        assert told["TORCHELASTIC_RUN_ID"] == told["RANKMESH_JOB"]
        assert told["TORCHELASTIC_USE_AGENT_STORE"] == "True", "torch's store is at MASTER_PORT"
        assert told["RANKMESH_GATEWAY"] == f"http://{told['MASTER_ADDR']}:{told['MASTER_PORT']}"
        assert told["MASTER_ADDR"] == "127.0.0.1"
        assert (told["PYTHONUNBUFFERED"], told["OMP_NUM_THREADS"]) == ("1", "1")
        assert f"[rank {rank}] ['--nnodes=7', '--', '-m']" in stderr
    told = ranks["[rank 0"]
    assert len(told["RANKMESH_TOKEN"]) == 64
    assert told["RANKMESH_TOKEN"] not in stderr
    assert told["RANKMESH_JOB"].startswith("script-")
    assert f"curl {told['RANKMESH_GATEWAY']}/health" in stderr
    assert "[rankmesh] --rdzv-conf: the gateway needs none" in stderr


def test_torch_distributed_launch_passes_the_local_rank(job: Job) -> None:
    job.script("print(sys.argv[1:], os.environ['LOCAL_RANK'])")
    code, stdout, stderr = job.run("--nproc_per_node=2", "script.py", "--steps=7", launcher="rankmesh.launch")
    assert code == 0, stderr
    assert sorted(stdout.splitlines()) == [
        f"[rank {rank}] ['--local-rank={rank}', '--steps=7'] {rank}" for rank in range(2)
    ]


def test_output_goes_to_files_with_torchruns_names(job: Job, tmp_path: Path) -> None:
    job.script("print('begun'); sys.exit('broken' if os.environ['RANK'] == '1' else 0)")
    logs = ("--rdzv-id=job", f"--log-dir={tmp_path / 'new/logs'}", "--redirects=1:3", "--tee=0:1")
    code, stdout, stderr = job.run("--nproc-per-node=2", *logs, "script.py")
    assert (code, stdout) == (1, "[rank 0] begun\n")
    (folder,) = (tmp_path / "new/logs").glob("job_*")
    assert f"[rankmesh] output files in {folder}\n" in stderr
    assert f"  the end of its stderr ({folder}/attempt_0/1/stderr.log):\n[rankmesh]   | broken\n" in stderr
    assert {str(path.relative_to(folder / "attempt_0")): path.read_text() for path in folder.rglob("*.log")} == {
        "0/stdout.log": "begun\n",
        "1/stdout.log": "begun\n",
        "1/stderr.log": "broken\n",
    }


def test_modules_and_programs(job: Job) -> None:
    job.script("print('as', __name__, __spec__.name)", "some_module.py")
    code, stdout, _ = job.run("-m", "some_module")
    assert (code, stdout) == (0, "[rank 0] as __main__ some_module\n")
    code, stdout, _ = job.run("--no-python", "sh", "-c", "echo $RANK; exit 9")
    assert (code, stdout) == (9, "[rank 0] 0\n")


# What cannot start


def test_a_port_in_use(job: Job) -> None:
    job.script("open('started', 'w')")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        code, _, stderr = job.run(f"--master-port={port}", "script.py")
    assert code == 2
    assert re.fullmatch(rf"rankmesh run: the launcher hosts the gateway, but 127.0.0.1:{port} is in use.*\n", stderr)
    assert not (job.folder / "started").exists()


def test_a_program_that_cannot_be_executed(job: Job) -> None:
    (job.folder / "broken").write_text("#!/no/such/interpreter\n")
    (job.folder / "broken").chmod(0o755)
    code, _, stderr = job.run("--no-python", "./broken")
    assert code == 2
    assert "cannot start ./broken" in stderr


# Output


def test_lines_of_many_ranks_are_never_torn(job: Job) -> None:
    job.script("""
        word = b"%d" % rank * (1 + 7 * rank)
        for count in range(0, 3000, 3):
            os.write(1, (word * count)[:9000])
            os.write(1, word + b"\\n")
        os.write(1, word * 300_000)
    """)
    launcher = job.start("--nproc-per-node=4", "script.py")
    stdout, _ = launcher.communicate(timeout=DEADLINE)
    assert launcher.returncode == 0
    lines = stdout.split(b"\n")
    assert lines.pop() == b""
    assert len(lines) == 4 * 1001
    for rank in range(4):
        word = b"%d" % rank * (1 + 7 * rank)
        expected = [(word * count)[:9000] + word for count in range(0, 3000, 3)] + [word * 300_000]
        prefix = b"[rank %d] " % rank
        assert [line.removeprefix(prefix) for line in lines if line.startswith(prefix)] == expected


class Screen:
    """What a terminal shows."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self.shown = descriptor, b""

    def see(self, text: bytes) -> None:
        """Wait for a text, and forget what is before its end."""
        while text not in self.shown:
            assert select.select([self._descriptor], [], [], DEADLINE)[0], self.shown
            self.shown += os.read(self._descriptor, 4096)
        self.shown = self.shown.partition(text)[2]


def on_a_terminal(job: Job, *options: str) -> tuple[subprocess.Popen[bytes], int]:
    """Start the job's script on a terminal; return the launcher, and the terminal's other side."""
    screen, terminal = pty.openpty()
    launcher = subprocess.Popen(
        [sys.executable, "-m", "rankmesh.run", *options, "script.py"],
        cwd=job.folder,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
    )
    os.close(terminal)
    job.launchers.append(launcher)
    return launcher, screen


def test_pdb_on_any_rank_reads_the_terminal(job: Job) -> None:
    job.script("""
        import rankmesh as dist
        dist.init_process_group()
        for step in range(2):
            dist.breakpoint(rank=1, skip=1)
        print("all went on")
        dist.barrier()
        if dist.get_rank() == 1:
            breakpoint()
        dist.barrier()
    """)
    launcher, screen = on_a_terminal(job, "--nproc-per-node", "2")
    terminal_screen = Screen(screen)
    see = terminal_screen.see
    see(b"[rank 1] rank 1: breakpoint at ")
    see(b"(Pdb) ")
    assert b"went on" not in terminal_screen.shown
    os.write(screen, b"up\np f'step {step}'\n")
    see(b"'step 1'")
    os.write(screen, b"c\n")
    see(b"all went on")
    see(b"all went on")
    see(b"[rank 1] (Pdb) ")  # Python's own breakpoint()
    os.write(screen, b"p 6 * 7\n")
    see(b"42")
    os.write(screen, b"c\n")
    assert launcher.wait(DEADLINE) == 0
    os.close(screen)


def test_pdb_starts_where_the_rank_of_the_option_fails(job: Job) -> None:
    job.script("""
        import rankmesh as dist
        dist.init_process_group()
        if rank:
            breakpoint()
            raise ValueError(f"odd {rank}")
        dist.barrier()
    """)
    launcher, screen = on_a_terminal(job, "--nproc-per-node=3", "--pdb=2", "--failure-grace=0")
    see = Screen(screen).see
    see(b"[rank 1]   pdb reads /dev/null: 'rankmesh run --pdb 1' passes its stdin on")
    see(b"the others may go on until rank 2 ends (--pdb)")
    os.write(screen, b"p 6 * 7\n")
    see(b"[rank 2] (Pdb) 42")
    os.write(screen, b"c\n")
    see(b"[rank 2] ValueError: odd 2")
    os.write(screen, b"p 7 * 8\n")
    see(b"[rank 2] (Pdb) 56")
    os.write(screen, b"q\n")
    see(b"rank 1 failed first: exit code 1")
    assert launcher.wait(DEADLINE) == 1
    os.close(screen)


def test_pdb_without_a_terminal_says_what_to_do(job: Job) -> None:
    job.script("""
        import rankmesh as dist
        dist.init_process_group()
        dist.breakpoint(rank=1)
    """)
    stderr = job.start("--nproc-per-node", "2", "script.py").communicate(timeout=DEADLINE)[1]
    assert b"rank 1 cannot start pdb: its standard input is /dev/null; start the job from a terminal" in stderr


def test_the_output_of_what_a_rank_leaves_behind(job: Job) -> None:
    job.script("""
        wait = "while [ ! -e all ]; do sleep 0.05; done; echo uploaded; touch done"
        subprocess.Popen(["sh", "-c", wait])
        subprocess.Popen(["sh", "-c", "while [ ! -e done ]; do sleep 0.05; done"])
    """)
    launcher = job.start("--output-grace=1000", "script.py")
    assert launcher.stderr is not None
    lines = iter(lambda: launcher.stderr.readline().decode(), "")  # type: ignore[union-attr]
    line = next(line for line in lines if "held open" in line)
    assert re.search(r"held open by sh -c while \[ ! -e all .* \(pid \d+\), .*; it gets 1000 s to end", line)
    (job.folder / "all").touch()
    assert job.finish(launcher)[:2] == (0, "[rank 0] uploaded\n")


UPLOAD = """
subprocess.Popen(
    ["sh", "-c", "echo $$ > pid.0; while [ ! -e go ]; do sleep 0.05; done; echo uploaded > upload"],
    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
)
while not os.path.exists("pid.0"):
    time.sleep(0.01)
"""


def test_what_a_failed_rank_leaves_behind_is_killed(job: Job) -> None:
    job.script(f"{UPLOAD}\nsys.exit(3)")
    assert job.run("script.py")[0] == 3
    (child,) = job.pids(1)
    wait_until(lambda: not alive(child), "what the rank started to be killed", DEADLINE)


def test_an_interrupt_ends_the_wait_for_output(job: Job) -> None:
    job.script("subprocess.Popen(['sleep', '1000'])")
    launcher = job.start("--output-grace=1000", "script.py")
    assert launcher.stderr is not None
    line = next(line for line in iter(launcher.stderr.readline, b"") if b"held open by sleep 1000" in line)
    child = int(line.partition(b"(pid ")[2].partition(b")")[0])
    launcher.send_signal(signal.SIGINT)
    assert job.finish(launcher)[0] == 128 + signal.SIGINT
    wait_until(lambda: not alive(child), "what the rank started to be killed", DEADLINE)


def test_a_grandchild_that_holds_the_output_open(job: Job) -> None:
    job.script("""
        import threading
        child = subprocess.Popen(["sleep", "1000"])
        stray = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        for number, process in enumerate((child, stray)):
            open(f"pid.{number}", "w").write(f"{process.pid}\\n")
        print("done", end="")
    """)
    code, stdout, _ = job.run("--output-grace=0.1", "script.py")
    assert (code, stdout) == (0, "[rank 0] done\n")
    child, stray = (int((job.folder / f"pid.{number}").read_text()) for number in range(2))
    try:
        wait_until(lambda: not alive(child), "what the launcher has killed to end", DEADLINE)
        assert alive(stray), "what left the rank's session is not ours to kill"
    finally:
        os.kill(stray, signal.SIGKILL)


def test_a_full_disk(job: Job) -> None:
    job.script("print('lost'); print('shown', file=sys.stderr)")
    with open("/dev/full", "w") as full:
        launcher = subprocess.run(
            [sys.executable, "-m", "rankmesh.run", "script.py"],
            cwd=job.folder,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=DEADLINE,
            check=False,
        )
    assert launcher.returncode == 120
    assert "[rankmesh] cannot write to stdout, and output is lost: No space left on device\n" in launcher.stderr
    assert "[rank 0] shown\n" in launcher.stderr


# Failures


def test_the_first_failure_is_reported_although_others_fail_milliseconds_after(job: Job) -> None:
    os.mkfifo(job.folder / "line")
    job.script("""
        line = open("line", "w" if rank == 1 else "r")
        open(f"ready.{rank}", "w")
        if rank == 1:
            for number in range(20):
                print("rank 1 says", number, file=sys.stderr)
            while not (os.path.exists("ready.0") and os.path.exists("ready.2")):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        line.read()  # ends when rank 1 does
        sys.exit("rank 1 is gone")
    """)
    code, _, stderr = job.run("--nproc-per-node=3", "script.py")
    assert code == 128 + signal.SIGKILL
    report = stderr[stderr.index("[rankmesh] rank 1 failed first") :].splitlines()
    where = rf"\(host {re.escape(socket.gethostname())}, pid \d+\)"
    assert re.fullmatch(rf"\[rankmesh\] rank 1 failed first: signal SIGKILL \(9\) after \d+\.\d s {where}", report[0])
    assert "memory" in report[1]
    assert report[2:13] == ["[rankmesh]   the end of its stderr:"] + [
        f"[rankmesh]   | rank 1 says {number}" for number in range(10, 20)
    ]
    assert [line.partition(",")[2].partition(",")[0] for line in report[13:]] == [" 2: exit code 1"], report


def state(pid: int) -> str:
    """Return the state of a process: Z if it has ended, T if it is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_of_ranks_that_ended_while_the_launcher_did_not_look_a_killed_one_failed_first(job: Job) -> None:
    job.script(f"""
        def end(*_):
            print("the last output of", rank, file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL) if rank else sys.exit(3)
        signal.signal(signal.SIGTERM, end)
        {WRITE_PID.strip()}
        while rank < 2 or not os.path.exists("pid.1"):
            time.sleep(0.01)
        while os.path.exists("/proc/" + open("pid.1").read().strip()):  # until the launcher has reaped it
            time.sleep(0.01)
    """)
    launcher = job.start("--nproc-per-node=3", "script.py")
    job.pids(3)
    exits, killed = (int((job.folder / f"pid.{rank}").read_text()) for rank in range(2))
    launcher.send_signal(signal.SIGSTOP)
    wait_until(lambda: state(launcher.pid) == "T", "the launcher to stop")
    os.kill(exits, signal.SIGTERM)
    os.kill(killed, signal.SIGTERM)
    wait_until(lambda: state(exits) == state(killed) == "Z", "both to end")
    launcher.send_signal(signal.SIGCONT)
    code, _, stderr = job.finish(launcher)
    assert code == 128 + signal.SIGKILL
    assert "[rankmesh] rank 1 failed first: signal SIGKILL (9)" in stderr
    assert stderr.index("the last output of 1") < stderr.index("[rankmesh] rank 1 failed: ")


def test_ranks_that_hang_after_a_failure_are_ended(job: Job) -> None:
    job.script(
        WRITE_PID
        + """
if rank == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen(["sleep", "1000"])
open(f"ready.{rank}", "w")
while rank == 1 and not all(os.path.exists(f"ready.{r}") for r in range(3)):
    time.sleep(0.01)
if rank == 1:
    print("out of ideas")
    sys.exit(3)
time.sleep(1000)
"""
    )
    code, _, stderr = job.run("--nproc-per-node=3", "--failure-grace=0.3", "--stop-grace=0.3", "script.py")
    assert code == 3
    assert "[rankmesh] rank 1 failed: exit code 3; the others get 0.3 s to end" in stderr
    assert "[rankmesh]   the end of its stdout:\n[rankmesh]   | out of ideas\n" in stderr
    assert re.search(r"\[rankmesh\] rank 0: signal SIGKILL \(9\) from the launcher, \d+\.\d s later", stderr)
    # If it dies of the first signal only when the second has been sent, the launcher does not claim it.
    assert re.search(r"\[rankmesh\] rank 2: signal SIGTERM \(15\)( from the launcher)?, \d+\.\d s later", stderr)
    assert not any(alive(pid) for pid in job.pids(3))


def test_a_rank_that_is_done_early_is_no_failure(job: Job) -> None:
    job.script("time.sleep(0.3 * rank); print('done')")
    code, stdout, stderr = job.run("--nproc-per-node=2", "--failure-grace=0", "script.py")
    assert (code, sorted(stdout.splitlines())) == (0, ["[rank 0] done", "[rank 1] done"])
    assert "failed" not in stderr


def test_shared_memory_of_a_crashed_job_is_swept(job: Job) -> None:
    shared = job.folder / "shared"
    shared.mkdir()
    (shared / "rankmesh-other-1").touch()
    job.script(
        "from rankmesh_agent.shared_memory.mapping import Mapping\n"
        "memory = Mapping.create('shared', os.environ['RANKMESH_JOB'], 4096)\n"
        "print(len(os.listdir('shared')), flush=True)\n"
        "os.abort()"
    )
    code, stdout, _ = job.run("script.py", RANKMESH_SHM_DIR=str(shared))
    assert (code, stdout) == (128 + signal.SIGABRT, "[rank 0] 2\n")
    assert [path.name for path in shared.iterdir()] == ["rankmesh-other-1"]


# Signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGQUIT])
def test_a_signal_is_passed_on(number: signal.Signals, job: Job) -> None:
    job.script(
        f"def leave(*_):\n    print('leaving')\n    sys.exit(0)\nsignal.signal({int(number)}, leave)\n"
        + WRITE_PID
        + "time.sleep(1000)"
    )
    launcher = job.start("--nproc-per-node=2", "script.py")
    pids = job.pids(2)
    launcher.send_signal(number)
    code, stdout, stderr = job.finish(launcher)
    assert code == 128 + number
    assert sorted(stdout.splitlines()) == ["[rank 0] leaving", "[rank 1] leaving"]
    again = "a second Ctrl-C" if number == signal.SIGINT else "Ctrl-C (SIGINT)"
    text = f"{number.name} passed on to the ranks; they get 30 s to end, {again} kills them at once"
    assert f"[rankmesh] {text}\n" in stderr
    assert "failed" not in stderr
    assert not any(alive(pid) for pid in pids)


IGNORE = "signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGINT, signal.SIG_IGN)\n"


@pytest.mark.parametrize(
    ("grace", "does", "stopped"),
    [
        ("0.3", f"{IGNORE}{WRITE_PID}time.sleep(1000)", False),
        ("1000", f"{WRITE_PID}time.sleep(1000)", True),
        ("30", f"{WRITE_PID}while True: print('x' * 10_000)", False),
    ],
    ids=["ignores it", "is stopped", "writes what nobody reads"],
)
def test_a_signal_ends_a_rank_that(job: Job, grace: str, does: str, stopped: bool) -> None:
    job.script(does)
    launcher = job.start(f"--stop-grace={grace}", "script.py")
    (pid,) = job.pids(1)
    if stopped:
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: state(pid) == "T", "the rank to stop")
    launcher.terminate()
    assert launcher.wait(DEADLINE) == 128 + signal.SIGTERM
    assert not alive(pid)
    if IGNORE in does:
        assert "[rankmesh] rank 0: signal SIGKILL (9) from the launcher" in job.finish(launcher)[2]


def test_a_second_interrupt_kills_at_once(job: Job) -> None:
    job.script(IGNORE + WRITE_PID + "time.sleep(1000)")
    launcher = job.start("--stop-grace=1000", "script.py")
    pids = job.pids(1)
    launcher.send_signal(signal.SIGINT)
    assert launcher.stderr is not None
    while b"SIGINT passed on" not in launcher.stderr.readline():
        pass
    launcher.send_signal(signal.SIGINT)
    assert job.finish(launcher)[0] == 128 + signal.SIGINT
    assert not alive(pids[0])


def test_ranks_die_with_a_killed_launcher(job: Job) -> None:
    job.script(IGNORE + WRITE_PID + "time.sleep(1000)")
    launcher = job.start("--nproc-per-node=2", "script.py")
    pids = job.pids(2)
    launcher.kill()
    wait_until(lambda: not any(alive(pid) for pid in pids), "the ranks to end")


def test_the_launcher_is_light_to_import() -> None:
    heavy = "{'fastapi', 'uvicorn', 'cryptography', 'typer', 'torch', 'rankmesh_gateway'}"
    code = (
        f"import sys, rankmesh.launch; sys.exit(str({heavy} & set(sys.modules)) if {heavy} & set(sys.modules) else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
