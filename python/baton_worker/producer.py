# SPDX-License-Identifier: Apache-2.0
"""Prefill for who asks: ASK, OFFER, RESERVE, LAYER ..., COMMIT, LOGITS ..., ACK, CLOSE.

One request at a time; those that come meanwhile wait in the connection's queue.
"""
import hashlib
import struct
import time

from . import wire
from .layout import (BF16, NO_SLOT, Commit, Offer, SlotDigest, argmax_margin, pieces, read_ask,
                     write_commit, write_offer)
from .wire import WireError

ROW_PART = 262144  # logits a frame


class Ended(Exception):
    """The request is over; the connection goes on."""


class Producer:
    """Over one open connection. `turn`: who holds it has the back-end."""

    def __init__(self, conn, backend, identity, turn, log=lambda text: None):
        self.conn, self.backend, self.identity = conn, backend, identity
        self.turn, self.log = turn, log
        self.late = set()  # requests that ended here and wait for the consumer's final frame
        self.waiting = []  # frames of other requests

    def serve(self):
        """Until the connection ends; returns how many were acknowledged."""
        done = 0
        while True:
            frame = self.waiting.pop(0) if self.waiting else self.conn.take()
            if self._of_late(frame):
                continue
            if frame.type == wire.CLAIM:
                self._abort(frame.request, WireError(wire.STALE, "this end issues no tickets"))
            elif frame.type == wire.ASK:
                done += self._request(frame)
            elif frame.type not in (wire.LANDING, wire.CREDIT):
                raise WireError(wire.PEER, f"{wire.NAMES[frame.type - 1]} for an unknown request")

    # ---- how requests end

    def _of_late(self, frame):
        if frame.request not in self.late or frame.type in (wire.ASK, wire.CLAIM):
            return False
        if frame.type in (wire.REFUSE, wire.ACK, wire.NACK, wire.ABORT, wire.CLOSE):
            self.late.discard(frame.request)
        return True

    def _abort(self, request, why):
        self.conn.send(wire.ABORT, request, wire.reason(why.code, str(why)))
        self.late.add(request)

    def _closed(self, request, why):
        """The consumer's final frame came: answered with CLOSE."""
        self.conn.send(wire.CLOSE, request)
        if why:
            self.log(f"request {request}: {why}")
            raise Ended

    # ---- one request

    def _request(self, frame):
        try:
            ids, max_new = read_ask(frame.control)
            if max(ids) >= self.backend.vocab:
                raise ValueError(f"token id {max(ids)} of {self.backend.vocab}")
        except ValueError as e:
            self._abort(frame.request, WireError(wire.INPUT, str(e)))
            return 0
        try:
            self._hand_over(frame.request, ids, max_new)
            return 1
        except Ended:
            return 0

    def _hand_over(self, request, ids, max_new):
        g = self.backend.geometry
        offer = Offer(self.identity, g, ids, max_new, stream=False, digest=True)
        self.conn.send(wire.OFFER, request, write_offer(offer))
        held, wants_row = self._await_reserve(request)
        slots = {}
        try:
            with self.turn:
                begin = time.monotonic_ns()
                row = self.backend.prefill(
                    ids, lambda l, k, v: slots.update({2 * l: k, 2 * l + 1: v}))
                prefill_ns = time.monotonic_ns() - begin
        except Exception as e:
            self._abort(request, WireError(wire.INTERNAL, f"{self.backend.name}: {e}"))
            raise Ended from e
        commit = self._send_slots(request, slots, len(ids), held)
        commit.argmax, commit.margin = argmax_margin(row)
        commit.prefill_ns = prefill_ns
        raw = row.astype("<f4").tobytes()
        if wants_row:
            commit.vocab, commit.row_digest = len(row), hashlib.sha256(raw).digest()
        self.conn.send(wire.COMMIT, request, write_commit(commit))
        for at in range(0, len(row) if wants_row else 0, ROW_PART):
            part = raw[4 * at:4 * (at + ROW_PART)]
            self.conn.send(wire.LOGITS, request, struct.pack("<IIQ", at, len(part) // 4, 0), part)
        self._await_ack(request, commit.digest)
        self.log(f"request {request}: {len(ids)} tokens, {commit.bytes} bytes, acknowledged")

    def _send_slots(self, request, slots, n, held):
        """All pieces, and what COMMIT says of them."""
        g, table, n_bytes, n_pieces = self.backend.geometry, [], 0, 0
        for slot in range(2 * g.n_layers):
            layer, which = divmod(slot, 2)
            retained = g.first(layer, n)
            first = max(retained, held)
            if slots[slot].shape != (g.kv_heads, n - retained, g.head_dim):
                raise ValueError(f"{self.backend.name}: slot {slot} is {slots[slot].shape}")
            digest = SlotDigest(slot, g, first, n)
            for at, end in pieces(g, first, n):
                self._look(request)
                block = slots[slot][:, at - retained:end - retained]
                digest.feed(at, block)
                payload = block.tobytes()
                head = struct.pack("<6IQ", layer, which, at, end - at, BF16, 0, 0)
                self.conn.send(wire.LAYER, request, head, payload)
                n_bytes, n_pieces = n_bytes + len(payload), n_pieces + 1
            table.append((first, n - 1, digest.final()))
        total = hashlib.sha256(b"".join(d for _, _, d in table)).digest()
        return Commit(0, 0.0, 0, n_bytes, n_pieces, 0, total, bytes(32), table)

    # ---- the consumer's answers

    def _next_of(self, request, timeout=None):
        """The next frame of this request; what is of others waits."""
        while True:
            frame = self.conn.take(timeout)
            if frame is None or frame.request == request:
                return frame
            if not self._of_late(frame):
                self.waiting.append(frame)

    def _answer(self, request, frame, *wanted):
        """The frame if it is a wanted one; ends the request where the consumer did."""
        if frame.type in wanted:
            return frame
        if frame.type in (wire.REFUSE, wire.ABORT):
            self._closed(request, wire.read_reason(frame.control))
        if frame.type == wire.NACK and wire.RESERVE not in wanted:
            slot, = struct.unpack_from("<I", frame.control)
            at = "" if slot == NO_SLOT else f"slot {slot}: "
            self._closed(request, f"{at}{wire.read_reason(frame.control[8:])}")
        raise WireError(wire.PEER, f"{wire.NAMES[frame.type - 1]} where it may not come")

    def _look(self, request):
        """Did the consumer give up meanwhile?"""
        frame = self._next_of(request, timeout=0)
        if frame:
            self._answer(request, frame)

    def _await_reserve(self, request):
        frame = self._answer(request, self._next_of(request), wire.RESERVE)
        held, flags, zero, credits, landing = struct.unpack_from("<IIQII", frame.control)
        if flags > 1 or zero or credits or landing or any(frame.control[24:]):
            raise WireError(wire.PEER, "RESERVE with fields that this connection does not have")
        return held, bool(flags)

    def _await_ack(self, request, digest):
        frame = self._answer(request, self._next_of(request), wire.ACK)
        right = frame.control == digest
        self._closed(request, None if right else "the consumer acknowledged another digest")
