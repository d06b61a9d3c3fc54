"""barrier: every rank waits until all ranks have arrived."""

from __future__ import annotations

from rankmesh_agent.collectives.link import Link
from rankmesh_agent.transports.segment import Segment


def over_segment(segment: Segment) -> None:
    """One step without data.

    Steps: 1.
    """
    segment.step()


def direct_link(link: Link) -> None:
    """One message without data to every other rank.

    Steps: 1. Each rank sends and receives (size - 1) headers.
    """
    link.all_exchange()


def star_link(link: Link) -> None:
    """One message without data to rank 0, which replies when it has received one from every rank.

    Steps: 2. Each rank sends and receives a header, rank 0 (size - 1): fewer messages in total than direct_link.
    """
    link.via_root(b"", lambda _: b"")
