// Aborts an evaluation of a context from another thread.

#pragma once

#include <atomic>

#include "llama.h"

namespace towerd::wire {

class Interruption {
public:
    // Outlives the evaluations of `ctx`, which asks it after each node of a graph.
    explicit Interruption(llama_context * ctx) { llama_set_abort_callback(ctx, &is_asked, &state_); }
    Interruption(const Interruption &) = delete;
    Interruption & operator=(const Interruption &) = delete;

    // From here to disarm() an evaluation may be aborted.
    void arm() noexcept { state_ = State::Armed; }
    void disarm() noexcept { state_ = State::Idle; }
    // Aborts the running or next evaluation, if it may be aborted.
    void ask() noexcept {
        State armed = State::Armed;
        state_.compare_exchange_strong(armed, State::Asked);
    }

private:
    enum class State { Idle, Armed, Asked };

    static bool is_asked(void * state) { return *static_cast<std::atomic<State> *>(state) == State::Asked; }

    std::atomic<State> state_{State::Idle};
};

}  // namespace towerd::wire
