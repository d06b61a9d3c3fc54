"""Groups: communicators, the queue of their calls, their failure state, and the flight recorder.

``communicator`` is the interface, ``local`` the communicator over this process's progress engine; ``call_queue`` orders
and executes the calls, ``pending`` waits for them, ``work`` is what an asynchronous call returns; ``state`` keeps the
failure.
"""
