/* SPDX-License-Identifier: Apache-2.0 */
/* cpu: the fast device of this machine's processor.
 *
 * Files: init.c (instruction sets, the device object), pack.c (weights), ops.c (programs, runs and
 * the verbs that work row by row), linear.c and attend.c (scheduling of the two large verbs), and
 * the kernels: generic.c is the portable definition, avx2.c and avx512bf16.c are the tables of the
 * instruction sets, each built with its own flags from the files named after it.
 *
 * Exactness. A row's bits depend on its data and absolute positions alone. Every output of a linear
 * map is one chain over k, whatever number of rows runs beside it, and a chain that is stored and
 * taken up again at a block border stays the same chain. Attention walks tiles of 64 positions
 * aligned at absolute multiples of 64; a tile that a row cannot see leaves its state untouched, so
 * tiles may be skipped; 8 tiles make a segment that starts from nothing, and segments are combined
 * in order, so that they may be computed by different threads.
 */
#ifndef DEVICE_CPU_CPU_PRIV_H
#define DEVICE_CPU_CPU_PRIV_H

#include "base/base.h"
#include "device/device_priv.h"

#define CPU_MAX_ROWS 512u
#define CPU_MAX_LANES 8u
#define CPU_PANEL 16u  /* outputs of a weight panel */
#define CPU_TILE 64u   /* positions of an attention tile; a page */
#define CPU_SEGMENT 8u /* tiles that are summed up before they meet what came before */
#define CPU_MAX_HEAD_DIM 256u
#define CPU_ATTEND_ROWS 96u /* (row, head) pairs of one attention item at most */
#define CPU_MAX_ROPES 4u

/* ---- kernels ------------------------------------------------------------------------------ */

/* How a panel of 16 outputs stores its weights, in 32-bit words of two bf16. Both orders let a
 * kernel turn a loaded vector into operands with one shift and one mask, or with nothing. */
enum cpu_order {
    CPU_ORDER_OUTPUTS = 1, /* [k][8]: word j = output j | output j+8 << 16 */
    CPU_ORDER_PAIRS = 2,   /* [k/2][16]: word j = output j at k | output j at k+1 << 16 */
};

/* One linear map over packed operands: y [m, n] = x w^T + bias. */
struct cpu_linear {
    float *y;
    size_t ldy;        /* elements from a row of y to the next */
    void *a;           /* activations as pack_rows orders them */
    const uint16_t *w; /* [ceil(n/16)][k padded][16] in the kernels' order */
    const float *bias; /* [n padded to 16] or NULL */
    uint32_t m, n;
    uint32_t k; /* padded to the kernels' k_unit; the padding is zero on both sides */
};

/* One kv head's part of attention for consecutive rows of a span: row r stands at position + r,
 * and its `group` query heads lie side by side. Pair i = r*group + head of the group. */
struct cpu_attend {
    const float *q; /* [rows, ldq] at the group's first head */
    size_t ldq;
    uint32_t rows, group, dim;
    uint32_t position; /* absolute, of row 0 */
    uint32_t window;   /* 0 = global */
    float scale;
    const uint8_t *k, *v; /* this head in block 0; bf16 [64][dim] in each block */
    const int32_t *blocks;
    int64_t stride_block; /* bytes */
};

/* Softmax under way for every pair: o = sum p v, l = sum p, with p = exp(s - m). m is -inf where
 * nothing has been seen yet. */
struct cpu_partial {
    float *o;     /* [pairs, ldo] */
    size_t ldo;   /* dim padded to 16 */
    float *m, *l; /* [pairs] */
};

/* The signatures, one macro each, for C, SIMD and tests. */

/* Bring rows [r0, r1) of x [m, k_x] into the order that gemv and gemm read; r0 is a multiple of
 * mr; up to gemv_rows rows come in one call. l->a, l->m and l->k are set. */
#define CPU_PACK_ROWS(name)                                                                        \
    void name(const struct cpu_linear *l, const float *x, uint32_t k_x, uint32_t r0, uint32_t r1)
/* All l->m <= gemv_rows rows times panels [p0, p1): streams the weights once. */
#define CPU_GEMV(name) void name(const struct cpu_linear *l, uint32_t p0, uint32_t p1)
/* Rows [r0, r1), r0 a multiple of mr, times panels [p0, p1). Same bits as gemv. */
#define CPU_GEMM(name)                                                                             \
    void name(const struct cpu_linear *l, uint32_t r0, uint32_t r1, uint32_t p0, uint32_t p1)
/* Attention of all pairs over tiles [t0, t1) from nothing into p. */
#define CPU_ATTEND(name)                                                                           \
    void name(const struct cpu_attend *j, uint32_t t0, uint32_t t1, const struct cpu_partial *p,   \
              void *scratch)
/* p += q, q being the segment after those in p. */
#define CPU_COMBINE(name)                                                                          \
    void name(const struct cpu_partial *p, const struct cpu_partial *q, uint32_t pairs,            \
              uint32_t dim)
/* out[pair] = o / l; pair i goes to out + (i / group)*ldout + (i % group)*dim. */
#define CPU_FINISH(name)                                                                           \
    void name(const struct cpu_partial *p, uint32_t pairs, uint32_t dim, uint32_t group,           \
              float *out, size_t ldout)
/* y = x / sqrt(mean(x^2) + eps) * (offset + w) over n. y may be x. */
#define CPU_NORM(name)                                                                             \
    void name(float *y, const float *x, const float *w, uint32_t n, float eps, float offset)
/* Rotate `heads` heads of 2*half columns by the row's angles. */
#define CPU_ROPE(name)                                                                             \
    void name(float *x, uint32_t heads, uint32_t half, const float *cosine, const float *sine)
#define CPU_ADD(name) void name(float *x, const float *y, size_t n)
#define CPU_GATE(name)                                                                             \
    void name(float *y, const float *gate, const float *up, size_t n, enum device_act act)
/* Round to nearest even. */
#define CPU_NARROW(name) void name(uint16_t *y, const float *x, size_t n)

#define CPU_KERNELS_DECLARE(isa)                                                                   \
    CPU_PACK_ROWS(device_cpu_pack_rows_##isa);                                                     \
    CPU_GEMV(device_cpu_gemv_##isa);                                                               \
    CPU_GEMM(device_cpu_gemm_##isa);                                                               \
    CPU_ATTEND(device_cpu_attend_##isa);                                                           \
    CPU_COMBINE(device_cpu_combine_##isa);                                                         \
    CPU_FINISH(device_cpu_finish_##isa);                                                           \
    CPU_NORM(device_cpu_norm_##isa);                                                               \
    CPU_ROPE(device_cpu_rope_##isa);                                                               \
    CPU_ADD(device_cpu_add_##isa);                                                                 \
    CPU_GATE(device_cpu_gate_##isa);                                                               \
    CPU_NARROW(device_cpu_narrow_##isa)

struct cpu_kernels {
    const char *isa;      /* as `isa=` spells it */
    const char *numerics; /* baton_caps.numerics */
    enum cpu_order order;
    uint32_t mr;        /* rows of an activation tile: gemm is cut at multiples */
    uint32_t gemv_rows; /* up to so many rows run through gemv, all in one item */
    uint32_t k_unit;    /* k is padded to a multiple */
    uint32_t row_block; /* rows of one gemm item, a multiple of mr: its activations stay in L2 */
    CPU_PACK_ROWS((*pack_rows));
    CPU_GEMV((*gemv));
    CPU_GEMM((*gemm));
    CPU_ATTEND((*attend));
    CPU_COMBINE((*combine));
    CPU_FINISH((*finish));
    CPU_NORM((*norm));
    CPU_ROPE((*rope));
    CPU_ADD((*add));
    CPU_GATE((*gate));
    CPU_NARROW((*narrow));
};

#define CPU_KERNELS_FILL(name)                                                                     \
    .pack_rows = device_cpu_pack_rows_##name, .gemv = device_cpu_gemv_##name,                      \
    .gemm = device_cpu_gemm_##name, .attend = device_cpu_attend_##name,                            \
    .combine = device_cpu_combine_##name, .finish = device_cpu_finish_##name,                      \
    .norm = device_cpu_norm_##name, .rope = device_cpu_rope_##name, .add = device_cpu_add_##name,  \
    .gate = device_cpu_gate_##name, .narrow = device_cpu_narrow_##name

CPU_KERNELS_DECLARE(generic);
CPU_KERNELS_DECLARE(avx2);
CPU_KERNELS_DECLARE(avx512bf16);
extern const struct cpu_kernels device_cpu_kernels_generic;
extern const struct cpu_kernels device_cpu_kernels_avx2;
extern const struct cpu_kernels device_cpu_kernels_avx512bf16;

/* Kernels under a mask ("scalar", "avx2", "avx512bf16"; NULL = the best that this machine runs).
 * NULL with `why` where the machine lacks it or nothing is called so. */
const struct cpu_kernels *device_cpu_kernels_find(const char *isa, const char **why);

/* Bytes of scratch that `attend` wants: packed queries, scores, widened K and V of one tile. */
static inline size_t cpu_attend_scratch(uint32_t pairs, uint32_t dim)
{
    size_t wide = (dim + 15u) / 16u * 16u, rows = pairs + 16u;
    return sizeof(float) * (rows * wide + 2 * rows * CPU_TILE + 2 * CPU_TILE * wide + rows + 64);
}

/* Tiles [*t0, *t1) that some of the rows see. */
static inline void cpu_attend_tiles(const struct cpu_attend *j, uint32_t *t0, uint32_t *t1)
{
    uint32_t first = j->window && j->position >= j->window ? j->position - j->window + 1 : 0;
    *t0 = first / CPU_TILE;
    *t1 = (j->position + j->rows - 1) / CPU_TILE + 1;
}

/* What row r sees of tile t: positions [*a, *b) counted from the tile's first; empty: a >= b. */
static inline void cpu_attend_sees(const struct cpu_attend *j, uint32_t r, uint32_t t, uint32_t *a,
                                   uint32_t *b)
{
    uint32_t p = j->position + r, base = t * CPU_TILE;
    uint32_t first = j->window && p >= j->window ? p - j->window + 1 : 0;
    *a = first > base ? first - base : 0;
    *b = p < base ? 0 : p - base + 1 < CPU_TILE ? p - base + 1 : CPU_TILE;
}

/* Positions of tile t that any row sees: outside of them the page may hold anything, NaN too. */
static inline void cpu_attend_held(const struct cpu_attend *j, uint32_t t, uint32_t *a, uint32_t *b)
{
    uint32_t unused;
    cpu_attend_sees(j, 0, t, a, &unused);
    cpu_attend_sees(j, j->rows - 1, t, &unused, b);
}

/* ---- objects ------------------------------------------------------------------------------ */

struct cpu_device {
    struct device base;
    const struct cpu_kernels *kernels;
    struct base_pool *pool; /* NULL until device_start */
};

struct cpu_weight {
    struct device_weight base;
    char name[96];
    unsigned kind;
    uint32_t rows, cols;
    uint32_t k;       /* cols padded */
    uint16_t *packed; /* DEVICE_MATRIX: panels; a tied table is read from them too */
    uint16_t *table;  /* DEVICE_TABLE alone: [rows, cols] */
    float *vector;    /* DEVICE_VECTOR: [cols padded to 16], zero behind */
    size_t bytes;
};

/* Cosine and sine of every row of the batch for one rope: [rows, head_dim/2] each. */
struct cpu_angles {
    struct device_rope rope; /* a copy: the table is found by content */
    float *cosine, *sine;    /* [max_rows, CPU_MAX_HEAD_DIM/2] */
};

/* Memory of a program, sized at its first run, when the threads exist (and after a fork, so that
 * it is never shared). Later runs allocate nothing, except where a context outgrows the buffers of
 * split attention. */
struct cpu_program {
    struct device_program base;
    bool ready;
    unsigned n_threads;
    float *arrays;   /* the verbs' scratch arrays, handed out from the bottom */
    size_t n_arrays; /* floats */
    float *a;        /* packed activations of the linear under way */
    size_t a_bytes;
    float *tables; /* memory of the angles */
    struct cpu_angles angles[CPU_MAX_ROPES];
    float *scratch; /* [n_threads][scratch_bytes] */
    size_t scratch_bytes;
    float *partials; /* split attention, grown on demand */
    size_t n_partials;
};

struct cpu_run {
    struct device_run base;
    struct cpu_device *device;
    const struct cpu_kernels *kernels;
    struct cpu_program *program;
    size_t used;       /* floats of program->arrays */
    uint32_t n_angles; /* tables of program->angles that are this run's */
};

/* Note an error in the run unless it has one. */
void device_cpu_fail(struct device_run *r, int code, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/* Run fn(ctx, item, scratch) for items [0, n) over the pool. Each call has a scratch of
 * program->scratch_bytes to itself. */
typedef void (*cpu_item_fn)(void *ctx, unsigned item, void *scratch);
void device_cpu_parallel(struct cpu_run *r, cpu_item_fn fn, void *ctx, unsigned n);

/* pack.c */
int device_cpu_weight_bind(struct device *d, const struct baton_tensor *t, unsigned kind,
                           struct device_weight **out, struct baton_error *e);
void device_cpu_weight_close(struct device *d, struct device_weight *w);
uint64_t device_cpu_weight_bytes(const struct device_weight *w);
/* Row `row` of a table or of a packed matrix as float32. */
void device_cpu_weight_row(const struct cpu_weight *w, enum cpu_order order, uint32_t row,
                           float *out);

/* linear.c: y [rows, w->rows] = x [rows, w->cols] w^T + bias. */
void device_cpu_linear_run(struct cpu_run *r, float *y, const float *x, uint32_t rows,
                           const struct cpu_weight *w, const float *bias);

/* attend.c */
void device_cpu_kv_append(struct device_run *r, uint32_t layer, struct device_array k,
                          struct device_array v);
void device_cpu_attend(struct device_run *r, struct device_array o, struct device_array q,
                       const struct device_attn *a);

/* ops.c */
int device_cpu_program_open(struct device *d, const struct device_graph *g,
                            struct device_program **out, struct baton_error *e);
void device_cpu_program_close(struct device_program *p);
int device_cpu_submit(struct device_program *p, const struct baton_batch *b, uint64_t *id,
                      struct baton_error *e);
/* True where the run goes on and `a` is [rows, cols]. */
bool device_cpu_shape(struct device_run *r, const char *verb, struct device_array a, uint32_t rows,
                      uint64_t cols);

#endif
