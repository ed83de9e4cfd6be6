// Enough of Metal's language for g++ and clang++ to compile kernels/mlx/shaders and run it on the CPU:
// every thread of a threadgroup is a coroutine that runs to the next barrier before the next one
// starts, in rising or falling order, so that a missing barrier shows in the results.
#pragma once

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

using half = _Float16;
using float16_t = half;
using uint = unsigned int;

struct uint3 {
    uint x, y, z;
};

template <typename To, typename From>
inline To as_type(From from) {
    static_assert(sizeof(To) == sizeof(From), "as_type: sizes differ");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}

namespace metal {
inline float fabs(float x) { return ::fabsf(x); }
inline float rint(float x) { return ::rintf(x); }
inline int   min(int a, int b) { return a < b ? a : b; }
}  // namespace metal

enum class mem_flags { mem_threadgroup };

namespace shim {

constexpr int kStackBytes = 32768;

struct Thread {
    ucontext_t context;
    char       stack[kStackBytes];
    bool       is_done;
};

using Kernel = void (*)(uint3 in_grid, uint3 in_group, uint3 group);

static ucontext_t scheduler;
static Thread *   threads;
static Kernel     kernel;
static uint3      group;
static uint       group_size;
static uint       current;

static bool       is_out_of_bounds;

// A pointer into an array of n elements that knows when it is used outside.
template <typename T>
struct Checked {
    T *     data;
    int64_t n;
    int64_t at;

    Checked operator+(int64_t distance) const { return Checked{data, n, at + distance}; }
    T &     operator[](int64_t i) const {
        static T nothing[1] = {};
        is_out_of_bounds = is_out_of_bounds || at + i < 0 || at + i >= n;
        return at + i < 0 || at + i >= n ? nothing[0] : data[at + i];
    }
};

static void thread_main() {
    kernel(uint3{group.x * group_size + current, group.y, 0}, uint3{current, 0, 0}, group);
    threads[current].is_done = true;
    swapcontext(&threads[current].context, &scheduler);
}

// One threadgroup of n threads, which must all pass the same barriers.
static void run_group(uint n, bool falling) {
    for (uint i = 0; i < n; ++i) {
        threads[i].is_done = false;
        getcontext(&threads[i].context);
        threads[i].context.uc_stack.ss_sp = threads[i].stack;
        threads[i].context.uc_stack.ss_size = kStackBytes;
        threads[i].context.uc_link = nullptr;
        makecontext(&threads[i].context, thread_main, 0);
    }
    for (uint n_done = 0; n_done != n;) {
        n_done = 0;
        for (uint i = 0; i < n; ++i) {
            current = falling ? n - 1 - i : i;
            swapcontext(&scheduler, &threads[current].context);
            n_done += threads[current].is_done;
        }
        if (n_done != 0 && n_done != n) {
            fprintf(stderr, "a barrier that %u of %u threads do not reach\n", n - n_done, n);
            abort();
        }
    }
}

// Metal's dispatchThreads along x and y: the last group of a line may be smaller.
// False if an array was read or written outside.
static bool dispatch(Kernel body, uint columns, uint rows, uint size, bool falling) {
    is_out_of_bounds = false;
    threads = static_cast<Thread *>(malloc(size * sizeof(Thread)));
    kernel = body;
    group_size = size;
    for (uint y = 0; y < rows; ++y) {
        for (uint x = 0; x < columns; x += size) {
            group = uint3{x / size, y, 0};
            run_group(columns - x < size ? columns - x : size, falling);
        }
    }
    free(threads);
    return !is_out_of_bounds;
}

}  // namespace shim

static void threadgroup_barrier(mem_flags) {
    __asm__ volatile("" ::: "memory");
    swapcontext(&shim::threads[shim::current].context, &shim::scheduler);
    __asm__ volatile("" ::: "memory");
}

#define constant
#define device
#define thread
#define threadgroup static  // one group at a time, shared by its threads
