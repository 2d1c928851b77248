#include "team.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>

namespace bertopt_native {
namespace {
static_assert(sizeof(std::atomic<int>) == sizeof(int), "a futex is an int");

long futex(std::atomic<int>* word, int operation, int value) {
    return syscall(SYS_futex, reinterpret_cast<int*>(word), operation | FUTEX_PRIVATE_FLAG, value, nullptr, nullptr, 0);
}

// Leaves the core to the other thread on it, if there is one, and costs little energy.
void rest_a_moment() {
#if defined(__aarch64__)
    asm volatile("isb");  // `yield` does nothing on most cores
#else
    __builtin_ia32_pause();
#endif
}
}  // namespace

void wait_for(Step& step, int tasks) {
    constexpr int SPINS = 1500;  // some tens of microseconds: a task is as long; a thread that was suspended is not waited for so
    for (int i = 0; i < SPINS; i++) {
        if (step.done.load(std::memory_order_acquire) >= tasks) return;
        rest_a_moment();
    }
    step.sleepers.fetch_add(1, std::memory_order_seq_cst);
    for (int seen; (seen = step.done.load(std::memory_order_seq_cst)) < tasks;) futex(&step.done, FUTEX_WAIT, seen);
    step.sleepers.fetch_sub(1, std::memory_order_relaxed);
}

void wake(Step& step) { futex(&step.done, FUTEX_WAKE, INT_MAX); }

}  // namespace bertopt_native
