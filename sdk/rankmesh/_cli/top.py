"""The screen of ``rankmesh status`` and ``rankmesh top``, on which keys sort the ranks and show the stack of one."""

from __future__ import annotations

import os
import re
import select
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from queue import SimpleQueue
from typing import Any, NamedTuple

from rankmesh._cli.client import ServiceClient
from rankmesh._cli.exit_codes import UNREACHABLE, CommandError
from rankmesh._cli.options import PATIENCE
from rankmesh._cli.overview import Overview, Verdict, compact, fetch_snapshots, fetch_status, head, tables
from rankmesh._cli.stacks import Details, stack_lines
from rankmesh._cli.tables import Table, lines
from rankmesh_agent.wire.printable import printable, printable_lines
from rankmesh_gateway.humanize import seconds, size
from rankmesh_gateway.stragglers.scores import SLOW

_TICK = 0.25
_ORDERS = {"r": "rank", "c": "CPU", "w": "core wait", "m": "memory", "s": "slow", "o": "calls/s", "t": "for"}
_PERCENT = "{:.0%}".format
_TEXTS: dict[str, Callable[[float], str]] = {
    "CPU": _PERCENT, "core wait": _PERCENT, "memory": size, "slow": _PERCENT, "calls/s": "{:.1f}".format, "for": seconds
}  # fmt: skip
_USAGE = {"CPU": "cpu", "core wait": "core_wait", "memory": "memory"}
_MOVES = {"\x1b[A": -1, "\x1bOA": -1, "k": -1, "\x1b[B": 1, "\x1bOB": 1, "j": 1}
_KEYS = f"sort by {', '.join(f'{key} {name}' for key, name in _ORDERS.items())}; arrows and Enter: a stack; q: end"
_LEAST_ROWS = 3


class Answers(NamedTuple):
    """The answers of a gateway at one moment; the ranks by job, epoch, rank and pid, or why they are not shown."""

    overview: Overview
    verdict: Verdict
    ranks: Mapping[tuple[Any, ...], Details]
    refusal: str = ""


def live(service: ServiceClient, job: str, first: tuple[Overview, Verdict], interval: float) -> Verdict:
    """Show ranks, groups and calls in flight until q or Ctrl-C; return the last verdict."""
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    queue: SimpleQueue[Answers | Exception] = SimpleQueue()
    screen, changed = Screen(service.url, Answers(*first, {})), True
    threading.Thread(target=_ask, args=(queue, service, job, interval), daemon=True).start()
    with _cbreak() as there, Live(auto_refresh=False) as shown, suppress(KeyboardInterrupt):
        while True:
            while not queue.empty():
                screen.take(queue.get())
                changed = True
            if changed:
                top = Text.from_ansi(screen.head().rstrip())
                rows = shown.console.height - len(top.wrap(shown.console, shown.console.width))
                rest = Text.from_ansi(screen.body(rows, keys=there), no_wrap=True, overflow="ellipsis")
                shown.update(Group(top, rest), refresh=True)
            keys = _pressed(_TICK, there=there)
            if any(map(screen.press, keys)):
                break
            changed = bool(keys)
    return screen.answers.verdict


def _ask(queue: SimpleQueue[Answers | Exception], service: ServiceClient, job: str, interval: float) -> None:
    """Ask a gateway again and again, at most half of the time: it asks the agents of all ranks."""
    while True:
        begun = time.monotonic()
        try:
            found, refusal = [], ""
            overview, verdict = fetch_status(service, job)
            try:
                found = fetch_snapshots(service, job, PATIENCE)
            except CommandError as error:  # of a credential that may not see stacks
                refusal = str(error)
            ranks = {(each["job"], each["epoch"], each["rank"], each["pid"]): each for each in found}
            queue.put(Answers(overview, verdict, ranks, refusal))
        except Exception as error:
            queue.put(error)
        time.sleep(max(interval, time.monotonic() - begun))


class Screen:
    """The state of the screen."""

    def __init__(self, url: str, answers: Answers) -> None:
        self.answers = answers
        self._url, self._remark = url, ""
        self._order, self._place = "r", 0
        self._ranks: list[tuple[Any, ...]] = []
        self._stack: tuple[Any, ...] | None = None

    def take(self, answers: Answers | Exception) -> None:
        """Show the next answers; raise an error, unless it is that the gateway does not answer."""
        if isinstance(answers, Answers):
            self.answers, self._remark = answers, ""
        elif isinstance(answers, CommandError) and answers.code == UNREACHABLE:
            self._remark = self._remark or f"; NO ANSWER since {time.strftime('%H:%M:%S')}"
        else:
            raise answers

    def press(self, key: str) -> bool:
        """Do what a key is for; return whether it ends the screen."""
        self._order = key if key in _ORDERS else self._order
        self._place = min(max(0, self._place + _MOVES.get(key, 0)), max(0, len(self._ranks) - 1))
        if key in "\r\n":
            self._stack = self._ranks[self._place] if self._ranks and self._stack is None else None
        return key == "q"

    def head(self) -> str:
        """Return the first lines: the gateway, and the problems."""
        found = head(self.answers.overview, self.answers.verdict, self._url)
        return lines([found._replace(title=found.title + self._remark)], coloured=True)

    def body(self, height: int, *, keys: bool) -> str:
        """Return the other lines: a rank's stack, or the ranks, as many as there is room for, and the other tables."""
        if self._stack is not None:
            details = self.answers.ranks.get(self._stack)
            text = (
                [self.answers.refusal or "no answer yet"] if details is None else [*stack_lines(details, several=False)]
            )
            return printable_lines("\n".join(["", *text[-max(1, height - 4) :], "", "Enter: back"]))
        last = printable(self.answers.refusal), _KEYS * keys
        world, *others = tables(self.answers.overview)
        rest = "\n" + lines(others, coloured=True) + "".join(f"\n{text}" for text in last if text)
        room = max(_LEAST_ROWS, height - rest.count("\n") - 4)
        return "\n" + lines([self._table(world, room, keys=keys)], coloured=True) + rest

    def _table(self, world: Table, room: int, *, keys: bool) -> Table:
        rows, calls = [], Counter[tuple[Any, ...]]()
        for group in self.answers.overview["groups"]:
            for rank in group["ranks"]:
                calls[group["job"], group["epoch"], rank] += group.get("operations_rate", 0.0)
        for each in self.answers.overview["ranks"]:
            member = each["member"]
            key = each["job"], each["epoch"], member["rank"], member["pid"]
            age, doing = doing_of(self.answers.ranks.get(key))
            usage = each.get("usage") or {}
            values = {name: usage[of] for name, of in _USAGE.items() if of in usage} | age
            if key[:3] in calls:
                values["calls/s"] = calls[key[:3]]
            if each.get("slow", 0.0) >= SLOW:
                values["slow"] = each["slow"]
            state = usage.get("state", "") if member.get("observed") else ""
            at = each["reason"] or "; ".join(filter(None, (state, doing)))
            texts = [text(values[name]) if name in values else "" for name, text in _TEXTS.items()]
            number = "?" if member["rank"] < 0 else str(member["rank"])
            cells = [number, member["host"], str(member["pid"]), each["state"], *texts, at]
            rows.append((-values.get(_ORDERS[self._order], -1.0), key, cells))
        rows.sort(key=lambda row: row[:2])
        self._ranks = [key for _, key, _ in rows]
        begin = max(0, min(self._place - room // 2, len(rows) - room))
        marked = [[job, ">" * (keys and at == self._place), *cells] for at, (_, (job, *_), cells) in enumerate(rows)]
        columns = ["job", "", ">rank", "host", ">pid", "state", *(f">{name}" for name in _TEXTS), "at"]
        return compact(Table(world.title, columns, marked[begin : begin + room], world.empty))


def doing_of(details: Details | None) -> tuple[dict[str, float], str]:
    """Return for how long a rank is in a call, if it is in one, and where it is: there, or in a line of the user's."""
    if details is None or (snapshot := details["snapshot"]) is None:
        return {}, "" if details is None else "; ".join(filter(None, (details["error"], details["place"])))
    for wait in snapshot["store_waits"]:
        return {"for": wait["age"]}, f"store: {wait['op']} {', '.join(wait['keys'])}"
    for call in snapshot["calls"]:
        return {"for": call["age"]}, f"{call['call']} #{call['seq']}" if call["seq"] else call["call"]
    return {}, details["place"]


@contextmanager
def _cbreak() -> Iterator[bool]:
    """Have each key come at once; yield whether they do: standard input is a terminal, and the system has termios."""
    with ExitStack() as end:
        there = sys.stdin.isatty() and os.name == "posix"
        if there:
            import termios
            import tty

            end.callback(termios.tcsetattr, sys.stdin, termios.TCSADRAIN, termios.tcgetattr(sys.stdin))
            tty.setcbreak(sys.stdin)
        yield there


def _pressed(wait: float, *, there: bool) -> list[str]:
    """Return the keys of the next seconds, as soon as there is one; q at the end of the input."""
    if not there:
        time.sleep(wait)
    elif select.select([sys.stdin], [], [], wait)[0]:
        text = os.read(sys.stdin.fileno(), 64).decode(errors="replace")
        return re.findall(r"\x1b[\[O].|.", text, re.DOTALL) or ["q"]
    return []
