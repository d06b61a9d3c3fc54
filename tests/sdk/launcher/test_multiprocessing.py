"""spawn: processes on this machine that run a function as ranks. The programs that call it are processes, too."""

from __future__ import annotations

import contextlib
import inspect
import json
import multiprocessing
import os
import pickle
import re
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.launchers import alive
from support.processes import Rank, Ranks, free_port, wait_until

import rankmesh as dist
import rankmesh.multiprocessing as mp

HEADER = """\
from __future__ import annotations
import atexit, json, os, signal, sys, threading, time
from pathlib import Path
from typing import Any
import rankmesh as dist
import rankmesh.multiprocessing as mp
from support.me import wait_until
"""
SOON = 30.0
"""Seconds within which all must have ended, on a busy machine too; sleeping processes would take much longer."""

processes = pytest.mark.processes


def program(ranks: Ranks, main: Callable[..., Any], *uses: Callable[..., Any], **arguments: Any) -> Rank:
    """Start a program that calls ``main(**arguments)``; it has the source of the functions in ``uses``."""
    path = ranks.folder / f"{main.__name__}.py"
    sources = [textwrap.dedent(inspect.getsource(function)) for function in (*uses, main)]
    call = f"if __name__ == '__main__':\n    {main.__name__}(**json.loads({json.dumps(arguments)!r}))\n"
    path.write_text("\n\n".join([HEADER, *sources, call]))
    return ranks.command(str(path), name=main.__name__)


def run(ranks: Ranks, main: Callable[..., Any], *uses: Callable[..., Any], **arguments: Any) -> dict[str, Any]:
    """Run a program to its end; return what it reported as JSON."""
    started = program(ranks, main, *uses, **arguments)
    ranks.succeed([started])
    helpers_end(ranks)
    return started.reported


def helpers_end(ranks: Ranks) -> None:
    """Wait for the standard library's helpers, which end when they find that the program has."""
    wait_until(lambda: not ranks.left(), "helpers to end", SOON)


def pids(ranks: Ranks, count: int) -> list[int]:
    """The ids of the processes that wrote pid.* files, once they have."""

    def written() -> list[int]:
        return [int(text) for path in ranks.folder.glob("pid.*") if (text := path.read_text()).endswith("\n")]

    return wait_until(
        lambda: len(written()) == count and written(), f"{count} processes to begin: {ranks.transcript()}"
    )


def write_pid(i: int) -> None:
    """All at once: who is seen to have begun may be ended before the next line."""
    Path(f"begun.{i}").write_text(f"{os.getpid()}\n")
    os.replace(f"begun.{i}", f"pid.{i}")


def description(error: BaseException, began: float) -> dict[str, Any]:
    """Return what a failed spawn raised."""
    names = ("error_index", "error_pid", "exit_code", "signal_name")
    what = {name: getattr(error, name, None) for name in names}
    return {"error": type(error).__name__, "text": str(error), "seconds": time.monotonic() - began, **what}


# What the processes are told


def write_given(i: int, name: str, *rest: object) -> None:
    Path(f"{name}.{i}").write_text(json.dumps([os.environ["RANKMESH_TOKEN"], *rest]))


def start_thrice(method: str) -> None:
    before = dict(os.environ)
    assert mp.start_processes(write_given, args=("first", "a", [1, 2]), nprocs=2, start_method=method) is None
    mp.start_processes(write_given, args=("second",), nprocs=1, start_method=method)
    assert os.environ == before
    os.environ["RANKMESH_TOKEN"] = "given"
    mp.start_processes(write_given, args=("given",), nprocs=1, start_method=method)


@processes
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_each_process_gets_its_index_the_arguments_and_a_token(ranks: Ranks, method: str) -> None:
    """The token is fresh and the same for all that a program starts, unless one is set."""
    run(ranks, start_thrice, write_given, method=method)
    names = ["first.0", "first.1", "second.0", "given.0"]
    told = {name: json.loads((ranks.folder / name).read_text()) for name in names}
    token = told["first.0"][0]
    assert re.fullmatch("[0-9a-f]{64}", token)
    assert list(told.values()) == [[token, "a", [1, 2]]] * 2 + [[token], ["given"]]


def be_a_rank(i: int, size: int) -> None:
    import numpy as np  # here, as most processes of these tests need none

    dist.init_process_group("gloo", rank=i, world_size=size)
    array = np.full(1000, i + 1.0)
    dist.all_reduce(array)
    assert (array == size * (size + 1) / 2).all()
    objects = [None] * size
    dist.all_gather_object(objects, Path(f"rank {i}"))  # only authenticated ranks unpickle
    assert objects == [Path(f"rank {rank}") for rank in range(size)]
    dist.destroy_process_group()
    Path(f"done.{i}").touch()


def spawn_ranks(size: int, port: int) -> None:
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = str(port)
    mp.spawn(be_a_rank, args=(size,), nprocs=size)


@processes
def test_the_processes_are_ranks(ranks: Ranks) -> None:
    run(ranks, spawn_ranks, be_a_rank, size=3, port=free_port())
    assert len(list(ranks.folder.glob("done.*"))) == 3


# Failures


class Unpicklable(Exception):
    def __init__(self, one: str, two: Callable[[], None]) -> None:
        super().__init__(one)
        self.two = two


def fail(i: int, how: str) -> None:
    """Process 1 fails once the others sleep."""
    write_pid(i)
    if i != 1:
        time.sleep(1000)
    wait_until(lambda: len(list(Path().glob("pid.*"))) == 3, "all to begin")
    match how:
        case "raise":
            raise ValueError("no such file: weights.npy")
        case "unpicklable":
            raise Unpicklable("out of ideas", lambda: None)
        case "base":
            raise BaseException("not even an Exception")
        case "long":
            raise ValueError("x" * 1_000_000 + "!")
        case "exit":
            sys.exit(3)
        case "say why":
            sys.exit("no space left")
        case "abrupt":
            os._exit(4)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "real-time":
            os.kill(os.getpid(), signal.SIGRTMIN + 3)


def nothing(i: int) -> None:
    pass


def spawn_failing(hows: list[str], method: str) -> None:
    """Let process 1 fail in one way after the other; print by way what was raised, and what is left of it."""
    told = {}
    for how in ("well", *hows):
        began = time.monotonic()
        try:
            mp.start_processes(
                nothing if how == "well" else fail, args=(how,) * (how != "well"), nprocs=3, start_method=method
            )
        except mp.ProcessException as error:
            told[how] = description(error, began)
        started = [int(path.read_text()) for path in Path().glob("pid.*")]
        told.setdefault(how, {}).update(
            pids=started,
            alive=[pid for pid in started if alive(pid)],
            children=len(mp.active_children()),
            descriptors=len(os.listdir("/proc/self/fd")),
        )
        for path in Path().glob("pid.*"):
            path.unlink()
    print(json.dumps(told))


RAISED = {
    "raise": "\nValueError: no such file: weights.npy\n",
    "unpicklable": "Unpicklable: out of ideas\n",
    "base": "\nBaseException: not even an Exception\n",
    "long": "xxxx!\n",
}
EXITED = {
    "kill": (-signal.SIGKILL, "SIGKILL"),
    "exit": (3, None),
    "abrupt": (4, None),
    "say why": (1, None),
    "real-time": (-signal.SIGRTMIN - 3, f"<Unknown signal {signal.SIGRTMIN + 3}>"),
}


@processes
@pytest.mark.parametrize(
    ("method", "hows"),
    [
        ("spawn", ["raise", "kill"]),
        ("fork", ["raise", "kill", "unpicklable", "exit", "say why", "base", "long", "abrupt", "real-time"]),
    ],
)
def test_a_failure_comes_back_and_nothing_is_left(ranks: Ranks, method: str, hows: list[str]) -> None:
    started = program(
        ranks, spawn_failing, alive, write_pid, Unpicklable, fail, nothing, description, hows=hows, method=method
    )
    ranks.wait([started])
    helpers_end(ranks)
    assert started.code == 0, started
    assert started.stderr == ("no space left\n" if "say why" in hows else "")
    for how in hows:
        reported = started.reported[how]
        assert (reported["error_index"], len(reported["pids"])) == (1, 3)
        assert reported["error_pid"] in reported["pids"]
        if how in RAISED:
            assert reported["error"] == "ProcessRaisedException"
            beginning = f"process 1 (pid {reported['error_pid']}) raised:\n\nTraceback (most recent call last):"
            assert reported["text"].startswith(beginning)
            assert ", in fail\n" in reported["text"]
            assert reported["text"].endswith(RAISED[how])
        else:
            code, name = EXITED[how]
            assert (reported["error"], reported["exit_code"], reported["signal_name"]) == (
                "ProcessExitedException",
                code,
                name,
            )
            assert reported["text"].endswith(f"terminated with {f'signal {name}' if name else f'exit code {code}'}")
        assert reported["seconds"] < SOON
        assert (reported["alive"], reported["children"]) == ([], 0)
    descriptors = {each["descriptors"] for each in started.reported.values()}
    assert len(descriptors) == 1, "the first call starts the standard library's helpers, no other adds any"


def raise_among_ranks(i: int, size: int) -> None:
    import numpy as np

    dist.init_process_group(rank=i, world_size=size)
    dist.barrier()
    if i == 1:
        raise ValueError("bad sample")
    try:
        dist.all_reduce(np.ones(3))
    except dist.RankFailedError as error:
        Path(f"heard.{i}").write_text(str(error))


def wait_for_failing_ranks(size: int, port: int) -> None:
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = str(port)
    context = mp.spawn(raise_among_ranks, args=(size,), nprocs=size, join=False)
    began = time.monotonic()
    try:
        while not context.join(grace_period=60):
            pass
    except mp.ProcessException as error:
        print(json.dumps(description(error, began)))


@processes
def test_the_other_ranks_hear_of_an_exception_before_they_are_ended(ranks: Ranks) -> None:
    reported = run(ranks, wait_for_failing_ranks, raise_among_ranks, description, size=3, port=free_port())
    assert (reported["error"], reported["error_index"]) == ("ProcessRaisedException", 1)
    for other in (0, 2):
        heard = (ranks.folder / f"heard.{other}").read_text()
        assert heard.startswith("rank 1 ")
        assert "ValueError: bad sample" in heard
    assert reported["seconds"] < 60, "a grace period ends with the last process"


def ignore_signals(i: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    write_pid(i)
    if i == 1:
        wait_until(lambda: len(list(Path().glob("pid.*"))) == 2, "both to begin")
        raise ValueError("the other does not heed signals")
    time.sleep(1000)


def end_the_stubborn() -> None:
    context = mp.spawn(ignore_signals, nprocs=2, join=False)
    for _ in range(2):
        began = time.monotonic()
        try:
            while not context.join(grace_period=0.3):
                pass
        except mp.ProcessRaisedException as error:
            print(json.dumps(description(error, began)))


@processes
def test_who_heeds_no_signal_is_killed_and_joining_again_tells_the_same(ranks: Ranks) -> None:
    started = program(ranks, end_the_stubborn, write_pid, ignore_signals, description)
    ranks.wait([started])
    helpers_end(ranks)
    first, again = map(json.loads, started.stdout.splitlines())
    assert first["error_index"] == again["error_index"] == 1
    assert first["text"] == again["text"]
    assert not any(alive(pid) for pid in pids(ranks, 2))


# Waiting oneself


def sleep_until_told(i: int) -> None:
    write_pid(i)
    wait_until(Path(f"end.{i}").exists, "the word to end")


def join_by_hand() -> None:
    context = mp.spawn(sleep_until_told, nprocs=2, join=False)
    assert isinstance(context, mp.ProcessContext)
    assert isinstance(context, mp.SpawnContext)
    assert context.pids() == [process.pid for process in context.processes]
    assert context.join(timeout=0) is False
    assert context.join(timeout=0.05) is False
    Path("end.0").touch()
    assert context.join() is False
    Path("end.1").touch()
    assert context.join() is True
    assert context.join() is True
    assert [process.exitcode for process in context.processes] == [0, 0]
    print(json.dumps({"pids": context.pids()}))


@processes
def test_a_context_is_joined_by_hand(ranks: Ranks) -> None:
    reported = run(ranks, join_by_hand, write_pid, sleep_until_told)
    assert sorted(reported["pids"]) == sorted(pids(ranks, 2))


# Ends from outside


def clean_up_slowly(i: int) -> None:
    try:
        write_pid(i)
        time.sleep(1000)
    finally:
        time.sleep(0.5)
        with Path(f"cleaned.{i}").open("a") as file:
            file.write("once\n")


def wait_for_the_slow(method: str, in_a_loop: bool) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    context = mp.start_processes(clean_up_slowly, nprocs=3, join=not in_a_loop, start_method=method)
    while not context.join(timeout=1):
        pass


@processes
@pytest.mark.parametrize(
    ("method", "in_a_loop", "to_all"),
    [
        ("spawn", False, True),
        ("fork", True, False),
    ],
)
def test_ctrl_c_ends_all_in_order(ranks: Ranks, method: str, in_a_loop: bool, to_all: bool) -> None:
    started = program(ranks, wait_for_the_slow, write_pid, clean_up_slowly, method=method, in_a_loop=in_a_loop)
    children = pids(ranks, 3)
    for pid in (started.pid, *(children if to_all else ())):
        with contextlib.suppress(ProcessLookupError):  # the program may have ended it
            os.kill(pid, signal.SIGINT)
    ranks.wait([started], SOON)
    assert started.code in (-signal.SIGINT, 1), started
    assert started.stderr.count("Traceback") == 1, started
    assert started.stderr.endswith("\nKeyboardInterrupt\n")
    assert [(ranks.folder / f"cleaned.{i}").read_text() for i in range(3)] == ["once\n"] * 3
    helpers_end(ranks)


def interrupt_while_starting(when: str) -> None:
    """Press Ctrl-C when the second process has been started, but nobody knows yet."""
    import multiprocessing.process

    def interrupt() -> None:
        wait_until(lambda: len(list(Path().glob("pid.*"))) == len(forks), "all to begin")
        if len(forks) == 2:
            os.kill(os.getpid(), signal.SIGINT)

    def forked() -> None:
        forks.append(1)
        if when == "in a function that runs after a fork":
            interrupt()

    def starting(process: multiprocessing.process.BaseProcess) -> None:
        start(process)
        if when == "in start()":
            interrupt()

    forks: list[int] = []
    os.register_at_fork(after_in_parent=forked)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    start, multiprocessing.process.BaseProcess.start = multiprocessing.process.BaseProcess.start, starting
    mp.start_processes(clean_up_slowly, nprocs=3, start_method="fork")


@processes
@pytest.mark.parametrize("when", ["in start()", "in a function that runs after a fork"])
def test_ctrl_c_while_they_are_started_ends_those_that_are(ranks: Ranks, when: str) -> None:
    started = program(ranks, interrupt_while_starting, write_pid, clean_up_slowly, when=when)
    ranks.wait([started])
    assert started.stderr.endswith("\nKeyboardInterrupt\n"), started
    assert started.stderr.count("Traceback") == 1, started
    assert [(ranks.folder / f"cleaned.{i}").read_text() for i in range(2)] == ["once\n"] * 2
    assert not any(alive(pid) for pid in pids(ranks, 2))


def ignore_all(i: int) -> None:
    signal.signal(signal.SIGINT, lambda *_: Path(f"heard.{i}").touch())
    write_pid(i)
    while True:
        time.sleep(1000)


def wait_for_those_who_ignore() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    mp.spawn(ignore_all, nprocs=2)


@processes
def test_a_second_ctrl_c_kills(ranks: Ranks) -> None:
    started = program(ranks, wait_for_those_who_ignore, write_pid, ignore_all)
    children = pids(ranks, 2)
    os.kill(started.pid, signal.SIGINT)
    wait_until(lambda: len(list(ranks.folder.glob("heard.*"))) == 2, "the first one to be passed on")
    assert all(alive(pid) for pid in children)
    os.kill(started.pid, signal.SIGINT)
    ranks.wait([started], SOON)
    assert started.stderr.endswith("\nKeyboardInterrupt\n")
    assert not any(alive(pid) for pid in children)
    helpers_end(ranks)


@processes
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_the_processes_die_with_the_program(ranks: Ranks, method: str) -> None:
    started = program(ranks, wait_for_the_slow, write_pid, clean_up_slowly, method=method, in_a_loop=False)
    children = pids(ranks, 3)
    started.kill()
    wait_until(lambda: not any(alive(pid) for pid in children), "the processes to end", SOON)
    helpers_end(ranks)


def spawn_in_a_thread() -> None:
    thread = threading.Thread(target=lambda: contexts.append(mp.spawn(sleep_until_told, nprocs=2, join=False)))
    contexts: list[mp.ProcessContext] = []
    thread.start()
    thread.join()
    wait_until(lambda: len(list(Path().glob("pid.*"))) == 2, "both to begin")
    for i in range(2):
        Path(f"end.{i}").touch()
    while not contexts[0].join():
        pass


@processes
def test_the_processes_outlive_the_thread_that_started_them(ranks: Ranks) -> None:
    run(ranks, spawn_in_a_thread, write_pid, sleep_until_told)


# What is left


class PickledOnce:
    """Cannot be sent to a second process."""

    sent = 0

    def __reduce__(self) -> tuple[Any, ...]:
        PickledOnce.sent += 1
        if PickledOnce.sent > 1:
            raise TypeError("cannot be sent twice")
        return PickledOnce, ()


def sleep_with(i: int, given: object) -> None:
    write_pid(i)
    time.sleep(1000)


def start_only_one() -> None:
    try:
        mp.spawn(sleep_with, args=(PickledOnce(),), nprocs=2)
    except TypeError as error:
        print(json.dumps({"text": str(error), "children": len(mp.active_children())}))


@processes
def test_when_one_cannot_be_started_the_others_are_ended(ranks: Ranks) -> None:
    reported = run(ranks, start_only_one, write_pid, PickledOnce, sleep_with)
    assert reported == {"text": "cannot be sent twice", "children": 0}


# Wrong calls


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"fn": "train"}, TypeError, "fn must be a function, got str"),
        ({"nprocs": 0}, ValueError, "nprocs must be at least 1, got 0"),
        ({"nprocs": -1}, ValueError, "nprocs must be at least 1, got -1"),
        ({"args": 5}, TypeError, "args must be a tuple, got int"),
        ({"start_method": "thread"}, ValueError, "cannot find context for 'thread'"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        mp.start_processes(**{"fn": nothing, **arguments})
    assert not multiprocessing.active_children()


def test_spawn_is_only_for_spawning() -> None:
    with (
        pytest.warns(FutureWarning, match=r"start_processes\(\)"),
        pytest.raises(ValueError, match="nprocs"),
    ):
        mp.spawn(nothing, nprocs=0, start_method="fork")


# Names


def test_everything_of_the_standard_library_is_here() -> None:
    assert set(multiprocessing.__all__) < set(mp.__all__)
    assert all(getattr(mp, name) is getattr(multiprocessing, name) for name in multiprocessing.__all__)


@pytest.mark.parametrize(
    "error",
    [
        mp.ProcessException("text", 2, 300),
        mp.ProcessRaisedException("text", 2, 300),
        mp.ProcessExitedException("text", 2, 300, -9, "SIGKILL"),
    ],
)
def test_errors_can_be_sent_to_other_processes(error: mp.ProcessException) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert vars(copy) == vars(error)
    assert str(copy) == "text"


# Functions of a notebook or an interactive session: as in "python -c", their module has no file

INTERACTIVE = """
import functools, os, sys
import numpy as np
import rankmesh as dist
import rankmesh.multiprocessing as mp

ONES = np.ones(3)

def add_up(rank, port, size):
    dist.init_process_group(init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    total = ONES * (rank + 1)
    dist.all_reduce(total)
    if rank == 0:
        print("sum", *total, flush=True)
    dist.destroy_process_group()
"""


def interactive(ranks: Ranks, call: str) -> Rank:
    started = ranks.command("-c", INTERACTIVE + call.format(port=free_port()), name="interactive")
    ranks.wait([started])
    helpers_end(ranks)
    return started


@processes
@pytest.mark.parametrize(
    "call",
    [
        "mp.spawn(functools.partial(lambda f, *args: f(*args), add_up), ({port}, 2), nprocs=2)",
        "mp.start_processes(add_up, ({port}, 2), nprocs=2, start_method='fork')",
    ],
    ids=["spawn", "fork"],
)
def test_a_function_of_an_interactive_session_runs(ranks: Ranks, call: str):
    pytest.importorskip("cloudpickle")
    done = interactive(ranks, call)
    assert (done.code, done.stdout) == (0, "sum 3.0 3.0 3.0\n"), done


@processes
def test_without_cloudpickle_the_error_says_what_to_do(ranks: Ranks):
    done = interactive(ranks, "sys.modules['cloudpickle'] = None\nmp.spawn(functools.partial(add_up, 1), nprocs=2)")
    assert done.code == 1
    assert done.stderr.splitlines()[-1] == (
        "TypeError: add_up is defined in a notebook or an interactive session, so a new process cannot import it: "
        'install cloudpickle, define it in a module, or call start_processes(..., start_method="fork")'
    )
