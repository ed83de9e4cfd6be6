// What a client is told when something fails: llama-server's error object.

#pragma once

#include <exception>
#include <new>
#include <string>
#include <utility>

#include "server-common.h"

namespace towerd::wire {

class Refused : public std::exception {
public:
    explicit Refused(json error) : error_(std::move(error)), message_(json_value(error_, "message", std::string())) {}
    Refused(const std::string & message, error_type type) : Refused(format_error_response(message, type)) {}

    // {"code": status, "message": ..., "type": ...}
    const json & error() const { return error_; }
    const char * what() const noexcept override { return message_.c_str(); }

private:
    json        error_;
    std::string message_;
};

[[noreturn]] inline void refuse(const std::string & message) {
    throw Refused(message, ERROR_TYPE_INVALID_REQUEST);
}

// While one is alive, a failed assertion of ggml or llama.cpp on this thread throws std::runtime_error instead of
// ending the process. What was being worked on is lost, and nothing else.
class AbortGuard {
public:
    AbortGuard();
    ~AbortGuard();
    AbortGuard(const AbortGuard &)             = delete;
    AbortGuard & operator=(const AbortGuard &) = delete;
};

// Whatever `work` throws becomes a Refused of this type.
template <typename Work>
auto answering(error_type type, Work && work) {
    try {
        const AbortGuard guard;
        return work();
    } catch (const Refused &) {
        throw;
    } catch (const std::bad_alloc &) {
        throw Refused("There is no memory for this request now: try again in a few seconds", ERROR_TYPE_UNAVAILABLE);
    } catch (const std::exception & error) {
        throw Refused(error.what(), type);
    }
}

}  // namespace towerd::wire
