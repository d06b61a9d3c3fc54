"""The ``rankmesh`` command."""

from __future__ import annotations

import typer

_PASS_ON = {
    "allow_extra_args": True,
    "allow_interspersed_args": False,
    "ignore_unknown_options": True,
    "help_option_names": [],
}
"""Settings of a command whose arguments belong to another parser, ``--help`` and ``--`` included."""

app = typer.Typer(
    name="rankmesh", help="torch.distributed as a mesh of services.", no_args_is_help=True, add_completion=False
)


@app.command(context_settings=_PASS_ON)
def run(context: typer.Context) -> None:
    """Start a script as several ranks and watch over them ('rankmesh run --help')."""
    from rankmesh import launch

    raise typer.Exit(launch.main(context.args))


@app.command(context_settings=_PASS_ON)
def gateway(context: typer.Context) -> None:
    """Serve a gateway by itself ('rankmesh gateway --help')."""
    from rankmesh_gateway.__main__ import main as serve

    raise typer.Exit(serve(context.args))


def main() -> None:
    """Run the command line of this process."""
    app()
