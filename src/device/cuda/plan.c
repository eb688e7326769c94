/* SPDX-License-Identifier: Apache-2.0 */
/* From a list of verbs to steps.
 *
 * First every array gets its element type: float32 where sums go (embed, norm's input, add), bf16
 * elsewhere. Then neighbours are joined:
 *   products of one input                      -> one product, their matrices behind one another
 *   product, then add of its result            -> product that adds
 *   norms and rotations of heads, then append  -> one step
 *   norm in place, add, norm                   -> one step
 *   norm read by one product alone             -> decode norms inside the product
 *   heads, then attention                      -> decode does both at once
 *   gate of the two results of one product     -> decode gates inside the product
 * What is not joined runs by itself: any order of verbs works, the usual ones work fast. */
#include <stdlib.h>
#include <string.h>

#include "device/cuda/cuda_priv.h"

struct maker {
    struct cuda_device *d;
    const struct cuda_record *r;
    struct cuda_plan *p;
    uint32_t at; /* the next verb */
    struct baton_error *e;
};

static int unsupported(struct maker *m, const char *what)
{
    return base_fail(m->e, BATON_ERR_UNSUPPORTED, "cuda: %s", what);
}

static const struct cuda_op *peek(const struct maker *m, uint32_t ahead)
{
    static const struct cuda_op none = {0};
    return m->at + ahead < m->r->n_ops ? &m->r->ops[m->at + ahead] : &none;
}

/* Does a verb read array a? */
static bool reads(const struct cuda_op *op, uint8_t a)
{
    switch (op->verb) {
    case CUDA_V_NORM:
    case CUDA_V_LINEAR:
    case CUDA_V_HEAD_NORM:
    case CUDA_V_ROPE:
    case CUDA_V_ATTEND:
    case CUDA_V_SELECT:
    case CUDA_V_LOGITS:
        return op->x == a;
    case CUDA_V_APPEND:
    case CUDA_V_GATE:
        return op->x == a || op->z == a;
    case CUDA_V_ADD:
        return op->x == a || op->y == a;
    default:
        return false;
    }
}

static bool writes(const struct cuda_op *op, uint8_t a)
{
    switch (op->verb) {
    case CUDA_V_EMBED:
    case CUDA_V_NORM:
    case CUDA_V_LINEAR:
    case CUDA_V_ATTEND:
    case CUDA_V_GATE:
    case CUDA_V_SELECT:
        return op->y == a;
    default:
        return false;
    }
}

/* Nobody reads what a holds after verb `from` - 1. */
static bool dead_from(const struct maker *m, uint32_t from, uint8_t a)
{
    for (uint32_t i = from; i < m->r->n_ops; i++) {
        if (reads(&m->r->ops[i], a))
            return false;
        if (writes(&m->r->ops[i], a))
            return true;
    }
    return true;
}

static struct cuda_step *add_step(struct maker *m, enum cuda_step_kind kind)
{
    struct cuda_step *s = &m->p->steps[m->p->n_steps++];
    s->kind = kind;
    return s;
}

/* ---- arrays ------------------------------------------------------------------------------- */

static void set_wide(struct maker *m)
{
    struct cuda_plan *p = m->p;
    p->n_arrays = m->r->n_arrays;
    for (uint32_t i = 0; i < p->n_arrays; i++) {
        p->array[i].cols = p->array[i].ld = m->r->cols[i];
        p->array[i].home = (uint8_t)i;
        p->array[i].selected = m->r->selected[i];
    }
    for (uint32_t i = 0; i < m->r->n_ops; i++) {
        const struct cuda_op *op = &m->r->ops[i];
        if (op->verb == CUDA_V_EMBED)
            p->array[op->y].wide = true;
        if (op->verb == CUDA_V_NORM)
            p->array[op->x].wide = true;
        if (op->verb == CUDA_V_ADD)
            p->array[op->x].wide = p->array[op->y].wide = true;
    }
}

static bool is_plain(const struct cuda_array *a, uint8_t i)
{
    return a->home == i && a->ld == a->cols;
}

/* Put the results of one joined product side by side, once for the whole plan. */
static bool place_together(struct maker *m, const uint8_t *y, uint32_t n)
{
    struct cuda_array *a = m->p->array;
    uint32_t ld = 0, at = 0;
    bool fresh = true, placed = true;
    for (uint32_t i = 0; i < n; i++) {
        fresh = fresh && is_plain(&a[y[i]], y[i]) && !a[y[i]].selected && !a[y[i]].wide;
        placed = placed && a[y[i]].home == y[0] && a[y[i]].at == ld;
        ld += a[y[i]].cols;
    }
    if (!fresh)
        return placed && a[y[0]].ld == ld;
    for (uint32_t i = 0; i < n; i++) {
        a[y[i]].home = y[0];
        a[y[i]].at = at;
        a[y[i]].ld = ld;
        at += a[y[i]].cols;
    }
    return true;
}

/* The bf16 form of an operand, made by a step of its own where the array is float32. */
static int need_narrow(struct maker *m, uint8_t x)
{
    struct cuda_array *a = &m->p->array[x];
    if (!a->wide)
        return 0;
    a->shadow = true;
    add_step(m, CUDA_S_NARROW)->x = x;
    return 0;
}

/* ---- products ----------------------------------------------------------------------------- */

static uint32_t count_joinable(struct maker *m)
{
    const struct cuda_op *first = peek(m, 0);
    uint32_t n = 1;
    for (; n < 3; n++) {
        const struct cuda_op *op = peek(m, n);
        if (op->verb != CUDA_V_LINEAR || op->x != first->x || op->y == first->x ||
            m->p->array[op->y].wide != m->p->array[first->y].wide)
            break;
        for (uint32_t i = 0; i < n; i++)
            if (peek(m, i)->y == op->y || peek(m, i)->w == op->w)
                return n;
    }
    return n;
}

/* The biases of joined products behind one another, zeros where there is none. */
static int join_bias(struct maker *m, struct cuda_step *s, uint32_t n)
{
    bool any = false;
    float *all;
    uint32_t at = 0;
    for (uint32_t i = 0; i < n; i++)
        any = any || peek(m, i)->b;
    if (!any)
        return 0;
    int rc = device_cuda_check(cudaMalloc((void **)&all, s->m * sizeof *all), "a bias", m->e);
    if (rc)
        return rc;
    m->p->extra[m->p->n_extra++] = all;
    s->bias = all;
    rc = device_cuda_check(cudaMemset(all, 0, s->m * sizeof *all), "a bias", m->e);
    for (uint32_t i = 0; rc == 0 && i < n; i++) {
        const struct cuda_op *op = peek(m, i);
        if (op->b)
            rc = device_cuda_check(cudaMemcpy(all + at, op->b->vector, op->w->rows * sizeof *all,
                                              cudaMemcpyDeviceToDevice),
                                   "a bias", m->e);
        at += op->w->rows;
    }
    return rc;
}

/* The norm just before, where this product alone reads its result. */
static struct cuda_step *lazy_norm(struct maker *m, uint32_t n)
{
    uint8_t x = peek(m, 0)->x;
    struct cuda_step *last = m->p->n_steps ? &m->p->steps[m->p->n_steps - 1] : NULL;
    bool sum = last && last->kind == CUDA_S_NORM_ADD_NORM;
    if (!last || (last->kind != CUDA_S_NORM && !sum) || (sum ? last->z : last->y) != x ||
        m->p->array[x].wide || last->w->cols > CUDA_GEMV_NORM_MAX_K || !dead_from(m, m->at + n, x))
        return NULL;
    if (sum)
        m->p->array[last->x].twin = true;
    return last;
}

static int make_linear(struct maker *m)
{
    const struct cuda_op *op = peek(m, 0);
    struct cuda_weight *w[3];
    uint8_t y[3];
    uint32_t n = count_joinable(m);
    if (op->y == op->x || m->p->array[op->x].cols != op->w->cols)
        return unsupported(m, "a product in place");
    for (uint32_t i = 0; i < n; i++)
        y[i] = peek(m, i)->y;
    while (n > 1 && !place_together(m, y, n))
        n--;
    if (n == 1 && m->p->array[y[0]].home == y[0] && m->p->array[y[0]].ld < op->w->rows)
        return unsupported(m, "a product into a narrow array");
    struct cuda_step *norm = lazy_norm(m, n);
    int rc = need_narrow(m, op->x);
    struct cuda_step *s = add_step(m, CUDA_S_LINEAR);
    for (uint32_t i = 0; i < n; i++) {
        w[i] = peek(m, i)->w;
        s->m += w[i]->rows; /* NOLINT(clang-analyzer-core.NullDereference): a LINEAR has one */
    }
    if (rc == 0 && n > 1)
        rc = device_cuda_weight_join(m->d, w, n, m->e);
    if (rc == 0)
        rc = join_bias(m, s, n);
    if (rc)
        return rc;
    s->y = y[0];
    s->x = op->x;
    s->w = w[0];
    s->norm = norm;
    if (norm)
        norm->lazy = true;
    const struct cuda_op *next = peek(m, n);
    if (n == 1 && next->verb == CUDA_V_ADD && next->y == y[0] && next->x != y[0] && !op->b &&
        dead_from(m, m->at + 2, y[0])) {
        s->y = next->x;
        s->add = true;
        m->at++;
    }
    m->at += n;
    return 0;
}

static int make_gate(struct maker *m)
{
    const struct cuda_op *op = peek(m, 0);
    struct cuda_array *a = m->p->array;
    struct cuda_step *last = m->p->n_steps ? &m->p->steps[m->p->n_steps - 1] : NULL;
    if (a[op->x].wide || a[op->z].wide || a[op->y].wide || a[op->x].ld != a[op->z].ld ||
        a[op->x].cols % 8)
        return unsupported(m, "a gate over arrays of different kinds");
    struct cuda_step *s = add_step(m, CUDA_S_GATE);
    s->y = op->y;
    s->x = op->x;
    s->z = op->z;
    s->act = op->act;
    if (last && last->kind == CUDA_S_LINEAR && !last->add && !last->bias && last->y == op->x &&
        a[op->z].home == a[op->x].home && a[op->x].at == 0 && a[op->z].at == a[op->x].cols &&
        last->m == 2 * a[op->x].cols && op->y == op->x && dead_from(m, m->at + 1, op->z)) {
        last->gate = s;
        s->gated = true;
    }
    m->at++;
    return 0;
}

/* ---- norms -------------------------------------------------------------------------------- */

static int make_norm(struct maker *m)
{
    const struct cuda_op *op = peek(m, 0), *sum = peek(m, 1), *then = peek(m, 2);
    struct cuda_array *a = m->p->array;
    bool chain = op->y == op->x && sum->verb == CUDA_V_ADD && sum->y == op->y && sum->x != op->y &&
                 then->verb == CUDA_V_NORM && then->x == sum->x && then->y != op->y &&
                 then->eps == op->eps && then->offset == op->offset && !a[then->y].wide &&
                 dead_from(m, m->at + 2, op->y);
    struct cuda_step *s = add_step(m, chain ? CUDA_S_NORM_ADD_NORM : CUDA_S_NORM);
    s->x = chain ? sum->x : op->x;
    s->y = op->y;
    s->w = op->w;
    s->eps = op->eps;
    s->offset = op->offset;
    if (chain) {
        s->z = then->y;
        s->w2 = then->w;
    }
    m->at += chain ? 3 : 1;
    return 0;
}

/* ---- heads -------------------------------------------------------------------------------- */

/* Which of q, k, v an array is; q is the one that is neither. -1: a second q. */
static int part_of(const struct cuda_step *s, const struct cuda_op *append, uint8_t a, bool *has_q)
{
    if (a == append->x)
        return 1;
    if (a == append->z)
        return 2;
    if (*has_q && s->part[0].array != a)
        return -1;
    *has_q = true;
    return 0;
}

static int make_heads(struct maker *m)
{
    const struct cuda_op *append;
    uint32_t n = 0;
    bool has_q = false;
    while (peek(m, n)->verb == CUDA_V_HEAD_NORM || peek(m, n)->verb == CUDA_V_ROPE)
        n++;
    append = peek(m, n);
    if (append->verb != CUDA_V_APPEND)
        return unsupported(m, "norms or rotations of heads with no append behind them");
    struct cuda_step *s = add_step(m, CUDA_S_HEADS);
    s->layer = append->layer;
    s->part[0].rope = s->part[1].rope = s->part[2].rope = -1;
    s->part[1].array = append->x;
    s->part[2].array = append->z;
    for (uint32_t i = 0; i < n; i++) {
        const struct cuda_op *op = peek(m, i);
        int k = part_of(s, append, op->x, &has_q);
        if (k < 0)
            return unsupported(m, "two arrays of queries before one append");
        s->part[k].array = op->x;
        s->part[k].heads = op->heads;
        if (op->verb == CUDA_V_ROPE) {
            s->part[k].rope = (int)op->rope;
            s->head_dim = m->r->ropes[op->rope].head_dim;
        } else if (s->part[k].rope >= 0 || s->part[k].norm) {
            return unsupported(m, "a norm of heads after their rotation, or two");
        } else {
            s->part[k].norm = op->w;
            s->part[k].eps = op->eps;
            s->part[k].offset = op->offset;
            s->head_dim = op->w->cols;
        }
    }
    for (int k = has_q ? 0 : 1; k < 3; k++)
        if (m->p->array[s->part[k].array].wide)
            return unsupported(m, "heads in a float32 array");
    m->at += n + 1;
    return 0;
}

/* The pages say how wide heads are where no verb did; see step.c. */
static int make_append(struct maker *m)
{
    return make_heads(m);
}

/* The heads just before attention over their results, where nobody else wants those. A layer's end
 * between them is told after the attention, which stores its keys and values. */
static void join_heads(struct maker *m, struct cuda_step *s)
{
    const struct cuda_op *op = peek(m, 0);
    struct cuda_step *h = s - 1, *end = NULL;
    if (s > m->p->steps && h->kind == CUDA_S_LAYER_DONE && h->layer == op->attn.layer)
        end = h--;
    if (h < m->p->steps || h->kind != CUDA_S_HEADS || h->layer != op->attn.layer ||
        h->part[0].heads != op->attn.q_heads || h->part[0].array != op->x ||
        h->head_dim != op->attn.head_dim || !m->d->overlap ||
        !cuda_attend_step_has(op->attn.head_dim) || op->y == op->x)
        return;
    for (int i = 0; i < 3; i++)
        if (!dead_from(m, m->at + 1, h->part[i].array) || h->part[i].array == op->y)
            return;
    s->heads = h;
    h->late = true;
    if (end)
        end->late = true;
}

/* ---- the rest ----------------------------------------------------------------------------- */

static int make_simple(struct maker *m)
{
    static const enum cuda_step_kind kinds[] = {
        [CUDA_V_EMBED] = CUDA_S_EMBED,   [CUDA_V_ATTEND] = CUDA_S_ATTEND,
        [CUDA_V_ADD] = CUDA_S_ADD,       [CUDA_V_LAYER_DONE] = CUDA_S_LAYER_DONE,
        [CUDA_V_SELECT] = CUDA_S_SELECT, [CUDA_V_LOGITS] = CUDA_S_LOGITS,
    };
    const struct cuda_op *op = peek(m, 0);
    struct cuda_array *a = m->p->array;
    int rc = 0;
    if (op->verb == CUDA_V_ATTEND || op->verb == CUDA_V_SELECT || op->verb == CUDA_V_LOGITS)
        rc = need_narrow(m, op->x);
    if (rc == 0 && (op->verb == CUDA_V_ATTEND || op->verb == CUDA_V_SELECT) && a[op->y].wide)
        rc = unsupported(m, "attention or selected rows that are summed up later");
    if (rc)
        return rc;
    struct cuda_step *s = add_step(m, kinds[op->verb]);
    s->y = op->y;
    s->x = op->x;
    s->w = op->w;
    s->offset = op->offset;
    s->layer = op->verb == CUDA_V_ATTEND ? op->attn.layer : op->layer;
    s->attn = op->attn;
    if (op->verb == CUDA_V_ATTEND)
        join_heads(m, s);
    if (op->verb == CUDA_V_ATTEND && !s->heads && op->attn.q_heads > m->p->max_heads)
        m->p->max_heads = op->attn.q_heads;
    m->at++;
    return 0;
}

static int make_next(struct maker *m)
{
    switch (peek(m, 0)->verb) {
    case CUDA_V_NORM:
        return make_norm(m);
    case CUDA_V_LINEAR:
        return make_linear(m);
    case CUDA_V_GATE:
        return make_gate(m);
    case CUDA_V_HEAD_NORM:
    case CUDA_V_ROPE:
        return make_heads(m);
    case CUDA_V_APPEND:
        return make_append(m);
    default:
        return make_simple(m);
    }
}

static int upload_ropes(struct maker *m)
{
    struct cuda_plan *p = m->p;
    int rc = device_cuda_check(
        cudaMalloc((void **)&p->inv_freq, CUDA_MAX_ROPES * 128 * sizeof(float)), "rotation angles",
        m->e);
    p->n_ropes = m->r->n_ropes;
    for (uint32_t i = 0; rc == 0 && i < p->n_ropes; i++) {
        p->ropes[i] = m->r->ropes[i];
        rc = device_cuda_check(cudaMemcpy(p->inv_freq + 128 * i, p->ropes[i].inv_freq,
                                          sizeof p->ropes[i].inv_freq, cudaMemcpyHostToDevice),
                               "rotation angles", m->e);
    }
    return rc;
}

int device_cuda_plan_make(struct cuda_device *d, const struct cuda_record *r, struct cuda_plan *out,
                          struct baton_error *e)
{
    struct maker m = {.d = d, .r = r, .p = out, .e = e};
    out->n_layers = r->n_layers;
    /* A verb makes at most a step of its own and one that narrows its input. */
    out->steps = base_try_alloc(2u * r->n_ops + 1, sizeof *out->steps, e);
    out->extra = base_try_alloc(r->n_ops + 1, sizeof *out->extra, e);
    if (!out->steps || !out->extra)
        return BATON_ERR_NOMEM;
    set_wide(&m);
    int rc = upload_ropes(&m);
    while (rc == 0 && m.at < r->n_ops)
        rc = make_next(&m);
    return rc;
}

void device_cuda_plan_free(struct cuda_plan *p)
{
    for (uint32_t i = 0; i < p->n_extra; i++)
        cudaFree(p->extra[i]);
    for (uint32_t i = 0; i < p->n_arrays; i++) {
        cudaFree(p->array[i].data);
        cudaFree(p->array[i].copy);
        cudaFree(p->array[i].other);
    }
    cudaFree(p->inv_freq);
    free(p->extra);
    free(p->steps);
}
