"""Journal of a host's ranks: the changes of a store, in memory that outlives the process that makes them.

The memory is a file without a name (memfd). The host's first rank makes it, and the others open it through /proc while
that rank lives; the memory ends with the last of them. One of them at a time, the owner, appends records. A record is
in the memory of all as soon as it is written, without a message. Layout, in native byte order::

    offset  size  field
    0       8     owner word: epoch of the ownership (upper half), whether the owner has left (bit 31), the owner's rank
    8       8     offset of the first record
    2^46 e  ...   records of epoch e, each at a multiple of 8: 4 bytes for its length, and the record; a length of 0
                  ends them. They are in one half of these 2^46 bytes, and the next snapshot goes to the other half

The length is written last, so a record is there as a whole or not at all. An owner that was only thought dead does no
harm: its successor increments the epoch before it reads the records, and the owner looks at the epoch after each change
and before the response.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rankmesh_agent.wire.errors import ProtocolError
from rankmesh_agent.wire.store_frames import MAX_BYTES

KEPT_BYTES = 8 << 20
"""Size of the part of each half that the owner keeps mapped: writing to fresh pages takes several times as long."""
_WINDOW_BYTES = 1 << 20
_REGION_BITS = 46
_HALF = 1 << _REGION_BITS - 1
_SIZE = 1 << 62
_HEADER_BYTES = mmap.ALLOCATIONGRANULARITY
_OWNER, _START = 0, 1
_LEFT = 1 << 31
_RANK = _LEFT - 1
_LENGTH, _WORD = struct.Struct("@I"), struct.Struct("@Q")  # native: each is stored at once, never seen half written
_LENGTH_BYTES = _LENGTH.size
_write_length = _LENGTH.pack_into
_ZEROS = tuple(bytes(count) for count in range(12))
_CHUNK = 1 << 20
_LOCKED_SECONDS = 0.001
_MAX_UNMAPPED = 1 << 30
_MAX_RECORD = 2 * MAX_BYTES
"""Maximum size of a record: of a request and its reply."""


class Journal:
    """The journal of a host, as one of its ranks has it.

    Args:
        fd: descriptor of the memory; this object closes it.
        rank: this rank.

    Attributes:
        words: the header; the first is the owner word. After ``close`` it says that no rank is the owner.
    """

    def __init__(self, fd: int, rank: int) -> None:
        self._fd = fd
        self._rank = rank
        self._map = mmap.mmap(fd, _HEADER_BYTES)
        self.words = memoryview(self._map).cast("Q")
        self._mine = -1
        self._read_until = 0  # end of the records of the earlier owner
        self._half_until = 0  # end of the records before the latest snapshot
        self._closed = False
        self._kept: dict[int, mmap.mmap] = {}
        self._window: mmap.mmap | None = None
        self._window_begin = 0
        self._at = self._room = 0  # offsets in the window: of the next record, and its end

    @classmethod
    def create(cls, name: str, rank: int) -> Journal:
        """Make a journal.

        Args:
            name: random name.
            rank: this rank.

        Raises:
            OSError: the kernel refuses.
        """
        fd = os.memfd_create(_title(name))
        try:
            os.ftruncate(fd, _SIZE)
            return cls(fd, rank)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def open(cls, pid: int, name: str, rank: int) -> Journal | None:
        """Return the journal that another process of this host has made; None if this one cannot open it.

        Args:
            pid: of the process; in another container it may be another process's, so that the name counts.
            name: see ``create``.
            rank: this rank.
        """
        wanted = f"/memfd:{_title(name)}"
        with contextlib.suppress(OSError):
            for each in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                    if os.readlink(each).startswith(wanted):
                        return cls(os.open(each, os.O_RDWR | os.O_CLOEXEC), rank)
        return None

    # Ownership

    def owner(self) -> int | None:
        """Return the owner's rank; None if it has left."""
        word = self.words[_OWNER]
        return None if word & _LEFT else word & _RANK

    @property
    def last_owner(self) -> int:
        """The rank of the latest owner, which may have left."""
        return self.words[_OWNER] & _RANK

    def claim(self, word: int) -> tuple[int, list[bytes]] | None:
        """Become the owner.

        ``start`` must follow. Until then a successor, if this process dies, reads the same records.

        Args:
            word: the owner word on which the decision is based.

        Returns:
            The new owner word and all records; None if ``word`` is not the owner word any more.

        Raises:
            ProtocolError: the memory holds no journal, since one of its ranks has damaged it.
        """
        with self._exclusive() as locked:
            if not locked or self.words[_OWNER] != word:
                return None
            epoch = (word >> 32) + 1
            if epoch >= _SIZE >> _REGION_BITS:
                raise ProtocolError(f"the journal of this host's store is damaged: its epoch is {epoch - 1}")
            self._mine = epoch << 32 | self._rank
            os.pwrite(self._fd, _WORD.pack(self._mine), _WORD.size * _OWNER)  # a system call: no later read precedes it
            found = []
            self._read_until = start = self.words[_START]
            for record, end in self._read(start) if start else ():
                found.append(record)
                self._read_until = end
            self._map_window((epoch << _REGION_BITS) + _HALF)
            return self._mine, found

    def leave(self) -> None:
        """Give up the ownership, if this rank has it: another rank may claim it at once."""
        with self._exclusive() as locked:
            if locked and self.words[_OWNER] == self._mine:
                self.words[_OWNER] = self._mine | _LEFT

    # Records, for the owner. One thread at a time.

    @property
    def end(self) -> int:
        """The offset of the next record."""
        return self._window_begin + self._at

    def append(self, record: bytes) -> None:
        """Append a record."""
        at, size = self._at, len(record)
        after = at + size + 11 & -8
        end = after + _LENGTH_BYTES
        window = self._window
        if end > self._room or window is None:
            self.append_parts([record])
            return
        window[at + _LENGTH_BYTES : end] = record + _ZEROS[after - at - size]  # up to the next length, which is 0
        _write_length(window, at, size)
        self._at = after

    def append_parts(self, parts: Sequence[bytes]) -> None:
        """Append a record of several parts, without joining them."""
        size = sum(map(len, parts))
        body = self._at + _LENGTH_BYTES
        after = body + size + 7 & -8
        if after + _LENGTH_BYTES <= self._room:
            window = self._window
            assert window is not None
            for part in parts:
                window[body : body + len(part)] = part
                body += len(part)
            _LENGTH.pack_into(window, after, 0)
            _LENGTH.pack_into(window, self._at, size)
            self._at = after
            return
        at = self.end
        body = at + _LENGTH_BYTES
        for part in parts:
            view = memoryview(part)
            while len(view):
                written = os.pwrite(self._fd, view, body)
                view, body = view[written:], body + written
        after = body + 7 & -8
        os.pwrite(self._fd, _LENGTH.pack(0), after)
        os.pwrite(self._fd, _LENGTH.pack(size), at)
        self._map_window(after)

    def other_half(self) -> int:
        """Have the next record begin in the other half, where ``start`` may begin; return where."""
        self._half_until = self.end
        begin = self.end & -_HALF ^ _HALF
        self._map_window(begin)
        assert self._window is not None
        _LENGTH.pack_into(self._window, 0, 0)
        return begin

    def start(self, offset: int) -> bool:
        """Drop the records before ``offset``: those behind it lead to the same state.

        Returns:
            False if another rank has become the owner, and reads the old records: nothing more must be written.
        """
        while self.words[_OWNER] == self._mine:
            with self._exclusive() as locked:
                if locked and self.words[_OWNER] == self._mine:
                    before, self.words[_START] = self.words[_START], offset
                    if before:
                        self._free_behind(before, same_epoch=before >> _REGION_BITS == offset >> _REGION_BITS)
                    return True
            time.sleep(_LOCKED_SECONDS)
        return False

    def close(self) -> None:
        """Close the descriptor and unmap the memory."""
        if self._closed:
            return
        self._closed = True
        words, self.words = self.words, memoryview(_WORD.pack(_LEFT)).cast("Q")
        words.release()
        self._map.close()
        if self._window is not None:
            self._window.close()
        for window in self._kept.values():
            window.close()
        os.close(self._fd)

    def _map_window(self, at: int) -> None:
        """Map the memory around ``at``, where the next record begins."""
        if self._window is not None and self._window_begin not in self._kept:
            self._window.close()
        half = at & -_HALF
        if at - half < KEPT_BYTES:
            if half not in self._kept:
                self._kept[half] = mmap.mmap(self._fd, KEPT_BYTES, offset=half)
            self._window_begin, self._window, self._room = half, self._kept[half], KEPT_BYTES
        else:
            self._window_begin = at & -mmap.ALLOCATIONGRANULARITY
            self._window = mmap.mmap(self._fd, _WINDOW_BYTES, offset=self._window_begin)
            self._room = _WINDOW_BYTES
        self._at = at - self._window_begin

    def _read(self, at: int) -> Iterator[tuple[bytes, int]]:
        """Yield the records from an offset to the first that is not complete, each with its end."""
        begin, chunk = at, b""
        half_end = min((at & -_HALF) + _HALF, _SIZE)
        while True:
            if at + _LENGTH_BYTES > half_end:
                raise ProtocolError(f"the journal of this host's store is damaged: a record begins at offset {at}")
            if at - begin + _LENGTH_BYTES > len(chunk):
                begin, chunk = at, os.pread(self._fd, _CHUNK, at)
            (size,) = _LENGTH.unpack_from(chunk, at - begin)
            if not size:
                return
            if size > _MAX_RECORD:
                raise ProtocolError(f"the journal of this host's store is damaged: a record has {size} bytes")
            body = at + _LENGTH_BYTES
            if body - begin + size <= len(chunk):
                record = chunk[body - begin : body - begin + size]
            else:
                record = self._read_bytes(body, size)
            at = body + size + 7 & -8
            yield record, at

    def _read_bytes(self, at: int, size: int) -> bytes:
        parts = []
        while size:
            parts.append(os.pread(self._fd, size, at))
            at += len(parts[-1])
            size -= len(parts[-1])
        return b"".join(parts)

    def _free_behind(self, begin: int, *, same_epoch: bool) -> None:
        """Free the memory of old records from ``begin`` on, but for what is kept mapped."""
        if same_epoch:
            self._free(begin + KEPT_BYTES, self._half_until)
        else:
            self._free(begin, max(begin + KEPT_BYTES, self._read_until))
            self._free(begin ^ _HALF, (begin ^ _HALF) + KEPT_BYTES)

    def _free(self, begin: int, end: int) -> None:
        """Return the pages between two offsets to the kernel."""
        begin &= -mmap.ALLOCATIONGRANULARITY
        end &= -mmap.ALLOCATIONGRANULARITY
        while begin < end:
            size = min(end - begin, _MAX_UNMAPPED)
            with contextlib.suppress(OSError), mmap.mmap(self._fd, size, offset=begin) as unused:
                unused.madvise(mmap.MADV_REMOVE)
            begin += size

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[bool]:
        """Exclude other ranks that would become the owner; the body gets False if one is about to."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        try:
            yield True
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)


def _title(name: str) -> str:
    return f"rankmesh-store-{name}"
