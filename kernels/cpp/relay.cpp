// The contract is in towerd.kernels.reference_relay.

#include "relay.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <string_view>

namespace towerd {

namespace {

constexpr std::size_t kReadBytes     = 16 * 1024;
constexpr std::size_t kSizeLineBytes = 16;
#ifdef MSG_NOSIGNAL
constexpr int kSendFlags = MSG_DONTWAIT | MSG_NOSIGNAL;
#else
constexpr int kSendFlags = MSG_DONTWAIT;  // Python ignores SIGPIPE
#endif

bool has_any(std::string_view event, const std::vector<std::string> & marks) {
    return std::any_of(marks.begin(), marks.end(),
                       [&](const std::string & mark) { return event.find(mark) != event.npos; });
}

bool may_pass(std::string_view data, const Marks & marks) {
    if (data.find('\r') != data.npos) {
        return false;
    }
    while (!data.empty()) {
        const std::size_t end = data.find("\n\n");
        if (end == data.npos) {
            return false;
        }
        const std::string_view event = data.substr(0, end);
        if (!has_any(event, marks.goes_on) || has_any(event, marks.ends)) {
            return false;
        }
        data.remove_prefix(end + 2);
    }
    return true;
}

struct Chunk {
    enum { kWhole, kPartial, kStrange } state;
    std::string_view data;   // of a whole one
    std::size_t      bytes;  // with its size and line breaks
};

std::size_t hex_digit(char c) {
    if (c >= '0' && c <= '9') {
        return static_cast<std::size_t>(c - '0');
    }
    const char lower = static_cast<char>(c | 0x20);
    return lower >= 'a' && lower <= 'f' ? static_cast<std::size_t>(lower - 'a' + 10) : 16;
}

Chunk first_chunk(std::string_view raw, std::size_t bytes_max) {
    const std::size_t line = raw.substr(0, kSizeLineBytes).find("\r\n");
    if (line == raw.npos) {
        return {raw.size() < kSizeLineBytes ? Chunk::kPartial : Chunk::kStrange, {}, 0};
    }
    std::size_t n = 0;
    for (const char c : raw.substr(0, line)) {
        const std::size_t digit = hex_digit(c);
        if (digit > 15) {
            return {Chunk::kStrange, {}, 0};
        }
        n = 16 * n + digit;
        if (n > bytes_max) {
            return {Chunk::kStrange, {}, 0};
        }
    }
    if (n == 0) {
        return {Chunk::kStrange, {}, 0};  // the end
    }
    const std::size_t bytes = line + 2 + n + 2;
    if (raw.size() < bytes) {
        return {Chunk::kPartial, {}, 0};
    }
    const bool is_closed = raw.substr(bytes - 2, 2) == "\r\n";
    return {is_closed ? Chunk::kWhole : Chunk::kStrange, raw.substr(line + 2, n), bytes};
}

// What of `raw` may go out, in `out` and `passed`; true while nothing needs a second look.
bool take(std::string & raw, std::string & out, std::string & passed, const Marks & marks, std::size_t bytes_max,
          bool is_chunked) {
    std::size_t at      = 0;
    bool        is_fine = true;
    while (at < raw.size()) {
        const std::string_view left  = std::string_view(raw).substr(at);
        const Chunk            chunk = first_chunk(left, bytes_max);
        if (chunk.state != Chunk::kWhole || !may_pass(chunk.data, marks)) {
            is_fine = chunk.state == Chunk::kPartial;
            break;
        }
        passed += chunk.data;
        out += is_chunked ? left.substr(0, chunk.bytes) : chunk.data;
        at += chunk.bytes;
    }
    raw.erase(0, at);
    return is_fine;
}

std::size_t sent_of(int down, const std::string & out) {
    std::size_t n = 0;
    while (n < out.size()) {
        const ssize_t more = send(down, out.data() + n, out.size() - n, kSendFlags);
        if (more < 0 && errno == EINTR) {
            continue;
        }
        if (more <= 0) {
            break;
        }
        n += static_cast<std::size_t>(more);
    }
    return n;
}

// Appends what has arrived; false at the end, on an error, and when told to stop.
bool read_more(int up, int cancel, std::string & raw) {
    for (;;) {
        pollfd    watched[] = {{cancel, POLLIN, 0}, {up, POLLIN, 0}};
        const int n_ready   = poll(watched, 2, -1);
        if (n_ready < 0 && errno != EINTR) {
            return false;
        }
        if (n_ready <= 0) {
            continue;
        }
        if (watched[0].revents != 0) {
            return false;
        }
        char          bytes[kReadBytes];
        const ssize_t n = recv(up, bytes, sizeof bytes, MSG_DONTWAIT);
        if (n > 0) {
            raw.append(bytes, static_cast<std::size_t>(n));
            return true;
        }
        if (n == 0 || (errno != EINTR && errno != EAGAIN && errno != EWOULDBLOCK)) {
            return false;
        }
    }
}

}  // namespace

Relayed relay(int up, int down, int cancel, const Marks & marks, std::size_t bytes_max, bool is_chunked) {
    Relayed     found;
    std::string out;
    while (found.passed.size() < bytes_max && read_more(up, cancel, found.rest)) {
        out.clear();
        const bool        is_fine = take(found.rest, out, found.passed, marks, bytes_max, is_chunked);
        const std::size_t n       = sent_of(down, out);
        if (n < out.size()) {
            found.unsent = out.substr(n);
            break;
        }
        if (!is_fine) {
            break;
        }
    }
    return found;
}

}  // namespace towerd
