// Reductions and scaling of arrays in a GPU's memory: one kernel reads every source once and writes every destination.
//
// C++14 for NVRTC, which has no headers; any C++ compiler accepts it with definitions of a few CUDA keywords. The
// compiler must not contract multiplications and additions, flush subnormals (-ftz) or approximate divisions.
// kernels.py appends the kernel of one element type and one operation.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// The kernel's only argument, passed by value.
template <int POINTERS>
struct Table {
    u64 count;         // elements of each array
    u64 head;          // elements before the first that lies at a multiple of 16 bytes
    u64 packs;         // 16-byte packs after the head; the rest is the tail
    u64 sources;       // number of source pointers
    u64 destinations;  // number of destination pointers
    u64 members;       // divisor of an average
    u64 factor[2];     // of a scaling, real and imaginary part: bits in the type of the multiplication
    char* pointer[POINTERS];  // the sources, then the destinations
};

struct alignas(16) Pack {
    u32 word[4];
};

// Conversions between numbers and their bits.

__device__ inline u32 bits_of(float number) {
    u32 bits;
    memcpy(&bits, &number, sizeof bits);
    return bits;
}

__device__ inline u64 bits_of(double number) {
    u64 bits;
    memcpy(&bits, &number, sizeof bits);
    return bits;
}

__device__ inline float float_of(u32 bits) {
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

__device__ inline double double_of(u64 bits) {
    double number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

// Access to the elements of a pack and of memory, by their size in bytes.

template <int BYTES>
struct Size;
template <>
struct Size<1> {
    typedef u8 Cell;
};
template <>
struct Size<2> {
    typedef u16 Cell;
};
template <>
struct Size<4> {
    typedef u32 Cell;
};

template <int BYTES>
struct Cells {
    typedef u32 Bits;
    typedef typename Size<BYTES>::Cell Cell;
    static constexpr u32 MASK = 0xffffffffu >> (32 - 8 * BYTES);
    __device__ static u32 get(const Pack& pack, int i) { return pack.word[i * BYTES / 4] >> (i * BYTES % 4 * 8) & MASK; }
    __device__ static void put(Pack& pack, int i, u32 bits) {  // the place must be zero
        pack.word[i * BYTES / 4] |= (bits & MASK) << (i * BYTES % 4 * 8);
    }
};

template <>
struct Cells<8> {
    typedef u64 Bits;
    typedef u64 Cell;
    __device__ static u64 get(const Pack& pack, int i) { return pack.word[2 * i] | u64(pack.word[2 * i + 1]) << 32; }
    __device__ static void put(Pack& pack, int i, u64 bits) {
        pack.word[2 * i] = u32(bits);
        pack.word[2 * i + 1] = u32(bits >> 32);
    }
};

// Number formats; Wide is the type of the arithmetic.

template <class T, class W>
struct Integer {
    typedef W Wide;  // unsigned, except for comparisons: overflow of signed integers is undefined
    static constexpr int BYTES = sizeof(T);
    __device__ static W decode(u64 bits) { return W(T(bits)); }
    __device__ static u64 encode(W wide) { return u64(wide); }
    __device__ static W factor(u64 bits) { return W(bits); }
    __device__ static W mean(W sum, u64 members) {
        if (T(-1) > T(0)) return W(sum / W(members));
        return sizeof(W) == 4 ? W(int(sum) / int(members)) : W((long long)(sum) / (long long)(members));
    }
};

struct Single {
    typedef float Wide;
    static constexpr int BYTES = 4;
    __device__ static float decode(u32 bits) { return float_of(bits); }
    __device__ static u32 encode(float wide) { return bits_of(wide); }
    __device__ static float factor(u64 bits) { return float_of(u32(bits)); }
    __device__ static float mean(float sum, u64 members) { return sum / float(members); }
};

struct Double {
    typedef double Wide;
    static constexpr int BYTES = 8;
    __device__ static double decode(u64 bits) { return double_of(bits); }
    __device__ static u64 encode(double wide) { return bits_of(wide); }
    __device__ static double factor(u64 bits) { return double_of(bits); }
    __device__ static double mean(double sum, u64 members) { return sum / double(members); }
};

// Meaning of the largest bit patterns in formats narrower than float32.
enum Kind {
    IEEE,  // the largest exponent is infinity and NaN
    FN,    // finite: only the largest pattern of either sign is NaN
    FNUZ,  // finite, unsigned zero: the pattern of -0 is NaN
};

// Sign, exponent and mantissa in 8 or 16 bits. Rounds half to even; overflow is infinity, or NaN in formats without it.
template <int BYTES_, int MANTISSA, int BIAS, Kind KIND>
struct Narrow {
    typedef float Wide;
    static constexpr int BYTES = BYTES_;
    static constexpr int TO_SIGN = 32 - 8 * BYTES;
    static constexpr int SHIFT = 23 - MANTISSA;
    static constexpr u32 SIGN = 1u << (8 * BYTES - 1);
    static constexpr u32 MAGNITUDE = SIGN - 1;
    static constexpr u32 INFINITE = SIGN - (1u << MANTISSA);  // of IEEE
    static constexpr u32 NOT_A_NUMBER = KIND == IEEE ? INFINITE | 1u << (MANTISSA - 1) : KIND == FN ? MAGNITUDE : SIGN;
    static constexpr u32 OVERFLOWN = KIND == IEEE ? INFINITE : NOT_A_NUMBER;
    static constexpr u32 LARGEST = KIND == IEEE ? INFINITE - 1 : KIND == FN ? MAGNITUDE - 1 : MAGNITUDE;
    static constexpr u32 LEAST = u32(128 - BIAS) << 23;               // the least normal number, as a float's bits
    static constexpr u32 ROUNDER = u32(151 - BIAS - MANTISSA) << 23;  // a float with the last bit of the subnormals

    __device__ static float decode(u32 bits) {
        u32 magnitude = bits & MAGNITUDE, sign = (bits & SIGN) << TO_SIGN;
        if (BIAS == 127) return float_of(magnitude << SHIFT | sign);
        // Shifted to their place in a float, the bits are too small by a power of two, subnormal or not.
        u32 number = bits_of(float_of(magnitude << SHIFT) * float_of(u32(254 - BIAS) << 23));
        if (KIND == IEEE && magnitude >= INFINITE) number = magnitude << SHIFT | 0x7f800000u;
        if (KIND == FN && magnitude == MAGNITUDE) number = 0x7fc00000u;
        if (KIND == FNUZ && bits == SIGN) number = 0x7fc00000u;
        return float_of(number | sign);
    }

    __device__ static u32 encode(float wide) {
        u32 bits = bits_of(wide), sign = bits >> TO_SIGN & SIGN;
        bits &= 0x7fffffffu;
        u32 number = ((bits + (1u << (SHIFT - 1)) - 1 + (bits >> SHIFT & 1)) >> SHIFT) - (u32(127 - BIAS) << MANTISSA);
        if (BIAS != 127 && bits < LEAST) number = bits_of(float_of(bits) + float_of(ROUNDER)) - ROUNDER;
        else if (number > LARGEST) number = OVERFLOWN;
        if (bits > 0x7f800000u) number = NOT_A_NUMBER;
        return KIND == FNUZ && (number == 0 || number == SIGN) ? number : number | sign;
    }

    __device__ static float factor(u64 bits) { return float_of(u32(bits)); }
    __device__ static float mean(float sum, u64 members) { return sum / float(members); }
};

struct Half : Narrow<2, 10, 15, IEEE> {
#ifdef __CUDA_ARCH__
    __device__ static float decode(u32 bits) {
        float wide;
        asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(u16(bits)));
        return wide;
    }
    __device__ static u32 encode(float wide) {
        u16 bits;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(wide));
        return bits;
    }
#endif
};

// Powers of two from 2**-127 on: only an exponent, without sign and zero; the largest pattern is NaN.
struct Exponent : Narrow<1, 2, 15, IEEE> {
    __device__ static float decode(u32 bits) {
        return float_of(bits == 0xff ? 0x7fc00000u : bits == 0 ? 0x00400000u : bits << 23);
    }
    __device__ static u32 encode(float wide) {
        u32 bits = bits_of(wide);
        if (bits == 0 || bits > 0x7f800000u) return 0xff;
        return (bits + 0x00400000u - (bits < 0x00800000u)) >> 23;  // rounds half up, except to the least
    }
};

// Elements: a real number, or the two parts of a complex number.

template <class Format>
struct Real : Format {
    static constexpr int PARTS = 1;
    typedef typename Format::Wide Wide;
    typedef Cells<Format::BYTES> In;
    __device__ static Wide get(const Pack& pack, int i) { return Format::decode(In::get(pack, i)); }
    __device__ static void put(Pack& pack, int i, Wide wide) { In::put(pack, i, Format::encode(wide)); }
    __device__ static Wide scale(Wide wide, const u64* factor) { return wide * Format::factor(factor[0]); }
};

template <class R>
struct Complex {
    R real, imag;
};

__device__ inline float fused(float a, float b, float c) { return fmaf(a, b, c); }
__device__ inline double fused(double a, double b, double c) { return fma(a, b, c); }

template <class R>
__device__ inline Complex<R> operator+(Complex<R> a, Complex<R> b) {
    return {a.real + b.real, a.imag + b.imag};
}

// Rounds as NumPy's vector loops do on processors with fused multiply-add.
template <class R>
__device__ inline Complex<R> operator*(Complex<R> a, Complex<R> b) {
    return {fused(a.real, b.real, -(a.imag * b.imag)), fused(a.real, b.imag, a.imag * b.real)};
}

template <class Format>
struct Pair {
    static constexpr int PARTS = 2;
    static constexpr int BYTES = Format::BYTES;
    typedef typename Format::Wide Part;
    typedef Complex<Part> Wide;
    typedef Cells<BYTES> In;
    __device__ static Wide get(const Pack& pack, int i) {
        return {Format::decode(In::get(pack, 2 * i)), Format::decode(In::get(pack, 2 * i + 1))};
    }
    __device__ static void put(Pack& pack, int i, Wide wide) {
        In::put(pack, 2 * i, Format::encode(wide.real));
        In::put(pack, 2 * i + 1, Format::encode(wide.imag));
    }
    __device__ static Wide scale(Wide wide, const u64* factor) {
        return wide * Wide{Format::factor(factor[0]), Format::factor(factor[1])};
    }
    // Complex division by members + 0i, by Smith's method as in NumPy; complex32 divides its parts by powers of two.
    __device__ static Wide mean(Wide sum, u64 members) {
        Part divisor = Part(members), zero = Part(0), inverse = Part(1) / divisor;
        if (BYTES == 2 && (members & (members - 1)) == 0) return {sum.real / divisor, sum.imag / divisor};
        return {(sum.real + sum.imag * zero) * inverse, (sum.imag - sum.real * zero) * inverse};
    }
};

// Operations: join combines two elements, finish converts the total to the result.

struct Unchanged {
    template <class Element, class W, class T>
    __device__ static W finish(W total, const T&) {
        return total;
    }
};

struct Sum : Unchanged {
    template <class W>
    __device__ static W join(W a, W b) {
        return a + b;
    }
};

struct Average : Sum {
    template <class Element, class W, class T>
    __device__ static W finish(W total, const T& table) {
        return Element::mean(total, table.members);
    }
};

struct Scale : Sum {
    template <class Element, class W, class T>
    __device__ static W finish(W total, const T& table) {
        return Element::scale(total, table.factor);
    }
};

struct Product : Unchanged {
    template <class W>
    __device__ static W join(W a, W b) {
        return a * b;
    }
};

struct Minimum : Unchanged {
    template <class W>
    __device__ static W join(W a, W b) {
        return a < b || a != a ? a : b;  // a NaN operand is the result
    }
};

struct Maximum : Unchanged {
    template <class W>
    __device__ static W join(W a, W b) {
        return a > b || a != a ? a : b;
    }
};

struct And : Unchanged {
    template <class W>
    __device__ static W join(W a, W b) {
        return a & b;
    }
};

struct Or : Unchanged {
    template <class W>
    __device__ static W join(W a, W b) {
        return a | b;
    }
};

struct Xor : Unchanged {
    template <class W>
    __device__ static W join(W a, W b) {
        return a ^ b;
    }
};

// Memory access: a whole pack, or one element in the first place of a pack.

template <class Element>
struct Whole {
    static constexpr int ELEMENTS = 16 / (Element::BYTES * Element::PARTS);
    __device__ static u64 place(u64 pack, u64 head, u64) { return head * (16 / ELEMENTS) + pack * 16; }
    __device__ static Pack load(const char* address) { return *(const Pack*)address; }
    __device__ static void store(char* address, const Pack& pack) { *(Pack*)address = pack; }
};

template <class Element>
struct One {
    typedef Cells<Element::BYTES> In;
    static constexpr int ELEMENTS = 1;
    __device__ static u64 place(u64 element, u64 head, u64 packs) {  // for elements of the head and the tail
        return element * (Element::BYTES * Element::PARTS) + (element < head ? 0 : packs * 16);
    }
    __device__ static Pack load(const char* address) {
        Pack pack = {};
#pragma unroll
        for (int part = 0; part < Element::PARTS; part++)
            In::put(pack, part, ((const typename In::Cell*)address)[part]);
        return pack;
    }
    __device__ static void store(char* address, const Pack& pack) {
#pragma unroll
        for (int part = 0; part < Element::PARTS; part++)
            ((typename In::Cell*)address)[part] = typename In::Cell(In::get(pack, part));
    }
};

// Reduce the elements at COUNT indices. All reads precede all writes, as a destination may be a source.
template <class Element, class Operation, class Access, int COUNT, class T>
__device__ inline void reduce_at(const T& table, u64 index, u64 stride) {
    typedef typename Element::Wide Wide;
    u64 place[COUNT];
    Pack pack[COUNT];
    Wide total[COUNT][Access::ELEMENTS];
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        place[i] = Access::place(index + i * stride, table.head, table.packs);
        pack[i] = Access::load(table.pointer[0] + place[i]);
    }
#pragma unroll
    for (int i = 0; i < COUNT; i++)
#pragma unroll
        for (int j = 0; j < Access::ELEMENTS; j++) total[i][j] = Element::get(pack[i], j);
#pragma unroll 1
    for (int source = 1; source < int(table.sources); source++) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) pack[i] = Access::load(table.pointer[source] + place[i]);
#pragma unroll
        for (int i = 0; i < COUNT; i++)
#pragma unroll
            for (int j = 0; j < Access::ELEMENTS; j++)
                total[i][j] = Operation::join(total[i][j], Element::get(pack[i], j));
    }
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        pack[i] = {};
#pragma unroll
        for (int j = 0; j < Access::ELEMENTS; j++)
            Element::put(pack[i], j, Operation::template finish<Element>(total[i][j], table));
    }
#pragma unroll 1
    for (int destination = 0; destination < int(table.destinations); destination++)
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            Access::store(table.pointer[int(table.sources) + destination] + place[i], pack[i]);
}

// Each thread reduces several packs at a time, so that enough loads are in flight to saturate the memory, then
// single packs, then elements of the head and the tail.
template <class Element, class Operation, class T>
__device__ inline void reduce(const T& table) {
    typedef Whole<Element> Packs;
    const int AT_ONCE = Element::BYTES == 1 ? 2 : 4;  // packs of 16 numbers exhaust the registers
    const u64 thread = u64(blockIdx.x) * blockDim.x + threadIdx.x, threads = u64(gridDim.x) * blockDim.x;
    u64 pack = thread;
    for (; pack + (AT_ONCE - 1) * threads < table.packs; pack += AT_ONCE * threads)
        reduce_at<Element, Operation, Packs, AT_ONCE>(table, pack, threads);
    for (; pack < table.packs; pack += threads) reduce_at<Element, Operation, Packs, 1>(table, pack, threads);
    for (u64 single = thread; single < table.count - table.packs * Packs::ELEMENTS; single += threads)
        reduce_at<Element, Operation, One<Element>, 1>(table, single, threads);
}
