# cython: language_level=3, boundscheck=False, wraparound=False
"""Words in memory that processes share: what no other language of the package reads in order on every processor."""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport uint64_t

cdef extern from *:
    """
    #include <stdatomic.h>
    static uint64_t load_acquire(uint64_t *word) {
        return atomic_load_explicit((_Atomic uint64_t *)word, memory_order_acquire);
    }
    """
    uint64_t load_acquire(uint64_t *word) nogil


def load(memory, Py_ssize_t offset):
    """Return the 64-bit word at an offset, read before all that is read after it.

    Raises:
        ValueError: there is no aligned word at that offset.
    """
    cdef Py_buffer view
    PyObject_GetBuffer(memory, &view, PyBUF_WRITABLE | PyBUF_SIMPLE)
    try:
        if offset < 0 or offset % 8 or offset + 8 > view.len:
            raise ValueError(f"there is no aligned word at offset {offset} of {view.len} bytes")
        return load_acquire(<uint64_t *>(<char *>view.buf + offset))
    finally:
        PyBuffer_Release(&view)
