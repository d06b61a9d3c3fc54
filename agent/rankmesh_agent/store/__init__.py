"""The key-value store of a job.

``command`` defines a call and ``commands`` lists the calls; ``table`` holds the keys, values and queues. ``base`` has
the interfaces for callers with an event loop and without one. ``memory`` implements both in the process that owns the
table, with ``idempotency`` for repeated requests. Elsewhere, ``http_client`` sends HTTP requests to the owner, and
``client`` binary frames to the owner's ``server``. ``codec`` translates commands to frames, ``http_codec`` to HTTP
requests.
"""
