"""One run: its ranks as processes, their fault, and what became of them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support import rank_server
from support.network_hosts import Host, network_hosts
from support.rank_server import ForkedProcess, Program

from rankmesh_agent.shared_memory.orphans import remove_orphans
from tools.faults import PATHS
from tools.faults import rank as rank_module
from tools.faults.kinds import Specification, words

MARGIN = 10.0
"""Seconds beyond the time limit of the operations after which a rank without an answer counts as hanging."""
_START_SECONDS = 90.0
_LEFT_SECONDS = 5.0
"""Seconds until a rank's gateway has ended: after 3 s of silence, a rank on another host is gone."""
_POLL = 0.01
_OURS = ("RANKMESH_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "GLOO_", "NCCL_", "SLURM_", "OMPI_", "PMI")
_LAUNCHED = ("launched", "launcher killed", "launcher interrupted")
_forking = threading.Lock()
Process = subprocess.Popen[bytes] | ForkedProcess


@dataclass
class Outcome:
    """What became of a run.

    Attributes:
        seed, kind: of the run.
        errors: of the ranks that were to get one: rank, class, ranks named, seconds from the fault, text.
        hangs, wrong, unnamed, leaks, unrecovered: what is not as promised, a line each.
        missing: how many ranks got no error that were to get one.
        recoveries: how many ranks were to go on after the fault.
        log: program, fault, the events of all ranks, and what they wrote to standard error.
        seconds: the whole run took.
    """

    seed: int
    kind: str
    errors: list[dict[str, Any]] = field(default_factory=list)
    hangs: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    unnamed: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    unrecovered: list[str] = field(default_factory=list)
    missing: int = 0
    recoveries: int = 0
    log: str = ""
    seconds: float = 0.0

    @property
    def findings(self) -> list[str]:
        """Everything that is not as promised."""
        found = {"hang": self.hangs, "wrong": self.wrong, "not named": self.unnamed}
        found |= {"leak": self.leaks, "not recovered": self.unrecovered}
        return [f"{what}: {text}" for what, texts in found.items() for text in texts]


class NotStarted(Exception):
    """The ranks of a run are not there to be disturbed."""


class Run:
    """A run of a specification, from its start to what is left of it.

    Args:
        spec: what to do.
        margin: seconds beyond the time limits before a rank counts as hanging.
    """

    def __init__(self, spec: Specification, margin: float = MARGIN) -> None:
        self.spec, self.margin = spec, margin
        self.outcome = Outcome(spec["seed"], spec["kind"])
        self._ranks = range(spec["size"])
        self._victims: dict[int, dict[str, Any]] = {fault["rank"]: fault for fault in spec["faults"]}
        self._folder = Path(tempfile.mkdtemp(prefix="rankmesh-fault-"))
        self._shm = Path(tempfile.mkdtemp(prefix="faults-", dir="/dev/shm"))
        self._marker = secrets.token_hex(8)
        self._processes: dict[int, Process] = {}
        self._others: list[subprocess.Popen[bytes]] = []  # launcher, gateway, holder of a namespace
        self._variables: dict[str, str] = {}
        self._prefix: list[str] = []
        self._hosts: list[Host] = []
        self._hanging: set[int] = set()
        self._began = 0.0
        self._external_at: float | None = None
        self._undo = contextlib.ExitStack()

    def run(self) -> Outcome:
        """Carry it out; all processes are gone at the end."""
        began = time.monotonic()
        with self._undo:
            self._undo.callback(shutil.rmtree, self._folder, ignore_errors=True)
            self._undo.callback(shutil.rmtree, self._shm, ignore_errors=True)
            try:
                self._prepare()
                self._start()
                self._watch()
            except NotStarted as error:
                self.outcome.hangs.append(str(error))
            finally:
                self._kill_all()
            self._judge()
            self._find_leaks()
            self.outcome.log = self._log()
        self.outcome.seconds = time.monotonic() - began
        return self.outcome

    # Start

    def _prepare(self) -> None:
        """Make what the ranks stand on: test hosts, a small tmpfs, a gateway."""
        spec = self.spec
        spec["init"] = f"file://{self._folder}/rendezvous"
        if spec["medium"] == "network":
            self._hosts = self._undo.enter_context(network_hosts(spec["hosts"]))
            spec["init"] = "env://"
            token, address = secrets.token_hex(8), self._hosts[0].address
            self._variables |= {"MASTER_ADDR": address, "MASTER_PORT": "29400", "RANKMESH_TOKEN": token}
        if spec["shm_bytes"]:
            mount = f"mount -t tmpfs -o size={spec['shm_bytes']} tmpfs {self._shm} && echo mounted && exec sleep 600"
            holder = self._command(["unshare", "--mount", "--propagation", "private", "sh", "-c", mount], "holder")
            self._until(lambda: "mounted" in self._wrote("holder"))
            self._prefix = ["nsenter", f"--target={holder.pid}", "--mount", "--"]
        if spec["external"] == "gateway":
            self._command([sys.executable, "-m", "rankmesh_gateway", "--port", "0"], "gateway")
            self._until(lambda: "ready at" in self._wrote("gateway"))
            self._variables["RANKMESH_GATEWAY"] = self._wrote("gateway").split("ready at ")[1].split()[0]
            spec["init"] = "env://"
        if spec["external"] in _LAUNCHED:
            spec["init"] = "env://"

    def _start(self) -> None:
        path = self._folder / "spec.json"
        path.write_text(json.dumps(self.spec))
        if self.spec["external"] in _LAUNCHED:
            launch = ["-m", "rankmesh.run", "--nproc-per-node", str(len(self._ranks)), "--master-port", "0"]
            self._command([sys.executable, *launch, "-m", "tools.faults.rank", str(path)], "launcher", own_session=True)
        else:
            for rank in self._ranks:
                self._processes[rank] = self._start_rank(rank, path)
        self._until(lambda: all(self._event(rank, "ready") for rank in self._ranks))
        self._began = time.monotonic()
        (self._folder / "start").touch()

    def _start_rank(self, rank: int, path: Path) -> Process:
        errors = self._folder / f"rank-{rank}.err"
        errors.touch()
        environment = self._environment(rank)
        if self._hosts:
            host = self._hosts[self._host(rank)]
            prefix = ["ip", "netns", "exec", host.namespace]
            environment |= {"RANKMESH_BIND": host.address, "RANKMESH_SHM_DIR": str(host.shm)}
        else:
            prefix = self._prefix
        if not prefix:
            function = rank_module.forked.__name__
            program = Program(
                rank_module.__file__, "tools.faults.rank", function, str(self._folder), {"spec": str(path)}
            )
            with _forking:
                return rank_server.fork(
                    program, rank, len(self._ranks), environment, [os.devnull, str(errors), str(errors)]
                )
        with errors.open("ab") as opened:
            command = [*prefix, sys.executable, "-m", "tools.faults.rank", str(path), str(rank)]
            return subprocess.Popen(
                command, env=environment, cwd=self._folder, stdin=subprocess.DEVNULL, stdout=opened, stderr=opened
            )

    def _host(self, rank: int) -> int:
        return int(rank * self.spec["hosts"] // len(self._ranks))

    def _environment(self, rank: int = 0) -> dict[str, str]:
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith(_OURS) or name == "RANKMESH_NATIVE"
        }
        medium = self.spec["medium"]
        shm = self._shm
        if medium == "hosts":  # two test hosts are ranks that do not share a directory
            shm = self._shm / f"host-{rank % 2}"
            shm.mkdir(exist_ok=True)
        fixed = {
            rank_server.MARKER: self._marker,
            rank_module.LIBRARY: self.spec["library"], "PYTHONPATH": PATHS, "RANKMESH_JOB": self.spec["job"],
            "RANKMESH_SHM_DIR": str(shm), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "FATAL",
            # Every second run connects on demand, to addresses that the gateway has.
            "RANKMESH_FULL_MESH": "0" if self.spec["seed"] % 2 and self.spec["store"] else "16",
        }  # fmt: skip
        if medium in ("shm", "tcp"):
            fixed["RANKMESH_TRANSPORT"] = medium
        return {**inherited, **fixed, **self._variables}

    def _command(self, command: Sequence[str], name: str, own_session: bool = False) -> subprocess.Popen[bytes]:
        with (self._folder / f"{name}.err").open("wb") as output:
            process = subprocess.Popen(
                command, env=self._environment(), cwd=self._folder, stdin=subprocess.DEVNULL, stdout=output,
                stderr=output, start_new_session=own_session,
            )  # fmt: skip
        self._others.append(process)
        return process

    def _until(self, condition: Any) -> None:
        end = time.monotonic() + _START_SECONDS
        while not condition():
            if time.monotonic() > end or any(process.poll() is not None for process in self._all()):
                raise NotStarted("the processes did not start, or one ended early; its output is in the log")
            time.sleep(_POLL)

    def _all(self) -> list[Process]:
        return [*self._processes.values(), *self._others]

    # Watch

    def _watch(self) -> None:
        """Do the faults that come from outside; wait until every rank that is to end has ended, or hangs."""
        resume: float | None = self.spec["resume_after"]
        while running := [rank for rank in self._ranks if self._must_end(rank) and self._runs(rank)]:
            now = time.monotonic()
            if self.spec["external"] and self._external_at is None:
                self._external(now)
            fault = self._fault_at()
            if fault is None and now > self._began + _START_SECONDS:
                return self._hang(running, "no fault has come about", self._began)
            if fault is not None:
                if resume is not None and now > fault + resume:
                    resume = None
                    for rank in self._victims:
                        self._processes[rank].send_signal(signal.SIGCONT)
                late = [rank for rank in running if now > self._deadline(rank, fault)]
                if late:
                    return self._hang(late, "no answer", fault)
                self._answer()
            time.sleep(_POLL)
        if self.spec["external"] in _LAUNCHED:
            try:
                self._others[0].wait(self.margin)
            except subprocess.TimeoutExpired:
                self.outcome.hangs.append(f"the launcher runs {self.margin:g} s after the last rank has ended")
        return None

    def _external(self, now: float) -> None:
        """Do the fault that is not a rank's own, once all ranks have joined."""
        joined = [self._event(rank, "joined") for rank in self._ranks]
        after = max((event["at"] for event in joined if event), default=now) + self.spec["external_after"]
        if not all(joined) or now < after:
            return
        self._external_at = time.monotonic()
        what = self.spec["external"]
        if what == "cut":
            self._hosts[self.spec["cut"]].cut()
        elif what == "gateway":
            self._others[0].kill()
            self._others[0].wait()
        elif what == "launcher killed":
            self._others[0].kill()
        elif what == "launcher interrupted":
            os.killpg(self._others[0].pid, signal.SIGINT)
            if self.spec["seed"] % 2:
                time.sleep(0.2)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._others[0].pid, signal.SIGINT)
        (self._folder / "external").touch()

    def _must_end(self, rank: int) -> bool:
        deed = self._victims[rank]["deed"] if rank in self._victims else ""
        return deed not in ("stop", "never") or self.spec["resume_after"] is not None

    def _deadline(self, rank: int, fault: float) -> float:
        """Return when a rank has to have come to its next event."""
        at = max([fault, *(event["at"] for event in self._events(rank))])
        return float(at + self.spec["timeout"] + self.margin)

    def _answer(self) -> None:
        """Report the ranks to exclude, once all who are left have asked for them."""
        left = [rank for rank in self._ranks if rank not in self._victims]
        for attempt in range(1, rank_module.ATTEMPTS + 1):
            path = self._folder / f"exclude-{attempt}.json"
            asked = [rank for rank in left if any(e["attempt"] == attempt for e in self._named(rank, "asks"))]
            complete = not self.spec["ask"] or len(asked) == sum(self._runs(rank) for rank in left)
            if asked and not path.exists() and complete:
                temporary = path.with_suffix(".new")
                temporary.write_text(json.dumps(sorted(self._victims)))
                temporary.rename(path)

    def _hang(self, ranks: Sequence[int], what: str, since: float) -> None:
        """Record ranks that hang, with their stacks."""
        self._hanging.update(ranks)
        for rank in ranks:
            seconds = time.monotonic() - since
            self.outcome.hangs.append(f"rank {rank}: {what} for {seconds:.1f} s; its last event: {self._last(rank)}")
            with contextlib.suppress(OSError):
                os.kill(self._pid(rank), signal.SIGUSR1)
        time.sleep(0.5)  # until the stacks are written

    def _runs(self, rank: int) -> bool:
        if rank in self._processes:
            return self._processes[rank].poll() is None
        with contextlib.suppress(OSError):
            return Path(f"/proc/{self._pid(rank)}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        return False

    def _pid(self, rank: int) -> int:
        ready = self._event(rank, "ready")
        assert ready is not None
        return int(ready["pid"])

    # Events

    def _events(self, rank: int) -> list[dict[str, Any]]:
        path = self._folder / f"rank-{rank}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def _named(self, rank: int, event: str) -> list[dict[str, Any]]:
        return [each for each in self._events(rank) if each["event"] == event]

    def _event(self, rank: int, event: str) -> dict[str, Any] | None:
        return next(iter(self._named(rank, event)), None)

    def _last(self, rank: int) -> str:
        """Return what a rank reported last, in words."""
        told = [each for each in self._events(rank) if each["event"] not in ("end", "left", "asks", "shrunk")]
        return str(told[-1]) if told else "nothing"

    def _wrote(self, name: str) -> str:
        path = self._folder / f"{name}.err"
        return path.read_text(errors="replace") if path.exists() else ""

    def _fault_at(self) -> float | None:
        """Return when the fault came about; a fault of the surroundings is there from the start."""
        if not self._victims and not self.spec["external"]:
            return self._began
        faults = [event["at"] for rank in self._victims for event in self._named(rank, "fault")[:1]]
        return min(faults, default=None if self._victims and not self._hosts else self._external_at)

    # What it means

    def _judge(self) -> None:
        fault = self._fault_at()
        if fault is None and not self.outcome.hangs:
            self.outcome.wrong.append("no fault has come about: nothing is judged")
        for rank in self._ranks:
            self.outcome.wrong.extend(f"rank {rank}: {event['text']}" for event in self._named(rank, "wrong"))
            if rank not in self._hanging and fault is not None:
                self._judge_rank(rank, fault)
        if self.spec["external"] == "launched":
            self._judge_report()

    def _judge_rank(self, rank: int, fault: float) -> None:
        spec = self.spec
        if spec["kind"] == "descriptors":
            self._judge_without_descriptors(rank, fault)
        elif spec["kind"] == "full /dev/shm":
            self._judge_without_room(rank)
        elif spec["mismatch"]:
            step = spec["steps"][spec["at"][1]]
            if rank not in self._victims and (step["group"] < 0 or rank in spec["subgroups"][step["group"]]):
                self._judge_error(rank, self._event(rank, "mismatch"), fault, "CollectiveMismatchError")
            self._judge_completion(rank)
        elif not spec["errors"]:
            self._judge_completion(rank)
        elif self._hosts and rank in self._victims:
            self._judge_error(rank, self._event(rank, "error"), fault)
        elif rank not in self._victims and spec["external"] not in ("launcher killed", "launcher interrupted"):
            self._judge_survivor(rank, fault)

    def _judge_completion(self, rank: int) -> None:
        self.outcome.recoveries += 1
        if not self._event(rank, "completed"):
            self.outcome.unrecovered.append(f"rank {rank} did not complete the program: {self._last(rank)}")

    def _judge_survivor(self, rank: int, fault: float) -> None:
        outcome = self.outcome
        if self._named(rank, "completed"):
            outcome.unnamed.append(f"rank {rank} completed the program, though a rank it needs was gone")
        self._judge_error(rank, self._event(rank, "error"), fault)
        for event in self._named(rank, "error again"):
            self._judge_error(rank, event, None)
        if self.spec["recover"] and self._event(rank, "joined"):
            outcome.recoveries += 1
            if not self._event(rank, "recovered"):
                outcome.unrecovered.append(f"rank {rank}: {self._last(rank)}")

    def _judge_without_descriptors(self, rank: int, fault: float) -> None:
        error = self._event(rank, "error")
        if error is None:
            self._judge_completion(rank)
        elif rank not in self._victims:
            self._judge_survivor(rank, fault)
        else:
            self._judge_words(rank, error, ("descriptor", "ulimit"))

    def _judge_without_room(self, rank: int) -> None:
        error = self._event(rank, "error")
        if error is None or self.spec["medium"] != "shm":
            self._judge_completion(rank)
        else:
            words = ("room", str(self._shm), "RANKMESH_TRANSPORT")
            errors = {each: self._event(each, "error") for each in self._ranks}
            met = {each for each, found in errors.items() if found and all(word in found["text"] for word in words)}
            if rank in met or not error["ranks"] or not met.issuperset(error["ranks"]):
                self._judge_words(rank, error, words)
            else:  # as after any other failure: it names the ranks whose own error has the reason
                self._judge_words(rank, error, ())

    def _judge_words(self, rank: int, error: dict[str, Any], words: Sequence[str]) -> None:
        """Judge the error of a rank that has met a limit: it has to say which, and the remedy."""
        self.outcome.errors.append({**error, "rank": rank, "seconds": error["at"] - (self._fault_at() or 0.0)})
        if not all(word in error["text"] for word in words):
            self.outcome.unnamed.append(f"rank {rank}: neither the limit nor the remedy: {error['text']!r}")

    def _judge_report(self) -> None:
        text = self._wrote("launcher")
        # Exit code 0 is no failure: then the report has the rank that the others' errors name.
        first = re.findall(r"rank (\d+) failed first|error names rank (\d+)", text)[:1]
        first = [number for numbers in first for number in numbers if number]
        errors = [self._event(rank, "error") for rank in self._ranks if rank not in self._victims]
        if all(error and self._of_the_store(error) for error in errors):
            return
        if [int(number) for number in first] != list(self._victims):
            self.outcome.unnamed.append(
                f"the launcher's report: {first or text[-500:]!r} and not {list(self._victims)}"
            )

    def _judge_error(self, rank: int, event: dict[str, Any] | None, fault: float | None, kind: str = "") -> None:
        """Judge an error that is to name the culprits, or some of them, and no other rank."""
        outcome = self.outcome
        if event is None:
            outcome.missing += 1
            outcome.unnamed.append(f"rank {rank} got no error: {self._last(rank)}")
            return
        seconds = None if fault is None else event["at"] - fault
        outcome.errors.append({**event, "rank": rank, "seconds": seconds})
        culprits = set(self._victims)
        if self._hosts and rank in self._victims:
            culprits = set(self._ranks) - culprits  # as this side of the cut sees it
        if self.spec["library"] == "gloo":
            text = event["text"]
            named = {int(number) for number in re.findall(r"\brank:?\s*\[?(\d+)", text, re.IGNORECASE)}
            good = bool(named) and named <= culprits
        else:
            good = bool(event["ranks"]) and set(event["ranks"]) <= culprits
            good = good and event["in_text"]
            good = good and (self.spec["kind"] != "exception" or self.spec["planted"] in event["text"])
            good = good and kind in ("", event["kind"])
            good = good or self._of_the_store(event)
        if not good:
            after = "" if seconds is None else f" after {seconds:.2f} s"
            outcome.unnamed.append(
                f"rank {rank}{after}, the culprit is {sorted(culprits)}: {event['kind']} {event['ranks']} "
                f"{event['text']!r} in {event['where']}"
            )

    def _of_the_store(self, error: dict[str, Any]) -> bool:
        """Whether a store error cannot name a rank: a key has no owner, and a gateway that is cut off is none."""
        if not self.spec["silent"] or error["ranks"]:
            return False
        if error["kind"] == "StoreTimeoutError":
            return "key '" in error["text"] or "keys" in error["text"]
        return bool(self._hosts) and f"at the gateway at http://{self._hosts[0].address}" in error["text"]

    # The end

    def _kill_all(self) -> None:
        """Kill what still runs; the processes that the ranks left, if any, are leaks."""
        for process in self._all():
            if process.poll() is None:
                process.kill()
            process.wait()
        end = time.monotonic() + _LEFT_SECONDS
        while (left := _processes(self._marker)) and time.monotonic() < end:
            time.sleep(0.02)
        hanging = {self._pid(rank) for rank in self._hanging}
        for pid in left:
            if pid not in hanging:
                self.outcome.leaks.append(f"process {pid}: {_command_line(pid)}")
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    def _find_leaks(self) -> None:
        for rank in self._ranks:
            for event in self._named(rank, "left"):
                if event["what"]:
                    self.outcome.leaks.append(f"rank {rank} after destroy_process_group: {event['what']}")
        end = time.monotonic() + _LEFT_SECONDS
        while (left := self._shared_files()) and self.spec["external"] == "launcher killed" and time.monotonic() < end:
            remove_orphans(str(self._shm))  # as the launcher would, and the host's next job does; a rank may still end
            time.sleep(_POLL)
        self.outcome.leaks.extend(f"file of {path.stat().st_size} bytes in shared memory: {path}" for path in left)

    def _shared_files(self) -> list[Path]:
        folders = [self._shm, *(host.shm for host in self._hosts)]
        return sorted(path for folder in folders for path in folder.rglob("*") if not path.is_dir())

    def _log(self) -> str:
        lines = [words(self.spec)]
        start = self._fault_at() or 0.0
        events = sorted(
            ((event["at"], rank, event) for rank in self._ranks for event in self._events(rank)),
            key=lambda each: each[:2],
        )
        for at, rank, event in events:
            rest = {name: value for name, value in event.items() if name not in ("at", "event")}
            lines.append(f"{at - start:+9.3f} s  rank {rank}: {event['event']} {rest or ''}")
        for path in sorted(self._folder.glob("*.err")):
            text = path.read_text(errors="replace").strip()
            if text:
                lines.append(f"--- {path.stem} wrote:\n{text[-8000:]}")
        return "\n".join(lines)


def _processes(marker: str) -> list[int]:
    """Return the processes with this marker in their environment."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if f"{rank_server.MARKER}={marker}".encode() in Path(f"/proc/{entry}/environ").read_bytes():
                found.append(int(entry))
    return found


def _command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return "ended since"
