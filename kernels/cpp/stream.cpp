#include "stream.h"

#include <algorithm>
#include <cstring>

namespace towerd {

bool should_stream(const Isa & isa, std::size_t bytes) { return isa.stream != nullptr && bytes >= kStreamBytes; }

Stage::~Stage() {
    if (streams_) {
        write(n_);
        isa_.finish_stream();
    }
}

std::uint8_t * Stage::place(std::uint8_t * to, std::size_t n) {
    if (!streams_ || n > kRoom) {
        return to;
    }
    if (to_ + n_ != to) {
        write(n_);
        to_ = to;
    } else if (n_ >= kEnough || n_ + n > sizeof bytes_) {
        const std::size_t begun = reinterpret_cast<std::uintptr_t>(to) % kLineBytes;
        write(n_ - std::min(n_, begun));
    }
    std::uint8_t * at = bytes_ + n_;
    n_ += n;
    return at;
}

// Writes the first `n` bytes; the others, the start of an unfinished line, move to the front.
void Stage::write(std::size_t n) {
    if (n != 0) {
        isa_.stream(bytes_, to_, n);
        n_ -= n;
        to_ += n;
        std::memmove(bytes_, bytes_ + n, n_);
    }
}

}  // namespace towerd
