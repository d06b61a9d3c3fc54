# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False, binding=False
"""Short collectives and messages in shared memory, and collectives over TCP, each carried out whole by one function.

The memory's layout, the steps and the arithmetic are those of slots.py and of the algorithms of one step, for messages
those of shm_ring.py and matching.py, over TCP those of message_link.py: their Python code is the reference, and a rank
that runs it works with ranks that run this. A call that the core does not know, and a message that does not come soon,
it leaves to the Python code, having done nothing. A collective that does not end soon, or whose ranks make different
calls, it hands to the Python code with its step begun: time limits, failures, Ctrl-C and errors are all there.
"""

from threading import get_ident

import numpy

from rankmesh_agent.wire import frames
from rankmesh_agent.wire.errors import CollectiveMismatchError
from rankmesh_agent.wire.ops import ReduceOp

from cpython.object cimport PyObject, PyObject_CallFunctionObjArgs
from libc.stdint cimport int32_t, int64_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcmp, memcpy, memmove

cdef extern from *:
    """
    #include <linux/futex.h>
    #include <sched.h>
    #include <string.h>
    #include <sys/syscall.h>
    #include <time.h>
    #include <unistd.h>

    /* What NumPy's C API makes public of an array (PyArrayObject_fields). */
    typedef struct {
        PyObject_HEAD
        char *data;
        int nd;
        Py_ssize_t *dimensions, *strides;
        PyObject *base, *descr;
        int flags;
    } ArrayFields;

    #define load_acquire(word) __atomic_load_n(word, __ATOMIC_ACQUIRE)
    #define store_release(word, value) __atomic_store_n(word, value, __ATOMIC_RELEASE)
    #define full_fence() __atomic_thread_fence(__ATOMIC_SEQ_CST)
    #if defined(__x86_64__)
    #define relax() __builtin_ia32_pause()
    #else
    #define relax() __asm__ volatile("yield")
    #endif

    static double monotonic(void) {
        struct timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
    }
    static void wake_sleepers(uint64_t *word) { syscall(SYS_futex, word, FUTEX_WAKE, 0x7fffffff, NULL, NULL, 0); }
    static void sleep_while(uint64_t *word, uint64_t value, long nanoseconds) {
        struct timespec slice = {0, nanoseconds};
        syscall(SYS_futex, word, FUTEX_WAIT, (uint32_t)value, &slice, NULL, 0);
    }
    """
    ctypedef struct ArrayFields:
        char *data
        int nd, flags
        Py_ssize_t *dimensions
        PyObject *descr
    uint64_t load_acquire(uint64_t *word) noexcept nogil
    void store_release(uint64_t *word, uint64_t value) noexcept nogil
    void full_fence() noexcept nogil
    void relax() noexcept nogil
    double monotonic() noexcept nogil
    void wake_sleepers(uint64_t *word) noexcept nogil
    void sleep_while(uint64_t *word, uint64_t value, long nanoseconds) noexcept nogil
    int sched_yield() noexcept nogil
    uint32_t CHECKSUM "SOURCES"

cdef enum:
    CONTIGUOUS_ALIGNED = 0x101  # flags of an array
    WRITEABLE = 0x400
    SLICE_NANOSECONDS = 50000000  # see slots.SLICE_SECONDS
    YIELDS = 20  # see slots._YIELDS
    SPIN_ROUNDS = 64, LONG_SPIN_ROUNDS = 1024  # with and without the interpreter lock
    SPINS = 32  # twice slots._SPINS: a check takes half the time

cdef enum:  # see OpType
    BARRIER = 1, ALL_REDUCE, BROADCAST, ALL_GATHER, NEW_GROUP, REDUCE, GATHER, SCATTER, REDUCE_SCATTER, ALL_TO_ALL

cdef object numpy_array = numpy.ndarray
cdef set key_types = {ReduceOp, int, type(None)}  # others may not be hashable
cdef double TIME_SLICE = 0.0015  # see spin._SLICE_SECONDS
cdef double MAX_SPIN = 0.001
cdef struct Line:  # see slots.py
    uint64_t count
    uint64_t[2] fingerprints
    uint64_t sleepers, left
    uint64_t[3] unused

include "reductions.pxi"
include "records.pxi"


cdef class Slots:
    """The part of slots.Slots that the core changes."""

    cdef public uint64_t _steps
    cdef public int _turn


cdef class State:
    """The part of state.GroupState that the core looks at in each call."""

    cdef public object call, failure
    cdef public uint64_t seq


cdef class Plan(Recorded):
    """A plan as the core carries it out.

    Args:
        owner, call, counts: see Recorded.
        place: the root's group rank, the bytes for an array in a slot, the first of them for this rank in each rank's
            slot, and the most that an array may have.
        arrays: the number that this rank reads, and the number that it writes; the one of the former that no other rank
            reads, and the one of the latter that it copies from its own: -1 for none.
    """

    cdef object dtype
    cdef uint64_t fingerprint
    cdef int kind, op, root, inputs, outputs, own_input, own_output, in_at, form
    cdef Py_ssize_t count, itemsize, lane, offset, most

    def __init__(self, owner, call, Counts counts, tuple place, tuple arrays):
        self.root, self.lane, self.offset, self.most = place
        self.inputs, self.outputs, self.own_input, self.own_output = arrays
        Recorded.__init__(self, owner, call, counts)
        self.kind, self.dtype, self.count, self.fingerprint = call.kind, call.dtype, call.count, call.fingerprint
        self.op = -1 if call.reduce_op is None else call.reduce_op.value
        self.in_at = self.kind not in (ALL_REDUCE, BROADCAST, REDUCE)
        if self.dtype is not None:
            self.itemsize = self.dtype.itemsize
            self.form = ord(self.dtype.char)


cdef class Calls:
    """A group's synchronous calls in shared memory.

    Args:
        queue: the group's calls, a CallQueue.
        state: the group's state.
        segment: the group's memory.
        shared: the plans, the queued calls and the lock of the queue.
        contention: a CoreContention.
        python: reduces the parts from a byte of all slots into an array, given segment, reduction, byte and array; and
            carries out an all_to_all whose arrays differ in length, after its step; and makes lists of whole arrays.
    """

    cdef object error, queue, queued, turn, is_taken, contention, combine, complete, split
    cdef State state
    cdef Records records
    cdef dict plans
    cdef Slots segment
    cdef Line *lines
    cdef char *slots
    cdef size_t slot_bytes, note_bytes
    cdef int rank, size
    cdef bint oversubscribed, held, owned  # the latter two: the queue's lock, during a call; the caller has taken it
    cdef char **inputs
    cdef char **outputs
    cdef char **parts
    cdef Plan plan
    cdef Py_ssize_t count
    cdef uint64_t seq, nbytes
    cdef double started

    def __init__(self, queue, State state, Slots segment, tuple shared, contention, tuple python):
        cdef object whole = segment
        cdef size_t address = whole.mapping.address
        self.set_up(queue, state, shared, contention, python, whole)
        self.segment, self.slot_bytes = segment, whole.slot_bytes
        self.oversubscribed = whole.oversubscribed
        self.lines = <Line *>address
        self.slots = <char *>address + <size_t>whole.bytes_for(whole.size, 0)
        self.note_bytes = (32 * <size_t>self.size + 63) // 64 * 64  # see slots._note_bytes

    cdef int set_up(self, queue, State state, tuple shared, contention, tuple python, members) except -1:
        self.queue, self.state = queue, state
        self.plans, self.queued, self.turn = shared
        self.is_taken = self.turn.locked
        self.combine, self.complete, self.split = python
        self.contention, self.records = contention, (<object>state).recorder.latest
        self.rank, self.size = members.rank, members.size
        self.inputs = <char **>calloc(3 * self.size, sizeof(char *))
        if self.inputs == NULL:
            raise MemoryError
        self.outputs, self.parts = self.inputs + self.size, self.inputs + 2 * self.size
        return 0

    def __dealloc__(self):
        free(self.inputs)

    def close(self):
        """Leave all calls to the queue from now on; the memory may be unmapped once no call is under way."""
        self.plans = None
        if not self.held:
            self.segment = self.plan = None

    def submit(self, key, tuple arguments, options, *, launches=False):
        """See CallQueue.submit."""
        if self.plans is not None and self.make(self.plans.get(key), arguments, options, False):
            return None
        return self.queue.submit(key, arguments, options, launches=launches)

    def at_once(self, options, kind, output=None, given=None, op=None, root=None):
        """Carry out a call without options of its own, with arrays in place of lists; return whether that was done."""
        cdef ArrayFields *array
        cdef int number = kind
        if self.plans is None or type(op) not in key_types or type(root) not in key_types:
            return False
        dtype, count, arguments = None, 0, ()
        if number != BARRIER:
            counted = output if number == REDUCE_SCATTER else given
            array = <ArrayFields *><PyObject *>counted
            if type(counted) is not numpy_array or array.nd != 1:
                return False
            dtype, arguments = <object>array.descr, (output, given)
            count = array.dimensions[0] if number != ALL_TO_ALL else -1
        return self.make(self.plans.get((kind, dtype, count, op, root)), arguments, options, False)

    def run(self, found, tuple arguments, options):
        """Carry out a call in the thread that holds the queue's lock; return whether that was done."""
        return self.plans is not None and self.make(found, arguments, options, True)

    cdef bint make(self, found, tuple arguments, options, bint owned) except -1:
        if found is None or (<tuple>found)[5] is None or not self.is_free(options, owned):
            return False
        self.plan, self.owned = (<tuple>found)[5], owned
        return self.find_arrays(arguments) and self.carry_out(found, arguments, options)

    cdef bint is_free(self, given, bint owned) except -1:
        """Return whether a call may begin now, and has no options that the core does not know."""
        cdef tuple options = <tuple>given
        if options[3] is not None or self.state.failure is not None:
            return False
        worker = self.queue.worker
        if not owned and (options[1] or options[5] is not None or worker is not None and worker.ident == get_ident()):
            return False
        # Last: until ``hold`` nothing lets another thread run.
        return owned or not len(self.queued) and PyObject_CallFunctionObjArgs(self.is_taken, NULL) is False

    cdef bint find_arrays(self, tuple arguments) except -1:
        """Find the addresses of a call's arrays; return whether all are as expected."""
        cdef Plan plan = self.plan
        self.count = plan.count
        if plan.inputs and not self.find(self.inputs, plan.inputs, arguments[plan.in_at], CONTIGUOUS_ALIGNED):
            return False
        if plan.outputs and not self.find(self.outputs, plan.outputs, arguments[0], CONTIGUOUS_ALIGNED | WRITEABLE):
            return False
        self.nbytes = self.count * plan.itemsize * (self.size if plan.kind == ALL_TO_ALL else 1)
        return True

    cdef bint find(self, char **addresses, int number, given, int flags) except -1:
        cdef ArrayFields *array
        cdef int i, parts = number if type(given) is numpy_array else 1
        number //= parts
        if number > 1 and (type(given) is not list or len(<list>given) != number):
            return False
        for i in range(number):
            item = (<list>given)[i] if number > 1 else given
            if type(item) is not numpy_array:
                return False
            array = <ArrayFields *><PyObject *>item
            if array.nd != 1 or array.descr != <PyObject *>self.plan.dtype or array.flags & flags != flags:
                return False
            if self.count < 0:  # all_to_all: not known before
                self.count = array.dimensions[0] // parts
                if self.count * self.plan.itemsize > self.plan.most:
                    return False
            if array.dimensions[0] != self.count * parts:
                return False
            addresses[i] = array.data
        for i in range(1, parts):
            addresses[i] = addresses[0] + i * self.count * self.plan.itemsize
        return True

    cdef bint carry_out(self, found, tuple arguments, options) except -1:
        self.started = monotonic()
        self.seq = self.state.seq + 1
        try:
            if self.step():
                self.collect(arguments)
                self.end()
            else:
                if self.plans is None:  # the group was closed meanwhile
                    (<object>self.state).raise_if_failed()
                self.hand_over(self.resume, found, arguments, options)
        except BaseException as error:
            if isinstance(error, CollectiveMismatchError) or self.state.failure is not None:
                raise
            self.error = error  # Ctrl-C before the Python code had begun
            self.hand_over(self.fail, found, arguments, options)
        finally:
            if self.held:
                self.held, (<object>self.state).started_at = False, None
                if not self.owned:
                    self.turn.release()
                if self.plans is None:
                    self.close()
        return True

    cdef bint step(self) except -1:
        """Write what the other ranks read, and wait for them; return whether all have come, to the same call."""
        cdef Line *own = &self.lines[self.rank]
        own.fingerprints[self.seq & 1] = self.plan.fingerprint  # others may still read the previous call's
        if self.plan.kind != BARRIER:
            self.segment._turn ^= 1
            self.write(own)
        self.post(own)
        if self.await_all() and self.matches():
            return True
        self.segment._steps -= 1
        return False

    cdef hand_over(self, algorithm, found, tuple arguments, options):
        self.hold()
        if self.plan.kind == ALL_TO_ALL and type(arguments[0]) is numpy_array:
            arguments, options = self.split(arguments, options, self.size)
        self.queue.execute(found._replace(algorithm=algorithm), arguments, options, self.seq, self.started)

    def fail(self, *_):
        """Algorithm of a call that has failed: an error ends the group."""
        error, self.error = self.error, None  # which refers to the call's arrays
        raise error

    def resume(self, segment, *arguments):
        """Algorithm of a call that has begun: repeat its step, which stores the same count, and waits."""
        segment.step()
        if self.matches():
            self.collect(arguments)
        else:
            self.complete(segment, *arguments)

    cdef char *slot(self, int rank) noexcept:
        return self.slots + (self.segment._turn * self.size + rank) * self.slot_bytes

    cdef int64_t *note(self, int rank) noexcept:
        cdef size_t number = self.segment._turn * self.size + rank
        return <int64_t *>(<char *>(self.lines + self.size) + number * self.note_bytes)

    cdef void write(self, Line *own) noexcept:
        """Write what the other ranks read into the slot and the note of this rank."""
        cdef Plan plan = self.plan
        cdef char *slot = self.slot(self.rank)
        cdef size_t nbytes = self.count * plan.itemsize
        cdef int64_t *note
        cdef int i
        for i in range(plan.inputs):
            if i != plan.own_input:
                memcpy(slot + i * plan.lane, self.inputs[i], nbytes)
        if plan.kind == ALL_TO_ALL:
            note = self.note(self.rank)
            for i in range(self.size):
                note[i] = note[self.size + i] = self.count
                note[2 * self.size + 2 * i], note[2 * self.size + 2 * i + 1] = -1, 0  # no array is exposed

    cdef void post(self, Line *own) noexcept:
        """See Slots.step."""
        cdef bint sleepers = load_acquire(&own.sleepers) != 0
        self.segment._steps += 1
        if sleepers:
            store_release(&own.sleepers, 0)
        store_release(&own.count, self.segment._steps)
        full_fence()
        if sleepers or load_acquire(&own.sleepers):
            wake_sleepers(&own.count)

    cdef bint await_all(self) except -1:
        """Wait for the other ranks, but for none longer than a slice; return whether all have come."""
        cdef uint64_t steps = self.segment._steps, count
        cdef Line *line
        cdef int rank
        for rank in range(self.size):
            line = &self.lines[rank]
            if spin(&line.count, steps, self.oversubscribed, self.contention, self):
                continue
            self.hold()
            store_release(&line.sleepers, 1)
            full_fence()
            count = load_acquire(&line.count)
            if count < steps:
                with nogil:
                    sleep_while(&line.count, count, SLICE_NANOSECONDS)
                if load_acquire(&line.count) < steps:  # a rank is at most one step behind, if it obeys the rules
                    return False
        return True

    cdef bint matches(self) noexcept:
        """Return whether all ranks make the same call, an all_to_all with the same lengths."""
        cdef uint64_t fingerprint = self.plan.fingerprint
        cdef int rank, word = self.seq & 1
        for rank in range(self.size):
            if self.lines[rank].fingerprints[word] != fingerprint:
                return False
            if self.plan.kind == ALL_TO_ALL and memcmp(self.note(rank), self.note(self.rank), 32 * self.size):
                return False
        return True

    cdef int collect(self, arguments) except -1:
        """Read the slots of all ranks into this rank's outputs."""
        cdef Plan plan = self.plan
        cdef size_t nbytes = self.count * plan.itemsize
        cdef char *first = self.slot(0) + plan.offset
        cdef int rank
        if plan.op >= 0 and plan.outputs:
            for rank in range(self.size):
                self.parts[rank] = first + rank * self.slot_bytes
            if plan.inputs == 1 and self.rank < 2:  # nearer than this rank's slot, which the other ranks read
                self.parts[self.rank] = self.inputs[0]
            if not reduce_parts(self.outputs[0], self.parts, self.size, self.count, plan.op, plan.form, plan.itemsize):
                self.hold()
                self.combine(self.segment, plan.call.reduce_op, plan.offset, arguments[0])
        elif plan.outputs:
            if plan.own_output >= 0:  # first: the inputs may overlap the outputs
                memmove(self.outputs[plan.own_output], self.inputs[max(plan.own_input, 0)], nbytes)
            for i in range(plan.outputs):
                if i != plan.own_output:
                    memcpy(self.outputs[i], first + (i if plan.outputs > 1 else plan.root) * self.slot_bytes, nbytes)
        return 0

    cdef int hold(self) except -1:
        """Let other threads see the call, before this one releases the interpreter lock for the first time."""
        if not self.held:
            if not self.owned:
                self.turn.acquire(False)
            self.held = True
            state, plan = <object>self.state, self.plan
            state.call, state.seq, state.nbytes, state.started_at = plan.call, self.seq, self.nbytes, self.started
        return 0

    cdef int end(self) except -1:
        """Count and record the call."""
        cdef double ended = monotonic()
        cdef Plan plan = self.plan
        if not self.held:
            self.state.call, self.state.seq = plan.call, self.seq
        self.records.end(plan, Ended(self.seq, self.nbytes, self.started, ended))
        return 0


cdef bint spin(uint64_t *word, uint64_t value, bint oversubscribed, contention, Calls calls) except -1:
    """Wait a moment for a word; return whether it has the value. See Slots._wait and CoreContention.

    A rank with a core of its own that waits for a collective goes on without the interpreter lock: a sleep would make
    it late for the next one, where the other ranks sleep then. Not in the worker thread: its program computes meanwhile.
    """
    cdef double[2] slice
    if load_acquire(word) >= value or monotonic() < <double>contention.free_at:
        return load_acquire(word) >= value
    cdef bint free = poll(word, value, 1 if oversubscribed else SPINS, YIELDS if oversubscribed else SPIN_ROUNDS, slice)
    if calls is not None and (not free or not (oversubscribed or calls.owned) and load_acquire(word) < value):
        calls.hold()
        with nogil:
            free = free and poll(word, value, SPINS, LONG_SPIN_ROUNDS, slice)
    if not free:
        contention.lose_time_slice(slice[0], slice[1])
    return load_acquire(word) >= value


cdef bint poll(uint64_t *word, uint64_t value, int looks, int rounds, double *slice) noexcept nogil:
    """Look at a word, yielding the core after each round; return whether no other program had a time slice meanwhile."""
    cdef double first = monotonic()
    cdef int look
    for look in range(1, looks * rounds + 1):
        if load_acquire(word) >= value:
            break
        relax()
        if look % looks == 0:
            slice[0] = monotonic()
            sched_yield()
            slice[1] = monotonic()
            if slice[1] - slice[0] >= TIME_SLICE:
                return False
            if slice[1] - first >= MAX_SPIN:
                break
    return True


include "words.pxi"
include "messages.pxi"
include "tcp.pxi"


SOURCES = CHECKSUM  # of the files that this was built from, which the build computes
_array = numpy.frombuffer(bytes(24))  # read-only
_fields = _array.__array_interface__["data"][0], 1, 3, id(_array.dtype), CONTIGUOUS_ALIGNED
cdef ArrayFields *_c = <ArrayFields *><PyObject *>_array
if (<size_t>_c.data, _c.nd, _c.dimensions[0], <size_t>_c.descr, _c.flags & (CONTIGUOUS_ALIGNED | WRITEABLE)) != _fields:
    raise ImportError(f"NumPy {numpy.__version__} lays out arrays in another way")
