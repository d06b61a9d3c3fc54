"""TLS 1.3 for all connections of a process between hosts: HTTP, its upgrades, and those between ranks.

One certificate serves servers and clients. With RANKMESH_TLS_CA both ends of a connection show one, and names are
checked: a server's certificate must have the name or address that the client connects to. ``TlsSocket`` behaves like
a socket, so that the code on top of it is the same with TLS and without.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import socket
import ssl
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rankmesh_agent.config.tls import TlsSettings, tls_settings
from rankmesh_agent.net.addresses import is_beyond_host
from rankmesh_agent.net.peer_credentials import warn_refused
from rankmesh_agent.net.record_socket import NO_SIGNAL, RecordChangedError, RecordSocket
from rankmesh_agent.wire.errors import AuthenticationError

_BATCH_BYTES = 1 << 18
"""Plaintext encrypted for one system call."""
_RECORD_BYTES = 1 << 14
"""Maximum plaintext of a record (RFC 8446, section 5.1)."""
_SMALL_BYTES = 1 << 12
"""Buffers up to this size are copied together into one record."""
_LEAST_READ, _MOST_READ = 17 << 10, 1 << 18
"""Ciphertext read in one system call: a record and more, though not much more than the caller asks for."""
_NAMES_SECONDS = 2.0
_NAME_MISMATCH = (62, 64)
"""X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH."""
_UNKNOWN_ISSUER = (2, 18, 19, 20, 21)
"""Of an authority that is not trusted, or of none."""
_HTTP_REFUSAL = b"This port serves HTTPS; the request came without TLS. Set RANKMESH_TLS_CA, or use https://.\n"
_HTTP_RESPONSE = (
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s"
    % (len(_HTTP_REFUSAL), _HTTP_REFUSAL)
)
_REMEDY = "set RANKMESH_TLS_CA, RANKMESH_TLS_CERT and RANKMESH_TLS_KEY"
ALERT = b"\x15\x03\x03\x00\x02\x02\x46"
"""The fatal alert protocol_version (RFC 8446, section 6.2): the response to a client that does not speak TLS."""
_REASONS = {
    "WRONG_VERSION_NUMBER": "the other side does not use TLS: set RANKMESH_TLS_CERT and RANKMESH_TLS_KEY there",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "the other side requires a certificate: set RANKMESH_TLS_CERT and "
    "RANKMESH_TLS_KEY",
    "TLSV1_ALERT_UNKNOWN_CA": "the other side does not know the authority of this host's certificate: RANKMESH_TLS_CA "
    "must have it there",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "this host's certificate has expired",
    "SSLV3_ALERT_BAD_CERTIFICATE": "the other side does not accept this host's certificate",
}
_scratch = threading.local()
DEFAULT_PORTS = {"http": 80, "https": 443}
"""Ports of URLs without one."""


class _TlsObject(ssl.SSLObject):
    """TLS state of one connection, with its memory BIOs."""

    incoming: ssl.MemoryBIO
    outgoing: ssl.MemoryBIO
    _failed: ssl.SSLError | None = None

    def do_handshake(self) -> None:
        """As SSLObject's, but a client that is refused learns why: asyncio would close the connection before the alert.

        One that does not speak TLS gets a response that says so.
        """
        if self._failed is not None:
            raise self._failed
        try:
            super().do_handshake()
        except ssl.SSLError as error:
            if isinstance(error, ssl.SSLWantReadError) or not self.server_side:
                raise
            if error.reason == "HTTP_REQUEST":
                warn_refused(AuthenticationError(f"the client does not use TLS, as this process does: {_REMEDY} there"))
            self.outgoing.write({"HTTP_REQUEST": _HTTP_RESPONSE, "WRONG_VERSION_NUMBER": ALERT}.get(error.reason, b""))
            self._failed = error
            raise ssl.SSLWantReadError from error  # the caller sends what is in the BIO; then the client closes


class _Context(ssl.SSLContext):
    """Context whose TLS objects have their BIOs, so that a connection can be taken over from asyncio."""

    certificate = b""
    """This host's certificate (DER)."""

    def wrap_bio(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        tls = super().wrap_bio(incoming, outgoing, *args, **kwargs)
        assert isinstance(tls, _TlsObject)
        tls.incoming, tls.outgoing = incoming, outgoing
        return tls


class TlsSocket(RecordSocket):
    """A connected socket with TLS on top, see RecordSocket.

    Args:
        sock: the socket, which this object takes over.
        tls: the TLS state.
        peer: the peer's address, for errors.

    Attributes:
        secured: whether the TLS handshake is complete.
    """

    def __init__(self, sock: socket.socket, tls: ssl.SSLObject, peer: str = "") -> None:
        super().__init__(sock)
        assert isinstance(tls, _TlsObject)
        self.secured = tls.version() is not None
        self.peer = peer
        self._tls = tls
        self._lock = threading.Lock()
        self._unsent = memoryview(b"")
        self._records: deque[tuple[int, int]] = deque()
        """Bytes of plaintext and of ciphertext of each record that has not left entirely."""
        self._left = 0
        """Bytes of the first one that have left."""
        self._peeked = b""
        self._more = False

    @property
    def binding(self) -> bytes:
        """Channel binding of this connection, the same at both ends; see ``channel_binding``."""
        context = self._tls.context
        if self._tls.server_side and isinstance(context, _Context):
            return channel_binding(context.certificate)
        return channel_binding(self._tls.getpeercert(binary_form=True) or b"")

    def handshake(self) -> bool:
        """Continue the TLS handshake; return whether it is complete. A blocking socket completes it.

        Raises:
            AuthenticationError: the peer's certificate is not accepted.
            OSError: the handshake has failed, or the connection has ended.
        """
        while not self.secured:
            try:
                self._drain()
                self._tls.do_handshake()
                self.secured = True
            except ssl.SSLWantReadError:
                try:
                    self._drain()
                    if not self._fill(_LEAST_READ, 0):
                        raise ConnectionResetError
                except BlockingIOError:
                    return False
                except ConnectionResetError:
                    raise ConnectionResetError(
                        "closed by the other side in the TLS handshake: is RANKMESH_TLS_CERT set there?"
                    ) from None
            except ssl.SSLError as error:
                with contextlib.suppress(OSError):
                    self._drain()  # the alert
                raise self._explained(error) from None  # a cause would be the network's, to try again
        self._drain()
        return True

    def wants_to_write(self) -> bool:
        """Return whether ciphertext waits for room in the socket's buffer."""
        return bool(self._unsent)

    def committed(self) -> int:
        return sum(plain for plain, _ in self._records)

    def buffered(self) -> bool:
        return bool(self._peeked) or (self._more and bool(self._tls.pending() or self._tls.incoming.pending))

    # As a socket's

    def sendmsg(  # type: ignore[override]
        self, buffers: Any, ancdata: Sequence[Any] = (), flags: int = 0, address: Any = None
    ) -> int:
        with self._lock:
            sent = self._drain(flags)
            if not self._unsent:
                self._encrypt(buffers, sent)
                sent += self._drain(flags)
            if self._unsent and not sent:
                raise BlockingIOError
            return sent

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        view = memoryview(buffer).cast("B")
        if nbytes:
            view = view[:nbytes]
        wanted, filled = len(view), 0
        if self._peeked:
            filled = min(wanted, len(self._peeked))
            view[:filled] = self._peeked[:filled]
            self._peeked = self._peeked[filled:]
        while filled < wanted:
            try:
                with self._lock:  # the stubs know only one of the two results
                    count: Any = self._tls.read(wanted - filled, view[filled:])
            except ssl.SSLWantReadError:
                self._more = False
                if filled and not flags & socket.MSG_WAITALL:
                    return filled
                try:
                    if not self._fill(wanted - filled, flags):
                        return filled
                except BlockingIOError:
                    if filled:
                        return filled
                    raise
                continue
            except ssl.SSLZeroReturnError:
                return filled
            except ssl.SSLError as error:
                raise self._explained(error) from None  # a cause would be the network's, to try again
            if not count:
                return filled
            filled += count
        self._more = True
        return filled

    def recv(self, bufsize: int, flags: int = 0) -> bytes:
        if flags & socket.MSG_PEEK:
            if not self._peeked:
                self._peeked = self.recv(bufsize, flags & ~socket.MSG_PEEK)
            return self._peeked[:bufsize]
        data = bytearray(bufsize)
        return bytes(memoryview(data)[: self.recv_into(data, 0, flags)])

    def _encrypt(self, buffers: Sequence[Any], skipped: int) -> None:
        """Encrypt a batch of what follows the first ``skipped`` bytes."""
        room, small, small_bytes = _BATCH_BYTES, [], 0
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            if skipped:
                view, skipped = view[skipped:], max(0, skipped - len(view))
            view = view[:room]
            room -= len(view)
            if len(view) <= _SMALL_BYTES and small_bytes <= _RECORD_BYTES - _SMALL_BYTES:
                small.append(view)
                small_bytes += len(view)
            else:
                self._write(b"".join(small))
                small, small_bytes = [], 0
                self._write(view)
            if not room:
                break
        self._write(b"".join(small))

    def _write(self, data: bytes | memoryview) -> None:
        view, outgoing = memoryview(data), self._tls.outgoing
        while view:
            before = outgoing.pending
            written = self._tls.write(view[:_RECORD_BYTES])
            self._records.append((written, outgoing.pending - before))
            view = view[written:]

    def _drain(self, flags: int = 0) -> int:
        """Send as much ciphertext as fits now; return the bytes of plaintext in the records that have left."""
        if not self._unsent and self._tls.outgoing.pending:
            self._unsent = memoryview(self._tls.outgoing.read())
            known = sum(cipher for _, cipher in self._records)
            if known < len(self._unsent):  # the handshake's, an alert, or an update of the keys: before the data
                self._records.appendleft((0, len(self._unsent) - known))
        reported = 0
        while self._unsent:
            try:
                sent = socket.socket.send(self, self._unsent, flags | NO_SIGNAL)
            except BlockingIOError:
                break
            self._unsent = self._unsent[sent:]
            self._left += sent
            while self._records and self._left >= self._records[0][1]:
                plain, cipher = self._records.popleft()
                self._left -= cipher
                reported += plain
        return reported

    def _fill(self, wanted: int, flags: int) -> int:
        """Receive ciphertext; return how many bytes, 0 at the end of the connection."""
        scratch: bytearray | None = getattr(_scratch, "buffer", None)
        if scratch is None:
            scratch = _scratch.buffer = bytearray(_MOST_READ)
        size = min(max(wanted + (wanted >> 6), _LEAST_READ), _MOST_READ)
        received = super().recv_into(scratch, size, flags & ~(socket.MSG_PEEK | socket.MSG_WAITALL))
        with self._lock:
            self._tls.incoming.write(memoryview(scratch)[:received])
        return received

    def _explained(self, error: ssl.SSLError) -> Exception:
        """Return the error to raise in place of OpenSSL's."""
        if isinstance(error, ssl.SSLCertVerificationError):
            return AuthenticationError(
                f"the certificate of {self.peer} is not accepted: {self._verification_reason(error)}", address=self.peer
            )
        if error.reason == "DECRYPTION_FAILED_OR_BAD_RECORD_MAC":
            return RecordChangedError("a record was changed on its way")
        reason = _REASONS.get(error.reason or "", error.strerror or str(error))
        if "CERTIFICATE" in (error.reason or "") or "UNKNOWN_CA" in (error.reason or ""):
            return AuthenticationError(f"{self.peer}: {reason}", address=self.peer)
        return OSError(reason)

    def _verification_reason(self, error: ssl.SSLCertVerificationError) -> str:
        if error.verify_code in _UNKNOWN_ISSUER:
            known = tls_settings().ca
            return f"no authority in {f'RANKMESH_TLS_CA ({known})' if known else 'the system'} has signed it"
        if error.verify_code in _NAME_MISMATCH and not self._tls.server_side:
            names = ", ".join(_names_at(self.getpeername())) or "no names"
            return f"it has {names}, and not {self._tls.server_hostname}"
        return error.verify_message


def client_context(settings: TlsSettings | None = None) -> ssl.SSLContext:
    """Return the context of clients with these settings, by default this process's.

    Raises:
        ValueError: a file is missing or invalid; the message names its variable.
    """
    return _client_context(settings or tls_settings())


def server_context(settings: TlsSettings | None = None) -> ssl.SSLContext | None:
    """Return the context of servers with these settings, by default this process's; None if they serve without TLS.

    Raises:
        ValueError: a file is missing or invalid, or RANKMESH_TLS=require lacks the certificate.
    """
    settings = settings or tls_settings()
    if settings.cert:
        return _server_context(settings)
    if settings.required:
        raise ValueError("RANKMESH_TLS=require: a server needs RANKMESH_TLS_CERT and RANKMESH_TLS_KEY, too")
    return None


def check_environment(*, server: bool) -> None:
    """Check the settings of this process and their files, before it connects or serves.

    Args:
        server: whether it serves.

    Raises:
        ValueError: see client_context and server_context.
    """
    if tls_settings().enabled:
        client_context()
    if server:
        server_context()


def client_side(sock: socket.socket, host: str, port: int, settings: TlsSettings | None = None) -> TlsSocket:
    """Return the client's end of TLS on a socket, whose handshake has not begun."""
    tls = client_context(settings).wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), server_hostname=host)
    return TlsSocket(sock, tls, f"{host}:{port}")


def server_side(sock: socket.socket, peer: str, settings: TlsSettings | None = None) -> TlsSocket:
    """Return the server's end of TLS on a socket, whose handshake has not begun."""
    context = server_context(settings)
    assert context is not None
    return TlsSocket(sock, context.wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), server_side=True), peer)


def connect(scheme: str, host: str, port: int | None, seconds: float) -> socket.socket:
    """Return a connection to an HTTP server, with TLS if the scheme is https.

    Args:
        scheme: ``http`` or ``https``.
        host: name or address of the server.
        port: its port; None for the scheme's.
        seconds: timeout of each step; the socket keeps it.

    Raises:
        ValueError: the scheme is another one, or http where RANKMESH_TLS=require.
        AuthenticationError: the server's certificate is not accepted.
        OSError: the server cannot be reached, or does not speak TLS.
    """
    check_scheme(scheme, f"{scheme}://{host}")
    port = port or DEFAULT_PORTS[scheme]
    sock = socket.create_connection((host, port), seconds)
    if scheme == "http":
        return sock
    try:
        sock = client_side(sock, host, port)
        sock.handshake()
    except BaseException:
        sock.close()
        raise
    return sock


def check_scheme(scheme: str, url: str) -> None:
    """Check the scheme of a URL.

    Raises:
        ValueError: it is neither http nor https, or http where RANKMESH_TLS=require.
    """
    if scheme not in ("http", "https"):
        raise ValueError(f"{url!r} is not a URL of the form http://host:port/path")
    if scheme == "http" and tls_settings().required:
        raise ValueError(f"RANKMESH_TLS=require refuses {url}, which is without TLS: use https://")


def server_scheme() -> str:
    """Return the scheme of the URLs of this process's servers."""
    return "https" if tls_settings().cert else "http"


def client_scheme() -> str:
    """Return the scheme of URLs that are given without one, as host and port."""
    return "https" if tls_settings().enabled else "http"


def secures(settings: TlsSettings, sock: socket.socket, peer_host: str) -> bool:
    """Return whether ranks use TLS on a connection between them: beyond this host, and everywhere if it is required.

    Both ends find the same, whatever network the connection takes.

    Args:
        settings: the rank's settings.
        sock: the socket.
        peer_host: numeric address of the peer.
    """
    return settings.required or (bool(settings.cert) and is_beyond_host(sock, peer_host))


def binding_of(sock: socket.socket) -> bytes:
    """Return the channel binding of a connection; empty without TLS."""
    return sock.binding if isinstance(sock, TlsSocket) else b""


def channel_binding(certificate: bytes) -> bytes:
    """Return the channel binding of connections to a server (tls-server-end-point, RFC 5929).

    It binds to the server, not to one connection: Python has no access to the exporter (RFC 9266).

    Args:
        certificate: the server's certificate (DER).
    """
    return b"tls-server-end-point:" + hashlib.sha256(certificate).digest()


def _new_context(settings: TlsSettings, protocol: int) -> _Context:
    context = _Context(protocol)
    context.sslobject_class = _TlsObject
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if settings.cert:
        _load_certificate(context, settings)
    if settings.ca:
        try:
            context.load_verify_locations(settings.ca)
        except FileNotFoundError:
            raise ValueError(f"RANKMESH_TLS_CA: there is no file {settings.ca}") from None
        except (OSError, ssl.SSLError) as error:
            raise ValueError(f"RANKMESH_TLS_CA: {settings.ca} has no certificate in PEM: {error.strerror}") from error
    return context


def _load_certificate(context: _Context, settings: TlsSettings) -> None:
    for name, path in (("KEY", settings.key), ("CERT", settings.cert)):
        try:
            text = Path(path).read_text(errors="replace")
        except OSError as error:
            raise ValueError(f"RANKMESH_TLS_{name}: cannot read {path}: {error.strerror}") from error
    try:
        context.load_cert_chain(settings.cert, settings.key, password=_no_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            why = f"the key in RANKMESH_TLS_KEY ({settings.key}) does not belong to {settings.cert}"
        else:
            why = f"{settings.cert} or RANKMESH_TLS_KEY ({settings.key}) is not PEM: {error.strerror}"
        raise ValueError(f"RANKMESH_TLS_CERT: {why}") from error
    _, begin, rest = text.partition(ssl.PEM_HEADER)
    body, end, _ = rest.partition(ssl.PEM_FOOTER)
    context.certificate = ssl.PEM_cert_to_DER_cert(begin + body + end)


def _no_password() -> str:
    raise ValueError("RANKMESH_TLS_KEY is encrypted with a password: give a key without one, with mode 0600")


@functools.lru_cache(maxsize=8)
def _client_context(settings: TlsSettings) -> ssl.SSLContext:
    context = _new_context(settings, ssl.PROTOCOL_TLS_CLIENT)
    if not settings.ca:
        context.load_default_certs(ssl.Purpose.SERVER_AUTH)
    return context


@functools.lru_cache(maxsize=8)
def _server_context(settings: TlsSettings) -> ssl.SSLContext:
    context = _new_context(settings, ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0  # a connection is readable only when the peer has sent data
    if settings.ca:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _names_at(address: Any) -> list[str]:
    """Return the names in the certificate of the server at an address, if a trusted authority has signed it."""
    context = _new_context(tls_settings(), ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    try:
        with (
            socket.create_connection(address[:2], _NAMES_SECONDS) as sock,
            context.wrap_socket(sock) as secured,
        ):
            certificate = secured.getpeercert() or {}
    except OSError:
        return []
    return [str(entry[1]) for entry in certificate.get("subjectAltName", ())]
