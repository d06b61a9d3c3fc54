"""The reference of the command line: the options of each command, from typer's and argparse's parsers."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import typer

from rankmesh import cli
from rankmesh._launcher import arguments
from rankmesh_agent import __main__ as agent
from rankmesh_gateway import __main__ as gateway

PARSERS = {
    "run": lambda: arguments._parser("rankmesh run", use_env=True),
    "gateway": lambda: gateway._parser("rankmesh gateway"),
    "agent": lambda: agent._parser("rankmesh agent"),
}
"""Commands whose arguments argparse reads."""


def sections() -> str:
    """Return the sections."""
    app: Any = typer.main.get_command(cli.app)
    return "\n\n".join(["\n\n## Options\n\nWritten from the commands themselves.", *commands(app, "rankmesh")])


def commands(group: Any, path: str) -> Iterator[str]:
    """Yield the section of each command of a group."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{path} {name}")
        elif path == "rankmesh" and name in PARSERS:
            yield f"### {path} {name}\n\n{of_argparse(PARSERS[name]())}"
        else:
            yield f"### {path} {name}\n\n{of_typer(command, f'{path} {name}')}"


def of_typer(command: Any, path: str) -> str:
    """Return the help text and the options of a command."""
    context = command.make_context(path, [], resilient_parsing=True)
    usage = " ".join([path, *command.collect_usage_pieces(context)])
    records = [each.get_help_record(context) for each in command.params if each.param_type_name == "option"]
    rows = [(f"`{names}`", meaning) for names, meaning in filter(None, records)]
    return f"{text(command.help or '')}\n\n```text\n{usage}\n```\n\n{table(rows)}"


def of_argparse(parser: argparse.ArgumentParser) -> str:
    """Return the description and the options of a parser."""
    rows = []
    for action in parser._actions:
        if action.help is argparse.SUPPRESS:
            continue
        metavar = "" if action.nargs == 0 else f" {action.metavar or action.dest.upper()}"
        names = ", ".join(action.option_strings)
        shown = f"`{names}{metavar}`" if names else f"`{action.metavar or action.dest}`"
        plain = (
            action.default in (None, False, argparse.SUPPRESS) or action.nargs == 0 or isinstance(action.default, list)
        )
        help_text = parser._get_formatter()._expand_help(action) if action.help else ""
        rows.append(
            (shown, help_text if plain or "default" in help_text else f"{help_text} [default: {action.default}]")
        )
    epilog = f"\n\n```text\n{parser.epilog.strip()}\n```" if parser.epilog else ""
    usage = parser.format_usage().removeprefix("usage: ").strip()
    return f"{text(parser.description or '')}\n\n```text\n{usage}\n```\n\n{table(rows)}{epilog}"


def text(paragraphs: str) -> str:
    """Return the text of a help, without the form feed that ends it."""
    return paragraphs.partition("\f")[0].strip()


def table(rows: list[tuple[str, str]]) -> str:
    """Return a Markdown table of options."""
    lines = ["| option | |", "|---|---|"]
    return "\n".join([*lines, *(f"| {' | '.join(cell.replace('|', '&#124;') for cell in row)} |" for row in rows)])
