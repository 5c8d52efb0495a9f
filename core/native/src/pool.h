// Threads that take tasks.
//
// Whoever has time takes the next task; a part of a job is over when its tasks are, whoever did them. So nobody waits for
// a thread that the system has not woken yet or has stopped in favour of another process: only for tasks that are begun.
// A step has some two hundred short parallel parts, and waking a thread for each costs more than many of them take:
// an idle thread looks for work for some microseconds before it sleeps. Threads that never slept would take the cores
// from whoever else is at work.
#pragma once
#include <atomic>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>
#include <sched.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

static inline void pause_briefly() {
#if defined(__x86_64__)
    _mm_pause();
#else
    std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
}
constexpr int AWAKE = 2000;  // pauses before sleep: 20 to 80 microseconds
constexpr int PARTS = 8;     // of a job, at most

// What the threads of one job share.
struct Team {
    int threads = 1;
    struct alignas(64) Part {
        std::atomic<long> next{0}, done{0};
    } parts[PARTS];

    // f(task) for tasks 0 .. total that nobody else takes.
    template <class F> void each(int part, long total, F&& f) {
        for (long task; (task = parts[part].next.fetch_add(1, std::memory_order_relaxed)) < total;) {
            f(task);
            parts[part].done.fetch_add(1, std::memory_order_release);
        }
    }
    // Until all tasks of a part are done.
    void wait(int part, long total) {
        for (int spins = 0; parts[part].done.load(std::memory_order_acquire) < total; spins++)
            spins < AWAKE ? pause_briefly() : (void)sched_yield();
    }
};
typedef void (*Work)(Team&, void* what);

struct Pool {
    std::mutex busy;
    int workers = 0;
    pid_t owner = 0;
    Team team;
    Work work = nullptr;
    void* what = nullptr;
    std::atomic<int> jobs{0};       // begun so far: what idle threads watch
    std::atomic<bool> open{false};  // whether a job may be joined
    std::atomic<int> inside{0};     // threads that have joined, or are about to see that they may not

    void loop(int number) {
        for (int seen = 0;;) {
            int spins = 0, now;
            while ((now = jobs.load(std::memory_order_acquire)) == seen)
                if (spins++ < AWAKE) pause_briefly();
                else jobs.wait(seen, std::memory_order_acquire);
            seen = now;
            inside.fetch_add(1);
            if (open.load() && number < team.threads) work(team, what);
            if (inside.fetch_sub(1) == 1) inside.notify_all();
        }
    }
    void run(int threads, Work job, void* argument) {
        std::lock_guard<std::mutex> lock(busy);
        if (owner != getpid()) {  // a forked child has no thread but the one that forked
            workers = 0, inside.store(0);
            owner = getpid();
        }
        for (; workers < threads - 1; workers++) std::thread([this, number = workers + 1] { loop(number); }).detach();
        team.threads = threads;
        for (auto& part : team.parts) part.next.store(0), part.done.store(0);
        work = job, what = argument;
        open.store(true);
        jobs.fetch_add(1);
        jobs.notify_all();
        job(team, argument);
        open.store(false);
        int spins = 0;
        for (int left; (left = inside.load()) > 0;)
            if (spins++ < AWAKE) pause_briefly();
            else inside.wait(left);
    }
};

static Pool& pool() {
    static Pool* one = new Pool;  // never destroyed: its threads outlive everything
    return *one;
}

// f(team) in up to so many threads. When the first of them has returned from it, all tasks must have been taken.
template <class F> static void parallel(int threads, F& f) {
    if (threads <= 1) {
        Team alone;
        f(alone);
        return;
    }
    pool().run(threads, [](Team& team, void* what) { (*(F*)what)(team); }, &f);
}
