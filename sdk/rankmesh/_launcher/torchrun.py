"""torchrun's forms of arguments: abbreviated, from PET_ variables, and those without effect here, with a remark.

Source: https://pytorch.org/docs/stable/elastic/run.html
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

_NO_FILES = "all output comes here, no files are written"
_FLAGS = {
    "standalone": "one node",
    "run-path": "run the script in a Python of its own",
}
"""Flags whose effect is always on."""
_VALUES = {
    "monitor-interval": "the launcher learns of a rank's end at once",
    "start-method": "ranks are started afresh",
}
"""Options without meaning here."""
_IGNORED = {
    "rdzv-conf": "the gateway needs none",
    "log-dir": _NO_FILES,
    "redirects": _NO_FILES,
    "tee": _NO_FILES,
    "local-ranks-filter": "the output of all ranks is shown",
    "duplicate-stdout-filters": _NO_FILES,
    "duplicate-stderr-filters": _NO_FILES,
    "event-log-handler": "there are no handlers; the gateway serves events over HTTP",
    "logs-specs": _NO_FILES,
    "numa-binding": "ranks are not bound to NUMA nodes",
    "signals-to-handle": "SIGINT, SIGTERM, SIGHUP and SIGQUIT are passed on to the ranks",
}
"""Options whose effect is missing: each use is remarked on."""
_IGNORED_FLAGS = {"virtual-local-rank": "LOCAL_RANK counts the ranks of a node, and each sees all GPUs"}
_SHORT = {"redirects": "-r", "tee": "-t"}
_PLACE = {"master_addr", "master_port", "rdzv_endpoint"}
_OUTRANKED = {
    "gateway": {*_PLACE, "standalone"},
    "standalone": {*_PLACE, "nnodes", "node_rank", "rdzv_backend"},
    "nnodes=auto": {*_PLACE, "node_rank", "rdzv_backend", "standalone"},
}
"""Options of the environment that an option of the command line excludes."""


class Parser(argparse.ArgumentParser):
    """A parser of torchrun's forms: argparse's own abbreviations would take those among the script's arguments, too.

    Attributes:
        variables: the PET_ variables of the environment; Kubeflow gives torchrun its options so.
        used: those that the command line does not outrank.
    """

    variables: Mapping[str, str] = MappingProxyType({})
    used: tuple[str, ...] = ()

    def complete(self, argv: Sequence[str], environ: Mapping[str, str]) -> list[str]:
        """Return a command line with the options of the environment before its own, and no abbreviated ones."""
        words, given = list(argv), set()
        position = 0
        while position < len(words) and words[position].startswith("-") and words[position] not in ("-", "--"):
            name, equals, value = words[position].partition("=")
            if words[position] not in self._option_string_actions:
                name = self._whole(name)
                words[position] = name + equals + value
            action = self._option_string_actions.get(words[position]) or self._option_string_actions.get(name)
            position += 1
            if action is not None:
                takes_next = not equals and action.nargs != 0
                value = "".join(words[position : position + 1]) if takes_next else value
                given |= {action.dest, f"{action.dest}={value}"}
                position += takes_next
        forms = {f"PET_{option[2:].upper()}": option for option in self._option_string_actions if option[1] == "-"}
        self.variables = {variable: environ[variable] for variable in forms if environ.get(variable)}
        excluded = given.union(*(names for option, names in _OUTRANKED.items() if option in given))
        return [*self._from_environment(forms, excluded), *words]

    def _whole(self, name: str) -> str:
        options = self._option_string_actions
        if name in options or not name.startswith("--"):
            return name
        found = {action.dest: option for option, action in reversed(options.items()) if option.startswith(name)}
        if len(found) > 1:
            self.error(f"ambiguous option: {name} could match {', '.join(sorted(found.values()))}")
        return next(iter(found.values()), name)

    def _from_environment(self, forms: Mapping[str, str], excluded: set[str]) -> list[str]:
        words = []
        for variable, text in self.variables.items():
            option = forms[variable]
            action = self._option_string_actions[option]
            if action.dest in excluded:
                continue
            self.used += (f"{variable}={text}",)
            if action.nargs != 0:
                words.append(f"{option}={text}")
            elif not text.isdigit():
                self.error(f"{variable}={text!r} is not 0 or 1")
            elif int(text):
                words.append(option)
        return words

    def error(self, message: str) -> NoReturn:
        """End the process with code 2; the message names the variables that options came from."""
        super().error(f"{message} (from the environment: {', '.join(self.used)})" if self.used else message)


def spellings(*names: str) -> list[str]:
    """Return the options of these names with dashes and, like torchrun, with underscores."""
    return list(dict.fromkeys(f"--{spelt}" for name in names for spelt in (name, name.replace("-", "_"))))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add torchrun's arguments to a parser; the namespace's ``remarks`` has a line for each one used without effect."""
    parser.set_defaults(remarks=())
    group = parser.add_argument_group("torchrun's arguments that change nothing here")
    for name, why in _FLAGS.items():
        group.add_argument(*spellings(name), action="store_true", help=why)
    for name, why in _VALUES.items():
        group.add_argument(*spellings(name), metavar="…", help=why)
    for name, why in _IGNORED.items():
        short = [_SHORT[name]] if name in _SHORT else []
        group.add_argument(*short, *spellings(name), action=_Ignored, metavar="…", help=why)
    for name, why in _IGNORED_FLAGS.items():
        group.add_argument(*spellings(name), action=_Ignored, nargs=0, help=why)


class _Ignored(argparse.Action):
    """Adds a remark on an argument, unless its value is 0, torchrun's default."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        if values != "0":
            namespace.remarks = (*namespace.remarks, f"{option_string}: {self.help}")
