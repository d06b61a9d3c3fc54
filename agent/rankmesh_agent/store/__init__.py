"""The key-value store of a job.

``command`` says what a call is, and ``commands`` are the calls; ``table`` holds the keys, values and queues that they
work on. ``base`` says what a store is for callers with an event loop: ``memory`` is that of the agent that owns the
table, with ``answers`` for requests that come twice, ``client`` that of every other agent, which asks the owner over
HTTP.

``blocking`` is for callers without an event loop. Those in the owner's process call the table; all others go the fast
path, from ``fast_client`` to ``fast_server``, in frames whose contents ``forms`` knows; ``lookout`` spares both of
them falling asleep and being woken.
"""
