# Statistics and records of the calls that the core has carried out.

cdef enum:
    BUCKETS = 16  # see stats.BOUNDS

cdef double[BUCKETS - 1] BOUNDS = [
    1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0
]


cdef class Counts:
    """Statistics of an operation's calls, see OpStats."""

    cdef uint64_t nbytes
    cdef double seconds
    cdef uint64_t[BUCKETS] buckets

    cdef void add(self, uint64_t nbytes, double seconds) noexcept:
        cdef int bucket = 0
        while bucket < BUCKETS - 1 and BOUNDS[bucket] < seconds:
            bucket += 1
        self.buckets[bucket] += 1
        self.nbytes += nbytes
        self.seconds += seconds

    def totals(self):
        """Return the bytes, the seconds and the calls by bucket."""
        return self.nbytes, self.seconds, self.buckets


cdef class Recorded:
    """What the records of the core's calls say alike.

    Args:
        owner: the state of the group, as records name it.
        call: the call or message.
        counts: statistics that count it.
    """

    cdef object owner, call  # nothing that keeps the memory mapped: records refer to them
    cdef Counts counts

    def __init__(self, owner, call, Counts counts):
        self.owner, self.call, self.counts = owner, call, counts


cdef struct Ended:
    uint64_t seq, nbytes
    double started, ended


cdef class Records:
    """The latest records of calls that have ended, as a deque of this length; those of the core are made when read."""

    cdef list items  # records, or what those of the core say
    cdef Ended *calls
    cdef Py_ssize_t capacity, count

    def __init__(self, Py_ssize_t capacity):
        self.items, self.capacity = [None] * capacity, capacity
        self.calls = <Ended *>calloc(capacity + 1, sizeof(Ended))
        if self.calls == NULL:
            raise MemoryError

    def __dealloc__(self):
        free(self.calls)

    def append(self, record):
        self.put(record, Ended(0, 0, 0, 0))

    def copy(self):
        return [self.at(number) for number in range(max(self.count - self.capacity, <Py_ssize_t>0), self.count)]

    def __getitem__(self, Py_ssize_t number):
        if not 0 > number >= -min(self.count, self.capacity):
            raise IndexError(number)
        return self.at(self.count + number)

    cdef object at(self, Py_ssize_t number):
        item = self.items[number % self.capacity]
        if type(item) is tuple:
            return item
        cdef Recorded recorded = item
        cdef Ended *call = &self.calls[number % self.capacity]
        return recorded.owner, recorded.call, call.seq, call.started, call.ended, "", call.nbytes

    cdef int put(self, item, Ended call) except -1:
        cdef Py_ssize_t place = self.count % (self.capacity or 1)
        if self.capacity:
            self.calls[place] = call
            self.count += 1
            self.items[place] = item  # last: the end of the oldest record may let other threads run
        return 0

    cdef int end(self, Recorded recorded, Ended call) except -1:
        """Count and record a call of the core."""
        recorded.counts.add(call.nbytes, call.ended - call.started)
        return self.put(recorded, call)
