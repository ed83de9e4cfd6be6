// A stream of server-sent events from one socket to another, while nothing in it needs a second look.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace towerd {

struct Marks {
    std::vector<std::string> goes_on;  // an event with one of these may pass
    std::vector<std::string> ends;     // unless it has one of these
};

struct Relayed {
    std::string passed;  // the events that went out, and those in `unsent`
    std::string unsent;  // what the client did not take of them, as it is to be written
    std::string rest;    // what was read beyond, from the first byte of a chunk on
};

// Until something else arrives than whole chunks of whole events that may pass, `bytes_max` have
// passed, the client takes no more, `up` ends or `cancel` can be read. Allocates, does not throw otherwise.
Relayed relay(int up, int down, int cancel, const Marks & marks, std::size_t bytes_max, bool is_chunked);

}  // namespace towerd
