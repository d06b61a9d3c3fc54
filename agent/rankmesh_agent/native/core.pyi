"""Types of the compiled core, core.pyx."""

from collections.abc import Callable, Sequence
from typing import Any

class Slots:
    _steps: int
    _turn: int

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

class Plan:
    def __init__(
        self,
        owner: Any,
        call: Any,
        counts: Counts,
        place: tuple[int, int, int, int],
        arrays: tuple[int, int],
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
