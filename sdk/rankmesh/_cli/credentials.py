"""``rankmesh token`` and ``rankmesh get``: credentials of a job, and a request that proves one without sending it."""

from __future__ import annotations

import contextlib
from enum import StrEnum
from http import HTTPStatus
from typing import Annotated
from urllib.parse import urlsplit

import typer

from rankmesh._cli import options
from rankmesh._cli.client import ServiceClient
from rankmesh._cli.exit_codes import OK, USAGE, CommandError, command, write
from rankmesh._cli.options import GatewayOption, TokenFileOption
from rankmesh_agent.wire.credentials import Credentials, Role


class RoleName(StrEnum):
    """Role of a credential."""

    READ = "read"
    USE = "use"
    RUN = "run"


@command
def token(
    role: Annotated[
        RoleName, typer.Option(help="read: state and metrics; use: store and tensors, too; run: everything.")
    ] = RoleName.RUN,
    gateway: GatewayOption = "",
    token_file: TokenFileOption = None,
) -> int:
    """Print the token of your job on this host, or of the environment; with --role a credential derived from it.

    A client sets it as its RANKMESH_TOKEN. The gateway is asked for nothing: --gateway selects one of several jobs.
    """
    settings = options.settings()
    secret = options.token(token_file)
    if not secret:
        with contextlib.closing(options.gateway(gateway, token_file)) as service:
            secret = service.token
    if not secret:
        raise CommandError(
            "there is no token: no rank of a job of yours runs on this host, RANKMESH_TOKEN and RANKMESH_TOKEN_FILE "
            "are not set, and --token-file is not given",
            USAGE,
        )
    write(Credentials(secret, settings.token_use, settings.token_read).of_role(Role[role.name]) + "\n")
    return OK


@command
def get(
    url: Annotated[str, typer.Argument(metavar="URL", help="An endpoint of a gateway or an agent.")],
    token_file: TokenFileOption = None,
) -> int:
    """Print the response to GET, as curl does, but from any host: the token is proved, not sent."""
    split = urlsplit(url if "://" in url else f"http://{url}")
    target = f"{split.path or '/'}?{split.query}" if split.query else split.path or "/"
    base = options.base_url(f"{split.scheme}://{split.netloc}")
    with contextlib.closing(ServiceClient("service", base, options.token_at(base, token_file))) as service:
        response = service.request("GET", target)
        if response.status >= HTTPStatus.BAD_REQUEST:
            service.document_of("GET", target, response)
    write(response.body)
    return OK
