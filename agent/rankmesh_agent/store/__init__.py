"""Key-value stores.

``command`` defines a call and ``commands`` lists the calls; ``table`` holds the keys, values and queues. ``server``
serves tables, in the gateway those of all jobs, with ``replies`` for repeated requests. ``client`` is its client, and
``job_store`` a rank's; ``codec`` has the frames of commands. ``store`` has the interface of all stores, and that of
the process that has the table itself.
"""
