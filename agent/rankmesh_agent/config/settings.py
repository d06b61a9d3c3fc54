"""Configuration from environment variables."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import stat
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from rankmesh_agent.config import launched
from rankmesh_agent.config.addresses import resolves_to_loopback
from rankmesh_agent.config.env import integer, permits_native
from rankmesh_agent.config.launchers import Launcher, detect_launcher
from rankmesh_agent.config.tls import private_network
from rankmesh_agent.wire.credentials import Credentials, check_form, for_job, job_of

Transport = Literal["auto", "tcp", "shm"]
Pickle = Literal["authenticated", "never"]
Hosting = Literal["auto", "attached", "embedded"]

DEFAULT_TIMEOUT = 1800.0
"""Default seconds an operation may take: torch's 30 minutes."""
MIN_TOKEN_CHARACTERS = 16
"""Shortest token with which a service listens beyond loopback."""

_log = logging.getLogger("rankmesh")


def _variable(default: Any, read: Callable[[Mapping[str, str]], Any]) -> Any:
    """Return a field of Settings, and how it is read from the environment; None stands for the default."""
    return field(default=default, metadata={"read": read})


def _text(name: str, default: str | None = None) -> Any:
    return _variable(default, lambda environ: environ.get(name) or None)


def _number(name: str, default: int | None = None, **bounds: int) -> Any:
    return _variable(default, lambda environ: integer(environ, name, **bounds))


def _choice(name: str, kind: Any) -> Any:
    """Return a field that is one of a Literal's words, by default the first one."""
    choices = get_args(kind)

    def read(environ: Mapping[str, str]) -> str:
        text = (environ.get(name) or choices[0]).lower()
        if text not in choices:
            raise ValueError(f"{name}={text!r}: set it to {choices[-2]!r} or {choices[-1]!r}, or leave it out")
        return text

    return _variable(choices[0], read)


def _token(environ: Mapping[str, str]) -> str:
    token, path = environ.get("RANKMESH_TOKEN"), environ.get("RANKMESH_TOKEN_FILE")
    try:
        return check_form(token or "") if token or not path else read_token(Path(path))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{'RANKMESH_TOKEN' if token else f'RANKMESH_TOKEN_FILE={path}'}: {reason}") from error


def _role_token(name: str) -> Any:
    def read(environ: Mapping[str, str]) -> str:
        text = environ.get(name, "")
        if text and len(text) < MIN_TOKEN_CHARACTERS:
            raise ValueError(f"{name} has fewer than {MIN_TOKEN_CHARACTERS} characters, so that it could be guessed")
        return text

    return _variable("", read)


def _advertised(environ: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(each.strip() for each in environ.get("RANKMESH_ADVERTISE", "").split(",") if each.strip())


def _has_torchrun_store(environ: Mapping[str, str]) -> bool:
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and not launched.has_store(environ)


def _debug(environ: Mapping[str, str]) -> str:
    for name in ("RANKMESH_DEBUG", "TORCH_DISTRIBUTED_DEBUG"):
        text = environ.get(name)
        if text:
            if text.upper() not in ("OFF", "INFO", "DETAIL"):
                raise ValueError(f"{name}={text!r}: set it to OFF, INFO or DETAIL, or leave it out")
            return text.upper()
    return "OFF"


def _interface(environ: Mapping[str, str]) -> str | None:
    names = environ.get("GLOO_SOCKET_IFNAME")
    if names:
        return names if names.startswith(("=", "^")) else f"={names}"
    return environ.get("NCCL_SOCKET_IFNAME") or None


def _timeout(environ: Mapping[str, str]) -> float:
    text = environ.get("RANKMESH_TIMEOUT") or str(DEFAULT_TIMEOUT)
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"RANKMESH_TIMEOUT={text!r} is not a number of seconds") from None
    if not value > 0:
        raise ValueError(f"RANKMESH_TIMEOUT={text} must be more than 0 seconds")
    return value


@dataclass(frozen=True)
class Settings:
    """Settings of a process, from the environment. Variables of torch, Slurm and Open MPI keep their names.

    Attributes:
        rank: RANK, or the rank from the launcher.
        world_size: WORLD_SIZE, or the launcher's number of processes; if RANK is set, only if it equals the launcher's.
        local_rank: LOCAL_RANK, or the launcher's, under the same condition.
        local_size: LOCAL_WORLD_SIZE, the number of ranks on each node.
        launcher: Open MPI, MPICH, Slurm or Kubernetes, if one of them provided this process's rank; None if RANK is set
            (by torchrun, ``rankmesh run`` or a user).
        master_addr: MASTER_ADDR, the host of the gateway.
        master_port: MASTER_PORT, the port of the gateway.
        gateway: RANKMESH_GATEWAY, the URL of a running gateway; the launcher sets it.
        parent: from RANKMESH_LAUNCHED, set by the launcher: job and rank (``job/0``) of the launcher's process that
            this one is, or descends from; empty without a launcher.
        job: RANKMESH_JOB, distinguishes jobs at one gateway; by default the job that the token is the credential of.
        attempt: RANKMESH_ATTEMPT, set by the launcher: how often it has restarted the job.
        join: RANKMESH_JOIN, set by the launcher: whether this process joins a job that runs, in place of a lost one.
        token: RANKMESH_TOKEN, the secret all processes of a job share, or the job's credential derived from the
            gateway's token; or the content of the file RANKMESH_TOKEN_FILE.
        token_use, token_read: RANKMESH_TOKEN_USE and RANKMESH_TOKEN_READ, at servers: the credentials of these roles;
            empty for those derived from the token.
        private_network: RANKMESH_PRIVATE_NETWORK, whether the connections between hosts need no TLS, and
            their servers accept bearer tokens, and a gateway clients of torch's store, without TLS.
        transport: RANKMESH_TRANSPORT, ``tcp`` or ``shm`` forces one; ``auto`` takes shared memory inside a
            host.
        native: RANKMESH_NATIVE, whether the compiled core may be used.
        bind: RANKMESH_BIND, the address to listen on.
        advertise: RANKMESH_ADVERTISE, the addresses for peers, comma-separated.
        interface: GLOO_SOCKET_IFNAME, or else NCCL_SOCKET_IFNAME, the network interfaces of which one is to listen on
            where other hosts are to reach this one; in NCCL's syntax, where gloo's list of names begins with ``=``.
        shm_dir: RANKMESH_SHM_DIR, directory of shared memory files.
        slot_bytes: RANKMESH_SLOT_BYTES, bytes of one rank's slot in a group's shared memory; slots are smaller
            on hosts with many ranks.
        full_mesh: RANKMESH_FULL_MESH, ranks of the largest world that connects all pairs at the join; in a larger one,
            a pair connects when the first byte needs it.
        eager_bytes: RANKMESH_EAGER_BYTES, largest message that a rank sends before the receive is posted.
        timeout: RANKMESH_TIMEOUT, default seconds an operation may take.
        pickle: RANKMESH_PICKLE, whether ranks may pickle objects that are not plain data: only ``authenticated`` ranks
            (those of a job with a token), or ``never``.
        max_body: RANKMESH_MAX_BODY, largest array in bytes that an agent accepts or returns over HTTP.
        store_keys: RANKMESH_STORE_KEYS, the most keys and queued values that a store of this process holds.
        store_bytes: RANKMESH_STORE_BYTES, the most bytes that they have together.
        hosting: RANKMESH_HOSTING, whether this process attaches to a standalone agent (``attached``) or has its own
            (``embedded``); ``auto`` attaches where an http:// gateway has standalone agents.
        elastic_run: TORCHELASTIC_RUN_ID, set by torchrun.
        torchrun_store: TORCHELASTIC_USE_AGENT_STORE, whether torchrun has a store at MASTER_ADDR and MASTER_PORT.
        flight_recorder: RANKMESH_FLIGHT_RECORDER, how many of the latest operations to remember; 0 for none.
        dump_dir: RANKMESH_DUMP_DIR, directory to which a rank writes a dump when a group fails; none if empty.
        failure_file: RANKMESH_FAILURE_FILE, set by the launcher: where a rank reports which other ranks ended it.
        pdb: RANKMESH_PDB, set by the launcher: whether an uncaught exception starts pdb in this rank.
        debug: RANKMESH_DEBUG or TORCH_DISTRIBUTED_DEBUG: ``OFF``, ``INFO`` or ``DETAIL``.
    """

    rank: int | None = _number("RANK")
    world_size: int | None = _number("WORLD_SIZE", at_least=1)
    local_rank: int | None = _number("LOCAL_RANK")
    local_size: int | None = _number("LOCAL_WORLD_SIZE", at_least=1)
    launcher: Launcher | None = None
    master_addr: str | None = _text("MASTER_ADDR")
    master_port: int | None = _number("MASTER_PORT", at_most=65535)
    gateway: str | None = _text("RANKMESH_GATEWAY")
    parent: str = _variable("", launched.parent)
    job: str = _text("RANKMESH_JOB", "default")
    attempt: int = _number("RANKMESH_ATTEMPT", 0)
    join: bool = _variable(False, lambda environ: bool(integer(environ, "RANKMESH_JOIN", at_most=1)))
    token: str = _variable("", _token)
    token_use: str = _role_token("RANKMESH_TOKEN_USE")
    token_read: str = _role_token("RANKMESH_TOKEN_READ")
    private_network: bool = _variable(False, private_network)
    transport: Transport = _choice("RANKMESH_TRANSPORT", Transport)  # noqa: RUF009  # a word
    native: bool = _variable(True, permits_native)
    bind: str | None = _text("RANKMESH_BIND")
    advertise: tuple[str, ...] = _variable((), _advertised)
    interface: str | None = _variable(None, _interface)
    shm_dir: str = _text("RANKMESH_SHM_DIR", "/dev/shm")
    slot_bytes: int = _number("RANKMESH_SLOT_BYTES", 1 << 20, at_least=4096)
    full_mesh: int = _number("RANKMESH_FULL_MESH", 16)
    eager_bytes: int = _number("RANKMESH_EAGER_BYTES", 1 << 16, at_most=1 << 20)
    timeout: float = _variable(DEFAULT_TIMEOUT, _timeout)
    pickle: Pickle = _choice("RANKMESH_PICKLE", Pickle)  # noqa: RUF009  # a word
    max_body: int = _number("RANKMESH_MAX_BODY", 1 << 30, at_least=1)
    store_keys: int = _number("RANKMESH_STORE_KEYS", 1 << 20, at_least=1)
    store_bytes: int = _number("RANKMESH_STORE_BYTES", 4 << 30, at_least=1)
    hosting: Hosting = _choice("RANKMESH_HOSTING", Hosting)  # noqa: RUF009  # a word
    elastic_run: str | None = _variable(None, lambda environ: environ.get("TORCHELASTIC_RUN_ID"))
    torchrun_store: bool = _variable(False, _has_torchrun_store)
    flight_recorder: int = _number("RANKMESH_FLIGHT_RECORDER", 1000, at_most=1 << 20)
    dump_dir: str = _text("RANKMESH_DUMP_DIR", "")
    failure_file: str = _text("RANKMESH_FAILURE_FILE", "")
    pdb: bool = _variable(False, lambda environ: bool(integer(environ, "RANKMESH_PDB", at_most=1)))
    debug: str = _variable("OFF", _debug)

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Settings:
        """Read the settings from ``environ`` (usually ``os.environ``), of a launcher's those that count here.

        Raises:
            ValueError: a variable has an invalid value; the message names the variable.
        """
        environ = launched.counting(environ)
        read = {each.name: each.metadata["read"](environ) for each in fields(cls) if each.metadata}
        given = {name: value for name, value in read.items() if value is not None}
        rank = given.get("rank")
        launcher = detect_launcher(environ) if rank is None else None
        source = launcher if rank is None else _launcher_of(rank, environ)
        if source is not None:
            given["rank"] = None if source.problem else source.rank
            given = {"world_size": source.world_size, "local_rank": source.local_rank} | given
        given.setdefault("job", job_of(given["token"]) or "default")
        return cls(launcher=launcher, **given)

    @property
    def credentials(self) -> Credentials:
        """The credentials that the servers of this process accept."""
        return Credentials(self.token, self.token_use, self.token_read, self.private_network)

    @property
    def names_job(self) -> bool:
        """True if the environment names the job, by RANKMESH_JOB or by a token that is a job's credential."""
        return self.job != Settings.job or job_of(self.token) is not None

    @property
    def job_credentials(self) -> Credentials:
        """The credentials that the servers of a rank accept: those, and its job's."""
        return replace(self.credentials, job=self.job)

    @property
    def job_token(self) -> str:
        """The credential by which the ranks of the job know each other; raises ForbiddenJobError for another job's."""
        return for_job(self.token, self.job)


def require_token_beyond_loopback(host: str, token: str, what: str) -> None:
    """Raise ValueError if an address that other machines can reach is used without a token, or with a short one."""
    if len(token) < MIN_TOKEN_CHARACTERS and not resolves_to_loopback(host):
        lack = f"with a token of fewer than {MIN_TOKEN_CHARACTERS} characters" if token else "without a token"
        raise ValueError(
            f"{what} would listen on {host}, which other machines can reach, {lack}. "
            "Set RANKMESH_TOKEN to the same secret on every rank (for example the output of 'openssl rand -hex 32'), "
            "or listen on 127.0.0.1."
        )


def protection(token: str) -> str:
    """Return in words who may use a server."""
    return "token required" if token else "open to this user's processes on this host"


def read_token(path: Path) -> str:
    """Return the token in a file; warn if other users can read it.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file contains no token, or not all of one.
    """
    token = path.read_text().strip()
    if not token:
        raise ValueError(f"{path} is empty; put the token in it, for example the output of 'openssl rand -hex 32'")
    if path.stat().st_mode & (stat.S_IROTH | stat.S_IWOTH):
        _warn_of_access(path)
    return check_form(token)


@functools.cache
def _warn_of_access(path: Path) -> None:
    _log.warning("other users can read or change the token in %s: run chmod 600 on it, and set a new token", path)


def create_token(path: Path) -> None:
    """Write a new token to a file that only its owner can read, unless the file exists."""
    with contextlib.suppress(FileExistsError), tempfile.NamedTemporaryFile("w", dir=path.parent) as fresh:
        fresh.write(f"{secrets.token_hex(32)}\n")
        fresh.flush()
        os.link(fresh.name, path)  # atomic: the file is complete, and only one of two concurrent tokens wins


def _launcher_of(rank: int, environ: Mapping[str, str]) -> Launcher | None:
    """Return the launcher that provided this rank, None if none did; invalid variables of one are no error then."""
    with contextlib.suppress(ValueError):
        launcher = detect_launcher(environ)
        return launcher if launcher is not None and not launcher.problem and launcher.rank == rank else None
    return None
