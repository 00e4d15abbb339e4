/* norm → qkv → q/k norm → rope → write keys and values → attend → o → norm → gate_up → silu·up → down, and the head.
 * The residual stream is float. Rows never meet outside attention, so each is computed as if it were alone. */
#include "step.h"

#include <stddef.h>

#include "row_ops.h"
#include "threads.h"

#define SERIAL_ROWS 4 /* fewer rows than this are not worth waking a thread between products */
#define ROWS_PER_TASK 4

typedef struct {
    const kv_model *m;
    const kv_step *s;
    float *hidden, *qkv;
    kv_rows narrow, wide; /* products of `hidden` or heads · head_dim inputs, and of ffn inputs */
    int32_t layer;
    const float *norm;    /* of the normalisation that runs */
    const int64_t *pick;  /* rows that are normalised, or NULL for all */
} pass;

static int64_t align64(int64_t bytes) { return (bytes + 63) / 64 * 64; }

static int64_t widest(const kv_model *m) {
    int64_t attended = (int64_t)m->heads * m->head_dim;
    return kv_padded(attended > m->hidden ? attended : m->hidden);
}

/* Places the buffers; `base` NULL only measures. */
static int64_t place(const kv_model *m, int64_t rows, uint8_t *base, pass *p) {
    int64_t at = 0, size = m->rows_bf16 ? 2 : 4;
#define TAKE(field, type, bytes) (p->field = base ? (type)(base + at) : NULL, at += align64(bytes))
    TAKE(hidden, float *, rows * m->hidden * 4);
    TAKE(qkv, float *, rows * (m->heads + 2 * m->kv_heads) * m->head_dim * 4);
    TAKE(narrow.x, void *, rows * widest(m) * size);
    TAKE(narrow.sums, float *, rows * widest(m) / KV_GROUP * 4);
    TAKE(wide.x, void *, rows * kv_padded(m->ffn) * size);
    TAKE(wide.sums, float *, rows * kv_padded(m->ffn) / KV_GROUP * 4);
#undef TAKE
    return at;
}

int64_t kv_step_scratch(const kv_model *m, int64_t capacity) {
    pass p;
    return place(m, capacity, NULL, &p);
}

typedef void (*row_fn)(const pass *p, int64_t row);
typedef struct {
    const pass *p;
    row_fn fn;
    int64_t rows;
} row_job;

static void row_task(void *ctx, int64_t task, int32_t thread) {
    (void)thread;
    const row_job *j = ctx;
    int64_t end = (task + 1) * ROWS_PER_TASK < j->rows ? (task + 1) * ROWS_PER_TASK : j->rows;
    for (int64_t r = task * ROWS_PER_TASK; r < end; r++) j->fn(j->p, r);
}

static void each_row(const pass *p, int64_t rows, row_fn fn) {
    row_job j = {p, fn, rows};
    if (rows > SERIAL_ROWS) kv_parallel((rows + ROWS_PER_TASK - 1) / ROWS_PER_TASK, row_task, &j);
    else
        for (int64_t r = 0; r < rows; r++) fn(p, r);
}

static void embed_row(const pass *p, int64_t row) {
    int64_t n = p->m->hidden, token = p->s->tokens[row];
    for (int64_t i = 0; i < n; i += 16) kv_store(p->hidden + row * n + i, kv_take(p->m->is_bf16, p->m->embed, token * n + i));
}

static void norm_row(const pass *p, int64_t row) {
    int64_t n = p->m->hidden;
    const float *x = p->hidden + (p->pick ? p->pick[row] : row) * n;
    kv_f16 scale = kv_set(kv_inverse_rms(x, n, p->m->eps));
    for (int64_t i = 0; i < n; i += 16)
        kv_rows_put(&p->narrow, row, i, kv_mul(kv_mul(kv_load(x + i), scale), kv_load(p->norm + i)));
    kv_rows_sum(&p->narrow, row);
}

/* q, k, v of one row: norms, rotation, stored in the compute dtype; decode also appends k and v to the row's tail. */
static void heads_row(const pass *p, int64_t row) {
    const kv_model *m = p->m;
    const kv_step *s = p->s;
    const kv_decoder_layer *layer = &m->layer[p->layer];
    int64_t dim = m->head_dim, half = dim / 2, heads = m->heads + 2 * m->kv_heads;
    const float *cos = m->cos + s->positions[row] * half, *sin = m->sin + s->positions[row] * half;
    float *x = p->qkv + row * heads * dim;
    for (int64_t h = 0; h < heads; h++, x += dim) {
        int is_q = h < m->heads, is_v = h >= m->heads + m->kv_heads;
        int64_t head = is_q ? h : is_v ? h - m->heads - m->kv_heads : h - m->heads;
        const float *norm = is_q ? layer->q_norm : is_v ? NULL : layer->k_norm;
        if (norm) kv_normalise(x, dim, kv_inverse_rms(x, dim, m->eps), norm, x);
        if (!is_v) kv_turn(x, dim, cos, sin);
        void *to = is_q ? s->q : is_v ? s->v : s->k;
        int64_t at = (row * (is_q ? m->heads : m->kv_heads) + head) * dim;
        if (s->decode && !is_q) {
            const kv_layer *pool = &s->pool[p->layer];
            to = s->tails + s->append_slots[row] * pool->tail_bytes + (is_v ? pool->tail_v : pool->tail_k);
            at = (head * pool->block_size + s->append_positions[row]) * dim;
        }
        for (int64_t i = 0; i < dim; i += 16) kv_put(m->is_bf16, to, at + i, kv_load(x + i));
    }
}

static void attended_row(const pass *p, int64_t row) {
    int64_t n = (int64_t)p->m->heads * p->m->head_dim;
    for (int64_t i = 0; i < n; i += 16)
        kv_rows_put(&p->narrow, row, i, kv_take(p->m->is_bf16, p->s->attended, row * n + i));
    kv_rows_sum(&p->narrow, row);
}

static void sum_wide_row(const pass *p, int64_t row) { kv_rows_sum(&p->wide, row); }

static void set_inputs(pass *p, int64_t rows, int64_t in) {
    p->narrow.rows = rows;
    p->narrow.stride = in;
}

int32_t kv_step_run(const kv_model *m, const kv_step *s) {
    for (int64_t r = 0; r < s->rows; r++)
        if (s->tokens[r] < 0 || s->tokens[r] >= m->vocab || s->positions[r] < 0 || s->positions[r] >= m->context)
            return KV_STEP_OUT_OF_RANGE;
    pass p = {.m = m, .s = s};
    place(m, s->capacity, s->scratch, &p);
    p.narrow.is_bf16 = p.wide.is_bf16 = m->rows_bf16;
    p.wide.rows = s->rows;
    p.wide.stride = m->ffn;
    int64_t n = s->rows, hidden = m->hidden, qkv = (int64_t)(m->heads + 2 * m->kv_heads) * m->head_dim;
    each_row(&p, n, embed_row);
    for (p.layer = 0; p.layer < m->layers; p.layer++) {
        const kv_decoder_layer *layer = &m->layer[p.layer];
        set_inputs(&p, n, hidden);
        p.norm = layer->input_norm;
        each_row(&p, n, norm_row);
        kv_linear_run(&layer->qkv, &p.narrow, KV_STORE, p.qkv, qkv, NULL);
        each_row(&p, n, heads_row);
        int32_t failed = s->decode ? s->decode(&s->pool[p.layer], s->calls + p.layer * s->call_bytes)
                                   : s->attention(s->attention_ctx, p.layer);
        if (failed) return failed;
        set_inputs(&p, n, (int64_t)m->heads * m->head_dim);
        each_row(&p, n, attended_row);
        kv_linear_run(&layer->o, &p.narrow, KV_ADD, p.hidden, hidden, NULL);
        set_inputs(&p, n, hidden);
        p.norm = layer->post_norm;
        each_row(&p, n, norm_row);
        kv_linear_run(&layer->gate_up, &p.narrow, KV_STORE, NULL, 0, &p.wide);
        each_row(&p, n, sum_wide_row);
        kv_linear_run(&layer->down, &p.wide, KV_ADD, p.hidden, hidden, NULL);
    }
    set_inputs(&p, s->logits, hidden);
    p.norm = m->norm;
    p.pick = s->logits_rows;
    each_row(&p, s->logits, norm_row);
    kv_linear_run(&m->head, &p.narrow, KV_STORE, s->logits_out, m->vocab, NULL);
    return 0;
}
