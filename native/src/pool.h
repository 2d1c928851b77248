// One pool of threads for the process. A call works itself and lends its job to idle threads; nobody waits for a thread that
// has not started. After a fork the child's pool is empty and fills again when needed.
#pragma once
#include <condition_variable>
#include <mutex>

namespace bertopt_native {

class Job {
public:
    virtual ~Job() = default;
    // Runs on every thread that takes part; `caller` on the one that called run_job.
    virtual void work(bool caller) noexcept = 0;

    size_t wanted = 0;  // threads that may still join; guarded by the pool's lock, as is `active`
    size_t active = 0;
    Job* next = nullptr;
};

// Held for moments only: around a fork too, so that the child finds it free and what it guards whole.
std::mutex& process_lock();

// Runs job.work() here and on up to `helpers` other threads; returns when all who joined are done.
void run_job(Job& job, size_t helpers);

}  // namespace bertopt_native
