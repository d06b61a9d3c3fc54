"""The ``rankmesh`` command."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Annotated, Any

import typer

from rankmesh._cli import store, tls
from rankmesh._cli.bench import bench
from rankmesh._cli.credentials import get, token
from rankmesh._cli.dashboard import dashboard
from rankmesh._cli.diagnose import diagnose
from rankmesh._cli.doctor import doctor
from rankmesh._cli.exit_codes import (
    FAILED,
    INTERRUPTED,
    USAGE,
    CommandError,
    command,
    discard,
    print_error,
    require_linux,
    write,
)
from rankmesh._cli.metrics import metrics
from rankmesh._cli.stacks import stacks
from rankmesh._cli.status import status
from rankmesh._cli.stragglers import find_stragglers
from rankmesh._cli.trace import trace
from rankmesh_agent.net.inherited import reset_inherited
from rankmesh_agent.wire.version import __version__

_PASS_ON = {
    "allow_extra_args": True,
    "allow_interspersed_args": False,
    "ignore_unknown_options": True,
    "help_option_names": [],
}
"""Settings of a command whose arguments, ``--help`` and ``--`` included, another parser reads."""

app = typer.Typer(
    name="rankmesh",
    help="torch.distributed as a mesh of services.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # plain tracebacks, without the values of variables
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        write(f"rankmesh {__version__}\n")
        raise typer.Exit


@app.callback()
def rankmesh(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """torch.distributed as a mesh of services."""


@app.command(context_settings=_PASS_ON, short_help="Start a script on several ranks.")
@command
def run(context: typer.Context) -> int:
    """Start a script on several ranks and supervise them ('rankmesh run --help')."""
    require_linux()
    from rankmesh.launch import main as serve  # not from rankmesh, which would load all of its public names

    return serve(context.args)


@app.command(context_settings=_PASS_ON, short_help="Run a standalone gateway.")
@command
def gateway(context: typer.Context) -> int:
    """Run a standalone gateway ('rankmesh gateway --help')."""
    require_linux()
    from rankmesh_gateway.__main__ import main as serve

    return serve(context.args, prog="rankmesh gateway")


@app.command(context_settings=_PASS_ON, short_help="Run a standalone agent.")
@command
def agent(context: typer.Context) -> int:
    """Run a standalone agent, for a rank in another process ('rankmesh agent --help')."""
    require_linux()
    from rankmesh_agent.__main__ import main as serve

    return serve(context.args, prog="rankmesh agent")


@app.command(context_settings=_PASS_ON, short_help="Run a rank of a job that is not RankMesh's, and watch it.")
@command
def observe(context: typer.Context) -> int:
    """Run a rank of another library's job, or a launcher, and watch it from outside ('rankmesh observe --help')."""
    require_linux()
    from rankmesh._cli.observe import main as serve

    return serve(context.args)


_SERVERS: dict[str, Callable[[Any], None]] = {"run": run, "gateway": gateway, "agent": agent, "observe": observe}

app.command(short_help="Show ranks, groups, rates and operations in flight.")(status)
app.command("top", short_help="The same, live: keys sort the ranks, and show the stack of one.")(status)
app.command(short_help="Print a link to your job's dashboard.")(dashboard)
app.command(short_help="Report which rank holds up a job, and where.")(diagnose)
app.command(short_help="Show the Python stacks of ranks.")(stacks)
app.command("stragglers", short_help="Report which ranks make the others wait, and why.")(find_stragglers)
app.command(short_help="Write the latest calls of all ranks as a trace.")(trace)
app.command(short_help="Print a dashboard for Grafana, or alert rules for Prometheus.")(metrics)
app.command(short_help="Check hosts, network and shared memory.")(doctor)
app.command(short_help="Measure collectives on this machine.")(bench)
app.command(short_help="Print the token of your job, or derive one.")(token)
app.command(short_help="Send a GET request to a gateway or an agent.")(get)
app.add_typer(store.app, short_help="Read and write a job's key-value store.")
app.add_typer(tls.app, short_help="Make certificates for hosts.")


def main() -> None:
    """Run the command line of this process, and exit."""
    if sys.platform != "win32":
        reset_inherited()
    if sys.argv[1:2] == ["groups"]:  # the name of releases up to 0.2
        sys.argv[1:2] = ["status", "--groups"]
    try:
        name, *arguments = sys.argv[1:] or [""]
        if name in _SERVERS:  # it runs for hours: without what typer loads for the conversion of options, pydantic
            _SERVERS[name](SimpleNamespace(args=arguments))
        code = app(prog_name="rankmesh", standalone_mode=False)
    except typer.Exit as end:
        code = end.exit_code
    except typer.Abort:
        code = INTERRUPTED
    except CommandError as error:
        print_error(str(error))
        code = error.code
    except OSError as error:  # typer's own output, such as --help, cannot be written
        discard(1)
        print_error(str(error))
        code = FAILED
    except Exception as error:  # usage errors of typer's copy of click, which have no public name
        if not hasattr(error, "format_message"):
            raise
        where = getattr(error, "ctx", None)
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()  # type: ignore[attr-defined]
        else:
            hint = f"; try '{where.command_path} --help'" if where is not None else ""
            print_error(f"{error.format_message().rstrip('.')}{hint}")
        code = USAGE
    sys.exit(code)
