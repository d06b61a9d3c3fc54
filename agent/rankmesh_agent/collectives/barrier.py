"""barrier: every rank waits until all ranks have arrived."""

from __future__ import annotations

from rankmesh_agent.collectives.link import Link
from rankmesh_agent.shared_memory.segment import Segment


def over_segment(segment: Segment) -> None:
    """One step without data.

    Steps: 1.
    """
    segment.step()


def over_link(link: Link) -> None:
    """The arrival at the call, see Link.arrive.

    Steps: log2 size. Each rank sends and receives as many headers. Among few ranks, 1 step and (size - 1) headers, or 2
    steps and 1 header at all ranks but rank 0.
    """
    link.arrive()
