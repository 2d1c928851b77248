// Several threads on one small batch. Every step of the batch is a number of tasks; whoever is there takes the next one, so
// a thread that comes late, or never, costs nothing.
#pragma once
#include <atomic>
#include <cstddef>

namespace bertopt_native {

struct alignas(128) Step {
    std::atomic<int> next{0};
    alignas(64) std::atomic<int> done{0};
    std::atomic<int> sleepers{0};
};

// A thread's view of the steps: `at` counts its own.
struct Team {
    Step* steps;
    size_t at;
    size_t threads;
};

// Returns when all tasks of a step are done: spins for some microseconds, then sleeps.
void wait_for(Step& step, int tasks);
void wake(Step& step);

template <class Task>
inline void share(Team* team, size_t tasks, const Task& task) {
    if (!team) {
        for (size_t i = 0; i < tasks; i++) task(i);
        return;
    }
    Step& step = team->steps[team->at++];
    const int n = static_cast<int>(tasks);
    for (int i; (i = step.next.fetch_add(1, std::memory_order_relaxed)) < n;) {
        task(static_cast<size_t>(i));
        const bool last = step.done.fetch_add(1, std::memory_order_seq_cst) + 1 == n;
        if (last && step.sleepers.load(std::memory_order_seq_cst)) wake(step);
    }
    if (step.done.load(std::memory_order_acquire) < n) wait_for(step, n);
}

}  // namespace bertopt_native
