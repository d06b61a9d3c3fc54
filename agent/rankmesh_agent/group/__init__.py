"""Groups, the order of their calls, and what carries them out.

``peer`` is the framing on one connection; ``mesh`` moves frames between this process and all peers; ``p2p`` matches
messages to receives; ``rounds`` gives the collectives their Link; ``backends`` carry out a call; ``communicator`` is a
group: order and queue; ``standing`` is how it fails, ``waits`` how its calls wait; ``work`` is what an asynchronous
call returns; ``registered`` makes arrays that all members have mapped; ``establish`` connects all pairs.
"""
