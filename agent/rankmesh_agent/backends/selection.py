"""Selection of a group's CPU backend: by the number of its members, and the memory that they share."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from rankmesh_agent.backends.base import Backend
from rankmesh_agent.backends.cpu import CpuBackend, HierarchicalCpuBackend
from rankmesh_agent.backends.segment_setup import SegmentOptions, create_segment
from rankmesh_agent.backends.self import SelfBackend
from rankmesh_agent.collectives.hosts import HierarchicalLink, layout_of
from rankmesh_agent.collectives.select import Algorithm
from rankmesh_agent.progress.message_link import MessageLink
from rankmesh_agent.shared_memory.segment import Segment


def first_backend(link: MessageLink) -> Backend:
    """Return the backend of a group whose members have not met yet."""
    return SelfBackend() if link.size == 1 else CpuBackend(link)


def select_backend(
    link: MessageLink, hosts: Sequence[Hashable], options: SegmentOptions, set_up: Callable[[Algorithm], None]
) -> Backend | None:
    """Return the backend over the memory that the members share, None if they share none; all return alike.

    Args:
        link: messages among the members.
        hosts: equal for members that see the same shared memory, by group rank.
        options: how this member shares memory.
        set_up: executes a step of the group's set-up as a collective call.
    """
    layout = layout_of(hosts)
    created: list[Segment | None] = []
    set_up(lambda link: created.append(create_segment(link, layout, options)))
    (segment,) = created
    if segment is None:
        return None
    if len(layout) > 1:
        return HierarchicalCpuBackend(link, HierarchicalLink(link, segment, layout))
    return CpuBackend(link, segment)
