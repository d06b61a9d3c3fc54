"""Types of the compiled core, core.pyx."""

from _typeshed import WriteableBuffer

def load(memory: WriteableBuffer, offset: int) -> int: ...
