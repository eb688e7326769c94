# SPDX-License-Identifier: Apache-2.0
"""What a cache looks like on the wire: geometry, positions, bodies of frames, digests.

Entries travel as bfloat16, held here as numpy uint16: numpy has no such type, and nothing here
computes with them. An array of one slot is [kv_heads, positions, head_dim].
"""
import hashlib
import struct
from dataclasses import dataclass

import numpy as np
import xxhash

from .wire import INTEGRITY, MAX_IDS, MISMATCH, PEER, WireError

BF16 = 3
LEAF = 64
PIECE = 1 << 20
NO_SLOT = 0xFFFFFFFF
OFFER_HEAD = struct.Struct("<32s32s32s32s8I32x")
COMMIT_HEAD = struct.Struct("<IIifQQQII32s32s16x")
PARTS = ("arch", "weights", "numerics", "tokenizer")


@dataclass(frozen=True)
class Geometry:
    n_layers: int
    kv_heads: int
    head_dim: int
    window: int  # W of local layers; 0 where there are none
    local: tuple  # [n_layers] of bool

    def first(self, layer, n):
        """The first position that a layer retains after n tokens."""
        return max(0, n - self.window + 1) if self.local[layer] else 0


@dataclass(frozen=True)
class Offer:
    identity: dict
    geometry: Geometry
    ids: tuple
    max_new: int
    stream: bool
    digest: bool


# ---- OFFER, ASK


def write_offer(o):
    g, n = o.geometry, len(o.ids)
    head = OFFER_HEAD.pack(*(o.identity[p] for p in PARTS), g.n_layers, g.kv_heads, g.head_dim, BF16,
                           g.window, n, o.max_new, o.stream | o.digest << 1)
    rows = b"".join(struct.pack("<4I", g.local[l], g.first(l, n), n - g.first(l, n), 0)
                    for l in range(g.n_layers))
    return head + rows + np.asarray(o.ids, "<i4").tobytes()


def read_offer(body):
    """The offer of a stranger. A body that does not fit raises PEER (an error of the connection),
    a layer table that breaks the retention rule MISMATCH (REFUSE)."""
    *parts, layers, heads, dim, dtype, window, n, max_new, flags = OFFER_HEAD.unpack_from(body)
    ticket = 64 if flags & 4 else 0
    if not (1 <= layers <= 512 and 1 <= n <= MAX_IDS and dtype in (1, 2, 3) and flags < 8
            and 1 <= heads * dim * (4 if dtype == 1 else 2) <= 65536 and not any(body[160:192])
            and len(body) == 192 + 16 * layers + 4 * n + ticket):
        raise WireError(PEER, "OFFER with fields out of range")
    if ticket:
        raise WireError(MISMATCH, "this end keeps no places for pushes")
    if dtype != BF16:
        raise WireError(MISMATCH, f"KV dtype {dtype}; this end takes 3 (bf16)")
    table = struct.unpack_from(f"<{4 * layers}I", body, 192)
    g = Geometry(layers, heads, dim, window, tuple(k == 1 for k in table[::4]))
    for l in range(layers):
        kind, first, count, zero = table[4 * l:4 * l + 4]
        if kind > 1 or zero or (kind and window < 2) or (first, count) != (g.first(l, n), n - first):
            raise WireError(MISMATCH, f"layer {l}: the table says [{first}, {first + count})")
    ids = np.frombuffer(body, "<i4", n, 192 + 16 * layers)
    if (ids < 0).any():
        raise WireError(PEER, "OFFER with a negative token id")
    return Offer(dict(zip(PARTS, parts)), g, tuple(ids.tolist()), max_new, bool(flags & 1),
                 bool(flags & 2))


def check_offer(mine, identity, offer):
    """Whether it is this end's model: MISMATCH names what differs."""
    for part in PARTS:
        if identity[part] != offer.identity[part]:
            raise WireError(MISMATCH, f"{part} differs between producer and consumer")
    if mine != offer.geometry:
        raise WireError(MISMATCH, f"geometry differs: {offer.geometry} and {mine}")


def read_ask(body):
    n, max_new, *zero = struct.unpack_from("<4I", body)
    if any(zero) or n != (len(body) - 16) / 4:
        raise WireError(PEER, "ASK with fields out of range")
    ids = np.frombuffer(body, "<i4", n, 16)
    if (ids < 0).any():
        raise WireError(PEER, "ASK with a negative token id")
    return tuple(ids.tolist()), max_new


# ---- pieces and digests


def pieces(g, first, n):
    """[first, n) cut where pieces may end, about 1 MiB each."""
    most = max(PIECE // (g.kv_heads * g.head_dim * 2) // LEAF, 1) * LEAF
    while first < n:
        end = min((first // LEAF) * LEAF + most, n)
        yield first, end
        first = end


class SlotDigest:
    """Of one slot, fed piece by piece in ascending order; pieces end at multiples of 64 or at n."""

    def __init__(self, slot, g, first, n):
        self.layer, self.which = divmod(slot, 2)
        self.head = struct.pack("<8I", 1, self.layer, self.which, BF16, g.kv_heads, g.head_dim, first,
                                n - first)
        self.leaves = []

    def feed(self, first, block):
        end = first + block.shape[1]
        at = first
        while at < end:
            to = min((at // LEAF + 1) * LEAF, end)
            leaf = struct.pack("<4I", self.layer, self.which, at, to - at)
            leaf += block[:, at - first:to - first].tobytes()
            self.leaves.append(xxhash.xxh3_128_digest(leaf))
            at = to

    def final(self):
        n = struct.pack("<I", len(self.leaves))
        return hashlib.sha256(self.head + n + b"".join(self.leaves)).digest()


def read_block(g, count, payload):
    return np.frombuffer(payload, "<u2").reshape(g.kv_heads, count, g.head_dim)


# ---- COMMIT


def argmax_margin(row):
    top = int(row.argmax())
    second = np.partition(row, -2)[-2] if len(row) > 1 else row[top]
    return top, float(row[top] - second)


@dataclass
class Commit:
    argmax: int
    margin: float
    prefill_ns: int
    bytes: int
    pieces: int
    vocab: int  # 0 without a row
    digest: bytes
    row_digest: bytes
    table: list  # of (first, last, digest) in slot order


def write_commit(c):
    head = COMMIT_HEAD.pack(len(c.table), c.vocab > 0, c.argmax, c.margin, c.prefill_ns, 0, c.bytes,
                            c.pieces, c.vocab, c.digest, c.row_digest)
    return head + b"".join(struct.pack("<II32s", *row) for row in c.table)


def read_commit(body):
    slots, flags, argmax, margin, ns, _, n_bytes, n_pieces, vocab, digest, row_digest = \
        COMMIT_HEAD.unpack_from(body)
    if (flags > 1 or len(body) != 128 + 40 * slots or any(body[112:128]) or argmax < 0
            or not margin >= 0 or bool(vocab) != bool(flags) or vocab > MAX_IDS):
        raise WireError(PEER, "COMMIT with fields out of range")
    table = [struct.unpack_from("<II32s", body, 128 + 40 * s) for s in range(slots)]
    return Commit(argmax, margin, ns, n_bytes, n_pieces, vocab, digest, row_digest, table)


def check_commit(c, g, n, held, digests, n_bytes, n_pieces):
    """The document's order: slots, then slot by slot, then the totals. Raises (slot, WireError)."""
    zero = bytes(32)
    if len(c.table) != 2 * g.n_layers:
        return NO_SLOT, WireError(INTEGRITY, f"COMMIT of {len(c.table)} slots")
    for slot, (first, last, digest) in enumerate(c.table):
        if (first, last) != (max(g.first(slot // 2, n), held), n - 1):
            return slot, WireError(INTEGRITY, f"slot {slot}: positions [{first}, {last}]")
        if digest != (digests[slot] if digests else zero):
            return slot, WireError(INTEGRITY, f"slot {slot}: its digest does not match")
    if (c.pieces, c.bytes) != (n_pieces, n_bytes):
        return NO_SLOT, WireError(INTEGRITY, "pieces or bytes do not match")
    if c.digest != (hashlib.sha256(b"".join(digests)).digest() if digests else zero):
        return NO_SLOT, WireError(INTEGRITY, "the digest over all slots does not match")
    return None
