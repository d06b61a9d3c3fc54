"""torchrun's arguments without effect here: accepted, so that its command lines work, with a remark.

Source: https://pytorch.org/docs/stable/elastic/run.html
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

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
