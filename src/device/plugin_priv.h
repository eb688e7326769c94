/* SPDX-License-Identifier: Apache-2.0 */
/* plugin: devices in shared objects of others, through baton/device.h. plugin.c: opening, weights;
 * plugin_program.c: plans and geometry; plugin_run.c: batches and what is checked of them;
 * plugin_kv.c: lanes and copies. */
#ifndef DEVICE_PLUGIN_PRIV_H
#define DEVICE_PLUGIN_PRIV_H

#include "base/base.h"
#include "device/device_priv.h"

struct plugin_device {
    struct device base;
    void *object; /* of dlopen */
    struct baton_device_api api;
    struct baton_device *theirs;
    char path[512];
    char *artifact; /* bytes of the file of artifact= */
    size_t artifact_bytes;
    struct plugin_program *program;
    uint32_t *first; /* [max_lanes, n_layers] positions below were never written into the lane */
    bool lost;
};

struct plugin_weight {
    struct device_weight base;
    struct baton_weight *theirs;
    char *name;
    uint32_t n_dims;
    int64_t stride[4]; /* as bound */
    uint64_t bytes;
};

struct plugin_program {
    struct device_program base;
    struct baton_program *theirs;
    uint32_t n_layers;
    /* the batch under way */
    struct baton_batch batch;
    void (*layer_done)(void *ctx, uint32_t layer);
    void *ctx;
    uint32_t layers_told;
    bool disorder; /* told of a layer out of turn */
};

/* What every slot's result goes through: a loss is remembered, a failure has a text. */
int device_plugin_result(struct plugin_device *d, const char *slot, int rc, struct baton_error *e);
/* 0, or that the device is lost. */
int device_plugin_alive(const struct plugin_device *d, struct baton_error *e);

/* Ask what it can do, refuse what can't be, and keep it in base.caps. */
int device_plugin_read_caps(struct plugin_device *d, struct baton_error *e);

int device_plugin_program_open(struct device *d, const struct device_graph *g,
                               struct device_program **out, struct baton_error *e);
void device_plugin_program_close(struct device_program *p);
int device_plugin_submit(struct device_program *p, const struct baton_batch *b, uint64_t *id,
                         struct baton_error *e);
int device_plugin_wait(struct device_program *p, uint64_t id, uint64_t timeout_ns,
                       struct baton_error *e);

int device_plugin_kv_open(struct device *d, const struct device_kv_pool *pool,
                          struct baton_error *e);
void device_plugin_kv_close(struct device *d);
int device_plugin_lane_bind(struct device *d, uint32_t lane, struct baton_error *e);
int device_plugin_lane_clear(struct device *d, uint32_t lane, struct baton_error *e);
void device_plugin_lane_release(struct device *d, uint32_t lane);
int device_plugin_kv_read(struct device *d, uint32_t lane, const struct baton_kv_view *views,
                          uint32_t n_layers, const uint32_t *first, uint32_t end,
                          struct baton_error *e);
int device_plugin_kv_write(struct device *d, uint32_t lane, const struct baton_kv_view *views,
                           uint32_t n_layers, const uint32_t *first, uint32_t end,
                           struct baton_error *e);
int device_plugin_kv_look(struct device *d, uint32_t lane, struct baton_kv_view *views,
                          uint32_t n_layers, struct baton_error *e);
bool device_plugin_pin(struct device *d, void *p, size_t bytes);
void device_plugin_unpin(struct device *d, void *p);

#endif
