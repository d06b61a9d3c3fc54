"""Objects that cannot be pickled; torch's own tests and test_objects.py have those that can."""

from __future__ import annotations

import threading
from typing import Any

from support.sides import Cells

cell = Cells()


class Unwilling:
    """An object that refuses to be pickled."""

    def __reduce__(self) -> Any:
        raise ArithmeticError("not today")


@cell(sizes=(1, 2), obj=["lock", "lambda", "own error"])
def the_error_of_an_object_that_cannot_be_pickled(dist: Any, rank: int, size: int, obj: str) -> Any:
    unpicklable = {"lock": threading.Lock(), "lambda": lambda: None, "own error": Unwilling()}[obj]
    output: list[Any] = [None] * size
    try:
        dist.all_gather_object(output, [unpicklable])
    except Exception as error:
        return f"{type(error).__module__}.{type(error).__qualname__}", str(error).partition(" at 0x")[0], output
