#include "taps.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>

namespace towerd {

namespace {

// The leading fields of struct ggml_tensor (ggml.h).
struct TensorHead {
    std::int32_t type;
    void *       buffer;
    std::int64_t ne[4];
    std::size_t  nb[4];
};

constexpr std::int32_t kTypeF32 = 0;
constexpr std::size_t  kDigitsMax = 6;

// "Qcur-12" is (Qcur, 12); a layer of -1 where a name has none.
NodeTap::Place place_of(const char * name) {
    const char * dash = std::strrchr(name, '-');
    if (dash == nullptr || dash[1] == '\0') {
        return {name, -1};
    }
    const std::size_t n_digits = std::strspn(dash + 1, "0123456789");
    if (dash[1 + n_digits] != '\0' || n_digits > kDigitsMax) {
        return {name, -1};
    }
    return {std::string(name, dash), std::atoi(dash + 1)};
}

}  // namespace

void NodeTap::watch(std::vector<std::string> names) {
    names_ = std::move(names);
    values_.clear();
    error_.clear();
}

bool NodeTap::on_node(void * tensor, bool ask, void * tap) noexcept {
    return static_cast<NodeTap *>(tap)->see(tensor, ask);
}

// Before a node is computed, returns whether its data is wanted; after it, true: otherwise the computation stops.
bool NodeTap::see(const void * tensor, bool ask) {
    if (names_.empty()) {
        return !ask;
    }
    try {
        const Place place = place_of(functions_.name(tensor));
        if (place.second < 0 || std::find(names_.begin(), names_.end(), place.first) == names_.end()) {
            return !ask;
        }
        if (!ask && error_.empty()) {
            read(tensor, place);
        }
    } catch (const std::bad_alloc &) {
        fail("There is no memory for a tapped tensor.");
    } catch (const std::exception &) {
        fail("A tapped tensor cannot be read.");
    }
    return true;
}

void NodeTap::read(const void * tensor, const Place & place) {
    TensorHead head;
    std::memcpy(&head, tensor, sizeof head);
    std::uint64_t n_elements = 1;  // with another layout it may be any number
    for (const std::int64_t n : head.ne) {
        n_elements *= static_cast<std::uint64_t>(n);
    }
    if (n_elements != static_cast<std::uint64_t>(functions_.n_elements(tensor))) {
        fail("This llama.cpp lays its tensors out in another way.");
        return;
    }
    if (head.type != kTypeF32) {
        fail("A tapped tensor does not hold 32-bit floats.");
        return;
    }
    Values & values = values_[place];
    for (std::size_t i = 0; i < 4; ++i) {
        values.shape[i] = static_cast<std::size_t>(head.ne[3 - i]);
        values.strides[i] = head.nb[3 - i];
    }
    values.data.resize(functions_.n_bytes(tensor));
    functions_.get(tensor, values.data.data(), 0, values.data.size());
}

}  // namespace towerd
