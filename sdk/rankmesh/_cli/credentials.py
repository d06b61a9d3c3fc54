"""``rankmesh token`` and ``rankmesh get``: credentials of a job, and a request with one."""

from __future__ import annotations

import contextlib
import re
import secrets
from enum import StrEnum
from typing import Annotated

import typer

from rankmesh._cli import options
from rankmesh._cli.client import ServiceClient
from rankmesh._cli.exit_codes import OK, USAGE, CommandError, command, write
from rankmesh._cli.options import GatewayOption, JobOption, TokenFileOption
from rankmesh_agent.wire.credentials import Credentials, Role, derive, for_job, for_lease, job_of
from rankmesh_agent.wire.errors import ForbiddenJobError


class RoleName(StrEnum):
    """Role of a credential."""

    READ = "read"
    USE = "use"
    RUN = "run"


def of_role(token: str, role: RoleName) -> str:
    """Return the credential of a role: that of the environment, else the one derived from the token."""
    given, wanted = options.settings(), Role[role.name]
    if job_of(token):
        return derive(token, wanted)
    return Credentials(token, given.token_use, given.token_read).of_role(wanted)


@command
def token(
    role: Annotated[
        RoleName, typer.Option(help="read: state and metrics; use: also the store and tensors; run: everything.")
    ] = RoleName.RUN,
    job: Annotated[str, typer.Option(metavar="NAME", help="Only for this job; by default for all jobs.")] = "",
    lease: Annotated[
        str, typer.Option(metavar="ID", help="Only for the rank of this lease of a standalone agent; needs --job.")
    ] = "",
    ca: Annotated[
        bool, typer.Option("--ca", help="Print the certificate authority of the job, for 'curl --cacert' and browsers.")
    ] = False,
    new: Annotated[bool, typer.Option("--new", help="Print a new token, of 256 random bits.")] = False,
    gateway: GatewayOption = "",
    token_file: TokenFileOption = None,
) -> int:
    """Print the token of your job on this host, or of the environment; or a credential derived from it.

    A client sets it as RANKMESH_TOKEN. With --job, so can all ranks of that job, which then need no RANKMESH_JOB. No
    request is sent; --gateway or --job selects one of several jobs.
    """
    if new:
        write(secrets.token_hex(32) + "\n")
        return OK
    secret = options.token(token_file)
    if not secret:
        with contextlib.closing(options.gateway(gateway, token_file, job)) as service:
            secret = service.token
    if not secret:
        raise CommandError(
            "there is no token: no rank of a job of yours runs on this host, RANKMESH_TOKEN and RANKMESH_TOKEN_FILE "
            "are not set, and --token-file is not given",
            USAGE,
        )
    job = job or job_of(secret) or ""
    if lease and not (job and re.fullmatch("[0-9a-f]{32}", lease)):
        raise CommandError(
            "--lease needs --job, and the 32 hexadecimal digits that POST /v1/lease returns as id", USAGE
        )
    try:
        if ca:
            from rankmesh_agent.net.authority import authority_pem

            found = authority_pem(for_job(secret, job) if job else secret).rstrip()
        elif lease:
            found = for_lease(for_job(secret, job), job, lease)
        else:
            found = of_role(for_job(secret, job) if job else secret, role)
    except ForbiddenJobError as error:
        raise CommandError(error.message, USAGE) from error
    write(found + "\n")
    return OK


@command
def get(
    url: Annotated[
        str,
        typer.Argument(metavar="URL", help="URL at a gateway or an agent, or a path at the gateway, such as /v1/jobs."),
    ],
    gateway: GatewayOption = "",
    token_file: TokenFileOption = None,
    job: JobOption = "",
) -> int:
    """Send an authenticated GET request to a gateway or an agent, over TLS where needed; print the response."""
    base, target = re.findall(r"^((?:[A-Za-z]+://)?[^/?#]*)([^#]*)", url)[0]
    target = target if target.startswith("/") else f"/{target}"
    if base:
        base = options.base_url(base)
        client = ServiceClient("service", base, options.token_at(base, token_file))
    else:
        client = options.gateway(gateway, token_file, job)
    with contextlib.closing(client) as service:
        response = service.checked("GET", target, service.request("GET", target))
    write(response.body)
    return OK
