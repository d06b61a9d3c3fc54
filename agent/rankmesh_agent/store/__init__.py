"""Key-value stores.

``command`` defines a call and ``commands`` lists the calls; ``table`` holds the keys, values and queues. ``server``
serves tables, in the gateway those of all jobs, with ``replies`` for repeated requests, and ``client`` is its client;
``codec`` translates commands to frames. ``base`` has the interface of a store: ``memory`` implements it in the process
that has the table, ``job_store`` at the ranks of a job. ``async_store`` is for the HTTP endpoints.
"""
