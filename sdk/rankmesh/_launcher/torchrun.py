"""torchrun's forms of arguments: abbreviated, from PET_ variables, and options without effect here.

Source: https://pytorch.org/docs/stable/elastic/run.html
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn


class Option(NamedTuple):
    """An option of the launcher.

    Attributes:
        names: its names, each with dashes or, like torchrun's, underscores; a short form may come first.
        help: description; of an option without effect the reason.
        metavar: name of its value; empty for a flag.
        type: converts the value.
        default: its default.
        remark: whether its use is remarked on, as the effect is missing.
    """

    names: str
    help: str
    metavar: str = ""
    type: Callable[[str], Any] = str
    default: Any = ""
    remark: bool = False

    @property
    def spellings(self) -> list[str]:
        """The option's forms on a command line."""
        short = [name for name in self.names.split() if name.startswith("-")]
        long = [form for name in self.names.split() if name not in short for form in (name, name.replace("-", "_"))]
        return [*short, *(f"--{name}" for name in dict.fromkeys(long))]


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Lists one spelling of each option, and its short form."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        short, long = ([form for form in action.option_strings if form.startswith("--") is it] for it in (False, True))
        value = f" {action.metavar}" if long and action.metavar else ""
        return ", ".join([*short, *long[:1]]) + value if long else super()._format_action_invocation(action)


UNUSED = (
    Option("standalone", "one node is the default"),
    Option("run-path", "each rank's script has a Python of its own"),
    Option("monitor-interval", "the launcher learns of a rank's end at once", "VALUE"),
    Option("start-method", "ranks are new processes", "VALUE"),
    Option("rdzv-conf", "the gateway needs none", "VALUE", remark=True),
    Option("duplicate-stdout-filters", "no lines are written a second time", "VALUE", remark=True),
    Option("duplicate-stderr-filters", "no lines are written a second time", "VALUE", remark=True),
    Option("event-log-handler", "there are no handlers; the gateway serves events over HTTP", "VALUE", remark=True),
    Option("logs-specs", "--log-dir, -r and -t are the options for files", "VALUE", remark=True),
    Option("numa-binding", "ranks are not bound to NUMA nodes", "VALUE", remark=True),
    Option("signals-to-handle", "SIGINT, SIGTERM, SIGHUP and SIGQUIT are passed on to the ranks", "VALUE", remark=True),
    Option("virtual-local-rank", "LOCAL_RANK counts the ranks of a node, and each sees all GPUs", remark=True),
)
"""torchrun's options without effect here."""
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

    def add_options(self, options: Iterable[Option], title: str = "") -> None:
        """Add options, below a title if there is one; each use of one with a remark adds a line to ``remarks``."""
        self.set_defaults(remarks=())
        target = self.add_argument_group(title) if title else self
        for option in options:
            value: dict[str, Any] = {"metavar": option.metavar, "type": option.type, "default": option.default}
            if option.remark:
                value = {"action": _Remark, "metavar": option.metavar, "nargs": None if option.metavar else 0}
            elif not option.metavar:
                value = {"action": "store_true"}
            target.add_argument(*option.spellings, help=option.help, **value)

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


class _Remark(argparse.Action):
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
