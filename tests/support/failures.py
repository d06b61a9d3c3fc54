"""One table of failures: what becomes of rank 1 while ranks 0 and 2 wait, in which calls, and what these raise.

The driver of a medium runs ``fail`` in three ranks that are processes, and passes them to ``check``. The calls wait at
the same time, each in a group of its own. wrong.py has the calls that differ from rank to rank.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, NoReturn

import numpy as np

import rankmesh
from rankmesh._session.session import require_session
from rankmesh_agent.group import local_state, messages
from rankmesh_agent.membership.heartbeats import HeartbeatThread
from rankmesh_agent.progress import wait_graph
from rankmesh_agent.wire.errors import from_code
from support.me import DEADLINE, Me

dist: Any = rankmesh
SIZE, VICTIM = 3, 1
SOON = 30.0
"""Seconds within which a failure must be known everywhere, on a busy machine too."""
LIMIT = 8.0
"""Time limit of the calls that wait for a rank that is late."""
SLOWNESS = 7
"""How many times as long as usual the ranks have to ask each other for whom they wait: on a busy machine, a rank that
has no core for the usual time is blamed, and rightly so."""

# What becomes of rank 1, which alone makes calls in the group ``idle``; rank 0 has sent it a long message there.


def kill(me: Me, idle: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_in_traffic(me: Me, idle: Any) -> None:
    threading.Timer(0.1, kill, (me, idle)).start()
    exchange_for_ever(me)


def exit_at_once(me: Me, idle: Any) -> None:
    os._exit(5)


def cut(me: Me, idle: Any) -> None:
    agent: Any = require_session().agent
    for peer in agent.engine._peers.values():
        peer.connection.socket.shutdown(socket.SHUT_RDWR)
    me.wait_for("over")
    os._exit(0)


def lose_agent(me: Me, idle: Any) -> None:
    offer = require_session().agent._client._offer  # type: ignore[union-attr]
    os.kill(offer.pid, signal.SIGKILL)
    raised = me.attempt(dist.recv, np.ones(1), 0, group=idle)
    assert raised["error"] == "RankFailedError", raised
    assert f"the agent of this rank, {offer.name!r}" in raised["text"], raised
    os._exit(0)


def fail_in_error(me: Me, idle: Any) -> NoReturn:
    raise ValueError("no such file")


def destroy_in_finally(me: Me, idle: Any) -> None:
    try:
        fail_in_error(me, idle)
    finally:
        dist.destroy_process_group()


def exit_with_code(me: Me, idle: Any) -> None:
    sys.exit(3)


def end(me: Me, idle: Any) -> None:
    pass


def destroy(me: Me, idle: Any) -> None:
    dist.destroy_process_group()


def refuse_message(me: Me, idle: Any) -> None:
    dist.recv(np.ones(100_000, np.float32), 0, group=idle)


def give_up_message(me: Me, idle: Any) -> None:
    me.attempt(dist.recv, np.ones(1), 2, group=idle, timeout=0.2)
    dist.destroy_process_group()


def interrupted_in_all_reduce(me: Me, idle: Any, again: float | None = None) -> None:
    me.interrupt_when_waiting(again)
    dist.all_reduce(np.ones(1), group=idle)


def interrupted_twice(me: Me, idle: Any) -> None:
    interrupted_in_all_reduce(me, idle, again=0.003)


def interrupted_in_recv(me: Me, idle: Any) -> None:
    me.interrupt_when_waiting()
    dist.recv(np.ones(1), 2, group=idle)


def interrupted_in_work(me: Me, idle: Any) -> None:
    me.interrupt_when_waiting()
    work = dist.all_reduce(np.ones(1), group=idle, async_op=True)
    try:
        work.wait()
    finally:
        dist.destroy_process_group()


def interrupted_as_it_leaves(me: Me, idle: Any) -> None:
    ended = HeartbeatThread.stop

    def interrupt_and_stop(self: HeartbeatThread) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        ended(self)

    HeartbeatThread.stop = interrupt_and_stop  # type: ignore[method-assign]
    interrupted_in_all_reduce(me, idle)


def be_late(me: Me, idle: Any) -> None:
    me.wait_for("over")
    os._exit(0)


def stop(me: Me, idle: Any) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


class Event(NamedTuple):
    """What becomes of rank 1.

    Attributes:
        happen: makes it so, in rank 1.
        says: pattern of what each error says after rank 1's name.
        codes: exit codes of rank 1, one of which it has; none if the test ends it.
        media: over which it is tried.
        keys: whether waits for keys end, too.
        limited: whether nothing ends the calls but their time limit.
    """

    happen: Callable[[Me, Any], None]
    says: str
    codes: Sequence[int]
    media: str
    keys: bool = True
    limited: bool = False


NO_FILE = "ValueError: no such file"
INTERRUPT = "(left|gave up) .*KeyboardInterrupt"
INTERRUPT_OR_LOSS = rf"({INTERRUPT}|failed \(connection )"
"""The second Ctrl-C may end the process before it says goodbye; the call's group knows of the first one by then."""
INTERRUPTED = (-signal.SIGINT, 1)
"""Python forgets at times, when code runs at its exit, that Ctrl-C ended it."""
EVENTS = {
    "killed": Event(kill, r"failed \(", (-signal.SIGKILL,), "shm tcp aab abb aba attached http"),
    "killed in traffic": Event(kill_in_traffic, r"failed \(", (-signal.SIGKILL,), "shm tcp aab abb"),
    "exits at once": Event(exit_at_once, r"failed \(", (5,), "shm"),
    "cut": Event(cut, r"failed \(connection ", (0,), "tcp"),
    "loses its agent": Event(lose_agent, r"failed \(", (0,), "agents"),
    "raises": Event(fail_in_error, rf"left \(it ended with {NO_FILE}\) ", (1,), "shm tcp aab abb attached"),
    "raises, and destroys": Event(destroy_in_finally, rf"left \(it called .* after {NO_FILE}\) ", (1,), "tcp"),
    "exits": Event(exit_with_code, r"left \(it exited without destroy_process_group\) ", (3,), "shm", keys=False),
    "ends": Event(end, r"left \(it exited without destroy_process_group\) ", (0,), "tcp", keys=False),
    "destroys": Event(destroy, r"left \(it was done\) ", (0,), "aab", keys=False),
    "refuses a message": Event(refuse_message, r"left \(it ended with DistBackendError: rank 0 sent ", (1,), "tcp"),
    "gives up a message": Event(give_up_message, r"left \(after CollectiveTimeoutError: recv ", (0,), "shm"),
    "Ctrl-C in all_reduce": Event(interrupted_in_all_reduce, INTERRUPT, INTERRUPTED, "aab attached"),
    "Ctrl-C twice": Event(interrupted_twice, INTERRUPT_OR_LOSS, INTERRUPTED, "shm tcp"),
    "Ctrl-C in recv": Event(interrupted_in_recv, INTERRUPT, INTERRUPTED, "shm tcp"),
    "Ctrl-C in a Work": Event(interrupted_in_work, INTERRUPT, INTERRUPTED, "tcp"),
    "Ctrl-C as it leaves": Event(interrupted_as_it_leaves, INTERRUPT_OR_LOSS, INTERRUPTED, "tcp"),
    "late": Event(be_late, "", (0,), "shm tcp aab abb attached http", limited=True),
    "stopped": Event(stop, "", (), "shm aba", limited=True),
}  # fmt: skip
CELLS = [(event, medium) for event, found in EVENTS.items() for medium in found.media.split()]

# In which calls ranks 0 and 2 wait


def exchange_for_ever(me: Me) -> None:
    """Reduce short and long arrays, and pass a large message on to the next rank, until something happens."""
    sent, received, array = np.ones(1 << 20), np.zeros(1 << 20), np.ones(400_000)
    while True:
        dist.all_reduce(array[:1000])
        dist.all_reduce(array)
        array[:] = 1
        sending = dist.isend(sent, (me.rank + 1) % me.size)
        dist.recv(received, (me.rank - 1) % me.size)
        sending.wait()
        assert received.all()


CALLS: dict[str, Callable[[Any], Any]] = {
    "all_reduce": lambda group: dist.all_reduce(np.ones(3), group=group),
    "a long all_reduce": lambda group: dist.all_reduce(np.ones(400_000), group=group),
    "broadcast": lambda group: dist.broadcast(np.ones(3), VICTIM, group=group),
    "all_to_all": lambda group: dist.all_to_all_single(np.ones(3), np.ones(3), group=group),
    "objects": lambda group: dist.all_gather_object([None] * SIZE, "an object", group=group),
    "barrier": lambda group: dist.barrier(group),
    "recv": lambda group: dist.recv(np.ones(3), VICTIM, group=group),
    "a long send": lambda group: dist.send(np.ones(1 << 20), VICTIM, group=group),
    "irecv": lambda group: dist.irecv(np.ones(3), VICTIM, group=group).wait(),
    "a Work": lambda group: dist.all_reduce(np.ones(3), group=group, async_op=True).wait(),
    "new_group": lambda group: dist.new_group(timeout=group._communicator.timeout),
}
OF_KEYS: dict[str, Callable[[Any], Any]] = {
    "wait": lambda group: dist.get_default_store().wait(["there", "missing"], DEADLINE),
    "queue_pop": lambda group: dist.get_default_store().queue_pop("missing"),
}


def post(path: str, array: Any = None) -> None:
    """Make a request to this rank's agent; raise what it reports."""
    body = io.BytesIO()
    if array is not None:
        np.save(body, array)
    url = f"{require_session().agent.member.http}/v1/{path}"
    try:
        with urllib.request.urlopen(url, body.getvalue() or None, timeout=DEADLINE):
            pass
    except urllib.error.HTTPError as error:
        problem = json.load(error)
        raise from_code(problem["code"], problem["detail"], ranks=problem.get("ranks", [])) from None


CALLS_OVER_HTTP: dict[str, Callable[[Any], Any]] = {
    "all_reduce": lambda group: post(f"groups/{group.group_name}/all_reduce", np.ones(3)),
    "recv": lambda group: post(f"groups/{group.group_name}/recv?src={VICTIM}&dtype=float64&shape=3", np.ones(0)),
}
KEYS_OVER_HTTP: dict[str, Callable[[Any], Any]] = {"wait": lambda group: post("store/missing?wait=20")}


def fail(me: Me, event: str, http: bool) -> None:
    """Take part in an event: rank 1 undergoes it, the others report what their calls raise."""
    kind = EVENTS[event]
    if kind.limited:
        modules: list[Any] = [wait_graph, messages, local_state]
        for module in modules:
            module.ASK_SECONDS *= SLOWNESS
        wait_graph._ANSWER_SECONDS *= SLOWNESS
        wait_graph._VALID_SECONDS *= SLOWNESS
    me.init(timeout=DEADLINE)
    calls, of_keys = (CALLS_OVER_HTTP, KEYS_OVER_HTTP) if http else (CALLS, OF_KEYS)
    groups = {name: dist.new_group() for name in calls}
    idle, pair = dist.new_group(), dist.new_group([0, 2])
    dist.get_default_store().set("there", "1")
    if http:
        post("groups")  # the first request imports the framework
    own_waits = hasattr(require_session().agent.store, "pending_waits")  # an agent has those of an attached process
    keys_end = kind.keys and not kind.limited and own_waits
    dist.barrier()
    if me.rank == VICTIM:
        me.wait_for("waits-0", "waits-2", *(("keys-0", "keys-2") if keys_end else ()))
        me.report(at=time.monotonic())
        kind.happen(me, idle)
        return
    if kind.limited:
        world = [dist.group.WORLD] if me.rank == 0 else []  # rank 2 learns of rank 0's limit
        for group in (*groups.values(), *world, *([pair] if kind.happen is stop else [])):
            group._communicator.set_timeout(LIMIT)
    if me.rank == 0:
        dist.isend(np.ones(100_000), VICTIM, group=idle)
    with ThreadPoolExecutor(20) as threads:
        waiting = {name: threads.submit(me.attempt, call, groups[name]) for name, call in calls.items()}
        if keys_end:
            waiting |= {name: threads.submit(me.attempt, call, None) for name, call in of_keys.items()}
            me.mark_when_waiting(f"keys-{me.rank}", len(of_keys))
        survivor = threads.submit(me.attempt, dist.recv, np.ones(1), 0, group=pair) if me.rank else None
        threading.Timer(0.2, me.mark, [f"waits-{me.rank}"]).start()
        raised = {"the main thread": me.attempt(exchange_for_ever, me)}
        raised |= {name: future.result(DEADLINE) for name, future in waiting.items()}
        if not kind.limited:
            raised["the group of rank 1's call"] = me.attempt(dist.all_reduce, np.ones(1), group=idle)
        if survivor is None:
            leave(me, kind)  # because of rank 1
        else:
            raised["a survivor"] = survivor.result(DEADLINE)
            leave(me, kind)
    me.report(raised=raised)


def leave(me: Me, kind: Event) -> None:
    """Leave the job: a world that has lost a rank that died first goes on without it."""
    if kind.happen is kill:
        dist.shrink_group([VICTIM])
        dist.get_default_store().set(f"alive/{me.rank}", "1")
        dist.get_default_store().wait(["alive/0", "alive/2"])
        array = np.ones(3)
        dist.all_reduce(array)
        assert array.tolist() == [2.0] * 3
    dist.destroy_process_group()


def check(event: str, medium: str, ranks: Sequence[Any]) -> None:
    """Fail unless each call of ranks 0 and 2 raised soon what the table has, which names rank 1."""
    kind, victim = EVENTS[event], ranks[VICTIM]
    assert victim.code in (kind.codes or (victim.code,)), victim
    if kind.codes == INTERRUPTED:
        # It gives up its traceback when the second Ctrl-C comes while it prints that.
        assert "\nKeyboardInterrupt\n" in victim.stderr or "lost sys.stderr" in victim.stderr, victim
    says = r"waited \d\.\d s for rank 1 \(" if kind.limited else rf"^rank 1 \(\S+, pid \d+\) {kind.says}"
    for rank in (ranks[0], ranks[2]):
        assert rank.code == 0, rank
        assert not rank.complaints or kind.happen is cut, rank  # then rank 1 reports the loss of the others, too
        for name, raised in rank.reported["raised"].items():
            told = name, raised
            aborted = "GroupAbortedError" in raised["is"]  # another rank reported it first
            late = kind.limited and (name != "a survivor" or kind.happen is stop)
            assert raised["error"] == ("CollectiveTimeoutError" if late else "RankFailedError") or aborted, told
            assert raised["ranks"] == [VICTIM], told
            assert re.search(says, raised["text"].partition(" gave up: ")[2] or raised["text"]), told
            assert raised["at"] - victim.reported["at"] < SOON + LIMIT * kind.limited, told
            assert "heartbeat" not in raised["text"], told  # for one that is missing they would have waited
            if late and name == "the main thread" and rank is ranks[2]:
                assert re.match(r"rank 0 \(\S+, pid \d+\) gave up: ", raised["text"]), told
            if name == "a survivor" and not late:
                why = r"\(it called shrink_group\(\[1\]\) on group 'world'\) " if kind.happen is kill else ""
                assert re.search(rf"; because of it rank 0 \(\S+, pid \d+\) left {why}", raised["text"]), told
            assert not kind.limited or "1" not in arrived(raised["text"]), told
            if kind.codes == INTERRUPTED and name == "the group of rank 1's call":
                assert re.search(INTERRUPT, raised["text"]), told
            if kind.says == r"failed \(" and victim.code and name != "a survivor":
                assert f"pid {victim.pid}" in raised["text"], told


def arrived(text: str) -> set[str]:
    """Return the ranks that a time limit's error says have arrived."""
    return set(re.split(r"[;,\s]+", text.partition("arrived: ")[2].partition(";")[0]))
