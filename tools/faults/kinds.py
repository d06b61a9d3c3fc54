"""The kinds of faults, and the specification of a run: drawn from its seed and its kind alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

from tools.faults.program import Step, describe, generate, of_world

Specification = dict[str, Any]
Draw = Callable[[random.Random, Specification], None]

DEATH_TIMEOUT = 15.0
"""Time limit of operations where a death is to be noticed at once."""
SILENCE_TIMEOUT = 2.5
"""Time limit of operations where only it ends the wait."""
NO_FAULT_ROUNDS = 4
_ENDLESS = 100_000


class Kind(NamedTuple):
    """A kind of fault.

    Attributes:
        text: what happens.
        draw: completes the specification.
        gloo: whether gloo can be put to the same.
        namespaces: whether it needs root, for namespaces of the kernel.
        store: whether the job's store outlives it.
    """

    text: str
    draw: Draw
    gloo: bool = False
    namespaces: bool = False
    store: bool = True


def specify(seed: int, kind: str, library: str = "rankmesh") -> Specification:
    """Return the specification of a run: program, medium, fault."""
    rng = random.Random(f"{seed}-{kind}")
    size = rng.randint(2, 6)
    gloo, store = library == "gloo", KINDS[kind].store
    subgroups, steps = generate(rng, size, length=rng.randint(4, 9), gloo=gloo, store=store)
    spec: Specification = {
        "seed": seed, "kind": kind, "library": library, "size": size, "job": f"fault-{kind}-{seed}".replace(" ", "-"),
        "medium": "gloo" if gloo else rng.choice(("shm", "shm", "tcp", "hosts")), "subgroups": subgroups,
        "steps": steps, "rounds": _ENDLESS, "at": [rng.randrange(3), rng.randrange(len(steps))],
        "timeout": DEATH_TIMEOUT, "faults": [], "mismatch": None, "planted": f"planted by seed {seed}",
        "recover": not gloo, "ask": False, "errors": True, "resume_after": None, "new_group": False,
        "silent": False, "external": None, "external_after": rng.random() * 0.05, "shm_bytes": None, "store": store,
    }  # fmt: skip
    KINDS[kind].draw(rng, spec)
    return spec


def _fault(
    rng: random.Random, deed: str, rank: int, *, place: str = "step", when: str = "", delay: float = 0.004, **more: Any
) -> dict[str, Any]:
    when = when or rng.choice(("before", "between", "timer"))
    return {"rank": rank, "deed": deed, "place": place, "when": when, "delay": rng.random() * delay, **more}


def _in_a_step(deed: str, *, timers: bool = True, **more: Any) -> Draw:
    def draw(rng: random.Random, spec: Specification) -> None:
        when = "" if timers else rng.choice(("before", "between"))
        spec["faults"] = [_fault(rng, deed, rng.randrange(spec["size"]), when=when, **more)]
        spec["silent"] = deed == "exit"  # a script that is over is no failure to those who wait for a key

    return draw


def _silent(deed: str) -> Draw:
    def draw(rng: random.Random, spec: Specification) -> None:
        _in_a_step(deed, timers=deed == "stop")(rng, spec)
        spec.update(timeout=SILENCE_TIMEOUT, silent=True)

    return draw


def _stop_and_go_on(rng: random.Random, spec: Specification) -> None:
    """Stop a rank for less than the time limit: no other is to notice."""
    _in_a_step("stop")(rng, spec)
    spec.update(timeout=DEATH_TIMEOUT, resume_after=0.5 + rng.random(), rounds=NO_FAULT_ROUNDS, errors=False)


def _interrupt(again: bool) -> Draw:
    def draw(rng: random.Random, spec: Specification) -> None:
        after = 0.02 + rng.random() * 0.3 if again else None
        spec["faults"] = [_fault(rng, "interrupt", rng.randrange(spec["size"]), again=after)]

    return draw


def _mismatch(rng: random.Random, spec: Specification) -> None:
    victim = rng.randrange(spec["size"])
    steps: list[Step] = spec["steps"]
    able = [
        index
        for index, step in enumerate(steps)
        if of_world(step, victim, spec["subgroups"]) and step["op"] != "all_gather_object"
    ]
    index = rng.choice(able)
    step = steps[index]
    other = rng.choice(("op", "op", "count", "dtype"))
    if step["op"] == "barrier" or other == "op":
        change: Step = {"op": "all_reduce" if step["op"] != "all_reduce" else rng.choice(("barrier", "broadcast"))}
    elif other == "count":
        change = {"count": step["count"] - 1 or 2}
    else:
        change = {"dtype": "int32" if step["dtype"] != "int32" else "float64"}
    spec.update(mismatch=change, rounds=NO_FAULT_ROUNDS, errors=False, timeout=SILENCE_TIMEOUT * 2)
    spec["at"][1] = index
    spec["faults"] = [_fault(rng, "mismatch", victim, when="before")]


def _two(rng: random.Random, spec: Specification) -> None:
    """Two ranks die, at once or within 50 ms of each other."""
    _at_least(rng, spec, 3)
    spec["faults"] = [
        _fault(rng, rng.choice(("kill", "kill", "exception", "exit")), rank, when=rng.choice(("before", "between")))
        for rank in rng.sample(range(spec["size"]), 2)
    ]
    for fault in spec["faults"]:
        if fault["deed"] == "kill":
            fault.update(when="timer", delay=rng.random() * 0.05)
    spec["ask"] = True


def _at_least(rng: random.Random, spec: Specification, size: int) -> None:
    if spec["size"] < size:
        spec["size"] = rng.randint(size, 6)
        spec["subgroups"], spec["steps"] = generate(rng, spec["size"], length=len(spec["steps"]))


def _during_init(rng: random.Random, spec: Specification) -> None:
    """A rank dies while it joins, or before it has begun to."""
    deed = rng.choice(("kill", "kill", "exception"))
    when = "before" if deed != "kill" else rng.choice(("before", "timer", "timer"))
    # The first one at the file has the gateway in its process; it stays, by coming first.
    spec["faults"] = [_fault(rng, deed, rng.randrange(1, spec["size"]), place="init", when=when, delay=0.15)]
    spec.update(timeout=SILENCE_TIMEOUT * 2, recover=False)


def _during_shrink(rng: random.Random, spec: Specification) -> None:
    """A second rank dies while the others shrink the group."""
    _at_least(rng, spec, 4)
    first, second = rng.sample(range(spec["size"]), 2)
    spec["faults"] = [
        _fault(rng, "kill", first),
        _fault(rng, "kill", second, place="shrink", when=rng.choice(("before", "timer", "timer")), delay=0.02),
    ]
    spec["timeout"] = DEATH_TIMEOUT / 2


def _cut(rng: random.Random, spec: Specification) -> None:
    """The network of a host fails: the ranks on both sides see the other side fall silent."""
    hosts = 2 if spec["size"] < 3 else rng.choice((2, 3))
    host = rng.randrange(1, hosts)
    there = [rank for rank in range(spec["size"]) if rank * hosts // spec["size"] == host]
    spec["faults"] = [_fault(rng, "cut", rank, place="network", when="external") for rank in there]
    spec.update(medium="network", hosts=hosts, cut=host, external="cut", at=[-1, -1])
    spec.update(timeout=SILENCE_TIMEOUT, silent=True, ask=True)


def _gateway(rng: random.Random, spec: Specification) -> None:
    """The gateway is killed: the program goes on, and a rank that dies later is named all the same."""
    then = rng.choice(("kill", "nothing"))
    fault = _fault(rng, then, rng.randrange(spec["size"]), when="before", after_external=True)
    spec.update(external="gateway", faults=[fault], errors=then == "kill")
    if then == "nothing":
        spec["rounds"] = NO_FAULT_ROUNDS


def _full(rng: random.Random, spec: Specification) -> None:
    """The directory for shared memory is small: ranks use TCP, or where shared memory is required fail at once."""
    forced = rng.random() < 0.4
    spec.update(
        medium="shm" if forced else "auto", shm_bytes=rng.choice((64, 500, 1500, 3000, 6000, 9000)) << 10,
        rounds=NO_FAULT_ROUNDS, at=[0, 0], new_group=True, errors=False,
    )  # fmt: skip


def _descriptors(rng: random.Random, spec: Specification) -> None:
    """A rank runs out of file descriptors, at the start or in new_group."""
    place = rng.choice(("init", "step"))
    spare = rng.randrange(1, 24) if place == "init" else rng.randrange(0, 5)
    fault = _fault(rng, "descriptors", rng.randrange(spec["size"]), place=place, when="before", spare=spare)
    spec.update(faults=[fault], rounds=NO_FAULT_ROUNDS, new_group=True, timeout=SILENCE_TIMEOUT * 2, errors=False)


def _launched(external: str, deeds: tuple[str, ...] = ()) -> Draw:
    def draw(rng: random.Random, spec: Specification) -> None:
        spec.update(external=external, recover=False)
        if spec["medium"] == "hosts":
            spec["medium"] = "shm"
        if deeds:
            _in_a_step(rng.choice(deeds), timers=False)(rng, spec)

    return draw


KINDS: dict[str, Kind] = {
    "kill": Kind("SIGKILL", _in_a_step("kill"), gloo=True),
    "stop": Kind("SIGSTOP for ever", _silent("stop"), gloo=True),
    "stop and go on": Kind("SIGSTOP, SIGCONT within the time limit", _stop_and_go_on),
    "exception": Kind("uncaught exception", _in_a_step("exception", timers=False), gloo=True),
    "exit": Kind("sys.exit(0) without destroy_process_group", _in_a_step("exit", timers=False), gloo=True),
    "never made": Kind("a call that one rank never makes", _silent("never"), gloo=True),
    "mismatch": Kind("a call that differs at one rank", _mismatch, gloo=True),
    "Ctrl-C": Kind("SIGINT", _interrupt(False)),
    "Ctrl-C twice": Kind("SIGINT, and again while the process ends", _interrupt(True)),
    "two at once": Kind("two ranks die within 50 ms", _two),
    "during init": Kind("a rank dies while the ranks join", _during_init),
    "during shrink": Kind("a second rank dies while the others shrink", _during_shrink),
    "cut": Kind("the network of a host fails", _cut, namespaces=True),
    "gateway killed": Kind("SIGKILL to the gateway; then, or not, to a rank", _gateway, store=False),
    "full /dev/shm": Kind("little room for shared memory", _full, namespaces=True),
    "descriptors": Kind("a rank has no more file descriptors", _descriptors),
    "launched": Kind(
        "a rank dies under rankmesh run, whose report names it", _launched("launched", ("kill", "exception", "exit"))
    ),
    "launcher killed": Kind("SIGKILL to rankmesh run", _launched("launcher killed")),
    "launcher Ctrl-C": Kind("SIGINT to rankmesh run and its ranks, once or twice", _launched("launcher interrupted")),
}


def words(spec: Specification) -> str:
    """Return the program and the fault of a run as text."""
    lines = [
        f"{spec['size']} ranks over {spec['medium']}, time limit {spec['timeout']:g} s, sub-groups {spec['subgroups']}"
    ]
    lines += [f"  step {number}: {describe(step)}" for number, step in enumerate(spec["steps"])]
    place = f"round {spec['at'][0]}, step {spec['at'][1]}"
    lines += [f"fault at {place}: {fault}" for fault in spec["faults"]]
    if spec["mismatch"]:
        lines.append(f"its call there has {spec['mismatch']}")
    return "\n".join(lines)
