/* SPDX-License-Identifier: Apache-2.0 */
/* Artifacts of the emulated devices: what compiling fixes, in a file. Weights stay outside and are
 * bound at run time, so the file has their names, types, shapes and the strides of the sample that
 * the program was compiled with; whose they are is a hash. docs/artifact.md describes the format.
 *
 * A file says nothing that could not be computed again here: what the emulation needs is recorded
 * from the model as ever, and compared. So nothing in a file is believed, and a program that is
 * another one is refused by the name of what differs.
 *
 * Files: artifact.c reads, artifact_check.c compares, artifact_write.c makes the bytes. */
#ifndef DEVICE_NPU_ARTIFACT_PRIV_H
#define DEVICE_NPU_ARTIFACT_PRIV_H

#include "device/npu/npu_priv.h"

#define NPU_ARTIFACT_MAGIC "baton-npu-artifact"
#define NPU_ARTIFACT_VERSION 1u
#define NPU_ARTIFACT_BYTES ((size_t)16 << 20) /* no file is longer */
#define NPU_ARTIFACT_WEIGHTS 65536u
#define NPU_COMPILER "baton emulated npu 1"

/* What is compared as numbers. 0 where a profile has no such thing. */
struct npu_geometry {
    uint32_t layers, vocabulary, hidden, kv_heads, head_dim, window;
    uint32_t part_layers;                    /* rngd: layers a part; the last one may have fewer */
    uint32_t chunk, lanes, positions, block; /* atom */
    uint32_t widths[BATON_MAX_WIDTHS];       /* rngd: rows of its programs, 0 ends them */
};
/* Members of the first two lines, by name; ends with NULL. */
struct npu_geometry_member {
    const char *name;
    size_t offset;
    uint32_t max;
};
extern const struct npu_geometry_member device_npu_geometry_members[];
uint32_t device_npu_geometry_get(const struct npu_geometry *g, size_t offset);
/* Byte strides of K and V as they lie in the device: block, head, position, dim. */
void device_npu_geometry_strides(const struct npu_geometry *g, int64_t out[4]);

struct npu_artifact_weight {
    const char *name;
    uint32_t dtype, n_dims;
    uint64_t shape[2];
    int64_t stride[2]; /* of the sample */
    bool host;         /* of a part that the host computes */
};

struct npu_artifact {
    char path[128];  /* for errors */
    char hash[65];   /* of the file */
    char device[32]; /* "npu:rngd" */
    char compiler[64];
    uint8_t source[32], checkpoint[32];
    struct npu_geometry geometry;
    struct npu_artifact_weight *weights; /* [n_weights], names inside `doc` */
    uint32_t n_weights;
    struct json_t *doc;
};

/* The whole file; `what` names it in errors. BATON_ERR_INPUT: it is none, truncated, damaged or
 * says what can't be; BATON_ERR_UNSUPPORTED: another version. */
int device_npu_artifact_parse(const char *bytes, size_t n, const char *what,
                              struct npu_artifact **out, struct baton_error *e);
/* Its second part alone: what the hash in the first one is of. */
int device_npu_artifact_body(const char *json, size_t n, const char *what,
                             struct npu_artifact **out, struct baton_error *e);
/* Read a file that is for the device of that name. */
int device_npu_artifact_open(const char *path, const char *device, struct npu_artifact **out,
                             struct baton_error *e);
void device_npu_artifact_close(struct npu_artifact *a); /* NULL and half-built are fine */

/* The strides that a tensor is to be read with, in place of its own: BATON_ERR_MISMATCH where it is
 * not the weight that was compiled for. Strides that differ are one too, unless `silent`: then the
 * device reads with those of the sample as long as that stays inside the tensor. */
int device_npu_artifact_weight(const struct npu_artifact *a, const struct baton_tensor *t,
                               bool silent, int64_t stride[2], struct baton_error *e);
/* Whether it is of this plan, geometry and checkpoint. */
int device_npu_artifact_check(const struct npu_artifact *a, const struct npu_plan *p,
                              const struct device_graph *g, const struct npu_geometry *now,
                              struct baton_error *e);
/* The steps of a plan with their constants and the names of weights. */
void device_npu_plan_hash(const struct npu_plan *p, uint8_t out[32]);

/* What a program has of its model; the rest of *out is the profile's. */
void device_npu_geometry_model(const struct npu_plan *p, const struct device_graph *g,
                               struct npu_geometry *out);
/* The bytes of a file, *out malloc'ed. `host_parts`: embedding and tail are the host's. */
int device_npu_artifact_write(const char *device, const struct npu_plan *p,
                              const struct npu_geometry *g, const uint8_t checkpoint[32],
                              bool host_parts, char **out, size_t *n, struct baton_error *e);

#endif
