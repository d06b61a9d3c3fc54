"""One file a collective, one short function an algorithm, over a Link (messages) or a Segment (shared memory).

``select`` is the one table that picks the algorithm, by the ``limits`` that were measured; ``reduction`` has the
arithmetic. Every algorithm begins by finding out that all ranks make the same call: over a Link with ``enter`` or
``consult``, over a Segment in its first ``step``. ``hierarchical`` has those for several ranks on several
hosts, which begin as over a Link.
"""
