"""The program of a rank in a recovery: an example, with a record of its steps, that may kill itself on the way.

    python recovery_rank.py MARKS KILLS DELAY PROGRAM [ARGUMENT]...

Args:
    MARKS: folder of the record, a file a process: lines of time.monotonic(), the attempt, and what came to pass.
    KILLS: the processes that are killed, each once, and after how many steps: ``RANK.RESTARTS:STEPS``, separated by
        commas; a ``+`` behind RESTARTS means a process that replaces the rank.
    DELAY: seconds after the step.
    PROGRAM: train_digits or ddp_digits, with its arguments.

Environment:
    RECOVERY_STEP_SECONDS: how long a world of two ranks waits after each step: a host takes seconds to come back.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[2] / "examples"
FOLDERS = {"train_digits": EXAMPLES, "ddp_digits": EXAMPLES / "torch"}


class Recorder:
    """Writes marks, and kills this process after a step, if that is what the command line says."""

    def __init__(self, folder: str, kills: str, delay: float) -> None:
        self._file = os.open(f"{folder}/{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._attempt = os.environ.get("RANKMESH_ATTEMPT", restarts)
        place = f"{os.environ.get('RANK')}.{restarts}{'+' if os.environ.get('RANKMESH_JOIN') == '1' else ''}"
        self._left = int(dict(each.split(":") for each in kills.split(",") if each).get(place, 0))
        self._once = f"{folder}/kills-{place}"
        self._delay = delay
        self._pause = float(os.environ.get("RECOVERY_STEP_SECONDS", 0)) if os.environ.get("WORLD_SIZE") == "2" else 0.0

    def mark(self, what: str) -> None:
        """Write that something has come to pass now."""
        os.write(self._file, f"{time.monotonic()} {self._attempt} {what}\n".encode())

    def step(self) -> None:
        """Write that a step is done."""
        self.mark("step")
        time.sleep(self._pause)
        self._left -= 1
        if self._left == 0 and not os.path.exists(self._once):
            open(self._once, "x").close()
            if self._delay:
                threading.Timer(self._delay, self._kill).start()
            else:
                self._kill()

    def _kill(self) -> None:
        self.mark("killed")
        os.kill(os.getpid(), signal.SIGKILL)


def after(method: Callable[..., Any], call: Callable[[], object]) -> Callable[..., Any]:
    """Return a function that calls both."""

    def both(*arguments: Any, **named: Any) -> Any:
        result = method(*arguments, **named)
        call()
        return result

    return both


def run_numpy(recorder: Recorder) -> int:
    """Run the program that trains with NumPy."""
    import rankmesh as dist

    dist.init_process_group = after(dist.init_process_group, lambda: recorder.mark("joined"))
    shrink = after(dist.shrink_group, lambda: recorder.mark("joined"))
    grow = dist.grow_group

    def grow_group(*arguments: Any, **named: Any) -> Any:
        before, grown = dist.group.WORLD, grow(*arguments, **named)
        if grown is not before:
            recorder.mark("joined")
        return grown

    def shrink_group(*arguments: Any, **named: Any) -> Any:
        recorder.mark("failed")
        return shrink(*arguments, **named)

    dist.shrink_group, dist.grow_group = shrink_group, grow_group
    train_digits: Any = importlib.import_module("train_digits")
    optimizer, compare = train_digits.Momentum, train_digits.identical_on_all_ranks
    optimizer.step = after(optimizer.step, recorder.step)

    def marked(array: Any) -> bool:
        recorder.mark(f"parameters {hashlib.sha256(array).hexdigest()[:16]}")
        return bool(compare(array))

    train_digits.identical_on_all_ranks = marked
    return int(train_digits.main())


def run_torch(recorder: Recorder) -> int:
    """Run the program that trains with torch."""
    import torch.distributed as dist
    from torch.optim.optimizer import register_optimizer_step_post_hook

    dist.init_process_group = after(dist.init_process_group, lambda: recorder.mark("joined"))
    register_optimizer_step_post_hook(lambda *ignored: recorder.step())
    runpy.run_path(str(FOLDERS["ddp_digits"] / "ddp_digits.py"), run_name="__main__")
    return 0


def main() -> int:
    """Run the program; return its exit code."""
    marks, kills, delay, program, *arguments = sys.argv[1:]
    recorder = Recorder(marks, kills, float(delay))
    recorder.mark("started")
    sys.path[0] = str(FOLDERS[program])
    sys.argv = [program, *arguments]
    try:
        return (run_torch if program == "ddp_digits" else run_numpy)(recorder)
    except Exception:
        recorder.mark("failed")
        raise


if __name__ == "__main__":
    sys.exit(main())
