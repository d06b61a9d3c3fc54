# The arithmetic of the reductions: that of reduction.py, bit for bit, or False where its bits vary.

cdef extern from *:
    """
    #include <string.h>

    static inline float float_of(uint32_t bits) { float number; memcpy(&number, &bits, 4); return number; }
    static inline uint32_t bits_of(float number) { uint32_t bits; memcpy(&bits, &number, 4); return bits; }
    static inline uint64_t bits_of_double(double number) { uint64_t bits; memcpy(&bits, &number, 8); return bits; }
    /* Not 0 for NaN, and for equal numbers whose bits differ. */
    static inline uint32_t unclear_float(float one, float other) {
        uint32_t differ = bits_of(one) ^ bits_of(other); /* masks: a choice would not be vectorised */
        return (-(uint32_t)(one == other) & differ) | -(uint32_t)((one != one) | (other != other));
    }
    static inline uint64_t unclear_double(double one, double other) {
        uint64_t differ = bits_of_double(one) ^ bits_of_double(other);
        return one == other ? differ : one < other || one > other ? 0 : 1;
    }

    static inline float of_bfloat16(uint16_t bits) { return float_of((uint32_t)bits << 16); }
    static inline uint16_t to_bfloat16(float number) {
        uint32_t bits = bits_of(number);
        return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
    /* As in float16.py: the bits in the place of a float's are those of a number 2**112 times too small. */
    static inline float of_float16(uint16_t bits) {
        uint32_t scaled = bits_of(float_of((uint32_t)(bits & 0x7fff) << 13) * 0x1p112f);
        return float_of((uint32_t)(bits & 0x8000) << 16 | scaled);
    }
    static inline uint16_t to_float16(float number) {
        uint32_t bits = bits_of(number), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
        uint32_t subnormal = bits_of(float_of(size) + 0.5f) - 0x3f000000; /* the last bit of 0.5 is a subnormal's */
        uint32_t normal = (size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13;
        uint32_t small = -(uint32_t)(size < 0x38800000); /* without a branch, which would not be vectorised */
        return (uint16_t)(sign | (subnormal & small) | (normal & ~small));
    }
    """
    uint32_t bits_of(float number) noexcept nogil
    float of_bfloat16(uint16_t bits) noexcept nogil
    uint16_t to_bfloat16(float number) noexcept nogil
    float of_float16(uint16_t bits) noexcept nogil
    uint16_t to_float16(float number) noexcept nogil
    uint32_t unclear_float(float one, float other) noexcept nogil
    uint64_t unclear_double(double one, double other) noexcept nogil

cdef enum:
    BLOCK = 1 << 11  # elements that are reduced at a time: all stay in the first-level cache
    MAX_BFLOAT16 = 0x7f7f0000  # the largest one's bits as a float

cdef enum:  # see ReduceOp
    SUM, AVG, PRODUCT, MIN, MAX

ctypedef fused Number:  # integers without signs wrap around to the same bits (-fwrapv)
    float
    double
    int32_t
    int64_t


cdef bint extremes(Number *out, char **parts, Py_ssize_t at, int size, Py_ssize_t count, bint largest) noexcept nogil:
    """Find the least or largest numbers; return False for NaN, and for zeros of two signs, whose bits vary."""
    cdef Number *part
    cdef Number one, other
    cdef Py_ssize_t i
    cdef uint32_t narrow = 0
    cdef uint64_t wide = 0
    cdef int rank
    if <char *>out != parts[0] + at and <char *>out != parts[1] + at:
        memcpy(out, parts[0] + at, count * sizeof(Number))
    for rank in range(size):
        part = <Number *>(parts[rank] + at)
        for i in range(count):
            one, other = out[i], part[i]
            if Number is float:
                narrow |= unclear_float(one, other)
            elif Number is double:
                wide |= unclear_double(one, other)
            if largest:
                out[i] = one if one > other else other
            else:
                out[i] = one if one < other else other
    return not (narrow or wide)


cdef bint reduce_numbers(Number *out, char **parts, Py_ssize_t at, int size, Py_ssize_t count, int op) noexcept nogil:
    """Reduce in rank order; return False where a result is NaN, whose bits vary.

    The output may be one of the first two parts. Loops that overwrite a part are separate, or they are not vectorised.
    """
    cdef Number *before = <Number *>(parts[0] + at)
    cdef Number *part
    cdef Number ranks = size
    cdef Py_ssize_t i
    cdef int rank, nan = 0
    if op == MIN or op == MAX:
        return extremes(out, parts, at, size, count, op == MAX)
    for rank in range(1, size):
        part = <Number *>(parts[rank] + at)
        if part == out:
            before, part = part, before
        if before != out:
            for i in range(count):
                out[i] = before[i] * part[i] if op == PRODUCT else before[i] + part[i]
        elif op == PRODUCT:
            for i in range(count):
                out[i] *= part[i]
        else:
            for i in range(count):
                out[i] += part[i]
        before = out
    if op == AVG:
        for i in range(count):
            out[i] /= ranks
    if Number is float or Number is double:
        for i in range(count):
            nan |= out[i] != out[i]
    return not nan


cdef bint reduce_half(
    uint16_t *out, char **parts, Py_ssize_t at, int size, Py_ssize_t count, int op, char form
) noexcept nogil:
    """Reduce float16 or bfloat16 in float32 and round once; return False where numbers are infinite or NaN."""
    cdef float[2][BLOCK] rows
    cdef float *total = rows[0]
    cdef float *wide = total
    cdef float ranks = size
    cdef uint16_t *part
    cdef Py_ssize_t i
    cdef int rank, special = 0
    for rank in range(size):
        part = <uint16_t *>(parts[rank] + at)
        if form == c"E":
            for i in range(count):
                wide[i] = of_bfloat16(part[i])
        else:
            for i in range(count):
                wide[i] = of_float16(part[i])
                special |= (part[i] & 0x7c00) == 0x7c00
        if op == PRODUCT and rank:
            for i in range(count):
                total[i] *= wide[i]
        elif rank:
            for i in range(count):
                total[i] += wide[i]
        wide = rows[1]
    if op == AVG:
        for i in range(count):
            total[i] /= ranks
    if form == c"E":
        for i in range(count):
            special |= (bits_of(total[i]) & 0x7fffffff) >= MAX_BFLOAT16
            out[i] = to_bfloat16(total[i])
    else:
        for i in range(count):
            special |= (bits_of(total[i]) & 0x7fffffff) >= 0x47800000  # 65536
            out[i] = to_float16(total[i])
    return not special


cdef bint reduce_parts(
    char *output, char **parts, int size, Py_ssize_t total, int op, char form, Py_ssize_t itemsize
) noexcept:
    """Reduce the usual dtypes; return whether the result is exact."""
    cdef char *out
    cdef Py_ssize_t at, begin = 0, count
    cdef bint exact = True
    if op > MAX or op == AVG and form not in b"fdeE" or op > PRODUCT and form in b"eEILQ":
        return False
    while begin < total:
        count, at = min(total - begin, <Py_ssize_t>BLOCK), begin * itemsize
        out = output + at
        begin += BLOCK
        if form == c"f":
            exact &= reduce_numbers(<float *>out, parts, at, size, count, op)
        elif form == c"d":
            exact &= reduce_numbers(<double *>out, parts, at, size, count, op)
        elif form in b"eE":
            exact &= reduce_half(<uint16_t *>out, parts, at, size, count, op, form)
        elif form in b"iI":
            reduce_numbers(<int32_t *>out, parts, at, size, count, op)
        elif form in b"lLqQ":
            reduce_numbers(<int64_t *>out, parts, at, size, count, op)
        else:
            return False
    return exact
