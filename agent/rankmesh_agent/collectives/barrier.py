"""barrier: no rank goes on before all have come."""

from __future__ import annotations

from rankmesh_agent.collectives.link import Link
from rankmesh_agent.transports.segment import Segment


def over_segment(segment: Segment) -> None:
    """One step without data.

    Steps: 1.
    """
    segment.step()


def over_link(link: Link) -> None:
    """One message without data to everyone.

    Steps: 1. Each rank sends and receives (size - 1) headers.
    """
    link.enter()
