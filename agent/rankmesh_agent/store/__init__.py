"""The key-value store of a job.

``base`` says what a store does; ``table`` holds the keys and values; ``memory`` is the store of the agent that owns the
table, ``client`` that of every other agent, which asks the owner over HTTP.
"""
