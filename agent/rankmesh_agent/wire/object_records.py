"""Marks of encoded objects, whose receivers may unpickle them: an HTTP client can send none of them.

An object is sent as a record, which begins with MAGIC, and what does not fit as a rest. Point to point, both have tags
below MIN_TAG; in a collective, the rests have the subject OBJECTS. A client's calls have neither, and a client's array
must not begin as a record does.
"""

from __future__ import annotations

MAGIC = b"RMP\x02"
"""First bytes of a record: the last is the version."""
RECORD_BYTES = 1024
OBJECTS = "objects"
"""Subject of the collectives of rests; see wire.ops.Call."""
RECORD_TAG = -(1 << 63)
MIN_TAG = -(1 << 62)
"""Minimum tag of messages that are no objects."""
