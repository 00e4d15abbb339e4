/* One small persistent thread pool per process, shared by every native op.
 *
 * The caller of kv_parallel works too, so `threads` = 1 means no extra thread. Tasks are handed out one by one from an
 * atomic counter: a thread that another process pushes off its core delays only the task it holds. Idle threads spin
 * for some microseconds (the gap between two ops of a step), then sleep on a futex and cost nothing.
 */
#ifndef KV_THREADS_H
#define KV_THREADS_H

#include <stdint.h>

#define KV_MAX_THREADS 64

/* One task; `thread` in [0, kv_threads()) is stable during the task and may index per-thread scratch. */
typedef void (*kv_task)(void *ctx, int64_t task, int32_t thread);

/* Sets the number of threads that work on the next job, the caller included (clamped to [1, KV_MAX_THREADS]). */
void kv_set_threads(int32_t threads);
int32_t kv_threads(void);

/* Runs fn(ctx, 0 .. n_tasks-1, thread) and returns when all are done. Results of the tasks are visible to the caller.
 * A call from inside a task, or while another thread of the process is inside kv_parallel, runs serially in place
 * with thread = 0 scratch of its own call: so per-thread scratch must belong to the call (ctx), never to the library. */
void kv_parallel(int64_t n_tasks, kv_task fn, void *ctx);

#endif
