"""Credentials of a job: its token, the credentials of lesser roles, and the keys derived from them. Pure.

No credential is sent by RankMesh's clients: ``wire.handshake`` and ``wire.http_auth`` prove the knowledge of one. Every
key is derived for one purpose by HKDF-SHA256 (RFC 5869), so a proof of one protocol is worth nothing in another one.
"""

from __future__ import annotations

import enum
import hmac
from collections.abc import Iterator
from dataclasses import dataclass

_HASH_BYTES = 32


class Role(enum.IntEnum):
    """Right of a client; each includes those before it."""

    READ = 1
    """Sees the state of jobs: health, metrics, events, flight recorder, dashboard."""
    USE = 2
    """Uses the store, and takes part in tensor calls over HTTP."""
    RUN = 3
    """Joins, leases agents, controls groups, reads stacks."""


@dataclass(frozen=True, repr=False)
class Credentials:
    """Credentials that a server accepts from its clients.

    Attributes:
        run: the job's token; empty for none, then every client has every role.
        use: credential of the role ``use``; empty for the one derived from the token.
        read: credential of the role ``read``; empty for the one derived from the token.
        private_network: whether clients on other hosts may send a credential itself, without TLS.
    """

    run: str
    use: str = ""
    read: str = ""
    private_network: bool = False

    @classmethod
    def of(cls, token: str | Credentials) -> Credentials:
        """Return the credentials of a token."""
        return token if isinstance(token, cls) else cls(str(token))

    def __bool__(self) -> bool:
        """Return whether clients need a credential."""
        return bool(self.run)

    def of_role(self, role: Role) -> str:
        """Return the credential of a role."""
        given = {Role.RUN: self.run, Role.USE: self.use, Role.READ: self.read}[role]
        return given or (derive(self.run, role) if self.run else "")

    def sufficient(self, needed: Role) -> Iterator[tuple[Role, str]]:
        """Yield the credentials that include a role, the strongest first."""
        for role in reversed(Role):
            if role >= needed:
                yield role, self.of_role(role)


def derive(token: str, role: Role) -> str:
    """Return the credential of a role, derived from a job's token; the token itself for the role ``run``."""
    return token if role is Role.RUN else hkdf(token.encode(), f"rankmesh role {role.name.lower()}").hex()


def hkdf(secret: bytes, info: str, salt: bytes = b"", context: bytes = b"") -> bytes:
    """Return a key of 32 bytes: HKDF-SHA256 (RFC 5869), whose output here is one block.

    Args:
        secret: the input keying material.
        info: purpose of the key.
        salt: random bytes, not secret.
        context: more of the ``info``, which binds the key to it.
    """
    extracted = hmac.digest(salt or bytes(_HASH_BYTES), secret, "sha256")
    return hmac.digest(extracted, info.encode() + context + b"\x01", "sha256")


def encode(*fields: bytes) -> bytes:
    """Return the fields as one sequence of bytes, each behind its length: no other fields have the same."""
    return b"".join(len(field).to_bytes(4, "big") + field for field in fields)
