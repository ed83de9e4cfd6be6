// Run independent tasks on a few threads; the caller is one of them.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <system_error>
#include <thread>
#include <vector>

namespace towerd {

constexpr std::size_t kTaskBytes = std::size_t{256} << 10;   // one task: well inside a core's L2
constexpr std::size_t kThreadBytes = std::size_t{1} << 20;   // below this a thread costs more than it gains

inline std::size_t useful_threads(std::size_t n_threads, std::size_t bytes) {
    return std::max<std::size_t>(1, std::min(n_threads, bytes / kThreadBytes + 1));
}

// Calls task(i, worker) once for each i in [0, n_tasks), in any order; calls with the same worker,
// a number below n_threads, never run at the same time. `task` must not throw.
template <typename Task>
void parallel_for(std::size_t n_tasks, std::size_t n_threads, const Task & task) {
    std::atomic<std::size_t> next{0};
    const auto work = [&](std::size_t worker) {
        for (std::size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n_tasks;) {
            task(i, worker);
        }
    };
    std::vector<std::thread> helpers;
    const std::size_t wanted = std::min(n_threads, n_tasks);
    helpers.reserve(wanted);
    try {
        while (helpers.size() + 1 < wanted) {
            helpers.emplace_back(work, helpers.size() + 1);
        }
    } catch (const std::system_error &) {
        // The process may start no more threads; those that started and this one do the work.
    }
    work(0);
    for (auto & helper : helpers) {
        helper.join();
    }
}

}  // namespace towerd
