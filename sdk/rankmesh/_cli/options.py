"""Options shared by most commands, and their defaults: from the environment, and from the jobs of this host."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple
from urllib.parse import urlsplit

import typer

from rankmesh._cli.client import ServiceClient
from rankmesh._cli.exit_codes import NEGATIVE, USAGE, CommandError
from rankmesh_agent.config.settings import Settings, read_token
from rankmesh_agent.config.tls import client_scheme
from rankmesh_agent.net.tls import check_environment, check_scheme

DEFAULT_GATEWAY = "http://127.0.0.1:8700"
"""Default address of 'rankmesh gateway'."""

GatewayOption = Annotated[
    str,
    typer.Option(
        "--gateway",
        metavar="URL",
        help="The gateway; by default RANKMESH_GATEWAY, MASTER_ADDR:MASTER_PORT, that of your job on this host, or "
        f"{DEFAULT_GATEWAY}.",
    ),
]
TokenFileOption = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        metavar="PATH",
        help="File with the token; by default RANKMESH_TOKEN, or the token of your job on this host.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
JobOption = Annotated[
    str, typer.Option("--job", metavar="NAME", help="Only this job; needed where several of your jobs run.")
]
PatienceOption = Annotated[
    float,
    typer.Option("--request-timeout", "--patience", metavar="SECONDS", min=0.1, max=60.0, help="Timeout of a request."),
]
PATIENCE = 1.0
"""Default of PatienceOption."""


def settings() -> Settings:
    """Return the settings of the environment, those of TLS checked as well."""
    try:
        check_environment(server=False)
        return Settings.from_env(os.environ)
    except ValueError as error:
        raise CommandError(str(error), USAGE) from error


def gateway(given: str, token_file: Path | None, job: str = "") -> ServiceClient:
    """Return a client of the gateway that a command line selects."""
    environment = settings()
    url = given or environment.gateway or _master(environment)
    secret = token(token_file)
    if url and secret:
        return ServiceClient("gateway", base_url(url), secret)
    here = local_jobs()
    if url:
        url = base_url(url)
        here = [found for found in here if found.gateway == url]
    elif len({found.gateway for found in here}) > 1:
        jobs = ", ".join(f"{found.job} ({found.gateway})" for found in here)
        here = [found for found in here if found.job == job]
        if job and not here:
            raise CommandError(f"no job {job!r} of yours runs here; there are: {jobs}", NEGATIVE)
        if len({found.gateway for found in here}) != 1:
            raise CommandError(f"several jobs of yours run here: give --job or --gateway, one of {jobs}", USAGE)
    if here:
        url, secret = here[0].gateway, secret or here[0].token
    return ServiceClient("gateway", base_url(url or DEFAULT_GATEWAY.partition("://")[2]), secret)


def _master(environment: Settings) -> str:
    if environment.master_port is None:
        return ""
    host = environment.master_addr or "127.0.0.1"
    return f"[{host}]:{environment.master_port}" if ":" in host else f"{host}:{environment.master_port}"


def base_url(text: str) -> str:
    """Return the base URL of ``http://host:port`` or ``host:port``."""
    settings()
    url = text if "://" in text else f"{client_scheme()}://{text}"
    try:
        parts = urlsplit(url)
        fine = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port is not None
    except ValueError:
        fine = False
    if not fine:
        raise CommandError(f"{text!r} is not an address: give http://host:port, or host:port", USAGE)
    try:
        check_scheme(parts.scheme, url)
    except ValueError as error:
        raise CommandError(str(error), USAGE) from error
    return url.rstrip("/")


def token_at(url: str, file: Path | None) -> str:
    """Return the token for a service: if none is given, that of your job on this host, if there is only one."""
    here = local_jobs() if not (given := token(file)) else []
    tokens = {found.token for found in here if found.gateway == url} or {found.token for found in here}
    return given or (tokens.pop() if len(tokens) == 1 else "")


def token(file: Path | None) -> str:
    """Return the token, empty if there is none."""
    if file is None:
        return settings().token
    try:
        return read_token(file)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CommandError(f"no token in {file}: {reason}", USAGE) from error


_PROC = Path("/proc")


class LocalJob(NamedTuple):
    """The gateway of a job with ranks on this host."""

    gateway: str
    token: str
    job: str


def local_jobs(proc: Path = _PROC) -> list[LocalJob]:
    """Return the jobs of this user's ranks on this host, sorted by name."""
    return sorted(set(_scan(proc)), key=lambda found: found.job)


def _scan(proc: Path) -> Iterator[LocalJob]:
    for folder in proc.iterdir() if proc.is_dir() else ():  # Linux alone has it
        if not folder.name.isdecimal():
            continue
        try:
            file = folder / "environ"
            if file.stat().st_uid != os.geteuid():
                continue
            entries = (entry.partition("=") for entry in file.read_bytes().decode(errors="replace").split("\0"))
            found = Settings.from_env({name: value for name, equals, value in entries if equals})
        except (OSError, ValueError):  # ended, or not a rank
            continue
        if found.gateway and found.rank is not None and found.job != Settings.job:
            yield LocalJob(found.gateway.rstrip("/"), found.token, found.job)
