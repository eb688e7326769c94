/* SPDX-License-Identifier: Apache-2.0 */
/* kv: the cache. Page pool, sequences, prefixes, layouts and their conversion, digests, files.
 *
 * Entries are addressed by (layer, K|V, absolute position). Layers fall into two groups, global
 * and local; a block is one page of 64 positions for *all* layers of its group, counted and with a
 * generation that rises whenever it is given out. A sequence has one block table per group. Block i
 * of a table holds the positions [64 i, 64 i + 64) of the sequence: a slot never implies another
 * position. Blocks of the local group that lie wholly out of the window are given back.
 *
 * Threads: pool and sequences belong to the engine thread. Another thread may read or write pages
 * of a sequence (through views) only while the engine keeps it open and does not append there.
 */
#ifndef KV_KV_H
#define KV_KV_H

#include <baton/device.h>

#define KV_BLOCK 64u /* positions a page; also a digest leaf and an attention tile */
#define KV_MAX_LAYERS 512u

/* What a model's cache looks like; filled from the model's configuration by the engine. */
struct kv_geometry {
    uint32_t n_layers, kv_heads, head_dim;
    uint32_t dtype;               /* enum baton_dtype of the pages */
    uint32_t window;              /* of local layers; 0 = the model has none */
    uint8_t local[KV_MAX_LAYERS]; /* [n_layers] 1 = local */
};

/* Bytes of one block of each group; local 0 where the model has no local layers. */
void kv_geometry_bytes(const struct kv_geometry *g, uint64_t *global_block, uint64_t *local_block);

/* First position that a local layer retains after n tokens: max(0, n - window + 1). Global: 0. */
uint32_t kv_retained_first(const struct kv_geometry *g, uint32_t layer, uint32_t n_tokens);

/* ---- pool --------------------------------------------------------------------------------- */

struct kv_pool;
/* Room for `n_tokens` positions in global layers and, for each of `n_seqs` sequences, a window plus
 * `chunk` rows in local ones. Host memory. Asking for more than there is: BATON_ERR_NOMEM that
 * names the bytes asked for and available. */
int kv_pool_open(struct kv_pool **out, const struct kv_geometry *g, uint32_t n_tokens,
                 uint32_t n_seqs, uint32_t chunk, struct baton_error *e);
/* The same in two steps: the blocks that come to it, and a pool of so many blocks or more. */
struct kv_pool_size {
    uint64_t global_blocks, local_blocks; /* local 0 where the model has no local layers */
};
void kv_pool_size(const struct kv_geometry *g, uint32_t n_tokens, uint32_t n_seqs, uint32_t chunk,
                  struct kv_pool_size *out);
int kv_pool_open_sized(struct kv_pool **out, const struct kv_geometry *g,
                       const struct kv_pool_size *size, struct baton_error *e);
void kv_pool_close(struct kv_pool *p); /* NULL is fine; logs an error when blocks are still out */
const struct kv_geometry *kv_pool_geometry(const struct kv_pool *p);
uint64_t kv_pool_bytes(const struct kv_pool *p);
/* Where the pages of both groups lie: kv_pool_bytes() from here. */
void *kv_pool_memory(const struct kv_pool *p);
/* Blocks in use, both groups: 0 when no sequence is open. */
uint32_t kv_pool_used(const struct kv_pool *p);
/* Blocks that the prefix index alone keeps: they go to whoever needs room. */
uint32_t kv_pool_idle(const struct kv_pool *p);
uint32_t kv_pool_capacity(const struct kv_pool *p);
/* Fill every free block with 0xFF bytes (NaN): a test's poison. */
void kv_pool_poison(struct kv_pool *p);

/* ---- sequences ---------------------------------------------------------------------------- */

struct kv_seq;
int kv_seq_open(struct kv_pool *p, struct kv_seq **out, struct baton_error *e);
void kv_seq_close(struct kv_seq *s); /* NULL is fine; gives every block back */
/* Make room so that positions [length, length + n_rows) can be appended; local blocks out of every
 * window from position `length` on are given back first. BATON_ERR_BUSY where the pool is out
 * of blocks; the sequence is then unchanged. */
int kv_seq_reserve(struct kv_seq *s, uint32_t n_rows, struct baton_error *e);
/* For an import into a sequence that is empty, or has the hit of kv_prefix_take_import: room for
 * [first, length) as each kind of layer retains it; sets the length.
 * `chunk` more rows follow through kv_seq_reserve as usual. */
int kv_seq_reserve_import(struct kv_seq *s, uint32_t length, struct baton_error *e);
/* n_rows positions were appended to every layer. */
void kv_seq_advance(struct kv_seq *s, uint32_t n_rows);
uint32_t kv_seq_length(const struct kv_seq *s);
/* Views of all layers, [n_layers]; valid until the next call that changes the sequence. The block
 * tables never move: a *copy* of a view stays good until kv_seq_close for positions that were
 * stored when it was made and are still retained, so another thread may send them meanwhile. */
const struct baton_kv_view *kv_seq_views(struct kv_seq *s);
/* Generation of the block that holds `position` in `layer`; 0 where none. */
uint32_t kv_seq_generation(const struct kv_seq *s, uint32_t layer, uint32_t position);
/* A number for all blocks held and their generations: another one as soon as a block was given back
 * or added. Equal numbers of different states are as likely as equal 64-bit hashes. */
uint64_t kv_seq_generations(const struct kv_seq *s);

/* ---- prefixes ----------------------------------------------------------------------------- */

/* Whole pages of sequences, kept after them and found again by what they hold: by their *origin*
 * (32 bytes that stand for whatever the numbers depend on besides token ids: the model, and the
 * arithmetic that computed them) and all token ids up to the page's end. A page that is found has
 * one owner more; nobody writes it. Pages that no sequence has are given up, the longest unused
 * first, as soon as a sequence needs room: an index takes no block from anybody.
 *
 * A hit of m positions has the global pages of [0, m) and the local ones that cover what a query
 * at m sees of it, [m - W + 1, m); where some of these are gone it is the next shorter m. At least
 * one position is left to compute. A sequence keeps to one origin from its first page on. */
struct kv_prefix;
int kv_prefix_open(struct kv_pool *p, struct kv_prefix **out,
                   struct baton_error *e); /* one a pool */
void kv_prefix_close(struct kv_prefix *x); /* before the pool; NULL is fine */
/* Index the whole pages of [0, n) that the sequence holds; n is at most its length. Each call goes
 * on where the last one stopped. */
void kv_prefix_put(struct kv_prefix *x, struct kv_seq *s, const uint8_t origin[32],
                   const int32_t *ids, uint32_t n);
/* Begin an empty sequence with the longest hit of at most `most` positions, a multiple of `grain`
 * (itself one of KV_BLOCK); its length, 0 = none. */
uint32_t kv_prefix_take(struct kv_prefix *x, struct kv_seq *s, const uint8_t origin[32],
                        const int32_t *ids, uint32_t most, uint32_t grain);
/* The same for an import of all `length` ids, before kv_seq_reserve_import: the local pages are
 * those that a query at `length` sees. */
uint32_t kv_prefix_take_import(struct kv_prefix *x, struct kv_seq *s, const uint8_t origin[32],
                               const int32_t *ids, uint32_t length);

/* ---- layouts ------------------------------------------------------------------------------ */

enum kv_which { KV_K = 0, KV_V = 1 };

/* The dense wire form of one slot piece: [kv_heads, n, head_dim] row-major, K and V apart. It is
 * the canonical order of digests; conversion between layouts goes position by position through the
 * strides of both. */
size_t kv_piece_bytes(uint32_t dtype, uint32_t kv_heads, uint32_t head_dim, uint32_t n);

/* Check a layout record that came from outside: every field in range, strides that do not
 * overlap, sizes that do not overflow. */
int kv_layout_check(const struct baton_kv_layout *l, struct baton_error *e);

/* Copy positions [first, first+n) of K or V from one view to another, converting layout and dtype.
 * Both views must hold (or have room for) those positions. Rounds to nearest even; equal dtypes are
 * copied bit by bit. Elements between head_dim and head_dim_padded of dst become zero.
 *
 * Where a row lies: paged, in its block; ring, in row p % rows, at most `rows` newest ones, and a
 * write past `end` makes the oldest fall out (the caller moves `end`); slid, the rows hold
 * [max(0, end - rows), end) from the first row on. Room to write: paged, every position with a
 * block; a whole-sequence block or slid window, [first, end) alone. int8 is
 * quantised with half a scale an element as budget (a scale is a block's largest magnitude / 127).
 * Fault: BATON_ERR_USAGE (positions), _MISMATCH (heads), _INPUT (a record that overlaps). */
int kv_copy(const struct baton_kv_view *dst, const struct baton_kv_view *src, enum kv_which which,
            uint32_t first, uint32_t n, struct baton_error *e);
/* Address of (position, head 0, dim 0), and in *run how many of the n positions from there lie
 * stride_position apart. The view must hold them. */
uint8_t *kv_view_run(const struct baton_kv_view *v, enum kv_which which, uint32_t position,
                     uint32_t n, uint32_t *run);
/* A view over a dense piece [kv_heads, n, head_dim] that holds [first, first+n) (layout filled in
 * *layout, a whole-sequence block). Positions keep their absolute numbers. */
struct baton_kv_view kv_dense_view(struct baton_kv_layout *layout, uint32_t dtype,
                                   uint32_t kv_heads, uint32_t head_dim, void *k, void *v,
                                   uint32_t first, uint32_t n);

/* ---- digests ------------------------------------------------------------------------------ */

/* A slot digest under way. Leaves are XXH3-128 over up to 64 positions aligned to absolute
 * multiples of 64, elements in the order head, position, dim, preceded by (layer, K|V, leaf's first
 * position, n); the slot is SHA-256 over the leaf table, dtype, first position and count: byte by
 * byte in digest.c. Pieces may come in any order as long as each leaf comes whole and once (a leaf
 * is cut only at the slot's ends); anything else is BATON_ERR_USAGE. */
struct kv_digest;
int kv_digest_open(struct kv_digest **out, uint32_t layer, enum kv_which which, uint32_t dtype,
                   uint32_t kv_heads, uint32_t head_dim, uint32_t first, uint32_t n,
                   struct baton_error *e);
void kv_digest_close(struct kv_digest *d); /* NULL is fine */
/* Digest positions [first, first+n) as they lie in a view (its dtype must be the digest's). */
int kv_digest_update(struct kv_digest *d, const struct baton_kv_view *v, uint32_t first, uint32_t n,
                     struct baton_error *e);
/* kv_copy and kv_digest_update in one pass, a tile of a leaf at a time, so that the second touch
 * finds the data in the cache. The digest is of the source's dtype. KV_DIGEST_SOURCE: of what lies
 * in the source, so that a fault of the copy shows. KV_DIGEST_COPY: the source may change while it
 * is read; every byte of it is read once, and what is digested is what was read and arrives. */
enum kv_digest_side { KV_DIGEST_SOURCE, KV_DIGEST_COPY };
int kv_digest_copy(struct kv_digest *d, enum kv_digest_side side, const struct baton_kv_view *dst,
                   const struct baton_kv_view *src, uint32_t first, uint32_t n,
                   struct baton_error *e);
/* BATON_ERR_INTEGRITY when a leaf is missing. */
int kv_digest_final(const struct kv_digest *d, uint8_t out[32], struct baton_error *e);

/* ---- files -------------------------------------------------------------------------------- */

/* A KV file is a safetensors file: "k.<layer>" and "v.<layer>" [kv_heads, positions, head_dim], all
 * of one dtype (F32, F16 or BF16), and I32 "positions.<layer>" [positions]: the absolute positions
 * of what the layer retains, the newest of `n_tokens` (none for a window of 1). It may hold the
 * token ids, I32 "ids" [n_tokens], and what the last of them predicts, F32 "logits" [vocab].
 * Metadata: "format" is KV_FILE_FORMAT, "n_tokens" a number; "ids_hash", SHA-256 over the ids as
 * little-endian 32 bits in hex, may repeat or replace the ids; the rest is the writer's: the engine
 * puts the identity there. docs/kv-file.md is the reader's version. */
#define KV_FILE_FORMAT "baton-kv-1"

struct kv_tokens {
    const int32_t *ids; /* NULL: not known */
    uint32_t n_ids;
    const float *logits; /* [vocab] of the last id; NULL: not known */
    uint32_t vocab;
};

/* The hash of ids as a KV file states it. */
void kv_ids_hash(const int32_t *ids, uint32_t n, char hex[65]);

/* Save all slots of a sequence. Metadata strings are pairs key, value, ..., NULL (may be NULL), at
 * most KV_FILE_METADATA pairs; tokens may be NULL. What a layer retains after kv_seq_length()
 * tokens is saved, not what its pages happen to hold. Written atomically: whatever fails, a full
 * disk too, leaves an older file as it was and nothing beside it. */
#define KV_FILE_METADATA 24u
int kv_save(struct kv_seq *s, const char *path, const char *const *metadata,
            const struct kv_tokens *tokens, struct baton_error *e);

/* A KV file that was opened: its form was checked (names, shapes, dtypes, positions, the hash of
 * the ids), not its numbers. Nothing outside the known tensors is accepted. The file is mapped and
 * must not be cut short meanwhile. */
struct kv_file;
struct kv_file_info {
    uint32_t n_layers, kv_heads, head_dim;
    uint32_t dtype; /* enum baton_dtype of all slots */
    uint32_t n_tokens;
    struct kv_tokens tokens; /* live as long as the file; n_ids is 0 or n_tokens */
};
int kv_file_open(const char *path, struct kv_file **out, struct baton_error *e);
/* The same over memory that the caller keeps (fuzzing). */
int kv_file_parse(const void *data, size_t n, const char *what, struct kv_file **out,
                  struct baton_error *e);
void kv_file_close(struct kv_file *f); /* NULL is fine */
const struct kv_file_info *kv_file_info(const struct kv_file *f);
const char *kv_file_metadata(const struct kv_file *f, const char *key); /* NULL where absent */
/* One layer's K and V as a dense view over [first, n_tokens); *layout is filled for it. */
struct baton_kv_view kv_file_view(const struct kv_file *f, uint32_t layer,
                                  struct baton_kv_layout *layout);
/* "F32", "F16" or "BF16". */
const char *kv_dtype_name(uint32_t dtype);

/* Does the file hold what a cache of this geometry retains after its n_tokens: layers, heads, sizes
 * and, layer by layer, positions? BATON_ERR_MISMATCH that names the layer. The dtype may differ. */
int kv_file_fits(const struct kv_file *f, const struct kv_geometry *g, struct baton_error *e);
/* Fill an empty sequence: room for n_tokens, every slot converted into its pages, length set.
 * BATON_ERR_INPUT that names slot and position where a number is not finite. */
int kv_load(struct kv_seq *s, const struct kv_file *f, struct baton_error *e);
/* The same for a sequence that kv_seq_reserve_import gave room for n_tokens or more: of the file's
 * positions those below `end` that a layer retains at the sequence's length. */
int kv_load_below(struct kv_seq *s, const struct kv_file *f, uint32_t end, struct baton_error *e);

#endif
