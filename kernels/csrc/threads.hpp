// Work split into tasks, which threads take one after the other. Threads live for one call only, so a fork between
// calls is safe. The result of a task must not depend on the thread that runs it.
#pragma once
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

namespace sigmoid_rl {

struct Free {
    void operator()(float* p) const { std::free(p); }
};
using Buffer = std::unique_ptr<float, Free>;

// n uninitialised words, aligned to a cache line. Throws bad_alloc if there is no memory.
inline Buffer buffer(int64_t n) {
    void* p = nullptr;
    if (posix_memalign(&p, 64, sizeof(float) * (n > 0 ? n : 1))) throw std::bad_alloc();
    return Buffer(static_cast<float*>(p));
}

// Calls work(task, scratch) for all tasks; each thread has its own `scratch` words. Memory is allocated before any
// thread starts, so that no thread throws.
template <class Work>
void for_each_task(int64_t tasks, int64_t threads, int64_t scratch, const Work& work) {
    threads = threads < tasks ? threads : tasks;
    if (threads < 1) return;
    const int64_t each = (scratch + 63) / 64 * 64;
    Buffer buffers = buffer(each * threads);
    std::atomic<int64_t> next{0};
    auto run = [&](int64_t thread) {
        for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;)
            work(task, buffers.get() + thread * each);
    };
    std::vector<std::thread> others;
    others.reserve(threads - 1);
    try {
        for (int64_t i = 1; i < threads; ++i) others.emplace_back(run, i);
    } catch (const std::system_error&) {  // no more threads can be started: the existing ones do the work
    }
    run(0);
    for (auto& thread : others) thread.join();
}

}  // namespace sigmoid_rl
