"""spawn beside torch.multiprocessing.spawn: the same functions succeed and fail the same way."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from torch.torch_version import TorchVersion, __version__

CASES = {
    "spawn": ("raise",),
    "fork": (
        "succeed",
        "raise",
        "exit",
        "exit 0",
        "say why",
        "abrupt",
        "interrupted",
        "terminate",
        "kill",
        "real-time",
    ),
}


def worker(i: int, case: str, word: str) -> None:
    """Process 1 does what the case says; process 0 would sleep long if it must fail."""
    assert word == "word"
    if case in ("succeed", "exit 0", "interrupted") and i == 0:
        return
    if i == 0:
        time.sleep(1000)
    match case:
        case "raise":
            raise ValueError("no such file: weights.npy")
        case "exit":
            sys.exit(3)
        case "exit 0":
            sys.exit(0)
        case "say why":
            sys.exit("no space left")
        case "abrupt":
            os._exit(4)
        case "interrupted":
            raise KeyboardInterrupt
        case "terminate":
            os.kill(os.getpid(), signal.SIGTERM)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "real-time":
            os.kill(os.getpid(), signal.SIGRTMIN + 3)


def outcome(mp: Any, method: str, case: str) -> dict[str, Any]:
    """Return how it went: what spawn returned or raised."""
    try:
        returned = mp.start_processes(worker, args=(case, "word"), nprocs=2, start_method=method)
    except Exception as error:
        names = ("error_index", "exit_code", "signal_name")
        about = {name: getattr(error, name, None) for name in names}
        return {"raised": type(error).__name__, "traced": "weights.npy" in str(error), **about}
    return {"returned": returned}


def outcome_joined(mp: Any) -> list[Any]:
    """Return what joining by hand returns, step by step."""
    context = mp.start_processes(worker, args=("succeed", "word"), nprocs=1, join=False, start_method="fork")
    steps = [context.join(timeout=30), context.join(timeout=30)]
    return [*steps, len(context.pids()), len(context.processes), context.processes[0].exitcode]


def main(module: str, method: str) -> None:
    mp = importlib.import_module(module)
    outcomes = {case: outcome(mp, method, case) for case in CASES[method]}
    print(json.dumps({"joined": outcome_joined(mp), **outcomes}))


@pytest.mark.processes
@pytest.mark.parametrize("method", CASES)
def test_the_same_functions_end_the_same_way(method: str, tmp_path: Path) -> None:
    told = {}
    for module in ("torch.multiprocessing", "rankmesh.multiprocessing"):
        done = subprocess.run(
            [sys.executable, __file__, module, method], cwd=tmp_path, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        told[module] = json.loads(done.stdout)
    theirs, ours = told.values()
    if TorchVersion(__version__) >= "2.15":  # where a KeyboardInterrupt of one process is its failure
        theirs.pop("interrupted", None)
        ours.pop("interrupted", None)
    assert ours == theirs
    assert ours["raise"]["raised"] == "ProcessRaisedException"
    if method == "fork":
        assert ours["succeed"] == {"returned": None}
        assert ours["kill"]["exit_code"] == -signal.SIGKILL


def test_names_are_torchs() -> None:
    theirs, ours = (importlib.import_module(f"{package}.multiprocessing") for package in ("torch", "rankmesh"))
    about_tensors = {"set_sharing_strategy", "get_sharing_strategy", "get_all_sharing_strategies"}
    assert set(theirs.__all__) - about_tensors <= set(ours.__all__)
    arguments = {"ProcessRaisedException": ("text", 1, 42), "ProcessExitedException": ("text", 1, 42, -9, "SIGKILL")}
    for name, given in arguments.items():
        their_error, our_error = (getattr(mp, name)(*given) for mp in (theirs, ours))
        for attribute in ("args", "msg", "error_index", "error_pid", "exit_code", "signal_name"):
            assert getattr(our_error, attribute, None) == getattr(their_error, attribute, None)


if __name__ == "__main__":
    main(*sys.argv[1:])
