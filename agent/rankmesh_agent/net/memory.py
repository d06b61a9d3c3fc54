"""Memory for bytes that a peer has announced: it grows with those that have arrived, as the rest may never come."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

FIRST_BYTES = 1 << 20
"""Memory before any byte has arrived."""
_GROWTH = 4


def next_size(arrived: int, announced: int) -> int:
    """Return the size to which full memory grows."""
    return min(announced, max(FIRST_BYTES, _GROWTH * arrived))


class GrowableMemory:
    """Pages that grow in place, or that the kernel moves: nothing is copied.

    Args:
        announced: number of bytes that the peer has announced; 0 if it has not.

    Attributes:
        pages: the memory; no view of it may be in use when it grows.

    Raises:
        MemoryError: there is no memory.
    """

    def __init__(self, announced: int) -> None:
        self._announced = announced
        with _no_memory(FIRST_BYTES):
            self.pages = mmap.mmap(-1, min(announced or FIRST_BYTES, FIRST_BYTES), flags=mmap.MAP_PRIVATE)

    def grow(self, arrived: int) -> None:
        """Grow to more than ``arrived`` bytes, or to the announced number; raise MemoryError if there is no memory."""
        size = max(arrived, next_size(arrived, self._announced or _GROWTH * arrived))
        with _no_memory(size):
            self.pages.resize(size)
        with contextlib.suppress(OSError):  # kernels may lack huge pages
            self.pages.madvise(mmap.MADV_HUGEPAGE)

    def array(self) -> npt.NDArray[np.uint8]:
        """Return the memory; it grows no more."""
        return np.frombuffer(self.pages, np.uint8)


@contextlib.contextmanager
def _no_memory(size: int) -> Iterator[None]:
    try:
        yield
    except (OSError, SystemError, ValueError, OverflowError) as error:
        raise MemoryError(f"there is no memory for {size} bytes") from error
