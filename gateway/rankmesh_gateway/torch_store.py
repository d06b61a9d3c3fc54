"""torch's TCPStore protocol at a gateway's HTTP port: for programs that expect torchrun's store at MASTER_PORT.

The client sends the number of a command and its arguments, in the byte order of both machines, which is little-endian;
it waits for the result before it sends the next command, except for commands that have none. A wait ends by the arrival
of its last key, or by the client's next command.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import struct
import sys
from collections.abc import Callable, Iterable

from rankmesh_agent.config.settings import Settings
from rankmesh_agent.net.admission import ConnectionLimit
from rankmesh_agent.net.peer_credentials import (
    PeerClosedError,
    PeerNotLocalError,
    PeerRefusedError,
    check_peer,
    warn_refused,
)
from rankmesh_agent.net.rate_limit import WarningInterval
from rankmesh_agent.net.sockets import configure_connection
from rankmesh_agent.store import commands
from rankmesh_agent.store.keys import MAX_KEYS, MAX_VALUE_BYTES
from rankmesh_agent.store.table import Quota, Table
from rankmesh_agent.wire.errors import DistNetworkError, DistStoreError, ProtocolError
from rankmesh_agent.wire.schemas import MAX_KEY_BYTES

PREFACE = struct.pack("<BI", 0, 0x3C85F7CE)
"""The first bytes of a connection: the command VALIDATE, and the protocol's magic number."""
STEP_SECONDS = 75.0
"""Time limit for a client to send the rest of a command, and to receive a piece of a result."""
_REFUSED_SECONDS = 10.0
_PIECE_BYTES = 1 << 20
_DESCRIPTORS_A_CLIENT = 2
_SIZE, _NUMBER, _NONCE = struct.Struct("<Q"), struct.Struct("<q"), struct.Struct("<I")
_READY, _NOT_READY = b"\0", b"\1"
_STOP_WAITING, _WAIT_CANCELED = b"\0", b"\1"

_log = logging.getLogger("rankmesh.store")


class TorchStore:
    """A store that torch's clients reach at the port of a gateway. For one event loop.

    torch's protocol has no authentication. So the clients are processes of this user and of root on this host; and
    those of other hosts where RANKMESH_PRIVATE_NETWORK=1 declares the network private. ``on_default_group`` is called
    when torch itself, without RankMesh, creates its default group with this store.
    """

    def __init__(
        self, settings: Settings, *, closed: str = "", on_default_group: Callable[[], object] = lambda: None
    ) -> None:
        self._quota = Quota(settings.store_keys, settings.store_bytes)
        self._private_network = settings.private_network
        self._closed = closed
        self._on_default_group = on_default_group
        self._warning = WarningInterval()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._clients: set[_Client] = set()
        self._refused = ConnectionLimit("connections to torch's store that are refused")
        self.table = Table(self._quota)
        self.waiting: dict[str, dict[_Client, None]] = {}

    def make_protocol(self) -> asyncio.Protocol:
        """Return the protocol of a connection that begins with PREFACE."""
        return asyncio.StreamReaderProtocol(asyncio.StreamReader(), self._serve)

    def clear(self) -> None:
        """Have all keys removed, and all connections closed, before later clients are served. For other threads."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._clear)

    def _clear(self) -> None:
        for client in self._clients:
            client.writer.close()
        self.table = Table(self._quota)
        self.waiting = {}

    def check_default_group(self, key: str) -> None:
        """Report if a key is of torch's default group, whose ranks have exchanged their addresses here."""
        if key.startswith("/default_pg/") and "/rankmesh/" not in key:
            self._on_default_group()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection until it ends."""
        self._loop = asyncio.get_running_loop()
        client = _Client(self, reader, writer)
        sock: socket.socket = writer.get_extra_info("socket")
        try:
            refusal = self._refusal(sock)
            if refusal is not None:
                warn_refused(refusal)
                await client.refuse(sock, self._refused)
                return
            configure_connection(sock)
            self._clients.add(client)
            await client.serve()
        except DistStoreError as error:
            if self._warning.is_due():
                _log.warning("closed a connection to torch's store: %s", error.message)
        except (asyncio.IncompleteReadError, OSError, ProtocolError) as error:  # TimeoutError is an OSError
            _log.debug("a connection to torch's store has ended: %s", error)
        finally:
            self._clients.discard(client)
            client.cancel_wait()
            writer.transport.abort()

    def _refusal(self, sock: socket.socket) -> DistNetworkError | None:
        """Return why a client is not served, None if it is."""
        if self._closed:
            return DistNetworkError(f"a client of torch's TCPStore: {self._closed}")
        try:
            check_peer(sock)
        except PeerClosedError as error:
            return error
        except PeerRefusedError as error:
            if not (self._private_network and isinstance(error, PeerNotLocalError)):
                return DistNetworkError(
                    f"a client of torch's TCPStore: {error.message.partition(';')[0]}. torch's protocol has no "
                    "authentication, so other hosts are served only where the network is declared private, by "
                    "RANKMESH_PRIVATE_NETWORK=1 in the environment of the gateway ('rankmesh run' on node 0), and "
                    "other users of this host never; RankMesh's own backend and stores need neither"
                )
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // _DESCRIPTORS_A_CLIENT
        if len(self._clients) >= most:
            return DistNetworkError(
                f"torch's store has {most} clients, for which it may use half of the descriptors of this process: "
                "raise the limit (ulimit -n)"
            )
        return None


class _Client:
    """A client and its commands."""

    def __init__(self, store: TorchStore, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.missing: set[str] = set()
        self._reader = reader
        self._check_default_group = store.check_default_group
        self._table, self._waiting = store.table, store.waiting
        self._unused_bytes = 0

    async def serve(self) -> None:
        """Execute commands until the client leaves."""
        await self._reader.readexactly(len(PREFACE))
        execute = (
            *(None, self._set, self._compare_set, self._get, self._add, self._check, self._wait, self._count),
            *(self._delete, self._append, self._multi_get, self._multi_set, self._cancel_wait, self._ping),
            *(self._push, self._pop, self._length, self._keys, self._barrier),
        )
        while True:
            number = (await self._reader.readexactly(1))[0]
            command = execute[number] if number < len(execute) else None
            if command is None:
                raise ProtocolError(f"there is no command {number}")
            self._unused_bytes = MAX_VALUE_BYTES + MAX_KEYS * _SIZE.size
            async with asyncio.timeout(STEP_SECONDS):
                result = await command()
            await self._send(result)

    async def refuse(self, sock: socket.socket, limit: ConnectionLimit) -> None:
        """Close the connection at the first command behind the client's PING, or soon.

        torch's client connects again if it gets no response to its PING, until its timeout. Later its call fails.
        """
        admission = limit.admit(sock)
        try:
            async with asyncio.timeout(_REFUSED_SECONDS):
                _, *nonce = struct.unpack("<6s4B", await self._reader.readexactly(len(PREFACE) + 1 + _NONCE.size))
                self.writer.write(bytes(nonce))
                await self._reader.readexactly(1)
        finally:
            admission.end()

    def cancel_wait(self) -> None:
        """End the wait, if there is one, without a response."""
        for key in self.missing:
            waiting = self._waiting.get(key, {})
            waiting.pop(self, None)
            if not waiting:
                self._waiting.pop(key, None)
        self.missing = set()

    # Commands: each reads its arguments, and returns its result, in pieces

    async def _ping(self) -> Iterable[bytes]:
        return [await self._reader.readexactly(_NONCE.size)]

    async def _set(self) -> Iterable[bytes]:
        key = await self._read_key()
        commands.Set(key, await self._read_value()).apply(self._table)
        self._wake(key)
        self._check_default_group(key)
        return ()

    async def _compare_set(self) -> Iterable[bytes]:
        key, expected, desired = await self._read_key(), await self._read_value(), await self._read_value()
        value = commands.CompareSet(key, expected, desired).apply(self._table)
        if self._table.value(key) is not None:
            self._wake(key)
        return _value(value)

    async def _get(self) -> Iterable[bytes]:
        return _value(self._table.value(await self._read_key()) or b"")

    async def _add(self) -> Iterable[bytes]:
        key, amount = await self._read_key(), await self._read_number()
        total = commands.Add(key, amount).apply(self._table)
        self._wake(key)
        return [_NUMBER.pack(total)]

    async def _check(self) -> Iterable[bytes]:
        return [_READY if self._table.has(await self._read_keys()) else _NOT_READY]

    async def _wait(self) -> Iterable[bytes]:
        keys = await self._read_keys()
        self.cancel_wait()
        if self._table.has(keys):
            return [_STOP_WAITING]
        self._wait_for({key for key in keys if not self._table.has([key])})
        return ()

    async def _cancel_wait(self) -> Iterable[bytes]:
        self.cancel_wait()
        return [_WAIT_CANCELED]

    async def _count(self) -> Iterable[bytes]:
        return [_NUMBER.pack(self._table.count())]

    async def _delete(self) -> Iterable[bytes]:
        return [_NUMBER.pack(commands.Delete(await self._read_key()).apply(self._table))]

    async def _append(self) -> Iterable[bytes]:
        key = await self._read_key()
        commands.Append(key, await self._read_value()).apply(self._table)
        self._wake(key)
        return ()

    async def _multi_get(self) -> Iterable[bytes]:
        values = [self._table.value(key) or b"" for key in await self._read_keys()]
        return (piece for value in values for piece in _value(value))

    async def _multi_set(self) -> Iterable[bytes]:
        values = [(await self._read_key(), await self._read_value()) for _ in range(await self._read_count())]
        commands.MultiSet(tuple(values)).apply(self._table)
        for key, _ in values:
            self._wake(key)
        return ()

    async def _push(self) -> Iterable[bytes]:
        key = await self._read_key()
        commands.QueuePush(key, await self._read_value()).apply(self._table)
        self._wake(key, 1)
        return ()

    async def _pop(self) -> Iterable[bytes]:
        key = await self._read_key()
        size = _NUMBER.pack(self._table.length(key))
        value = self._table.pop_one(key)
        return [size] if value is None else [size, *_value(value)]

    async def _length(self) -> Iterable[bytes]:
        return [_NUMBER.pack(self._table.length(await self._read_key()))]

    async def _keys(self) -> Iterable[bytes]:
        keys = self._table.keys()
        return [_NUMBER.pack(len(keys)), b"".join(piece for key in keys for piece in _value(key.encode("latin-1")))]

    async def _barrier(self) -> Iterable[bytes]:
        key, size = await self._read_key(), await self._read_number()
        self.cancel_wait()
        if commands.Add(key, 1).apply(self._table) >= size:
            self._wake(key)
            return [_STOP_WAITING]
        self._wait_for({key})
        return ()

    def _wait_for(self, keys: set[str]) -> None:
        self.missing = keys
        for key in keys:
            self._waiting.setdefault(key, {})[self] = None

    def _wake(self, key: str, most: int = sys.maxsize) -> None:
        """Note that a key has a value, and end the waits for which it was the last key, ``most`` at most."""
        waiting = self._waiting.pop(key, {})
        while waiting and most:
            client = next(iter(waiting))
            del waiting[client]
            client.missing.discard(key)
            if not client.missing:
                client.writer.write(_STOP_WAITING)
                most -= 1
        if waiting:
            self._waiting[key] = waiting

    # Arguments and results

    async def _read_key(self) -> str:
        return (await self._read_bytes(MAX_KEY_BYTES)).decode("latin-1")  # torch's keys are bytes, of any values

    async def _read_keys(self) -> list[str]:
        return [await self._read_key() for _ in range(await self._read_count())]

    async def _read_value(self) -> bytes:
        return await self._read_bytes(MAX_VALUE_BYTES)

    async def _read_number(self) -> int:
        number: int
        (number,) = _NUMBER.unpack(await self._reader.readexactly(_NUMBER.size))
        return number

    async def _read_count(self) -> int:
        return await self._read_size(MAX_KEYS)

    async def _read_size(self, most: int) -> int:
        size: int
        (size,) = _SIZE.unpack(await self._reader.readexactly(_SIZE.size))
        if size > most:
            raise DistStoreError(f"a client sends a size of {size}, where at most {most} is allowed")
        return size

    async def _read_bytes(self, most: int) -> bytes:
        size = await self._read_size(min(most, self._unused_bytes))
        self._unused_bytes -= size
        return await self._reader.readexactly(size)

    async def _send(self, result: Iterable[bytes]) -> None:
        """Send a result no faster than the client reads it."""
        for each in result:
            for begin in range(0, len(each), _PIECE_BYTES):
                self.writer.write(each[begin : begin + _PIECE_BYTES])
                async with asyncio.timeout(STEP_SECONDS):
                    await self.writer.drain()


def _value(value: bytes) -> tuple[bytes, bytes]:
    return _SIZE.pack(len(value)), value
