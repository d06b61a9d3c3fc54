"""Protocol of a backend, which keeps the jobs' stores for the next gateway. SQLite's and etcd's are examples.

The gateway has the keys and values of all stores in memory, executes the commands of their clients, and answers all
reads. A backend keeps rows: for each store, values by keys, whose meaning it need not know (``store_log`` has it). Its
rules:

* **All or nothing.** ``write`` returns once all of its rows are durable, in one transaction: whenever a machine stops,
  the next gateway loads all of them or none. The gateway makes a change in memory, and acknowledges it, after that.
* **A failed write leaves the old rows**: DistStoreError. If a backend cannot know, after a timeout, say, it raises
  OutcomeUnknownError. The change then fails, too; and before the gateway writes anything else of this store, it writes
  the rows as they were before the change, so that a write that was made after all is undone.
* **Writes take effect in the order of the calls**, also one whose outcome was unknown: it is made before the next write
  of the same gateway, or never.
* **One gateway at a time.** After ``load`` has returned, no write of a gateway that called ``load`` before succeeds.
  A backend that another gateway still uses may refuse ``load`` instead.
* **A few seconds at most.** The clients of all stores wait for a write, so none may take longer.
* Calls come from several threads.

A backend is given to ``Gateway``; ``__main__`` makes it from an option.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from rankmesh_agent.wire.errors import DistStoreError

Rows = Mapping[bytes, bytes | None]
"""Values to write, by key; None removes the key."""


class OutcomeUnknownError(DistStoreError):
    """A write has failed, as far as its caller can tell; it may have been made, or may yet be."""


class StoreBackend(Protocol):
    """Keeps rows of stores; see above."""

    def load(self) -> dict[str, dict[bytes, bytes]]:
        """Return all rows, by the ids of their stores; from now on, this gateway alone can write.

        Raises:
            DistStoreError: they cannot be read.
        """

    def write(self, store: str, rows: Rows) -> None:
        """Write rows of one store.

        Raises:
            DistStoreError: nothing is written.
            OutcomeUnknownError: whether they are written is not known.
        """

    def remove(self, store: str) -> None:
        """Remove all rows of a store.

        Raises:
            DistStoreError: they may still be there.
        """
