// towerd.kernels._native.decrypt_pages: pages of sealed files are decrypted without the GIL. All cryptography is that of a
// libcrypto which the process has loaded: its functions (EVP_*, the same since OpenSSL 1.1) come as addresses, so that
// nothing is linked with one.

#include <nanobind/nanobind.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "arguments.h"
#include "bind.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace towerd {

namespace {

constexpr std::size_t kKeyBytes = 32, kNonceBytes = 12, kTagBytes = 16, kFunctions = 7;
constexpr int         kSetTag = 0x11;  // EVP_CTRL_AEAD_SET_TAG

using New    = void * (*) ();
using Free   = void (*)(void *);
using Cipher = const void * (*) ();
using Init   = int (*)(void *, const void *, void *, const std::uint8_t *, const std::uint8_t *);
using Update = int (*)(void *, std::uint8_t *, int *, const std::uint8_t *, int);
using Ctrl   = int (*)(void *, int, int, void *);
using Final  = int (*)(void *, std::uint8_t *, int *);

// A context of libcrypto, which wipes the key that it has when it is freed.
class Context {
public:
    explicit Context(const std::array<std::uintptr_t, kFunctions> & at)
        : free_(reinterpret_cast<Free>(at[1])), cipher_(reinterpret_cast<Cipher>(at[2])), init_(reinterpret_cast<Init>(at[3])),
          update_(reinterpret_cast<Update>(at[4])), ctrl_(reinterpret_cast<Ctrl>(at[5])), final_(reinterpret_cast<Final>(at[6])),
          context_(reinterpret_cast<New>(at[0])()) {}
    Context(const Context &) = delete;
    Context & operator=(const Context &) = delete;
    ~Context() { free_(context_); }

    bool set_key(const std::uint8_t * key) { return context_ != nullptr && init_(context_, cipher_(), nullptr, key, nullptr) == 1; }

    // The number of a page, little-endian, is its nonce. False: it is damaged.
    bool decrypt(std::size_t page, const std::uint8_t * sealed, std::uint8_t * plain, std::size_t n_bytes) {
        std::uint8_t nonce[kNonceBytes] = {}, tag[kTagBytes];
        for (std::size_t i = 0; i < sizeof page; ++i) {
            nonce[i] = static_cast<std::uint8_t>(static_cast<std::uint64_t>(page) >> (8 * i));
        }
        for (std::size_t i = 0; i < kTagBytes; ++i) {
            tag[i] = sealed[n_bytes + i];
        }
        int  n = 0, n_last = 0;
        return init_(context_, nullptr, nullptr, nullptr, nonce) == 1 &&
               update_(context_, plain, &n, sealed, static_cast<int>(n_bytes)) == 1 && n == static_cast<int>(n_bytes) &&
               ctrl_(context_, kSetTag, kTagBytes, tag) == 1 && final_(context_, plain + n_bytes, &n_last) == 1;
    }

private:
    Free   free_;
    Cipher cipher_;
    Init   init_;
    Update update_;
    Ctrl   ctrl_;
    Final  final_;
    void * context_;
};

std::array<std::uintptr_t, kFunctions> functions_of(nb::handle given) {
    std::array<std::uintptr_t, kFunctions> at{};
    const nb::sequence                     each = sequence_of(given, "functions");
    if (nb::len(each) != kFunctions) {
        refuse("functions", "expected " + std::to_string(kFunctions) + " addresses");
    }
    for (std::size_t i = 0; i < kFunctions; ++i) {
        if (!nb::try_cast(each[i], at[i]) || at[i] == 0) {
            refuse("functions", "expected addresses");
        }
    }
    return at;
}

bool decrypt_pages(nb::handle functions, nb::handle key, nb::handle sealed, nb::handle plain, nb::handle page_bytes,
                   nb::handle first) {
    const auto   at = functions_of(functions);
    const Buffer secret(key, "key", false, 1, 1, kBytes), from(sealed, "sealed", false, 1, 1, kBytes);
    const Buffer to(plain, "plain", true, 1, 1, kBytes);
    secret.require_contiguous("key");
    from.require_contiguous("sealed");
    to.require_contiguous("plain");
    if (secret.shape(0) != kKeyBytes) {
        refuse("key", "expected 32 bytes");
    }
    const std::size_t page = count_of(page_bytes, "page_bytes", 1, 1LL << 30), n_bytes = to.shape(0);
    const std::size_t number = count_of(first, "first", 0, 1LL << 48), n_pages = (n_bytes + page - 1) / page;
    if (from.shape(0) != n_bytes + kTagBytes * n_pages) {
        refuse("sealed", "expected the pages of `plain`, each with its tag");
    }
    if (overlap(from.data(), from.shape(0), to.data(), n_bytes)) {
        refuse("plain", "shares memory with sealed");
    }
    const nb::gil_scoped_release free;
    Context                      context(at);
    bool                         is_sound = context.set_key(secret.data());
    for (std::size_t i = 0; i < n_pages && is_sound; ++i) {
        const std::size_t size = std::min(page, n_bytes - i * page);
        is_sound = context.decrypt(number + i, from.data() + i * (page + kTagBytes), to.data() + i * page, size);
    }
    return is_sound;
}

}  // namespace

void bind_sealed_pages(nb::module_ & m) {
    m.def("decrypt_pages", &decrypt_pages, "functions"_a.none(), "key"_a.none(), "sealed"_a.none(), "plain"_a.none(),
          "page_bytes"_a.none(), "first"_a.none(),
          "Decrypt pages of a sealed file by functions of a libcrypto. False: one is damaged.");
}

}  // namespace towerd
