"""The groups of a rank that were made over HTTP: their names, and that only they are ended over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from rankmesh_agent.group.local import LocalCommunicator
from rankmesh_agent.wire.errors import DistError
from rankmesh_agent.wire.schemas import GroupRequest


class GroupExistsError(DistError):
    """Another group has the name."""

    code = "group-exists"
    status = 409


class GroupInUseError(DistError):
    """The group was not made over HTTP: its job ends it."""

    code = "group-in-use"
    status = 409


class GroupRegistry:
    """Which groups were made over HTTP, and the names of those that are being made. For several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kinds: dict[int, str] = {}
        self._making: set[str] = set()

    def begin(self, wanted: GroupRequest, groups: Iterable[LocalCommunicator]) -> LocalCommunicator | None:
        """Begin to make a group, or return it if this very one, by its instance, is there.

        Args:
            wanted: the group.
            groups: all that the rank is in.

        Raises:
            GroupExistsError: another has its name.
        """
        with self._lock:
            found = next((group for group in groups if group.name == wanted.name), None)
            if found is None and wanted.name not in self._making:
                self._making.add(wanted.name)
                return None
            if (
                found is not None
                and wanted.instance
                and found.ranks == tuple(wanted.ranks)
                and self._kinds.get(found.id) == kind_of(wanted)
            ):
                return found
            raise GroupExistsError(
                f"there is a group {wanted.name!r}: take another name, or DELETE /v1/groups/{wanted.name} first",
                group=wanted.name,
            )

    def end(self, wanted: GroupRequest, made: LocalCommunicator | None) -> None:
        """Take note that a group has been made, or with None that it could not be."""
        with self._lock:
            self._making.discard(wanted.name)
            if made is not None:
                self._kinds[made.id] = kind_of(wanted)

    def drop(self, group: LocalCommunicator) -> None:
        """Forget a group that ends.

        Raises:
            GroupInUseError: it was not made over HTTP.
        """
        with self._lock:
            if self._kinds.pop(group.id, None) is None:
                raise GroupInUseError(
                    f"group {group.name!r} was not made over HTTP: its job ends it. To end it at all members now, POST "
                    f"/v1/groups/{group.name}/abort",
                    group=group.name,
                )


def kind_of(wanted: GroupRequest) -> str:
    """Return what tells a group made over HTTP from others of the same ranks; equal at all members."""
    return f"{wanted.name}/{wanted.instance}"
