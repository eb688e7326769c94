/* SPDX-License-Identifier: Apache-2.0 */
/* Products of many rows through cuBLASLt, which is opened at run time: a machine that lacks it says
 * so by name, and one whose toolkit lies elsewhere needs no other build.
 *
 * The algorithm of a shape is the library's first choice, taken once and kept: the same shape runs
 * the same kernel for the life of the program. */
#include <cublasLt.h>
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "device/cuda/cuda_priv.h"

#define WORKSPACE ((size_t)64 << 20)
#define MAX_SHAPES 512u

struct shape {
    uint32_t rows, m, k, ldx, ldy;
    bool wide, add;
};

struct entry {
    struct shape shape;
    cublasLtMatrixLayout_t w, x, y;
    cublasLtMatmulAlgo_t algo;
};

struct device_cuda_matmul {
    void *library, *workspace;
    cublasLtHandle_t handle;
    cublasLtMatmulDesc_t desc;
    cublasLtMatmulPreference_t preference;
    struct entry *entries;
    uint32_t n, next;
    __typeof__(&cublasLtCreate) create;
    __typeof__(&cublasLtDestroy) destroy;
    __typeof__(&cublasLtMatmul) matmul;
    __typeof__(&cublasLtMatmulDescCreate) desc_create;
    __typeof__(&cublasLtMatmulDescDestroy) desc_destroy;
    __typeof__(&cublasLtMatmulDescSetAttribute) desc_set;
    __typeof__(&cublasLtMatrixLayoutCreate) layout_create;
    __typeof__(&cublasLtMatrixLayoutDestroy) layout_destroy;
    __typeof__(&cublasLtMatmulPreferenceCreate) preference_create;
    __typeof__(&cublasLtMatmulPreferenceDestroy) preference_destroy;
    __typeof__(&cublasLtMatmulPreferenceSetAttribute) preference_set;
    __typeof__(&cublasLtMatmulAlgoGetHeuristic) heuristic;
};

static int check(cublasStatus_t rc, const char *what, struct baton_error *e)
{
    if (rc == CUBLAS_STATUS_SUCCESS)
        return 0;
    return base_fail(e, rc == CUBLAS_STATUS_ALLOC_FAILED ? BATON_ERR_NOMEM : BATON_ERR_DEVICE,
                     "cuda: cuBLASLt: %s: status %d", what, (int)rc);
}

static int open_library(struct device_cuda_matmul *m, struct baton_error *e)
{
    static const char *const names[] = {
        "libcublasLt.so.13",
        "/usr/local/cuda/lib64/libcublasLt.so.13",
        "/usr/local/cuda/targets/x86_64-linux/lib/libcublasLt.so.13",
        "libcublasLt.so.12",
        "/usr/local/cuda/lib64/libcublasLt.so.12",
        NULL};
    const char *given = getenv("BATON_CUBLASLT_LIBRARY");
    if (given)
        m->library = dlopen(given, RTLD_NOW | RTLD_LOCAL);
    for (int i = 0; names[i] && !m->library; i++)
        m->library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
    if (!m->library)
        return base_fail(e, BATON_ERR_DEVICE,
                         "cuda: libcublasLt.so.13 is neither in the system's path nor under "
                         "/usr/local/cuda; $BATON_CUBLASLT_LIBRARY names another place");
    return 0;
}

static int resolve(struct device_cuda_matmul *m, struct baton_error *e)
{
    const struct {
        const char *name;
        void *to;
    } symbols[] = {
        {"cublasLtCreate", &m->create},
        {"cublasLtDestroy", &m->destroy},
        {"cublasLtMatmul", &m->matmul},
        {"cublasLtMatmulDescCreate", &m->desc_create},
        {"cublasLtMatmulDescDestroy", &m->desc_destroy},
        {"cublasLtMatmulDescSetAttribute", &m->desc_set},
        {"cublasLtMatrixLayoutCreate", &m->layout_create},
        {"cublasLtMatrixLayoutDestroy", &m->layout_destroy},
        {"cublasLtMatmulPreferenceCreate", &m->preference_create},
        {"cublasLtMatmulPreferenceDestroy", &m->preference_destroy},
        {"cublasLtMatmulPreferenceSetAttribute", &m->preference_set},
        {"cublasLtMatmulAlgoGetHeuristic", &m->heuristic},
    };
    for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++) {
        void *p = dlsym(m->library, symbols[i].name);
        if (!p)
            return base_fail(e, BATON_ERR_DEVICE, "cuda: libcublasLt has no %s", symbols[i].name);
        memcpy(symbols[i].to, &p, sizeof p);
    }
    return 0;
}

static int prepare(struct device_cuda_matmul *m, struct baton_error *e)
{
    cublasOperation_t transposed = CUBLAS_OP_T;
    size_t bytes = WORKSPACE;
    int rc = check(m->create(&m->handle), "create", e);
    if (rc == 0)
        rc = check(m->desc_create(&m->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F), "description", e);
    if (rc == 0)
        rc = check(
            m->desc_set(m->desc, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed),
            "description", e);
    if (rc == 0)
        rc = check(m->preference_create(&m->preference), "preference", e);
    if (rc == 0)
        rc = check(m->preference_set(m->preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                     &bytes, sizeof bytes),
                   "preference", e);
    if (rc == 0)
        rc = device_cuda_check(cudaMalloc(&m->workspace, WORKSPACE), "cuBLASLt's workspace", e);
    return rc;
}

int device_cuda_matmul_open(struct device_cuda_matmul **out, struct baton_error *e)
{
    struct device_cuda_matmul *m = base_try_alloc(1, sizeof *m, e);
    if (!m)
        return BATON_ERR_NOMEM;
    m->entries = base_try_alloc(MAX_SHAPES, sizeof *m->entries, e);
    int rc = m->entries ? open_library(m, e) : BATON_ERR_NOMEM;
    if (rc == 0)
        rc = resolve(m, e);
    if (rc == 0)
        rc = prepare(m, e);
    if (rc) {
        device_cuda_matmul_close(m);
        return rc;
    }
    *out = m;
    return 0;
}

static void drop(struct device_cuda_matmul *m, struct entry *x)
{
    if (x->w)
        m->layout_destroy(x->w);
    if (x->x)
        m->layout_destroy(x->x);
    if (x->y)
        m->layout_destroy(x->y);
    memset(x, 0, sizeof *x);
}

void device_cuda_matmul_close(struct device_cuda_matmul *m)
{
    if (!m)
        return;
    for (uint32_t i = 0; i < m->n; i++)
        drop(m, &m->entries[i]);
    cudaFree(m->workspace);
    if (m->preference)
        m->preference_destroy(m->preference);
    if (m->desc)
        m->desc_destroy(m->desc);
    if (m->handle)
        m->destroy(m->handle);
    if (m->library)
        dlclose(m->library);
    free(m->entries);
    free(m);
}

/* Column-major eyes: y is [m, rows], w [k, m] transposed, x [k, rows]. */
static int choose(struct device_cuda_matmul *m, const struct shape *s, struct entry *x,
                  struct baton_error *e)
{
    cublasLtMatmulHeuristicResult_t found;
    int n = 0;
    x->shape = *s;
    int rc = check(m->layout_create(&x->w, CUDA_R_16BF, s->k, s->m, s->k), "layout", e);
    if (rc == 0)
        rc = check(m->layout_create(&x->x, CUDA_R_16BF, s->k, s->rows, s->ldx), "layout", e);
    if (rc == 0)
        rc = check(
            m->layout_create(&x->y, s->wide ? CUDA_R_32F : CUDA_R_16BF, s->m, s->rows, s->ldy),
            "layout", e);
    if (rc == 0)
        rc = check(
            m->heuristic(m->handle, m->desc, x->w, x->x, x->y, x->y, m->preference, 1, &found, &n),
            "choice of an algorithm", e);
    if (rc == 0 && n == 0)
        rc = base_fail(e, BATON_ERR_DEVICE, "cuda: cuBLASLt has no algorithm for [%u, %u] x [%u]",
                       s->rows, s->k, s->m);
    if (rc == 0)
        x->algo = found.algo;
    return rc;
}

static bool same_shape(const struct shape *a, const struct shape *b)
{
    return a->rows == b->rows && a->m == b->m && a->k == b->k && a->ldx == b->ldx &&
           a->ldy == b->ldy && a->wide == b->wide && a->add == b->add;
}

static int find(struct device_cuda_matmul *m, const struct shape *s, struct entry **out,
                struct baton_error *e)
{
    for (uint32_t i = 0; i < m->n; i++)
        if (same_shape(&m->entries[i].shape, s)) {
            *out = &m->entries[i];
            return 0;
        }
    struct entry *x = &m->entries[m->next];
    drop(m, x);
    int rc = choose(m, s, x, e);
    if (rc) {
        drop(m, x);
        return rc;
    }
    m->next = (m->next + 1) % MAX_SHAPES;
    if (m->n < MAX_SHAPES)
        m->n++;
    *out = x;
    return 0;
}

int device_cuda_matmul(struct device_cuda_matmul *mm, cudaStream_t stream, void *y, uint32_t ldy,
                       bool wide, bool add, const cuda_bf16 *x, uint32_t ldx, const cuda_bf16 *w,
                       uint32_t rows, uint32_t m, uint32_t k, struct baton_error *e)
{
    struct shape s;
    struct entry *entry;
    float alpha = 1, beta = add ? 1 : 0;
    memset(&s, 0, sizeof s); /* compared as bytes */
    s.rows = rows;
    s.m = m;
    s.k = k;
    s.ldx = ldx;
    s.ldy = ldy;
    s.wide = wide;
    s.add = add;
    int rc = find(mm, &s, &entry, e);
    if (rc)
        return rc;
    return check(mm->matmul(mm->handle, mm->desc, &alpha, w, entry->w, x, entry->x, &beta, y,
                            entry->y, y, entry->y, &entry->algo, mm->workspace, WORKSPACE, stream),
                 "a product", e);
}
