# SPDX-License-Identifier: Apache-2.0
"""Take an offered cache, verify it, decode from it.

A request is delivered in one place, after ACK: nothing that was not verified is ever decoded from.
One request at a time.
"""
import hashlib
import struct

import numpy as np

from . import wire
from .layout import (BF16, LEAF, NO_SLOT, SlotDigest, argmax_margin, check_commit, check_offer,
                     read_block, read_commit, read_offer)
from .wire import WireError


class Nack(Exception):
    """What LAYER, COMMIT or LOGITS say is wrong: this request fails, the connection goes on."""

    def __init__(self, slot, why):
        super().__init__(str(why))
        self.slot, self.why = slot, why


class Import:
    """One request's slots as they land."""

    def __init__(self, geometry, offer):
        self.g, self.n, self.digest = geometry, len(offer.ids), offer.digest
        self.blocks = [[] for _ in range(2 * geometry.n_layers)]
        self.next = [geometry.first(s // 2, self.n) for s in range(len(self.blocks))]
        self.sums = [SlotDigest(s, geometry, at, self.n) for s, at in enumerate(self.next)]
        self.bytes = self.pieces = 0

    def land(self, frame):
        g = self.g
        layer, which, first, count, dtype, placed, offset = struct.unpack("<6IQ", frame.control)
        slot = 2 * layer + which
        if layer >= g.n_layers or which > 1:
            raise Nack(NO_SLOT, WireError(wire.INTEGRITY, f"no slot {layer}, {which}"))
        if placed or offset or not frame.payload:
            raise Nack(slot, WireError(wire.INTEGRITY, "a placed piece, and no region was lent"))
        if first != self.next[slot] or not 0 < count <= self.n - first:
            raise Nack(slot, WireError(wire.INTEGRITY, f"positions from {first}, {self.next[slot]} due"))
        end = first + count
        if end % LEAF and end != self.n:
            raise Nack(slot, WireError(wire.INTEGRITY, f"a piece that ends at {end}, inside a leaf"))
        if dtype != BF16 or len(frame.payload) != g.kv_heads * count * g.head_dim * 2:
            raise Nack(slot, WireError(wire.INTEGRITY, "a piece of a wrong dtype or size"))
        if not self.digest and not frame.flags & wire.FLAG_PAYLOAD:
            raise WireError(wire.PEER, "LAYER that nothing checks")
        block = read_block(g, count, frame.payload)
        self.blocks[slot].append(block)
        if self.digest:
            self.sums[slot].feed(first, block)
        self.next[slot] = end
        self.bytes += len(frame.payload)
        self.pieces += 1

    def commit(self, frame, vocab):
        commit = read_commit(frame.control)
        for slot, at in enumerate(self.next):
            if at != self.n and len(commit.table) == len(self.next):
                raise Nack(slot, WireError(wire.INTEGRITY, f"positions from {at} are missing"))
        digests = [s.final() for s in self.sums] if self.digest else []
        wrong = check_commit(commit, self.g, self.n, 0, digests, self.bytes, self.pieces)
        if wrong:
            raise Nack(*wrong)
        if commit.vocab != vocab or commit.argmax >= vocab:
            raise Nack(NO_SLOT, WireError(wire.INTEGRITY, f"a row of {commit.vocab}, not {vocab}"))
        return commit

    def layers(self):
        whole = [np.concatenate(b, axis=1) for b in self.blocks]
        return list(zip(whole[::2], whole[1::2]))


class Consumer:
    def __init__(self, conn, backend, identity, log=lambda text: None):
        self.conn, self.backend, self.identity, self.log = conn, backend, identity, log
        self.late = set()  # requests that ended here and wait for the producer's final frame

    def serve(self, deliver):
        """Until the connection ends: deliver(offer, layers, row) for each verified request."""
        while True:
            frame = self.conn.take()
            if frame.request in self.late:
                if frame.type in (wire.ABORT, wire.CLOSE):
                    self.late.discard(frame.request)
            elif frame.type == wire.OFFER:
                self._request(frame, deliver)
            else:
                raise WireError(wire.PEER, f"{wire.NAMES[frame.type - 1]} for an unknown request")

    def _final(self, type, request, body=b""):
        self.conn.send(type, request, body)
        self.late.add(request)

    def _request(self, frame, deliver):
        request = frame.request
        try:
            offer = read_offer(frame.control)
            check_offer(self.backend.geometry, self.identity, offer)
            if max(offer.ids) >= self.backend.vocab:
                raise WireError(wire.MISMATCH, "token ids that the model does not have")
        except WireError as e:
            if e.code != wire.MISMATCH:
                raise
            self.log(f"request {request} refused: {e}")
            self._final(wire.REFUSE, request, wire.reason(e.code, str(e)))
            return
        try:
            landed, row, digest = self._import(request, offer)
        except Nack as e:
            self.log(f"request {request} failed: {e}")
            self._final(wire.NACK, request, struct.pack("<II", e.slot, 0)
                        + wire.reason(e.why.code, str(e.why)))
            return
        if landed is None:
            return
        self._final(wire.ACK, request, digest)
        self.log(f"request {request}: {len(offer.ids)} tokens, {landed.bytes} bytes, verified")
        deliver(offer, landed.layers(), row)

    def _import(self, request, offer):
        """What landed, the row, the digest over all slots; Nones where the producer gave up."""
        landed, commit, row = Import(self.backend.geometry, offer), None, b""
        self.conn.send(wire.RESERVE, request, struct.pack("<II88x", 0, 1))
        while commit is None or len(row) < 4 * commit.vocab:
            frame = self.conn.take()
            if frame.request in self.late and frame.type in (wire.ABORT, wire.CLOSE):
                self.late.discard(frame.request)
            elif frame.request != request:
                self._refuse_other(frame)
            elif frame.type == wire.ABORT:
                self.log(f"request {request} aborted: {wire.read_reason(frame.control)}")
                self.conn.send(wire.CLOSE, request)
                return None, None, None
            elif frame.type == wire.LAYER and commit is None:
                landed.land(frame)
            elif frame.type == wire.COMMIT and commit is None:
                commit = landed.commit(frame, self.backend.vocab)
            elif frame.type == wire.LOGITS and commit is not None:
                row += self._row_part(frame, len(row) // 4, commit.vocab)
            else:
                raise WireError(wire.PEER, f"{wire.NAMES[frame.type - 1]} where it may not come")
        if offer.digest and hashlib.sha256(row).digest() != commit.row_digest:
            raise Nack(NO_SLOT, WireError(wire.INTEGRITY, "the row of logits is another"))
        row = np.frombuffer(row, "<f4")
        if argmax_margin(row)[0] != commit.argmax:
            raise Nack(NO_SLOT, WireError(wire.INTEGRITY, "argmax is not the row's"))
        return landed, row, commit.digest

    def _row_part(self, frame, at, vocab):
        first, count, zero = struct.unpack("<IIQ", frame.control)
        if first != at or zero or not 0 < count <= vocab - at or len(frame.payload) != 4 * count:
            raise Nack(NO_SLOT, WireError(wire.INTEGRITY, f"logits from {first}, {at} due"))
        return frame.payload

    def _refuse_other(self, frame):
        if frame.request in self.late:
            return
        if frame.type != wire.OFFER:
            raise WireError(wire.PEER, f"{wire.NAMES[frame.type - 1]} for an unknown request")
        self._final(wire.REFUSE, frame.request, wire.reason(wire.BUSY, "one request at a time"))


def decode(backend, offer, layers, row, n, force=(), stop=()):
    """Greedy from a verified cache, or along forced ids. Yields (id, argmax, margin)."""
    state = backend.load(offer.ids, layers)
    for i in range(len(force) or n):
        argmax, margin = argmax_margin(row)
        token = force[i] if force else argmax
        yield token, argmax, margin
        if i + 1 == (len(force) or n) or (not force and token in stop):
            return
        row = backend.step(state, token)
