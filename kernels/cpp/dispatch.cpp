#include "dispatch.h"

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace towerd {

namespace avx512 {
const Isa & isa();
}
namespace avx2 {
const Isa & isa();
}
namespace neon {
const Isa & isa();
}
namespace generic {
const Isa & isa();
}

namespace {

enum Instructions : std::uint32_t {
    kAvx2 = 1u << 0,
    kF16c = 1u << 1,
    kFma = 1u << 2,
    kAvx512F = 1u << 3,
    kAvx512Bw = 1u << 4,
    kAvx512Vl = 1u << 5,
    kAvx512Dq = 1u << 6,
};

#if defined(__x86_64__)

// The registers that the operating system saves: XCR0, or 0 if it does not tell.
std::uint64_t saved_registers(std::uint32_t leaf1_ecx) {
    constexpr std::uint32_t osxsave = 1u << 27;
    if ((leaf1_ecx & osxsave) == 0) {
        return 0;
    }
    std::uint32_t low = 0;
    std::uint32_t high = 0;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return std::uint64_t{high} << 32 | low;
}

std::uint32_t detect() {
    std::uint32_t a = 0;
    std::uint32_t b = 0;
    std::uint32_t c = 0;
    std::uint32_t d = 0;
    if (__get_cpuid(1, &a, &b, &c, &d) == 0) {
        return 0;
    }
    const std::uint64_t saved = saved_registers(c);
    constexpr std::uint64_t ymm = 0x6;
    constexpr std::uint64_t zmm = 0xe6;
    std::uint32_t found = 0;
    const auto add = [&](bool has, Instructions what) { found |= has ? what : 0u; };
    if ((saved & ymm) == ymm) {
        add((c >> 29 & 1) != 0, kF16c);
        add((c >> 12 & 1) != 0, kFma);
        if (__get_cpuid_count(7, 0, &a, &b, &c, &d) != 0) {
            const bool wide = (saved & zmm) == zmm;
            add((b >> 5 & 1) != 0, kAvx2);
            add(wide && (b >> 16 & 1) != 0, kAvx512F);
            add(wide && (b >> 17 & 1) != 0, kAvx512Dq);
            add(wide && (b >> 30 & 1) != 0, kAvx512Bw);
            add(wide && (b >> 31 & 1) != 0, kAvx512Vl);
        }
    }
    return found;
}

#else

std::uint32_t detect() { return 0; }

#endif

struct Implementation {
    std::uint32_t required;
    const Isa & (*isa)();
};

// Best first.
constexpr Implementation kImplementations[] = {
#if defined(__x86_64__)
    {kAvx2 | kF16c | kFma | kAvx512F | kAvx512Bw | kAvx512Vl | kAvx512Dq, avx512::isa},
    {kAvx2 | kF16c | kFma, avx2::isa},
#endif
#if defined(__aarch64__)
    {0, neon::isa},
#endif
    {0, generic::isa},
};

std::vector<const Isa *> supported() {
    const std::uint32_t      found = detect();
    std::vector<const Isa *> isas;
    for (const Implementation & each : kImplementations) {
        if ((each.required & ~found) == 0) {
            isas.push_back(&each.isa());
        }
    }
    return isas;
}

}  // namespace

const std::vector<const Isa *> & available() {
    static const std::vector<const Isa *> isas = supported();
    return isas;
}

const Isa * isa_named(const char * name) {
    for (const Isa * isa : available()) {
        if (std::strcmp(isa->name, name) == 0) {
            return isa;
        }
    }
    return nullptr;
}

}  // namespace towerd
