#include <cstdio>
#include <stdexcept>

#include "ggml.h"
#include "refused.h"

namespace towerd::wire {

namespace {

thread_local int      guards = 0;
ggml_abort_callback_t previous = nullptr;

void on_abort(const char * message) {
    if (guards > 0) {
        throw std::runtime_error(message);
    }
    if (previous != nullptr) {
        previous(message);
    } else {
        std::fprintf(stderr, "%s\n", message);
    }
}

const bool installed = [] {
    previous = ggml_set_abort_callback(&on_abort);
    return true;
}();

}  // namespace

AbortGuard::AbortGuard() {
    ++guards;
}

AbortGuard::~AbortGuard() {
    --guards;
}

}  // namespace towerd::wire
