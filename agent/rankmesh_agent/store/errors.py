"""What can be wrong with a store request, besides the errors every part of RankMesh shares.

::

    DistStoreError
    ├── InvalidKeyError      a key is empty, too long or not text; too many keys to wait for
    ├── KeyNotFoundError     nobody has set the key
    ├── NotANumberError      the value cannot be added to
    └── StoreTimeoutError    keys did not appear before the deadline (in wire.errors; also a TimeoutError)
"""

from __future__ import annotations

from rankmesh_agent.wire.errors import DistStoreError, StoreTimeoutError


class InvalidKeyError(DistStoreError):
    """A key is empty, too long or not text, or there are too many keys to wait for."""

    code = "invalid-key"
    status = 422


class KeyNotFoundError(DistStoreError):
    """Nobody has set the key, or not before the time was over."""

    code = "key-not-found"
    status = 404


class NotANumberError(DistStoreError):
    """The value is not decimal digits, or the sum would not fit into 64 bits."""

    code = "not-a-number"
    status = 409


BY_CODE: dict[str, type[DistStoreError]] = {
    kind.code: kind for kind in (InvalidKeyError, KeyNotFoundError, NotANumberError, StoreTimeoutError)
}
"""Each error by its wire code, to raise at a client what happened at the owner."""
