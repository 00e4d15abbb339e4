#define _GNU_SOURCE
#include "threads.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <time.h>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
static void sleep_while(_Atomic uint32_t *word, uint32_t value) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}
static void wake(_Atomic uint32_t *word, int count) {
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, count, NULL, NULL, 0);
}
#else
static void sleep_while(_Atomic uint32_t *word, uint32_t value) {
    struct timespec nap = {0, 100000};
    if (atomic_load(word) == value) nanosleep(&nap, NULL);
}
static void wake(_Atomic uint32_t *word, int count) { (void)word, (void)count; }
#endif

#if defined(__x86_64__) || defined(__i386__)
#define RELAX() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define RELAX() __asm__ __volatile__("yield")
#else
#define RELAX() ((void)0)
#endif

/* Longer than the gap between two ops of a step, far shorter than a scheduler slice. */
#define SPIN_NS 40000

#define OPEN 0x80000000u    /* workers may enter the job */
#define WAITED 0x40000000u  /* the caller sleeps until the last worker leaves */
#define COUNT 0x3fffffffu   /* workers inside */

static pthread_mutex_t caller = PTHREAD_MUTEX_INITIALIZER; /* held during a job: one job at a time */
static _Thread_local bool inside;
static int32_t wanted = 1;  /* threads of the next job, the caller included */
static int32_t started;     /* workers that exist */

static _Atomic uint32_t bell;      /* goes up with each job */
static _Atomic uint32_t sleepers;  /* workers asleep on the bell */
static _Atomic uint32_t gate;      /* OPEN, WAITED and COUNT of the job below */
static _Atomic int64_t next_task;
static int64_t job_tasks;
static int32_t job_threads;
static kv_task job_fn;
static void *job_ctx;

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Returns when *word differs from `value`, or after SPIN_NS. */
static bool spin_until_changed(_Atomic uint32_t *word, uint32_t value) {
    int64_t end = 0;
    for (uint32_t i = 1;; i++) {
        if (atomic_load_explicit(word, memory_order_acquire) != value) return true;
        RELAX();
        if (i % 64 == 0) {
            int64_t now = now_ns();
            if (!end) end = now + SPIN_NS;
            else if (now > end) return false;
        }
    }
}

static void work(int32_t thread) {
    for (;;) {
        int64_t task = atomic_fetch_add_explicit(&next_task, 1, memory_order_relaxed);
        if (task >= job_tasks) return;
        job_fn(job_ctx, task, thread);
    }
}

/* A worker may enter while the gate is open; from then on the job's fields stay valid until it has left. */
static void try_job(int32_t thread) {
    uint32_t seen = atomic_load_explicit(&gate, memory_order_acquire);
    do {
        if (!(seen & OPEN)) return;
    } while (!atomic_compare_exchange_weak(&gate, &seen, seen + 1));
    if (thread < job_threads) work(thread);
    uint32_t before = atomic_fetch_sub_explicit(&gate, 1, memory_order_acq_rel);
    if ((before & WAITED) && (before & COUNT) == 1) wake(&gate, 1);
}

static void *worker(void *argument) {
    int32_t thread = (int32_t)(intptr_t)argument;
    uint32_t seen = 0;
    inside = true;
    for (;;) {
        if (!spin_until_changed(&bell, seen)) {
            atomic_fetch_add(&sleepers, 1);
            while (atomic_load(&bell) == seen) sleep_while(&bell, seen);
            atomic_fetch_sub(&sleepers, 1);
        }
        seen = atomic_load(&bell);
        try_job(thread);
    }
    return NULL;
}

/* The child of a fork has none of the workers. */
static void after_fork(void) {
    started = 0;
    atomic_store(&sleepers, 0);
    atomic_store(&gate, 0);
    inside = false;
    pthread_mutex_init(&caller, NULL);
}

static void start_workers(void) {
    static bool registered;
    if (!registered) {
        registered = true;
        pthread_atfork(NULL, NULL, after_fork);
    }
    while (started < wanted - 1) {
        pthread_t handle;
        pthread_attr_t attributes;
        pthread_attr_init(&attributes);
        pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
        int failed = pthread_create(&handle, &attributes, worker, (void *)(intptr_t)(started + 1));
        pthread_attr_destroy(&attributes);
        if (failed) break; /* fewer threads, same results */
        started++;
    }
}

void kv_set_threads(int32_t threads) {
    pthread_mutex_lock(&caller);
    wanted = threads < 1 ? 1 : threads > KV_MAX_THREADS ? KV_MAX_THREADS : threads;
    pthread_mutex_unlock(&caller);
}

int32_t kv_threads(void) { return wanted; }

void kv_parallel(int64_t n_tasks, kv_task fn, void *ctx) {
    if (n_tasks <= 1 || wanted == 1 || inside || pthread_mutex_trylock(&caller) != 0) {
        for (int64_t task = 0; task < n_tasks; task++) fn(ctx, task, 0);
        return;
    }
    start_workers();
    inside = true;
    job_fn = fn;
    job_ctx = ctx;
    job_tasks = n_tasks;
    job_threads = wanted;
    atomic_store_explicit(&next_task, 0, memory_order_relaxed);
    atomic_store(&gate, OPEN);
    atomic_fetch_add(&bell, 1);
    uint32_t asleep = atomic_load(&sleepers);
    if (asleep) wake(&bell, (int)asleep);
    work(0);
    uint32_t state = atomic_fetch_and(&gate, ~OPEN) & ~OPEN;
    while (state & COUNT) {
        if (!spin_until_changed(&gate, state)) {
            uint32_t waited = state | WAITED;
            if (atomic_compare_exchange_strong(&gate, &state, waited)) {
                while ((atomic_load(&gate) & COUNT) == (waited & COUNT)) sleep_while(&gate, waited);
            }
        }
        state = atomic_load_explicit(&gate, memory_order_acquire);
    }
    inside = false;
    pthread_mutex_unlock(&caller);
}
