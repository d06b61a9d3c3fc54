"""``rankmesh dashboard``: a link to the job's dashboard."""

from __future__ import annotations

import contextlib
import webbrowser
from typing import Annotated

import typer

from rankmesh._cli import options
from rankmesh._cli.exit_codes import OK, command, print_error, write
from rankmesh._cli.options import GatewayOption, TokenFileOption
from rankmesh_gateway.humanize import seconds


@command
def dashboard(
    gateway: GatewayOption = "",
    token_file: TokenFileOption = None,
    browser: Annotated[bool, typer.Option("--open", help="Also open the link in a browser on this host.")] = False,
) -> int:
    """Print a link to the dashboard of your job; it opens once, and has no token in it."""
    with contextlib.closing(options.gateway(gateway, token_file)) as service:
        link = f"{service.url}/"
        if service.token:
            code = service.post("/v1/dashboard/codes", {})
            link += f"#code={code['code']}"
            print_error(f"the link opens the dashboard once, within {seconds(code['expires_in'])}, to read only")
        else:
            service.get("/health")
    write(f"{link}\n")
    if browser and not webbrowser.open(link):
        print_error("there is no browser on this host: open the link in yours, through 'ssh -L' from another host")
    return OK
