"""Types of the compiled core, core.pyx."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

SOURCES: int

class Slots:
    _steps: int
    _turn: int

class Words:
    def __init__(self, memory: Any, address: int) -> None: ...
    def __getitem__(self, number: int) -> int: ...
    def __setitem__(self, number: int, value: int) -> None: ...

class State:
    call: Any
    failure: Any
    seq: int

class Counts:
    def totals(self) -> tuple[int, float, list[int]]: ...

class Records:
    def __init__(self, capacity: int) -> None: ...
    def append(self, record: Any) -> None: ...
    def copy(self) -> list[Any]: ...
    def __getitem__(self, number: int) -> Any: ...

class Ring:
    position: int
    capacity: int
    address: int

class Rings:
    _in: Ring
    _out: Ring
    _lost: Any

class Framing:
    connection: Any
    outgoing: Any
    _header: Any
    _begin: int
    _end: int
    _to_discard: int

class Credit:
    available: int
    unreturned: int

class Recorded:
    def __init__(self, owner: Any, call: Any, counts: Counts) -> None: ...

class Message(Recorded):
    def __init__(
        self, owner: Any, what: Any, counts: Counts, header: bytes, peer: Framing, credit: Credit, nbytes: int
    ) -> None: ...

class Messages:
    def __init__(
        self, state: Any, engine: Any, queues: tuple[Any, Any], kinds: Mapping[Any, Any], contention: Any
    ) -> None: ...
    def at_once(self, sends: bool, array: Any, rank: Any, tag: Any, waits: bool = True) -> bool: ...

class Plan(Recorded):
    def __init__(
        self,
        owner: Any,
        call: Any,
        counts: Counts,
        place: tuple[int, int, int, int],
        arrays: tuple[int, int, int, int],
    ) -> None: ...

class TcpCalls:
    def __init__(
        self,
        queue: Any,
        state: Any,
        link: Any,
        shared: tuple[Any, ...],
        contention: Any,
        combine: Callable[..., None],
        transfer: Callable[[], Any],
    ) -> None: ...

class Calls:
    def __init__(
        self,
        queue: Any,
        state: Any,
        segment: Any,
        shared: tuple[Any, ...],
        contention: Any,
        python: tuple[Callable[..., None], Callable[..., None], Callable[..., Any]],
    ) -> None: ...
    def close(self) -> None: ...
    def run(self, found: Any, arguments: Sequence[Any], options: Any) -> bool: ...
    def at_once(
        self, options: Any, kind: Any, output: Any = None, given: Any = None, op: Any = None, root: Any = None
    ) -> bool: ...
    def submit(
        self, key: tuple[Any, ...], arguments: Sequence[Any], options: Any, *, launches: bool = False
    ) -> Any: ...
