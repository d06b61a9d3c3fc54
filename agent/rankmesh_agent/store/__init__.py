"""The key-value store of a job.

``command`` defines a call and ``commands`` lists the calls; ``table`` holds the keys, values and queues. ``base`` is
the interface for callers with an event loop: ``memory`` implements it in the agent that owns the table, with
``idempotency`` for repeated requests, and ``http_client`` in every other agent.

``blocking`` is the interface for callers without an event loop. In the owner's process they use the table; elsewhere a
``client`` sends binary frames to the owner's ``server``, or HTTP requests to an owner that does not speak that
protocol. ``codec`` translates commands to frames, ``http_codec`` to HTTP requests.
"""
