"""Histories of the job's store under kills of its gateway are linearizable, and nothing is lost or made twice.

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
from support.gateway_process import GatewayProcess
from support.linearizability import UNKNOWN, Call, anomaly, read, step
from support.processes import Me, Ranks

import rankmesh as dist

SEEDS = range(int(os.environ.get("SEEDS", "2")))
SIZE = 4
SURVIVORS = (1, 2, 3)
KILLS = 5
KEYS = ("a", "b", "c")
ABSENT = "?"
QUEUE = "queue"
DIES = """
import os, random, signal
from rankmesh_agent.store.server import StoreServer
record = StoreServer._record
def record_or_die(*arguments):
    random.random() < 0.01 and os.kill(os.getpid(), signal.SIGKILL)
    record(*arguments)
StoreServer._record = record_or_die
"""
"""A gateway's: it dies after one of its changes is in the file, or in etcd, and before its client is answered."""


class History:
    """The calls of one client: each is written before it is made, and its result after it."""

    def __init__(self, file: Path) -> None:
        self._fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def call(self, method: Callable[..., Any], name: str, key: str, *arguments: Any) -> None:
        self._write(name=name, key=key, arguments=arguments, at=time.monotonic())
        try:
            # No value is like ABSENT, so this is a read that never waits.
            result = method(key, ABSENT, ABSENT) if name == "get" else method(key, *arguments)
        except dist.QueueEmptyError:
            result = None
        except dist.DistError as error:
            self._write(at=time.monotonic(), error=repr(error))
            return
        result = result.decode() if isinstance(result, bytes) else result
        self._write(at=time.monotonic(), result=None if name == "get" and result == ABSENT else result)

    def _write(self, **entry: Any) -> None:
        os.write(self._fd, json.dumps(entry).encode() + b"\n")


def client(me: Me, seed: int, url: str) -> None:
    """Make random calls until the time is over, or this rank is killed."""
    me.init(init_method=url)
    store = dist.get_default_store()
    store.set_timeout(timedelta(seconds=120))
    dist.barrier()
    history, chance = History(me.folder / f"history-{me.rank}"), random.Random(f"{seed}/{me.rank}")
    methods = {name: getattr(store, name) for name in ("set", "add", "delete_key", "compare_set", "queue_push")}
    methods |= {"get": store.compare_set, "queue_pop": lambda key: store.queue_pop(key, block=False)}
    names = ("set", "get", "get", "compare_set", "delete_key", "add", "add", "queue_push", "queue_pop")
    me.mark(f"begins-{me.rank}")
    count = 0
    while not (me.folder / "over").exists():
        count += 1
        key, value = chance.choice(KEYS), f"{me.rank}.{count}"
        name = chance.choice(names)
        key = {"add": "sum", "queue_push": QUEUE, "queue_pop": QUEUE}.get(name, key)
        values = {
            "add": (1,), "set": (value,), "queue_push": (value,), "compare_set": (chance.choice(("", value)), value),
        }  # fmt: skip
        history.call(methods[name], name, key, *values.get(name, ()))
        time.sleep(chance.random() * 0.02)
    me.mark(f"ended-{me.rank}")
    me.wait_for(*(f"ended-{rank}" for rank in SURVIVORS))
    if me.rank == SURVIVORS[0]:
        history.call(methods["get"], "get", "sum")
        while store.queue_len(QUEUE):
            history.call(methods["queue_pop"], "queue_pop", QUEUE)
        me.mark("read")
    me.wait_for("read")
    os._exit(0)


@pytest.mark.processes
@pytest.mark.parametrize("backend", ["sqlite", "etcd"])
@pytest.mark.parametrize("seed", SEEDS)
def test_it_is_linearizable_while_its_gateway_is_killed(
    ranks: Ranks, seed: int, backend: str, request: pytest.FixtureRequest
) -> None:
    """Rank 0 is killed, too, and others are stopped for a while."""
    options = [f"--store={request.getfixturevalue('etcd').url()}"] if backend == "etcd" else []
    gateway = GatewayProcess(ranks, keeps_state=not options, first=DIES, options=options)
    chance = random.Random(seed)
    started = ranks.start(client, SIZE, seed=seed, url=gateway.url)
    ranks.wait_for(*(f"begins-{rank}" for rank in range(SIZE)))
    for number in range(KILLS):
        if number == 0:  # at any moment; later, at one of those in DIES
            time.sleep(chance.uniform(0.1, 0.5))
            gateway.end()
        ranks.wait([gateway.process])
        stopped = started[chance.choice(SURVIVORS)]
        os.kill(stopped.pid, signal.SIGSTOP)
        if number == 1:
            started[0].kill()
        time.sleep(chance.uniform(0.0, 0.5))
        gateway.start()
        os.kill(stopped.pid, signal.SIGCONT)
    ranks.mark("over")
    while any(started[rank].code is None for rank in SURVIVORS):
        if gateway.process.code is not None:
            gateway.start()
        time.sleep(0.05)
    assert [started[rank].code for rank in SURVIVORS] == [0] * len(SURVIVORS), ranks.transcript()
    gateway.end()
    calls = read(ranks.folder / f"history-{rank}" for rank in range(SIZE))
    unknown = [call for call in calls if call.result == UNKNOWN and call.client != "history-0"]
    assert not unknown, "a call is repeated until the gateway is there again"
    assert len(calls) > 50
    assert not anomaly([call for call in calls if call.key != QUEUE])
    adds = [call for call in calls if call.name == "add"]
    answered = [call.result for call in adds if call.result != UNKNOWN]
    assert len(set(answered)) == len(answered), "an add was executed twice, or lost"
    total = max(int(call.result) for call in calls if call.name == "get" and call.key == "sum")  # the last one
    assert len(answered) <= total <= len(adds)
    pushes = {call.arguments[0]: call.result for call in calls if call.name == "queue_push"}
    popped = [call.result for call in calls if call.name == "queue_pop" and call.result not in (None, UNKNOWN)]
    assert len(set(popped)) == len(popped), "a value was popped twice"
    assert set(popped) <= set(pushes)
    lost = {value for value, result in pushes.items() if result != UNKNOWN}.difference(popped)
    pops = [call for call in calls if call.name == "queue_pop" and call.result == UNKNOWN]
    assert len(lost) <= len(pops), "a value was lost"


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
        return values[-11] if len(values) == 30 else values[-1]  # a gateway that starts with a state that is behind

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
