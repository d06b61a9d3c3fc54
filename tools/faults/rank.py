"""One rank of a fault run, as a process: forked, or ``python -m tools.faults.rank SPECIFICATION [RANK]``.

It joins, carries out the specification's program, does the fault if it is the victim, and after an error shrinks the
group and goes on. It appends what happens to ``rank-N.jsonl`` beside the specification, one line an event.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tools.faults.program import Runner, WrongResult, describe, generate

LIBRARY = "FAULTS_LIBRARY"
"""The variable that says whose calls are made: with gloo, the server that forks the ranks has to have torch."""
if os.environ.get(LIBRARY) == "gloo":
    import torch
    import torch.distributed

    torch.set_num_threads(1)

AGAIN_ROUNDS = 2
AGAIN_STEPS = 6
ATTEMPTS = 3
_JOIN_SECONDS = 60.0
"""Time limit of a join during which no fault comes about, on a busy machine."""
_SETTLE_SECONDS = 3.0


class Planted(Exception):  # the fault itself
    """The exception of a rank that is to fail."""


class Rank:
    """A rank of a run.

    Args:
        path: of the specification.
        rank: the rank.
    """

    def __init__(self, path: Path, rank: int) -> None:
        self.spec: dict[str, Any] = json.loads(path.read_text())
        self.rank, self.folder = rank, path.parent
        self.fault = next((fault for fault in self.spec["faults"] if fault["rank"] == rank), None)
        self._events = os.open(self.folder / f"rank-{rank}.jsonl", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        self.names = list(range(self.spec["size"]))
        """Ranks of the run by ranks of the current world."""
        self._out: set[int] = set()
        """Ranks of the run that are not to be in the next world."""
        self.where = "init"
        self.gloo = self.spec["library"] == "gloo"
        if self.gloo:
            self.dist: Any = torch.distributed
            self.wrap: Callable[[Any], Any] = torch.from_numpy
        else:
            import rankmesh

            self.dist, self.wrap = rankmesh, lambda array: array
            self.dist.init_process_group  # imports what stays  # noqa: B018

    def event(self, event: str, **data: Any) -> None:
        """Record an event."""
        os.write(self._events, f"{json.dumps({'event': event, 'at': time.monotonic(), **data})}\n".encode())

    def main(self) -> int:
        """Live through the run."""
        before = _resources()
        joined = False
        self.event("ready", pid=os.getpid())
        try:
            self._wait_for_start()
            with self._fault_at("init"):
                self._join()
            joined = True
            self.event("joined")
            self._program("main", self.spec["subgroups"], self.spec["steps"], self.spec["rounds"])
            self.event("completed")
        except WrongResult as wrong:
            self.event("wrong", text=str(wrong))
            return 3
        except Planted:
            raise
        except Exception as error:
            self._error("error", error)
            if self.spec["external"] == "launched":
                raise  # as in a script: the launcher has the cause among several failures
            if joined and self.spec["recover"] and (self.fault is None or self.fault["place"] == "shrink"):
                self._recover(error)
        self._end(before)
        return 0

    def _wait_for_start(self) -> None:
        """Wait until all have imported what they need: from then on times are counted."""
        while not (self.folder / "start").exists():
            time.sleep(0.005)

    def _join(self) -> None:
        spec = self.spec
        from datetime import timedelta

        timeout = join = timedelta(seconds=spec["timeout"])
        if not self.gloo and not any(fault["place"] == "init" for fault in spec["faults"]):
            join = timedelta(seconds=_JOIN_SECONDS)
        self.dist.init_process_group(
            "gloo" if self.gloo else None, init_method=spec["init"], rank=self.rank, world_size=spec["size"],
            timeout=join,
        )  # fmt: skip
        if join is not timeout:
            self.dist.group.WORLD.set_timeout(timeout)

    def _error(self, event: str, error: BaseException) -> None:
        numbers = [int(rank) for rank in getattr(error, "ranks", ())]
        ranks = [self.names[rank] if rank < len(self.names) else f"none: {rank}" for rank in numbers]
        in_text = all(re.search(rf"\branks? ([\d, ]+, )?{rank}\b", str(error)) for rank in numbers)
        if self.spec.get("plant") == {"what": "blame", "rank": self.rank}:
            ranks = [self.rank]
        kind, text = type(error).__name__, str(error)[:1000]
        self.event(event, kind=kind, ranks=ranks, in_text=in_text, text=text, where=self.where)

    # The program, and the fault in it

    def _program(self, phase: str, subgroups: list[list[int]], steps: list[dict[str, Any]], rounds: int) -> None:
        self.where = f"{phase}: sub-groups {subgroups}"
        runner = Runner(self.dist, self.wrap, self.spec["seed"], subgroups, self.spec["timeout"], phase)
        for turn in range(rounds):
            for index, step in enumerate(steps):
                number = f"{turn}.{index}"
                self.where = f"{phase} {number}: {describe(step)}"
                here = phase == "main" and [turn, index] == self.spec["at"]
                if not here:
                    runner.step(step, number)
                elif self.spec["mismatch"]:
                    self._mismatched(runner, step, number)
                else:
                    self._plant(runner)
                    with self._fault_at("step", runner):
                        if self.spec["new_group"]:
                            self._new_group(runner, number)
                        runner.step(step, number)
        self.where = f"{phase}: the barrier at the end"
        self.dist.barrier()  # a rank that leaves earlier may have what others need, the store for example

    def _new_group(self, runner: Runner, number: str) -> None:
        """Make another group of all ranks, and use it: that takes descriptors."""
        self.where = "new_group of all ranks"
        step = {"do": "collective", "op": "all_reduce", "count": 1000, "dtype": "float32", "reduction": "SUM"}
        runner.in_new_group(step | {"async": False}, number)

    def _mismatched(self, runner: Runner, step: dict[str, Any], number: str) -> None:
        """Make the call at which the victim makes another one."""
        if self.fault is not None:
            step = {**step, **self.spec["mismatch"]}
        self.event("fault", what=describe(step))
        try:
            runner.step(step, number)
        except Exception as error:
            self._error("mismatch", error)

    def _plant(self, runner: Runner) -> None:
        """Do what the suite has to find: it is planted in its own tests."""
        plant = self.spec.get("plant")
        if plant is None or plant["rank"] != self.rank:
            return
        if plant["what"] == "wrong":
            runner.spoil = True
        elif plant["what"] == "leak":
            (Path(os.environ["RANKMESH_SHM_DIR"]) / f"rankmesh-{self.spec['job']}-planted").touch()
        elif plant["what"] == "descriptor":
            os.open("/dev/null", os.O_RDONLY)
        elif plant["what"] == "process":
            subprocess.Popen(["sleep", "60"], stdin=subprocess.DEVNULL)
        elif plant["what"] == "hang":
            time.sleep(10_000)

    @contextlib.contextmanager
    def _fault_at(self, place: str, runner: Runner | None = None) -> Iterator[None]:
        """Do the fault, if it is this rank's and due here: before, between begin and wait, or after a delay."""
        fault = self.fault
        if fault is None or fault["place"] != place:
            yield
            return
        if fault["when"] == "timer":
            timer = threading.Timer(fault["delay"], self._do, [fault])
            timer.daemon = True
            timer.start()
        elif fault["when"] == "between" and runner is not None:
            runner.between = lambda: self._do(fault)
        else:
            self._do(fault)
        yield
        if runner is not None:
            runner.call_between()  # the step had no such place
        if fault["when"] == "timer":
            timer.join()

    def _do(self, fault: dict[str, Any]) -> None:
        deed = fault["deed"]
        while fault.get("after_external") and not (self.folder / "external").exists():
            time.sleep(0.001)
        self.event("fault", what=f"{deed} {fault['when']} {self.where}")
        if deed == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif deed == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif deed == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
            if fault["again"] is not None:
                again = threading.Timer(fault["again"], os.kill, [os.getpid(), signal.SIGINT])
                again.daemon = True
                again.start()
        elif deed == "exception":
            raise Planted(self.spec["planted"])
        elif deed == "exit":
            sys.exit(0)
        elif deed == "never":
            time.sleep(10_000)
        elif deed == "descriptors":
            used = max(map(int, os.listdir("/proc/self/fd"))) + 1
            resource.setrlimit(resource.RLIMIT_NOFILE, (used + fault["spare"], used + fault["spare"]))

    # After an error

    def _recover(self, error: BaseException) -> None:
        """Shrink the group to those that are left, and go on."""
        for attempt in range(1, ATTEMPTS + 1):
            self._out |= self._culprits(error, attempt)
            out = self._out & set(self.names)
            if not out or self.rank in out:
                self.event("lost", text=f"nobody else to exclude: {sorted(out)}")
                return
            try:
                with self._fault_at("shrink"):
                    left = [name for name in self.names if name not in out]
                    if left != self.names:
                        self.where = f"shrink_group without {sorted(out)}"
                        self.dist.shrink_group([self.names.index(name) for name in out])
                        self.names = left
                    self.event("shrunk")
                rng, size = random.Random(f"{self.spec['seed']}-{attempt}"), len(self.names)
                subgroups, steps = (
                    generate(rng, size, length=AGAIN_STEPS, store=self.spec["store"]) if size > 1 else ([], [])
                )
                self._program(f"again {attempt}", subgroups, steps, AGAIN_ROUNDS)
            except WrongResult as wrong:
                self.event("wrong", text=str(wrong))
                return
            except Planted:
                raise
            except Exception as next_error:
                self._error("error again", next_error)
                error = next_error
            else:
                self.event("recovered", attempt=attempt)
                return

    def _culprits(self, error: BaseException, attempt: int) -> set[int]:
        """Return the ranks of the run to exclude: those that the error names, or that the suite says are gone."""
        silent_key = type(error).__name__ == "StoreTimeoutError" and not getattr(error, "ranks", ())
        if not self.spec["ask"] and not silent_key:
            return {self.names[rank] for rank in getattr(error, "ranks", ()) if rank < len(self.names)}
        self.event("asks", attempt=attempt)
        answer = self.folder / f"exclude-{attempt}.json"
        end = time.monotonic() + 60
        while not answer.exists() and time.monotonic() < end:
            time.sleep(0.005)
        return set(json.loads(answer.read_text()))

    def _end(self, before: Counter[str]) -> None:
        """Leave the job; report what is left of it in this process."""
        if not self.gloo:  # whose destroy_process_group may wait for ranks that are gone
            self.where = "destroy_process_group"
            try:
                if self.dist.is_initialized():
                    self.dist.destroy_process_group()
            except Exception as error:
                self._error("error at the end", error)
            end = time.monotonic() + _SETTLE_SECONDS
            while (left := _resources() - before) and time.monotonic() < end:
                time.sleep(0.02)
            self.event("left", what=dict(left))
        self.event("end")


def _resources() -> Counter[str]:
    """Return the threads, open descriptors and mappings of shared memory of this process."""
    gc.collect()
    found = Counter(f"thread {thread.name}" for thread in threading.enumerate())
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{descriptor}")
            found[re.sub(r":\[\d+\]|-[0-9a-f]{16}\b", "", f"descriptor {target}")] += 1
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "rankmesh" in line and (" /dev/shm" in line or "memfd:" in line):
            found["mapping of shared memory"] += 1
    return found


def forked(me: Any, spec: str) -> None:
    """Run one rank in a process that the tests' rank server has forked."""
    _run(Path(spec), me.rank)


def main() -> int:
    """Run one rank in a process of its own; without a number it is the launcher's RANK."""
    return _run(Path(sys.argv[1]), int(sys.argv[2] if len(sys.argv) > 2 else os.environ["RANK"]))


def _run(path: Path, rank: int) -> int:
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return Rank(path, rank).main()


if __name__ == "__main__":
    sys.exit(main())
