/* Which parts are read together: sequences that share a prefix have the same pages in its parts.
 *
 * Sharing changes who reads a page, never what is computed of it: each row's arithmetic is its own, so its bits are those
 * of the sequence alone.
 */
#include <string.h>

#include "attend_job.h"

#define TOGETHER 8 /* sequences of a pass, so that other threads find work too */

static const int32_t *part_pages(const kv_job *j, int32_t b, int32_t part, int64_t *count) {
    const int32_t first = first_page(j, b, part);
    *count = least(j->part_pages, (int64_t)j->call->page_counts[b] - first);
    return j->call->tables + b * (int64_t)j->call->table_stride + first;
}

static int same_pages(const kv_job *j, int32_t a, int32_t b, int32_t part) {
    if (part >= part_count(j, b)) return 0;
    int64_t count, other;
    const int32_t *x = part_pages(j, a, part, &count), *y = part_pages(j, b, part, &other);
    return count > 0 && count == other && x[0] == y[0] && !memcmp(x, y, sizeof *x * (size_t)count);
}

static void emit(kv_job *j, const int32_t *who, int32_t count, int32_t part) {
    for (int32_t chunks = (count + TOGETHER - 1) / TOGETHER; chunks; chunks--) {
        const int32_t some = count / chunks;
        j->passes[j->pass_count++] = (kv_pass){j->member_count, some, part};
        memcpy(j->members + j->member_count, who, sizeof *who * (size_t)some);
        j->member_count += some;
        who += some;
        count -= some;
    }
}

/* Passes over the parts from `part` on of sequences that agree on all pages before it; reorders who. Prefixes are chains: two
 * sequences that differ in a part are not compared behind it. */
static void split(kv_job *j, int32_t *who, int32_t count, int32_t part) {
    while (count) {
        int32_t agree = 1;
        if (part < part_count(j, who[0]))
            for (int32_t i = 1; i < count; i++)
                if (same_pages(j, who[0], who[i], part)) {
                    int32_t other = who[agree];
                    who[agree++] = who[i];
                    who[i] = other;
                }
        if (agree == 1)
            for (int32_t rest = part; rest < part_count(j, who[0]); rest++) emit(j, who, 1, rest);
        else {
            emit(j, who, agree, part);
            split(j, who, agree, part + 1);
        }
        who += agree;
        count -= agree;
    }
}

void kv_plan_passes(kv_job *j) {
    const int32_t n = j->call->sequences;
    j->pass_count = j->member_count = 0;
    if (j->call->head_tables) { /* every head has pages of its own */
        for (int32_t b = 0; b < n; b++)
            for (int32_t part = 0; part < part_count(j, b); part++) emit(j, &b, 1, part);
        return;
    }
    int32_t *who = j->members + j->part_start[n]; /* n more */
    for (int32_t b = 0; b < n; b++) who[b] = b;
    split(j, who, n, 0);
}
