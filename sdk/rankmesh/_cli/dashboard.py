"""``rankmesh dashboard``: a link to the job's dashboard."""

from __future__ import annotations

import contextlib
import socket
import webbrowser
from typing import Annotated
from urllib.parse import urlsplit

import typer

from rankmesh._cli import options
from rankmesh._cli.client import ServiceClient
from rankmesh._cli.credentials import RoleName, of_role
from rankmesh._cli.exit_codes import OK, UNREACHABLE, CommandError, command, print_error, write
from rankmesh._cli.options import GatewayOption, JobOption, TokenFileOption
from rankmesh_agent.config.addresses import is_loopback
from rankmesh_gateway.humanize import seconds

_SECONDS = 5.0


@command
def dashboard(
    gateway: GatewayOption = "",
    token_file: TokenFileOption = None,
    job: JobOption = "",
    role: Annotated[
        RoleName, typer.Option(help="run: with the stacks of ranks, if your token has that role; read: without them.")
    ] = RoleName.RUN,
    browser: Annotated[bool, typer.Option("--open", help="Also open the link in a browser on this host.")] = False,
) -> int:
    """Print a link to the dashboard of your job. It works once, contains no token, and is read-only."""
    with contextlib.closing(options.gateway(gateway, token_file, job)) as service:
        base, tunnel = _seen_by_browsers(service)
        link = f"{base}/"
        if service.token:
            given = ServiceClient("gateway", service.url, of_role(service.token, role))
            with contextlib.closing(given):
                code = given.post("/v1/dashboard/codes", {})
            link += f"#code={code['code']}"
            stacks = "" if role is RoleName.RUN else ", without the stacks of ranks"
            print_error(
                f"the link opens the dashboard once, within {seconds(code['expires_in'])}, to read only{stacks}"
            )
    if tunnel:
        print_error(
            f"the gateway takes no browser's token from a network in clear: run this first, and leave it: {tunnel}"
        )
    write(f"{link}\n")
    if browser and not webbrowser.open(link):
        print_error("there is no browser on this host: open the link in yours, through 'ssh -L' from another host")
    return OK


def _seen_by_browsers(service: ServiceClient) -> tuple[str, str]:
    """Return the gateway's URL for browsers, and the tunnel that they need to it; empty if they need none.

    A browser sends its credential itself, which a gateway accepts from its own host, over TLS, or from a network that
    is declared private. A container's name is known in its network alone; its port is published at loopback.
    """
    health = service.get("/health")
    parts = urlsplit(service.url)
    if parts.scheme == "https" or not service.token or is_loopback(parts.hostname or ""):
        return service.url, ""
    local = f"http://localhost:{parts.port}"
    with (
        contextlib.suppress(CommandError),
        contextlib.closing(ServiceClient("gateway", local, service.token, _SECONDS)) as here,
    ):
        if here.get("/health").get("id") == health.get("id"):
            return local, ""
    try:
        with socket.create_connection((parts.hostname, parts.port), _SECONDS) as connection:
            own, peer = connection.getsockname()[0], connection.getpeername()[0]
    except OSError as error:
        raise CommandError(f"no gateway answers at {service.url}: {error}", UNREACHABLE) from error
    if own == peer or options.settings().private_network:
        return service.url, ""
    address = f"[{peer}]" if ":" in peer else peer
    return local, f"ssh -N -L {parts.port}:{address}:{parts.port} {parts.hostname}"
