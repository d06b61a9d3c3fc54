# Accesses to shared memory that keep their order, for Python's steps and rings.

cdef class Words:
    """Words of shared memory for a processor that reorders accesses, see Mapping.words.

    What follows a load comes after it. What precedes a store comes before it, and what follows it after it.
    """

    cdef object memory  # which stays mapped
    cdef uint64_t *words

    def __init__(self, memory, size_t address):
        self.memory, self.words = memory, <uint64_t *>address

    def __getitem__(self, size_t number):
        return load_acquire(self.words + number)

    def __setitem__(self, size_t number, uint64_t value):
        store_release(self.words + number, value)
        full_fence()
