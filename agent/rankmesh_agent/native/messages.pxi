# Short messages through rings: the layouts are those of shm_ring.py, the order of messages is that of matching.py.

cdef enum:  # see shm_ring.py: words of the lines, then bytes
    HEAD, TAIL = 8, READER_SLEEPS = 16, WRITER_SLEEPS = 24
    DATA = 256, HEADER_BYTES = 64, PIECE_BYTES = 1 << 14, CREDIT_BYTES = 1 << 20  # a quarter of matching.WINDOW


cdef class Ring:
    """The part of shm_ring._Ring that the core changes, and the address of its lines."""

    cdef public uint64_t position, capacity, address

    cdef void move(self, uint64_t begin, char *memory, uint64_t nbytes, bint writes) noexcept:
        """Copy bytes from memory into the ring, at a position, or from there into memory."""
        cdef uint64_t at = begin % self.capacity, first = min(nbytes, self.capacity - at)
        cdef char *data = <char *>self.address + DATA
        memcpy(data + at if writes else memory, memory if writes else data + at, first)
        memcpy(data if writes else memory + first, memory + first if writes else data, nbytes - first)


cdef class Rings:
    """The part of RingConnection that the core looks at."""

    cdef public Ring _in, _out
    cdef public object _lost


cdef class Framing:
    """The part of FramedConnection that the core looks at."""

    cdef public object connection, outgoing, _header
    cdef public uint64_t _begin, _end, _to_discard


cdef class Credit:
    """The part of matching._Credit that the core changes."""

    cdef public uint64_t available, unreturned


cdef class Message(Recorded):
    """Messages of one tag, dtype and length to a rank, or from it.

    Args:
        owner, call, counts: see Recorded.
        header: of the frame.
        peer: the connection to the rank.
        credit: flow control of the rank.
        nbytes: of the array.
    """

    cdef bytes header
    cdef Framing peer
    cdef Credit credit
    cdef uint64_t nbytes, cost

    def __init__(self, owner, what, Counts counts, bytes header, Framing peer, Credit credit, uint64_t nbytes):
        self.owner, self.call, self.counts, self.header, self.peer, self.credit = owner, what, counts, header, peer, credit
        self.nbytes, self.cost = nbytes, max(nbytes, <uint64_t>1 << 10)  # see matching._MIN_COST


cdef class Messages:
    """A group's synchronous messages through rings.

    Args:
        state: the group's state.
        engine: the progress engine.
        queues: the posted receives, and the unexpected messages.
        kinds: the Message, or None, of each kind.
        contention: a CoreContention.
    """

    cdef object engine, kinds, contention, acquire, release, posted, unexpected
    cdef State state
    cdef Records records
    cdef bint oversubscribed

    def __init__(self, State state, engine, tuple queues, kinds, contention):
        self.state, self.engine, self.kinds, self.contention = state, engine, kinds, contention
        self.posted, self.unexpected = queues
        self.acquire, self.release = engine.lock.acquire, engine.lock.release
        self.oversubscribed, self.records = engine.oversubscribed, (<object>state).recorder.latest

    def at_once(self, bint sends, array, rank, tag, bint waits=True):
        """Send an array to a global rank, or receive it, which may wait a moment; return whether that was done."""
        cdef ArrayFields *fields = <ArrayFields *><PyObject *>array
        cdef int flags = CONTIGUOUS_ALIGNED if sends else CONTIGUOUS_ALIGNED | WRITEABLE
        cdef double started = monotonic()
        if type(array) is not numpy_array or fields.nd != 1 or fields.flags & flags != flags:
            return False
        if type(rank) is not int or type(tag) is not int or self.state.failure is not None:
            return False
        cdef Message message = self.kinds[sends, <object>fields.descr, fields.dimensions[0], rank, tag]
        if message is None or self.acquire(False) is not True:
            return False
        try:
            if not (self.send(message, fields.data) if sends else self.receive(message, fields.data, waits)):
                return False
        finally:
            self.release()
        self.records.end(message, Ended(0, message.nbytes, started, monotonic()))
        return True

    cdef bint send(self, Message message, char *array) except -1:
        """See matching.send and _Ring.write."""
        cdef Rings rings = message.peer.connection
        cdef Ring ring = rings._out
        cdef uint64_t *words = <uint64_t *>ring.address
        cdef uint64_t first = ring.position + HEADER_BYTES, end = first + message.nbytes, count
        cdef uint64_t read = load_acquire(words + TAIL)
        if rings._lost is not None or len(message.peer.outgoing) or message.cost > message.credit.available:
            return False
        if ring.position - read > ring.capacity or end - read > ring.capacity:
            return False
        message.credit.available -= message.cost
        ring.move(ring.position, message.header, HEADER_BYTES, True)
        ring.position = first
        while ring.position < end:
            count = min(end - ring.position, <uint64_t>PIECE_BYTES)
            ring.move(ring.position, array + (ring.position - first), count, True)
            ring.position += count
            store_release(words + HEAD, ring.position)
        store_release(words + HEAD, end)
        full_fence()
        if load_acquire(words + READER_SLEEPS):
            (<object>rings)._ring_doorbell(ring, READER_SLEEPS)
        return True

    cdef bint receive(self, Message message, char *array, bint waits) except -1:
        """See matching.receive_soon and _Ring.take."""
        cdef Framing peer = message.peer
        cdef Rings rings = peer.connection
        cdef Ring ring = rings._in
        cdef uint64_t *words = <uint64_t *>ring.address
        cdef uint64_t first = ring.position + HEADER_BYTES, end = first + message.nbytes, at = first, count
        cdef bint here = load_acquire(words + HEAD) >= first
        cdef char[HEADER_BYTES] header
        if rings._lost is not None or self.engine.driven or len(self.posted) or len(self.unexpected):
            return False
        if peer._begin != peer._end or peer._header is not None or peer._to_discard:
            return False
        if message.credit.unreturned + message.cost >= CREDIT_BYTES:
            return False
        if not here and not (waits and spin(words + HEAD, first, self.oversubscribed, self.contention, None)):
            return False
        ring.move(ring.position, header, HEADER_BYTES, False)
        if memcmp(header, <char *>message.header, HEADER_BYTES):
            return False
        while at < end:
            count = min(load_acquire(words + HEAD), end) - at
            if count > message.nbytes or not count and not spin(
                words + HEAD, at + 1, self.oversubscribed, self.contention, None
            ):
                return False
            ring.move(at, array + (at - first), count, False)
            at += count
        ring.position = end
        store_release(words + TAIL, end)
        message.credit.unreturned += message.cost
        full_fence()
        if load_acquire(words + WRITER_SLEEPS):
            (<object>rings)._ring_doorbell(ring, WRITER_SLEEPS)
        return True
