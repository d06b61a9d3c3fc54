"""Credentials: a token, those of lesser roles, of a job and of a lease, and the keys derived from them. Pure.

::

    token                                          every role, every job
      HKDF "rankmesh role use", "… read"           the role, every job
      HKDF "rankmesh job", SHA-256 of its name     every role, one job
        HKDF "rankmesh role use", "… read"         the role, one job
        HKDF "rankmesh lease", its id              one rank of the job, at the agent that is leased for it

The text of a job's or a lease's credential begins with its name, so that a server which has the token can derive it::

    rankmesh-job:JOB:run:KEY        use, read in place of run; JOB percent-encoded, KEY 64 hexadecimal digits
    rankmesh-job:JOB:lease-ID:KEY

A client sends its credential over TLS alone, within its host, and over a network that is declared private. Every key is
derived for one purpose by HKDF-SHA256 (RFC 5869). That of the authority whose certificates both ends of TLS show is one
of them (``net.authority``): the client names its credential in the handshake by ``server_name``.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import hmac
import re
import shlex
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import quote, unquote

from rankmesh_agent.wire.errors import ForbiddenJobError

_HASH_BYTES = 32
_PREFIX = "rankmesh-job:"
NAMES = "rankmesh.internal"
"""Domain of the names of credentials, see ``server_name``. DNS has no names in ``internal``."""
_RANDOM = re.compile(r"[0-9A-Fa-f]{32,}")
_TEXT = re.compile(_PREFIX + r"([A-Za-z0-9_.~%-]+):(run|use|read|lease-([0-9a-f]{32})):([0-9a-f]{64})")

_JOB_NAME = re.compile(r"(run|use|read|lease-([0-9a-f]{32}))\.([0-9a-f]{32})\.([0-9a-f]{32})\." + re.escape(NAMES))


class Role(enum.IntEnum):
    """Right of a client; each includes those before it."""

    READ = 1
    """Sees the state of jobs: health, metrics, events, flight recorder, dashboard."""
    USE = 2
    """Uses the store, and takes part in tensor calls over HTTP."""
    LEASE = 3
    """Takes the part of the rank that an agent is leased for, and ends the lease."""
    RUN = 4
    """Joins, leases agents, controls groups, reads stacks."""


ROLES = Role.RUN, Role.USE, Role.READ
"""Roles of credentials that are not a lease's, the strongest first."""


class Grant(NamedTuple):
    """Rights of the holder of a credential.

    Attributes:
        job: the only job that it holds for; None for all.
        lease: id of the only lease that it holds for; empty for all.
    """

    role: Role
    job: str | None = None
    lease: str = ""

    def require(self, job: str) -> None:
        """Raise ForbiddenJobError unless the credential holds for a job."""
        if self.job not in (None, job):
            raise ForbiddenJobError(
                f"the credential given is that of job {self.job!r}, and the request is for job {job!r}: set "
                f"RANKMESH_TOKEN to that job's ('rankmesh token --job {shlex.quote(job)}', run by a holder of the "
                "gateway's token, prints it)"
            )

    def require_lease(self, job: str, lease: str) -> None:
        """Raise ForbiddenJobError unless the credential holds for a lease of a job."""
        self.require(job)
        if self.lease not in ("", lease):
            raise ForbiddenJobError(
                f"the credential given is that of lease {self.lease}, which has ended or is of another agent: take "
                "that of the agent's lease ('rankmesh token --job JOB --lease ID')"
            )


class _ParsedCredential(NamedTuple):
    """A credential's parts: the job, the role or lease by its name in the text, the lease's id, the secret."""

    job: str | None
    what: str
    lease: str
    key: bytes


def _parse(credential: str) -> _ParsedCredential:
    match = _TEXT.fullmatch(credential)
    if match is None:
        return _ParsedCredential(None, "", "", credential.encode())
    return _ParsedCredential(unquote(match[1], errors="surrogatepass"), match[2], match[3] or "", match[4].encode())


@dataclass(frozen=True, repr=False)
class Credentials:
    """Credentials that a server accepts from its clients.

    Attributes:
        run: the job's token; empty for none, then every client has every role.
        use: credential of the role ``use``; empty for the one derived from the token.
        read: credential of the role ``read``; empty for the one derived from the token.
        private_network: whether clients on other hosts may connect without TLS.
        job: the job that the server is in; empty for none, or several.
    """

    run: str
    use: str = ""
    read: str = ""
    private_network: bool = False
    job: str = ""

    @classmethod
    def of(cls, token: str | Credentials) -> Credentials:
        """Return the credentials of a token."""
        return token if isinstance(token, cls) else cls(str(token))

    def __bool__(self) -> bool:
        """Return whether clients need a credential."""
        return bool(self.run)

    def grant_of(self, credential: str) -> Grant | None:
        """Return what a client's credential permits; None for one that is not accepted."""
        if not self.run:
            return Grant(Role.RUN)
        job, _, lease, key = _parse(credential)
        derived = () if job is None else self._of_job(job, lease)
        accepted = (*_accepted(self), *derived)
        return next((grant for grant, each in accepted if hmac.compare_digest(key, key_material(each))), None)

    def named(self, name: str) -> str:
        """Return the credential, or its key, that a client names by ``server_name``; empty for an unknown one."""
        of_job = _JOB_NAME.fullmatch(name)
        if not self.run:
            return ""
        if of_job is None:
            found = [credential for _, credential in _accepted(self)]
            return next((credential for credential in found if server_name(credential) == name), "")
        what, lease, digest = of_job[1], of_job[2], bytes.fromhex(of_job[3] + of_job[4])
        key = self.key_of_job(digest)
        return _lease_key(key, lease) if lease else _role_key(key, what)

    @property
    def of_own_job(self) -> str:
        """The credential of the server's job, by which its processes know each other; see ``for_job``."""
        return for_job(self.run, self.job) if self.job else self.run

    def of_role(self, role: Role) -> str:
        """Return the credential of a role."""
        given = {Role.RUN: self.run, Role.USE: self.use, Role.READ: self.read}[role]
        return given or (derive(self.run, role) if self.run else "")

    def _of_job(self, job: str, lease: str = "") -> tuple[tuple[Grant, str], ...]:
        """Return the credentials of a job, or of a lease for it; none if the token is itself a job's."""
        return _derived(self.run, job, lease) if self.run and job and job_of(self.run) is None else ()

    def key_of_job(self, digest: bytes) -> str:
        """Return the key of the job of a digest; an unknown one if the token is another job's."""
        own = job_of(self.run)
        if own is not None and job_digest(own) != digest:
            return hkdf(key_material(self.run), "rankmesh no job").hex()
        return key_material(self.run).decode() if own is not None or not self.run else _job_key(self.run, digest)


def derive(token: str, role: Role) -> str:
    """Return the credential of a role, derived from a token or a job's credential; itself for the role ``run``."""
    if role is Role.RUN:
        return token
    name, job = role.name.lower(), job_of(token)
    key = _role_key(token, name)
    return key if job is None else _text(job, name, key)


def for_job(token: str, job: str) -> str:
    """Return the credential of a job, derived from a token; the token itself if it is the job's already, or empty.

    Raises:
        ForbiddenJobError: the token is the credential of another job.
    """
    held = job_of(token)
    if held not in (None, job):
        raise ForbiddenJobError(
            f"RANKMESH_TOKEN is the credential of job {held!r}, and this is for job {job!r}: set RANKMESH_JOB={held}, "
            f"or RANKMESH_TOKEN to what 'rankmesh token --job {shlex.quote(job)}' prints for a holder of the "
            "gateway's token"
        )
    return token if held is not None or not token else _text(job, "run", _job_key(token, job_digest(job)))


def for_lease(key: str, job: str, lease: str) -> str:
    """Return the credential of a lease, whose id has 32 hexadecimal digits; ``key`` is the job's, or its credential."""
    return key and _text(job, f"lease-{lease}", _lease_key(key, lease))


def _lease_key(key: str, lease: str) -> str:
    return hkdf(key_material(key), "rankmesh lease", context=bytes.fromhex(lease)).hex()


def job_of(credential: str) -> str | None:
    """Return the job that a credential holds for, None for one that holds for all."""
    return _parse(credential).job


@functools.lru_cache(256)
def server_name(credential: str) -> str:
    """Return the name by which a client of TLS names a credential to the server, in the format of a host name.

    It is visible on the network, and does not reveal the credential: the digest of a job's name, or of the credential.
    """
    job, what, _, _ = _parse(credential)
    if job is None:
        return f"{hkdf(tls_secret(credential), 'rankmesh name').hex()[:32]}.{NAMES}"
    digest = job_digest(job).hex()
    return f"{what}.{digest[:32]}.{digest[32:]}.{NAMES}"


def remedy(credential: str) -> str:
    """Return what to do where a server does not accept a credential."""
    job = job_of(credential)
    if job is None:
        return "RANKMESH_TOKEN must be the same there and here"
    return (
        "RANKMESH_TOKEN must be the same there and here, or here what 'rankmesh token --job "
        f"{shlex.quote(job)}' prints there"
    )


def check_form(credential: str) -> str:
    """Return a credential; raise ValueError for an incomplete one of a job."""
    if credential.startswith(_PREFIX) and not _TEXT.fullmatch(credential):
        raise ValueError(
            f"the token begins with {_PREFIX!r}, but is not complete: it must be all that 'rankmesh token --job' prints"
        )
    return credential


@functools.lru_cache(256)
def tls_secret(credential: str) -> bytes:
    """Return the secret of a credential's authority and name, which a network sees, and could try tokens by.

    So a token that is not made of 128 random bits is stretched by scrypt (RFC 7914): a try takes 0.1 s and 32 MiB.
    """
    material = key_material(credential)
    if not _RANDOM.fullmatch(credential) and material == credential.encode():
        material = hashlib.scrypt(material, salt=b"rankmesh token", n=1 << 15, r=8, p=1, maxmem=1 << 26, dklen=32)
    return hkdf(material, "rankmesh tls")


def key_material(credential: str) -> bytes:
    """Return the secret part of a credential."""
    return _parse(credential).key


def job_digest(job: str) -> bytes:
    """Return a job's name in 32 bytes."""
    return hashlib.sha256(job.encode("utf-8", "surrogatepass")).digest()


@functools.lru_cache(64)
def _accepted(credentials: Credentials) -> tuple[tuple[Grant, str], ...]:
    """Return the credentials of all jobs, and of the server's."""
    of_all = tuple((Grant(role), credentials.of_role(role)) for role in ROLES)
    return (*of_all, *credentials._of_job(credentials.job))


@functools.lru_cache(256)
def _derived(token: str, job: str, lease: str) -> tuple[tuple[Grant, str], ...]:
    run = for_job(token, job)
    if lease:
        return ((Grant(Role.LEASE, job, lease), for_lease(run, job, lease)),)
    return tuple((Grant(role, job), derive(run, role)) for role in ROLES)


def _job_key(token: str, digest: bytes) -> str:
    return hkdf(token.encode(), "rankmesh job", context=digest).hex()


def _role_key(credential: str, role: str) -> str:
    return credential if role == "run" else hkdf(key_material(credential), f"rankmesh role {role}").hex()


def _text(job: str, what: str, key: str) -> str:
    return f"{_PREFIX}{quote(job, safe='', errors='surrogatepass')}:{what}:{key}"


def hkdf(secret: bytes, info: str, salt: bytes = b"", context: bytes = b"") -> bytes:
    """Return a key of 32 bytes: HKDF-SHA256 (RFC 5869), whose output here is one block; ``context`` ends the info."""
    extracted = hmac.digest(salt or bytes(_HASH_BYTES), secret, "sha256")
    return hmac.digest(extracted, info.encode() + context + b"\x01", "sha256")
