"""Histories of the job's store under kills, stops and leaves of its owners are linearizable, and add happens once.

SEEDS in the environment is the number of histories; each is made by ranks that are processes.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from support import hosting
from support.linearizability import UNKNOWN, Call, anomaly, read, step
from support.processes import Me, Ranks
from support.slow_ranks import allow_slow_ranks

import rankmesh as dist

SEEDS = range(int(os.environ.get("SEEDS", "2")))
SIZE = 5
SURVIVORS = (3, 4)
SECONDS = 4.0
KEYS = ("a", "b", "c")
ABSENT = "?"


class History:
    """The calls of one client: each is written before it is made, and its result after it."""

    def __init__(self, file: Path) -> None:
        self._fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def call(self, method: Callable[..., Any], name: str, key: str, *arguments: Any) -> None:
        self._write(name=name, key=key, arguments=arguments, at=time.monotonic())
        try:
            # No value is like ABSENT, so this is a read that never waits.
            result = method(key, ABSENT, ABSENT) if name == "get" else method(key, *arguments)
        except dist.DistError as error:
            self._write(at=time.monotonic(), error=repr(error))
            return
        result = result.decode() if isinstance(result, bytes) else result
        self._write(at=time.monotonic(), result=None if name == "get" and result == ABSENT else result)

    def _write(self, **entry: Any) -> None:
        os.write(self._fd, json.dumps(entry).encode() + b"\n")


def client(me: Me, seed: int) -> None:
    """Make random calls until the time is over, this rank is to leave, or it is killed."""
    allow_slow_ranks()
    me.init()
    store = dist.get_default_store()
    dist.barrier()
    store.set_timeout(timedelta(seconds=60))
    history, chance = History(me.folder / f"history-{me.rank}"), random.Random(f"{seed}/{me.rank}")
    methods = {name: getattr(store, name) for name in ("set", "add", "delete_key", "compare_set")}
    methods["get"] = store.compare_set
    me.mark(f"begins-{me.rank}")
    count, over, leave = 0, me.folder / "over", me.folder / f"leave-{me.rank}"
    while not over.exists():
        if leave.exists():
            dist.destroy_process_group()
            me.mark(f"left-{me.rank}")
            return
        count += 1
        key, value = chance.choice(KEYS), f"{me.rank}.{count}"
        name = chance.choice(("set", "get", "get", "compare_set", "delete_key", "add", "add"))
        if name == "add":
            history.call(methods[name], name, "sum", 1)
        elif name == "set":
            history.call(methods[name], name, key, value)
        elif name == "compare_set":
            history.call(methods[name], name, key, chance.choice(("", value)), value)
        else:
            history.call(methods[name], name, key)
        time.sleep(chance.random() * 0.004)
    me.mark(f"added-{me.rank}")
    me.wait_for(*(f"added-{rank}" for rank in SURVIVORS))
    history.call(methods["get"], "get", "sum")
    me.mark(f"done-{me.rank}")
    me.wait_for(*(f"done-{rank}" for rank in SURVIVORS))
    os._exit(0)


def nemesis(ranks: Ranks, started: list[Any], chance: random.Random) -> None:
    """Take the owners away, one after the other: each is killed, or leaves; some are stopped for a while before."""
    for victim in (0, 1, 2):
        time.sleep(SECONDS / 4 * chance.uniform(0.5, 1.0))
        if chance.random() < 0.5:
            os.kill(started[victim].pid, signal.SIGSTOP)
            time.sleep(chance.uniform(0.05, 0.3))
            if chance.random() < 0.5:
                os.kill(started[victim].pid, signal.SIGCONT)
                time.sleep(chance.uniform(0.0, 0.1))
        if chance.random() < 0.6:
            started[victim].kill()
        else:
            os.kill(started[victim].pid, signal.SIGCONT)
            ranks.mark(f"leave-{victim}")
            ranks.wait_for(f"left-{victim}")
    time.sleep(SECONDS / 4)
    ranks.mark("over")


@pytest.mark.processes
@pytest.mark.parametrize("seed", SEEDS)
def test_it_is_linearizable_while_its_owners_go(ranks: Ranks, seed: int) -> None:
    hosts = ("aaaaa", "abcde", "aabbb", "aaabb", "abbab")[seed % 5]

    if hosting.ATTACHED and len(set(hosts)) > 1:
        pytest.skip("the agents of a cluster share one directory")

    def environment(rank: int) -> dict[str, str]:
        """Ranks with a directory of their own share no memory, as if they were on several hosts."""
        folder = ranks.folder / f"host-{hosts[rank]}"
        folder.mkdir(exist_ok=True)
        return {"RANKMESH_SHM_DIR": str(folder)}

    started = ranks.start(client, SIZE, env=environment, seed=seed)
    ranks.wait_for(*(f"begins-{rank}" for rank in range(SIZE)))
    nemesis(ranks, started, random.Random(seed))
    ranks.wait(started)
    assert [started[rank].code for rank in SURVIVORS] == [0, 0], ranks.transcript()
    calls = read(ranks.folder / f"history-{rank}" for rank in range(SIZE))
    assert not anomaly(calls)
    adds = [call for call in calls if call.name == "add"]
    answered = [call.result for call in adds if call.result != UNKNOWN]
    assert len(set(answered)) == len(answered), "an add was executed twice, or lost"
    total = max(int(call.result) for call in calls if call.name == "get" and call.key == "sum")  # the last one
    assert len(answered) <= total <= len(adds)
    unknown = [call for call in calls if call.result == UNKNOWN and call.client in {f"history-{r}" for r in SURVIVORS}]
    assert not unknown, "a survivor's call is repeated until it is known"
    assert len(calls) > 200


# The checker: negative controls


def simulated(
    seed: int, fault: Callable[[list[str | None], str], str | None], names: Sequence[str] = ("set", "get", "add")
) -> list[Call]:
    """Return the history of clients that call one after the other; ``fault`` returns the value after each call."""
    chance = random.Random(seed)
    values: list[str | None] = [None]
    calls: list[Call] = []
    for at in range(60):
        name = chance.choice(names)
        arguments = (str(at),) if name == "set" else (1,) if name == "add" else ()
        call = Call(f"client-{at % 3}", name, "key", arguments, at, at + 0.5 + chance.random(), UNKNOWN)
        if name == "add" and values[-1] is not None and not values[-1].isdigit():
            continue
        after = step(values[-1], call)[1]
        result: Any = {"set": None, "get": values[-1], "add": int(after or 0)}[name]
        calls.append(call._replace(result=result))
        values.append(fault([*values, after], name))
    return calls


def test_a_store_that_keeps_its_word_is_found_linearizable() -> None:
    for seed in range(20):
        assert not anomaly(simulated(seed, lambda values, name: values[-1]))


def test_a_store_that_loses_acknowledged_writes_is_found() -> None:
    def forget(values: list[str | None], name: str) -> str | None:
        return values[-11] if len(values) == 30 else values[-1]  # a failover to a copy that is behind

    assert all(anomaly(simulated(seed, forget, ("get", "add"))) for seed in range(20))


def test_an_add_that_is_executed_twice_is_found() -> None:
    def twice(values: list[str | None], name: str) -> str | None:
        if name == "add" and len(values) > 25 and values[-1] is not None:
            return str(int(values[-1]) + 1)
        return values[-1]

    assert all(anomaly(simulated(seed, twice)) for seed in range(20))


def test_a_call_without_a_response_may_take_effect_later_or_never() -> None:
    lost = Call("one", "set", "key", ("x",), 0.0, math.inf, UNKNOWN)
    before, after = (Call("two", "get", "key", (), at, at + 0.5, result) for at, result in ((1.0, None), (2.0, "x")))
    assert not anomaly([lost, before])
    assert not anomaly([lost, before, after])
    assert anomaly([lost, after._replace(invoked=1.0, responded=1.5), before._replace(invoked=2.0, responded=2.5)])
