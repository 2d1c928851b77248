#include "pool.h"

#include <pthread.h>

#include <exception>
#include <new>
#include <thread>

namespace bertopt_native {
namespace {

struct Pool {
    std::mutex lock;
    std::condition_variable work, done;
    Job* jobs = nullptr;
    size_t threads = 0, idle = 0;
};

// Never destroyed: its threads may outlive the end of main.
alignas(Pool) unsigned char storage[sizeof(Pool)];
Pool* pool = nullptr;
std::once_flag made;

void before_fork() { pool->lock.lock(); }
void after_fork_parent() { pool->lock.unlock(); }
void after_fork_child() {
    // The other threads are gone, and with them their jobs. This thread held the lock, so nothing was half done.
    new (storage) Pool();
}

Pool& the_pool() {
    std::call_once(made, [] {
        pool = new (storage) Pool();
        pthread_atfork(before_fork, after_fork_parent, after_fork_child);
    });
    return *pool;
}

void loop() {
    Pool& p = the_pool();
    std::unique_lock lock(p.lock);
    for (;;) {
        Job* job = p.jobs;
        while (job && !job->wanted) job = job->next;
        if (!job) {
            p.idle++;
            p.work.wait(lock);
            p.idle--;
            continue;
        }
        job->wanted--;
        job->active++;
        lock.unlock();
        job->work(false);
        lock.lock();
        if (--job->active == 0) p.done.notify_all();
    }
}

}  // namespace

std::mutex& process_lock() { return the_pool().lock; }

void run_job(Job& job, size_t helpers) {
    Pool& p = the_pool();
    if (helpers) {
        std::unique_lock lock(p.lock);
        job.wanted = helpers;
        job.next = p.jobs;
        p.jobs = &job;
        while (p.threads < helpers) {
            try {
                std::thread(loop).detach();
            } catch (const std::exception&) {
                break;  // no thread, or no memory for one: slower, not wrong; and nobody but this call takes the job off the list
            }
            p.threads++;
        }
        for (size_t i = 0; i < helpers; i++) p.work.notify_one();
    }
    job.work(true);
    if (!helpers) return;
    std::unique_lock lock(p.lock);
    for (Job** j = &p.jobs; *j; j = &(*j)->next)
        if (*j == &job) {
            *j = job.next;
            break;
        }
    p.done.wait(lock, [&] { return job.active == 0; });
}

}  // namespace bertopt_native
