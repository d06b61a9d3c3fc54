"""Socket with TLS: the calls, flags and partial sends of a socket, on the standard library's TLS without a socket."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Sequence
from typing import Any

from rankmesh_agent.config.tls import tls_settings
from rankmesh_agent.net.fork import close_in_children
from rankmesh_agent.wire.credentials import remedy
from rankmesh_agent.wire.errors import AuthenticationError
from rankmesh_agent.wire.hello import ClientRefusedError

NO_SIGNAL: int = getattr(socket, "MSG_NOSIGNAL", 0)
"""Flag of a send that raises no SIGPIPE; other systems than Linux lack it, and Python ignores the signal."""
_BATCH_BYTES = 1 << 18
"""Plaintext encrypted for one system call."""
_RECORD_BYTES = 1 << 14
"""Maximum plaintext of a record (RFC 8446, section 5.1): buffers that fit into one are copied together."""
_LEAST_READ, _MOST_READ = 17 << 10, 1 << 18
"""Ciphertext read in one system call: a record and more, though not much more than the caller asks for."""
_NAMES_SECONDS = 2.0
_NAME_MISMATCH = (62, 64)
"""X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH."""
_UNKNOWN_ISSUER = (2, 18, 19, 20, 21)
"""Of an authority that is not trusted, or of none."""
_NO_TLS = "the other side does not use TLS: set RANKMESH_TLS_CERT and RANKMESH_TLS_KEY there"
_REASONS = {
    "WRONG_VERSION_NUMBER": _NO_TLS,
    "SSLV3_ALERT_HANDSHAKE_FAILURE": _NO_TLS,
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "the other side requires a certificate: set RANKMESH_TLS_CERT and "
    "RANKMESH_TLS_KEY",
    "TLSV1_ALERT_UNKNOWN_CA": "the other side does not know the authority of this host's certificate: RANKMESH_TLS_CA "
    "must have it there",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "this host's certificate has expired",
    "SSLV3_ALERT_BAD_CERTIFICATE": "the other side does not accept this host's certificate",
}
_OTHER_AUTHORITY = frozenset(
    {
        "TLSV1_UNRECOGNIZED_NAME",
        "TLSV1_ALERT_UNKNOWN_CA",
        "TLSV1_ALERT_DECRYPT_ERROR",
        "SSLV3_ALERT_BAD_CERTIFICATE",
        "SSLV3_ALERT_CERTIFICATE_UNKNOWN",
    }
)
"""OpenSSL's reasons for the alerts of an end that does not accept the authority of the other one."""
_scratch = threading.local()


class RecordChangedError(ConnectionError):
    """A record is not the one that the peer has sent: the connection has ended, by an attack or an error of memory."""


class TlsError(OSError):
    """The handshake of TLS has failed, as it would once more."""


class OtherTokenError(AuthenticationError):
    """At a client: the server has another token, and so another authority."""


class NoTlsError(AuthenticationError):
    """At a client: the server does not use TLS with certificates of a token."""


class TlsObject(ssl.SSLObject):
    """TLS state of one connection; ``failed`` is why a server has ended the handshake."""

    failed: ssl.SSLError | None = None

    def do_handshake(self) -> None:
        """As SSLObject's, but a refused client learns why: asyncio would close the connection before the alert."""
        if self.failed is not None:
            raise self.failed
        try:
            super().do_handshake()
        except ssl.SSLError as error:
            if isinstance(error, ssl.SSLWantReadError) or not self.server_side:
                raise
            self.failed = error
            raise ssl.SSLWantReadError from error  # the caller sends the alert; then the client closes


class TlsContext(ssl.SSLContext):
    """Context of connections whose certificates are of a credential's authority, or from files."""

    credential = ""
    """The credential; empty for files."""


class TlsSocket(socket.socket):
    """A connected socket with TLS on top, which needs no other code than a socket.

    ``send`` encrypts a batch, and reports it once the kernel has taken all of it: until then, the next call must begin
    with the same bytes (see ``committed``). Bytes may be ready although the descriptor is not readable: a receive that
    returns fewer bytes than it could leaves none; else see ``buffered``.

    One thread may send while another one receives.

    Args:
        sock: the socket, which this object takes over.
        peer: the peer's address, for errors.
        name: at a client, the name of the server; None at a server.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, peer: str, name: str | None = None) -> None:
        timeout = sock.gettimeout()
        super().__init__(fileno=sock.detach())
        close_in_children(self)
        self.settimeout(timeout)
        self.secured = False
        self.peer = peer
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, name is None, name)
        self._lock = threading.Lock()
        self._unsent = memoryview(b"")
        self._encrypted = 0
        self._more = False

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
                    if isinstance(self._tls, TlsObject) and self._tls.failed is not None:
                        raise self._explained(self._tls.failed) from None
                    variable = "RANKMESH_TOKEN" if self._credential() else "RANKMESH_TLS_CERT"
                    raise ConnectionResetError(
                        f"closed by the other side in the TLS handshake: is {variable} set there?"
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
        """Return how many bytes have been encrypted, but not reported: the next ``send`` must begin with them."""
        return self._encrypted

    def buffered(self) -> bool:
        """Return whether bytes can be received although the descriptor may not be readable."""
        return self._more and bool(self._tls.pending() or self._incoming.pending)

    # As a socket's

    def send(self, data: Any, flags: int = 0) -> int:
        return self.sendmsg((data,), (), flags)

    def sendall(self, data: Any, flags: int = 0) -> None:
        view = memoryview(data).cast("B")
        while view:
            view = view[self.send(view, flags) :]

    def sendmsg(  # type: ignore[override]
        self, buffers: Any, ancdata: Sequence[Any] = (), flags: int = 0, address: Any = None
    ) -> int:
        with self._lock:
            if not self._encrypted:
                self._encrypted = self._encrypt(buffers)
            if not self._drain(flags):
                raise BlockingIOError
            sent, self._encrypted = self._encrypted, 0
            return sent

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        view = memoryview(buffer).cast("B")
        if nbytes:
            view = view[:nbytes]
        wanted, filled = len(view), 0
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
        data = bytearray(bufsize)
        return bytes(memoryview(data)[: self.recv_into(data, 0, flags)])

    def _encrypt(self, buffers: Sequence[Any]) -> int:
        """Encrypt as much as one system call takes; return the number of bytes."""
        views, room = [], _BATCH_BYTES
        for buffer in buffers:
            views.append(memoryview(buffer).cast("B")[:room])
            room -= len(views[-1])
            if not room:
                break
        size = _BATCH_BYTES - room
        for view in [memoryview(b"".join(views))] if size <= _RECORD_BYTES else views:
            self._write(view)
        return size

    def _write(self, view: memoryview) -> None:
        while view:
            view = view[self._tls.write(view) :]

    def _drain(self, flags: int = 0) -> bool:
        """Send as much ciphertext as fits now; return whether all of it has left."""
        while self._unsent or self._outgoing.pending:
            self._unsent = self._unsent or memoryview(self._outgoing.read())
            try:
                self._unsent = self._unsent[socket.socket.send(self, self._unsent, flags | NO_SIGNAL) :]
            except BlockingIOError:
                return False
        return True

    def _fill(self, wanted: int, flags: int) -> int:
        """Receive ciphertext; return how many bytes, 0 at the end of the connection."""
        scratch: bytearray | None = getattr(_scratch, "buffer", None)
        if scratch is None:
            scratch = _scratch.buffer = bytearray(_MOST_READ)
        size = min(max(wanted + (wanted >> 6), _LEAST_READ), _MOST_READ)
        received = super().recv_into(scratch, size, flags & ~socket.MSG_WAITALL)
        with self._lock:
            self._incoming.write(memoryview(scratch)[:received])
        return received

    def _explained(self, error: ssl.SSLError) -> Exception:
        """Return the error to raise in place of OpenSSL's."""
        if error.reason == "DECRYPTION_FAILED_OR_BAD_RECORD_MAC":
            return RecordChangedError("a record was changed on its way")
        if credential := self._credential():
            return self._explained_of_token(error, credential)
        if isinstance(error, ssl.SSLCertVerificationError):
            return AuthenticationError(
                f"the certificate of {self.peer} is not accepted: {self._verification_reason(error)}", address=self.peer
            )
        reason = _REASONS.get(error.reason or "", error.strerror or str(error))
        if "CERTIFICATE" in (error.reason or "") or "UNKNOWN_CA" in (error.reason or ""):
            return AuthenticationError(f"{self.peer}: {reason}", address=self.peer)
        return TlsError(reason)

    def _credential(self) -> str:
        return getattr(self._tls.context, "credential", "")

    def _explained_of_token(self, error: ssl.SSLError, credential: str) -> Exception:
        if self._tls.server_side:
            if is_of_another_token(error):
                return ClientRefusedError(f"the client at {self.peer} has another token than this service")
        elif is_of_another_token(error):
            text = f"{self.peer} has another token than this process: {remedy(credential)}"
            return OtherTokenError(text, address=self.peer)
        elif not self.secured:
            text = "another program has the port, or RankMesh there has no token, or is of another version"
            return NoTlsError(f"{self.peer} does not use TLS: {text}", address=self.peer)
        return TlsError(error.strerror or str(error))

    def _verification_reason(self, error: ssl.SSLCertVerificationError) -> str:
        if error.verify_code in _UNKNOWN_ISSUER:
            known = tls_settings().ca
            return f"no authority in {f'RANKMESH_TLS_CA ({known})' if known else 'the system'} has signed it"
        if error.verify_code in _NAME_MISMATCH and not self._tls.server_side:
            names = ", ".join(_names_at(self.getpeername())) or "no names"
            return f"it has {names}, and not {self._tls.server_hostname}"
        return error.verify_message


def buffered(sock: socket.socket) -> bool:
    """Return whether bytes can be received from a socket although its descriptor may not be readable."""
    return isinstance(sock, TlsSocket) and sock.buffered()


def committed(sock: socket.socket) -> int:
    """Return how many bytes a socket has encrypted, but not reported: the next ``send`` must begin with them."""
    return sock.committed() if isinstance(sock, TlsSocket) else 0


def is_of_another_token(error: BaseException) -> bool:
    """Return whether the failure of a handshake, with certificates of the token, is that the other end has another."""
    return isinstance(error, ssl.SSLCertVerificationError) or getattr(error, "reason", None) in _OTHER_AUTHORITY


def _names_at(address: Any) -> list[str]:
    """Return the names in the certificate of the server at an address, if a trusted authority has signed it."""
    settings = tls_settings()
    context = ssl.create_default_context(cafile=settings.ca or None)
    context.check_hostname = False
    if settings.cert:
        context.load_cert_chain(settings.cert, settings.key)
    try:
        with socket.create_connection(address[:2], _NAMES_SECONDS) as sock, context.wrap_socket(sock) as secured:
            certificate = secured.getpeercert() or {}
    except OSError:
        return []
    return [str(entry[1]) for entry in certificate.get("subjectAltName", ())]
