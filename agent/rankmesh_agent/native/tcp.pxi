# Short collectives of two or three ranks over TCP: the frames are those of MessageLink.all_exchange.

cdef extern from *:
    """
    #include <endian.h>
    #include <errno.h>
    #include <sys/socket.h>

    /* Return the bytes sent of a header and a payload. */
    static size_t send_now(int fd, char *header, char *payload, size_t nbytes) {
        struct iovec parts[2] = {{header, 64}, {payload, nbytes}};
        struct msghdr message = {.msg_iov = parts, .msg_iovlen = nbytes ? 2 : 1};
        ssize_t sent = sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
        return sent < 0 ? 0 : (size_t)sent;
    }
    /* Return the bytes received, 0 for none, -1 at the end of the connection. */
    static ssize_t receive_now(int fd, char *into, size_t nbytes) {
        ssize_t received = recv(fd, into, nbytes, MSG_DONTWAIT);
        return received > 0 ? received : received < 0 && (errno == EAGAIN || errno == EINTR) ? 0 : -1;
    }
    """
    uint64_t htobe64(uint64_t number) noexcept nogil
    size_t send_now(int fd, char *header, char *payload, size_t nbytes) noexcept nogil
    ssize_t receive_now(int fd, char *into, size_t nbytes) noexcept nogil

cdef enum:
    SEQ = 3, LENGTH = 5, FINGERPRINT = 6  # words of a header, see frames.py
    MAX_PAYLOAD = 1 << 16  # see frames.SMALL
    RECEIVES = 16  # between two yields
    CALLS_IN_PYTHON = 64  # one of so many, which polls the other connections now and then: see engine.TAKE_INTERVAL

cdef double MAX_POLL = 0.0001


cdef struct Peer:
    int fd
    char *staging
    size_t received, expected


cdef class TcpCalls(Calls):
    """A group's synchronous calls over TCP.

    No other thread runs Python code from ``find_peers`` until all frames are in the arrays, or what has come and what has
    not been sent is at the connections: so the engine's lock, for which other threads may wait, is not held.

    Args:
        link: the group's MessageLink.
        combine: reduces payloads by a reduction into an array.
        transfer: makes a Transfer.
    """

    cdef object link, engine, sockets, due, acquire, release, time_slice, transfer
    cdef tuple ranks
    cdef Peer *peers
    cdef char *own  # a copy of this rank's part: the arrays may overlap
    cdef uint64_t[8] header
    cdef uint64_t number

    def __init__(self, queue, State state, link, tuple shared, contention, combine, transfer):
        self.set_up(queue, state, shared, contention, (combine, None, None), link)
        self.link, self.engine, self.ranks = link, (<object>state).engine, (<object>state).ranks
        cdef bytes header = frames.encode(frames.Opcode.ENTER, 0, (<object>state).group, self.engine.epoch)
        self.transfer = transfer
        self.sockets, self.due = self.engine.sockets, self.engine._poller.due
        self.acquire, self.release = self.engine.lock.acquire, self.engine.lock.release
        self.oversubscribed = self.engine.oversubscribed
        memcpy(self.header, <char *>header, HEADER_BYTES)
        self.peers = <Peer *>calloc(self.size, sizeof(Peer))
        self.own = <char *>calloc(1, MAX_PAYLOAD)
        if self.peers == NULL or self.own == NULL:
            raise MemoryError

    def __dealloc__(self):
        free(self.peers)
        free(self.own)

    cdef bint find_arrays(self, tuple arguments) except -1:
        return Calls.find_arrays(self, arguments) and self.find_peers()

    cdef bint find_peers(self) except -1:
        """Return whether no frame is under way on the connections, and no thread holds the engine's lock."""
        cdef int rank
        self.number += 1
        if self.number % CALLS_IN_PYTHON == 0 or self.engine.driven or self.link._arrived:
            return False
        if not self.acquire(False):
            return False
        self.release()
        for rank in range(self.size):
            if rank != self.rank:
                found = self.sockets.get(self.ranks[rank])
                if found is None or found.bare_fd < 0 or found._begin != found._end or found._header is not None:
                    return False
                if found._to_discard or found.outgoing or found.corked or found._broken:
                    return False
                self.peers[rank].fd, self.peers[rank].staging = found.bare_fd, <char *><size_t>found.address
        return True

    cdef bint step(self) except -1:
        cdef list pending = self.send_all()
        cdef int rank
        cdef bint complete = pending is None
        for rank in range(self.size):
            complete = complete and (rank == self.rank or self.receive(&self.peers[rank]))
        if complete:
            return True
        for rank in range(self.size):
            if self.peers[rank].received:
                found = self.sockets[self.ranks[rank]]
                found._begin, found._end = 0, self.peers[rank].received
                self.due.add(found)
        self.hold()
        self.link.resume(pending or [])
        if self.time_slice is not None:
            self.contention.lose_time_slice(*self.time_slice)
            self.time_slice = None
        return False

    cdef list send_all(self):
        """Send a frame to each rank; queue the rests that the kernel does not take; return their ranks and transfers."""
        cdef Plan plan = self.plan
        cdef size_t nbytes = self.count * plan.itemsize, length, sent
        cdef bint to_root = plan.kind == REDUCE or plan.kind == GATHER
        cdef char *part
        cdef list pending = None  # an empty one might start a collection of garbage, which may run Python code
        cdef int step, rank
        self.header[SEQ], self.header[FINGERPRINT] = htobe64(self.seq), htobe64(plan.fingerprint)
        if plan.inputs and plan.outputs:
            memcpy(self.own, self.inputs[self.rank if plan.inputs > 1 else 0], nbytes)
        for step in range(1, self.size):
            rank = (self.rank + step) % self.size
            part = self.inputs[rank if plan.inputs > 1 else 0]
            length = nbytes if plan.inputs and (rank == plan.root or not to_root) else 0
            self.header[LENGTH] = htobe64(length)
            sent = send_now(self.peers[rank].fd, <char *>self.header, part, length)
            if sent < HEADER_BYTES + length:
                found, transfer = self.sockets[self.ranks[rank]], self.transfer()
                found._head_begun = sent > 0
                found.outgoing.append(([((<char *>self.header)[:HEADER_BYTES] + part[:length])[sent:]], transfer))
                pending = [*(pending or ()), (rank, transfer)]
            self.peers[rank].received = 0
            self.peers[rank].expected = HEADER_BYTES
            if plan.outputs and (plan.root < 0 or to_root or rank == plan.root):
                self.peers[rank].expected += nbytes
        return pending

    cdef bint receive(self, Peer *peer) except -1:
        """Receive a frame, polling a moment, see CoreContention; return whether it is the one expected."""
        cdef double first = monotonic(), now, began
        cdef int look = 0, looks = 1 if self.oversubscribed else RECEIVES
        cdef bint may_poll = first >= <double>self.contention.free_at
        cdef ssize_t received
        while True:
            received = receive_now(peer.fd, peer.staging + peer.received, peer.expected - peer.received)
            if received < 0:
                return False
            peer.received += received
            if peer.received == peer.expected:
                break
            look += 1
            if look % looks == 0 and not received:
                began = monotonic()
                if not may_poll or began - first >= MAX_POLL or look >= looks * YIELDS:
                    return False
                sched_yield()
                now = monotonic()
                if now - began >= TIME_SLICE:
                    self.time_slice = began, now
                    return False
        self.header[LENGTH] = htobe64(peer.expected - HEADER_BYTES)
        return memcmp(peer.staging, self.header, HEADER_BYTES) == 0

    def resume(self, link, *arguments):
        """Algorithm of a call that has begun: wait for the rest of the frames."""
        cdef int rank
        cdef list payloads = [bytes(payload) for payload in link.all_exchange()]
        for rank in range(self.size):
            if rank != self.rank:
                if len(payloads[rank]) != <Py_ssize_t>self.peers[rank].expected - HEADER_BYTES:
                    raise ValueError(f"rank {rank} sent {len(payloads[rank])} bytes in the same call")
                self.parts[rank] = payloads[rank]
        self.finish(arguments)

    cdef int collect(self, arguments) except -1:
        cdef int rank
        for rank in range(self.size):
            self.parts[rank] = self.peers[rank].staging + HEADER_BYTES
        return self.finish(arguments)

    cdef int finish(self, arguments) except -1:
        """Write the parts of all ranks, or their reduction, into this rank's outputs."""
        cdef Plan plan = self.plan
        cdef size_t nbytes = self.count * plan.itemsize
        cdef int rank
        self.parts[self.rank] = self.own
        if plan.op >= 0 and plan.outputs:
            if not reduce_parts(self.outputs[0], self.parts, self.size, self.count, plan.op, plan.form, plan.itemsize):
                parts = [self.parts[rank][:nbytes] for rank in range(self.size)]
                self.hold()
                self.combine(parts, plan.call.reduce_op, arguments[0])
        elif plan.outputs == 1:
            memcpy(self.outputs[0], self.parts[plan.root], nbytes)
        else:
            for rank in range(plan.outputs):
                memcpy(self.outputs[rank], self.parts[rank], nbytes)
        return 0
