"""The jobs' stores in etcd, by its HTTP interface: every change is one transaction of etcd's."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import secrets
import ssl
import threading
import time
from base64 import b64decode, b64encode
from typing import Any
from urllib.parse import urlsplit

from rankmesh_agent.wire.errors import DistStoreError
from rankmesh_gateway.state.store_backend import OutcomeUnknownError, Rows

_PORT = 2379
_PREFIX = "/rankmesh"
_SECONDS, _SHORT_SECONDS = 3.0, 1.0
"""Time limits of a request; the second one while the request before has failed, as all clients wait for each."""
_PAUSE_SECONDS = 0.05
_PAGE_ROWS = 64
_REFUSALS = frozenset({3, 5, 7, 8, 9, 11, 12, 16})
"""gRPC's codes of requests that have no effect, however often they are sent."""

Json = dict[str, Any]


class EtcdStores:
    """Backend of the jobs' stores: the keys ``PREFIX/stores/STORE/...`` of an etcd cluster, one for each row.

    The key ``PREFIX/gateway`` holds a mark: the random id of the last gateway that has loaded the stores, and the
    number of its last transaction. Each transaction requires the mark of the one before, and sets its own. So a gateway
    that another one has replaced can write nothing any more; a transaction that is sent twice, over another connection
    or to another member of the cluster, takes effect once; and one that has failed without an answer cannot take effect
    after the next one.

    Args:
        url: ``etcd://HOST:PORT[,HOST:PORT...][/PREFIX]``, with ``etcds`` for TLS, whose authorities are those of
            OpenSSL, or of the file SSL_CERT_FILE.
    """

    def __init__(self, url: str) -> None:
        split = urlsplit(url)
        members = [urlsplit(f"//{each}") for each in split.netloc.split(",")]
        if split.scheme not in ("etcd", "etcds") or not all(each.hostname for each in members) or "@" in split.netloc:
            raise ValueError(f"{url!r} is not of the form etcd://HOST:PORT[,HOST:PORT...][/PREFIX]")
        self._url = url
        self._prefix = split.path.rstrip("/").encode() or _PREFIX.encode()
        self._tls = ssl.create_default_context() if split.scheme == "etcds" else None
        self._addresses = itertools.cycle([(str(each.hostname), each.port or _PORT) for each in members])
        self._members = len(members)
        self._lock = threading.Lock()
        self._connection: http.client.HTTPConnection | None = None
        self._answers = True
        self._id = secrets.token_hex(16)
        self._mark, self._number = b"", 0

    def load(self) -> dict[str, dict[bytes, bytes]]:
        """See StoreBackend."""
        with self._lock:
            mark = self._next_mark()
            self._request("put", {"key": _text(self._prefix + b"/gateway"), "value": _text(mark)})
            self._mark = mark
            return self._rows()

    def _rows(self) -> dict[str, dict[bytes, bytes]]:
        """Return all rows, page by page."""
        begin = key = self._prefix + b"/stores/"
        stores: dict[str, dict[bytes, bytes]] = {}
        more = True
        while more:
            page = self._request("range", {"key": _text(key), "range_end": _text(_end(begin)), "limit": _PAGE_ROWS})
            for row in page.get("kvs", ()):
                key = b64decode(row["key"])
                store, _, name = key[len(begin) :].partition(b"/")
                stores.setdefault(store.decode(), {})[name] = b64decode(row.get("value", ""))
            key += b"\0"
            more = page.get("more", False)
        return stores

    def write(self, store: str, rows: Rows) -> None:
        """See StoreBackend."""
        base = self._base(store)
        self._commit(
            [
                {"request_delete_range": {"key": _text(base + key)}}
                if value is None
                else {"request_put": {"key": _text(base + key), "value": _text(value)}}
                for key, value in rows.items()
            ]
        )

    def remove(self, store: str) -> None:
        """See StoreBackend."""
        base = self._base(store)
        self._commit([{"request_delete_range": {"key": _text(base), "range_end": _text(_end(base))}}])

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            self._disconnect()

    def _base(self, store: str) -> bytes:
        return self._prefix + b"/stores/" + store.encode() + b"/"

    def _next_mark(self) -> bytes:
        self._number += 1
        return f"{self._id}/{self._number}".encode()

    def _commit(self, operations: list[Json]) -> None:
        """Make a transaction of operations."""
        with self._lock:
            mark, key = self._next_mark(), _text(self._prefix + b"/gateway")
            while True:
                reply = self._request(
                    "txn",
                    {
                        "compare": [{"key": key, "target": "VALUE", "result": "EQUAL", "value": _text(self._mark)}],
                        "success": [{"request_put": {"key": key, "value": _text(mark)}}, *operations],
                        "failure": [{"request_range": {"key": key}}],
                    },
                )
                if not reply.get("succeeded"):
                    rows = reply["responses"][0]["response_range"].get("kvs", ())
                    found = b64decode(rows[0]["value"]) if rows else b""
                    if found != mark and found.startswith(self._id.encode()):  # of a transaction that got no answer
                        self._mark = found
                        continue
                    if found != mark:
                        raise DistStoreError(
                            f"another gateway has taken over the stores at {self._url}: this one can write nothing any "
                            "more, so nothing has changed. Stop it, and give each gateway a prefix of its own"
                        )
                self._mark = mark
                return

    def _request(self, name: str, body: Json) -> Json:
        """Return the reply to a request; it is sent again, to the members in turn, until there is one."""
        content = json.dumps(body)
        until = time.monotonic() + (_SECONDS if self._answers else _SHORT_SECONDS)
        sent = False
        for attempt in itertools.count(1):
            try:
                if self._connection is None:
                    self._connection = self._connect(until)
                sent = True
                if self._connection.sock is not None:
                    self._connection.sock.settimeout(max(_PAUSE_SECONDS, until - time.monotonic()))
                self._connection.request("POST", f"/v3/kv/{name}", content, {"Content-Type": "application/json"})
                answer = self._connection.getresponse()
                reply: Json = json.loads(answer.read())
                if answer.status == http.client.OK:
                    self._answers = True
                    return reply
                failure = str(reply.get("message") or reply.get("error"))
                if reply.get("code") in _REFUSALS:
                    raise DistStoreError(
                        f"etcd at {self._url} refuses the change, so nothing has changed: {failure}. It takes "
                        "1.5 MiB and 128 keys at a time, unless --max-request-bytes and --max-txn-ops are set"
                    )
            except (OSError, http.client.HTTPException, ValueError, AttributeError) as error:
                failure = str(error) or type(error).__name__
            self._disconnect()
            if time.monotonic() >= until and attempt >= self._members:
                break
            if attempt % self._members == 0:
                time.sleep(min(_PAUSE_SECONDS, max(0.0, until - time.monotonic())))
        self._answers = False
        if not sent:
            raise DistStoreError(f"etcd at {self._url} cannot be reached, so nothing has changed: {failure}")
        raise OutcomeUnknownError(
            f"etcd at {self._url} does not answer: {failure}. If it has made the change, that is undone as soon as it "
            "answers"
        )

    def _connect(self, until: float) -> http.client.HTTPConnection:
        host, port = next(self._addresses)
        seconds = max(_PAUSE_SECONDS, (until - time.monotonic()) / self._members)
        if self._tls is None:
            connection = http.client.HTTPConnection(host, port, timeout=seconds)
        else:
            connection = http.client.HTTPSConnection(host, port, timeout=seconds, context=self._tls)
        connection.connect()
        return connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.close()
            self._connection = None


def _text(data: bytes) -> str:
    return b64encode(data).decode()


def _end(prefix: bytes) -> bytes:
    """Return the end of the range of all keys that begin with a prefix, whose last byte is not 255."""
    return prefix[:-1] + bytes([prefix[-1] + 1])
