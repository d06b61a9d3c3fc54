"""Groups, the order of their calls, and what carries them out.

``mesh`` moves frames between this process and every peer; ``p2p`` matches messages to receives; ``rounds`` gives the
collectives their Link; ``backends`` carry out a call; ``communicator`` is a group: order, queue, failure; ``work`` is
what an asynchronous call returns; ``establish`` connects all pairs.
"""
