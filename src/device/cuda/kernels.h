/* SPDX-License-Identifier: Apache-2.0 */
/* What the host files of the cuda device ask of its kernels.
 *
 * Plain C on both sides: the .cu files define these functions, the .c files call them. Every
 * pointer is device memory. Activations that a matrix reads are bf16, the residual stream and
 * sums are float32. All functions only put work on the stream and return the error of the launch.
 *
 * Exactness in decode (at most CUDA_DECODE_ROWS rows): a row's bits depend on its data and absolute
 * positions alone. The vector-matrix kernel gives each row a column of the matrix unit and adds up
 * in an order fixed by the weight's shape; attention walks splits whose borders are absolute
 * positions and combines them in order.
 */
#ifndef DEVICE_CUDA_KERNELS_H
#define DEVICE_CUDA_KERNELS_H

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define CUDA_DECODE_ROWS 8u /* up to so many rows run through the vector-matrix kernel */
#define CUDA_PAGE 64u       /* positions of a page */
#define CUDA_SPLIT 128u     /* positions of one block of decode attention */
#define CUDA_GROUPS 2u      /* block tables of a sequence: global, local */

typedef uint16_t cuda_bf16; /* raw bits on the host's side */

/* Where a launch goes. `overlap`: the kernel may start while the one before it ends, and waits for
 * it inside (programmatic launch, sm_90). */
struct cuda_where {
    cudaStream_t stream;
    bool overlap;
};

/* The rows of a batch, uploaded before each run. */
struct cuda_rows {
    const int32_t *ids;      /* [n] */
    const int32_t *position; /* [n] absolute */
    const int32_t *span;     /* [n] */
    const int32_t *logit;    /* [n_logits] */
    const int32_t *tables;   /* [spans][CUDA_GROUPS][table_stride] block numbers */
    uint32_t table_stride;
    uint32_t n;
};

/* One layer's pages: element (block b, head h, position p, dim d) of K lies at
 * k + b*stride_block + h*stride_head + (p % 64)*2*head_dim + 2*d. */
struct cuda_pages {
    uint8_t *k, *v;
    int64_t stride_block, stride_head;
    uint32_t group; /* which table */
};

/* ---- row by row (rows.cu) ----------------------------------------------------------------- */

cudaError_t cuda_embed(struct cuda_where at, float *y, const cuda_bf16 *table, struct cuda_rows r,
                       uint32_t cols, float scale);
/* y = norm(x) * (offset + w), to float32 (y) and bf16 (h); either may be NULL. ld in elements. */
cudaError_t cuda_norm(struct cuda_where at, float *y, cuda_bf16 *h, uint32_t ldh, const float *x,
                      const float *w, uint32_t rows, uint32_t cols, float eps, float offset);
/* x += norm(y; w1); h = norm(x; w2). Norms: cols is a multiple of 8. */
cudaError_t cuda_norm_add_norm(struct cuda_where at, cuda_bf16 *h, uint32_t ldh, float *x,
                               const float *y, const float *w1, const float *w2, uint32_t rows,
                               uint32_t cols, float eps, float offset);
cudaError_t cuda_add(struct cuda_where at, float *x, const float *y, uint64_t n);
/* y = act(gate) * up over [rows, cols]; all three with leading dimension ld. act as in verbs.h. */
cudaError_t cuda_gate(struct cuda_where at, cuda_bf16 *y, const cuda_bf16 *gate,
                      const cuda_bf16 *up, uint32_t ld, uint32_t ldy, uint32_t rows, uint32_t cols,
                      int act);
cudaError_t cuda_narrow(struct cuda_where at, cuda_bf16 *y, const float *x, uint64_t n);
/* y[i,:] = x[logit[i],:] */
cudaError_t cuda_select(struct cuda_where at, cuda_bf16 *y, const cuda_bf16 *x, uint32_t ldx,
                        struct cuda_rows r, uint32_t n_logits, uint32_t cols);
/* y += bias, y float32 or bf16. */
cudaError_t cuda_bias(struct cuda_where at, void *y, bool narrow, uint32_t ld, const float *bias,
                      uint32_t rows, uint32_t cols);
/* cs[row, i] = (cos, sin) of position * inv_freq[i]. */
cudaError_t cuda_angles(struct cuda_where at, float2 *cs, const float *inv_freq, uint32_t half,
                        struct cuda_rows r);

/* ---- heads (heads.cu) --------------------------------------------------------------------- */

/* One of q, k, v inside a row: where, how many heads, what is done to them. */
struct cuda_head_part {
    cuda_bf16 *x; /* [rows, heads*head_dim] with leading dimension ld */
    uint32_t ld, heads;
    const float *norm; /* [head_dim] or NULL */
    const float2 *cs;  /* angles or NULL */
    float eps, offset;
};
/* Norm and rotate q in place; norm and rotate k and store it and v into the pages. */
cudaError_t cuda_heads(struct cuda_where at, struct cuda_head_part q, struct cuda_head_part k,
                       struct cuda_head_part v, uint32_t head_dim, struct cuda_pages p,
                       struct cuda_rows r);

/* ---- vector times matrix (gemv.cu) -------------------------------------------------------- */

enum cuda_epilogue {
    CUDA_STORE_BF16 = 0,
    CUDA_STORE_F32 = 1,
    CUDA_ADD_F32 = 2, /* y += */
    CUDA_GATE = 3,    /* w holds gate [m, k] then up [m, k]: y = act(gate) * up, bf16 */
};
struct cuda_card {
    uint32_t n_sms;
    uint32_t block_bytes; /* shared memory that a block may have */
};

struct cuda_gemv {
    const cuda_bf16 *w; /* [m, k]; GATE: [2m, k] */
    const cuda_bf16 *x; /* [rows, k] with leading dimension ldx; NULL where xf is given */
    const float *xf;    /* [rows, k] float32: normed on the way with g, eps, offset */
    const float *g;
    float eps, offset;
    /* Where yf is given, xf + norm(yf; gf) takes the place of xf and goes to sum as well, which is
     * other memory than xf: [rows, k] with leading dimension ldx all three. */
    const float *yf, *gf;
    float *sum;
    const float *bias; /* [m] or NULL */
    void *y;           /* [rows, m] with leading dimension ldy */
    uint32_t ldx, ldy, rows, m, k;
    int epilogue, act;
};
/* rows <= CUDA_DECODE_ROWS, k a multiple of 8. */
cudaError_t cuda_gemv(struct cuda_where at, const struct cuda_gemv *g, struct cuda_card card);
#define CUDA_GEMV_NORM_MAX_K 4096u /* widest row that is normed on the way */

/* ---- attention ---------------------------------------------------------------------------- */

struct cuda_attention {
    const cuda_bf16 *q; /* [rows, q_heads*head_dim], leading dimension ldq */
    cuda_bf16 *o;       /* [rows, q_heads*head_dim], leading dimension ldo */
    uint32_t ldq, ldo, q_heads, kv_heads, head_dim, window;
    float scale;
    struct cuda_pages pages;
};
/* Scratch of split attention. */
struct cuda_partials {
    float *o;          /* [rows][q_heads][max_splits][head_dim] */
    float2 *ml;        /* [rows][q_heads][max_splits] maximum and sum */
    uint32_t *arrived; /* [rows][q_heads] zero between launches */
    uint32_t max_splits;
};
/* Every row by itself; splits: blocks a row may need at most. */
cudaError_t cuda_attend_decode(struct cuda_where at, const struct cuda_attention *a,
                               struct cuda_partials p, struct cuda_rows r, uint32_t splits);
/* The same with the heads' norms, rotations and the way into the pages in it, so that nothing need
 * be stored in between; part: q, k, v. sm_90 and the head sizes that _has names. */
cudaError_t cuda_attend_step(struct cuda_where at, const struct cuda_attention *a,
                             const struct cuda_head_part part[3], struct cuda_rows r);
bool cuda_attend_step_has(uint32_t head_dim);
/* Rows [row, row + n) of one span that starts at `position`. */
cudaError_t cuda_attend_prefill(struct cuda_where at, const struct cuda_attention *a,
                                struct cuda_rows r, uint32_t span, uint32_t row, uint32_t n,
                                uint32_t position);
/* Head sizes that cuda_attend_prefill has. */
bool cuda_attend_has(uint32_t head_dim);

#ifdef __cplusplus
}
#endif
#endif
