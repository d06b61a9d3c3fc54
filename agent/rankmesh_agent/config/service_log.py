"""Log of a service that is a process of its own: one line for each event, on standard error."""

from __future__ import annotations

import logging

from rankmesh_agent.wire.printable import printable_lines


class _LineFormatter(logging.Formatter):
    """Formats records as lines, in which names and reasons of other processes cannot control a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return printable_lines(super().format(record))


def log_to_stderr() -> None:
    """Write RankMesh's log records, INFO and above, to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(_LineFormatter("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%S%z"))
    logger = logging.getLogger("rankmesh")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
