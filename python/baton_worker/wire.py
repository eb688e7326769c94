# SPDX-License-Identifier: Apache-2.0
"""Frames and connections, as docs/wire.md has them. Nothing here knows models.

Three threads a connection: the owner's, which sends and takes frames; one that reads, checks and
queues them; one that sends heartbeats, since computing may take long. Whatever does not fit the
document ends the connection with BYE, and every later call raises what ended it.
"""
import hmac
import os
import queue
import socket
import struct
import threading
import time
from collections import namedtuple

import xxhash

(HELLO, HEARTBEAT, BYE, OFFER, RESERVE, REFUSE, LAYER, COMMIT, LOGITS, ACK, NACK, ABORT, CLOSE,
 CLAIM, LANDING, CREDIT, ASK) = range(1, 18)
NAMES = ("HELLO HEARTBEAT BYE OFFER RESERVE REFUSE LAYER COMMIT LOGITS ACK NACK ABORT CLOSE CLAIM "
         "LANDING CREDIT ASK").split()

USAGE, INPUT, NOMEM, UNSUPPORTED, MISMATCH, PEER = -1, -2, -4, -5, -6, -7
CANCELLED, BUSY, INTEGRITY, INTERNAL, STALE = -9, -10, -13, -14, -15

PRODUCER, CONSUMER = 1, 2
TAKES_ASK = 1
MAX_IDS = 1 << 20
MAX_PAYLOAD = 4 << 20
FLAG_PAYLOAD, FLAG_TAG = 1, 2
KEY_BYTES = range(16, 4097)

HEADER = struct.Struct("<4sHBBIIQQQQ")
HELLO_BODY = struct.Struct("<HHIII QQ 32s I 28x".replace(" ", ""))

# type: who sends it, whether it has a request, least and most control bytes, most payload
_B, _P, _C = PRODUCER | CONSUMER, PRODUCER, CONSUMER
BOUNDS = {
    HELLO: (_B, False, 96, 96, 0),
    HEARTBEAT: (_B, False, 0, 0, 0),
    BYE: (_B, False, 256, 256, 0),
    OFFER: (_P, True, 192, 4202752, 0),
    RESERVE: (_C, True, 96, 96, 0),
    REFUSE: (_C, True, 256, 256, 0),
    LAYER: (_P, True, 32, 32, MAX_PAYLOAD),
    COMMIT: (_P, True, 128, 41088, 0),
    LOGITS: (_P, True, 16, 16, 1 << 20),
    ACK: (_C, True, 32, 32, 0),
    NACK: (_C, True, 264, 264, 0),
    ABORT: (_B, True, 256, 256, 0),
    CLOSE: (_B, True, 0, 0, 0),
    CLAIM: (_C, True, 96, 96, 0),
    LANDING: (_C, False, 32, 32, 0),
    CREDIT: (_C, False, 16, 16, 0),
    ASK: (_C, True, 20, 16 + 4 * MAX_IDS, 0),
}

Frame = namedtuple("Frame", "type request control payload flags")


class WireError(Exception):
    """A reason as the wire has it: a code of baton/error.h and a sentence."""

    def __init__(self, code, text):
        super().__init__(text)
        self.code = code


def reason(code, text):
    raw = text.encode()[:251].decode(errors="ignore").encode()
    return struct.pack("<i252s", code, raw)


def read_reason(body):
    """A stranger's words: a known code, nothing that a terminal would obey."""
    code, raw = struct.unpack("<i252s", body)
    text = raw.split(b"\0")[0].decode(errors="replace").replace("\ufffd", "?")
    text = "".join(c if c >= " " and c != "\x7f" else "?" for c in text)
    return WireError(code if STALE <= code < 0 else PEER, text or "the peer gave no reason")


def body_check(flags, control, payload):
    x = xxhash.xxh3_64_intdigest(control)
    return xxhash.xxh3_64_intdigest(payload, x) if flags & FLAG_PAYLOAD else x


def read_key(path):
    """A key file as baton reads it: private, and one newline at its end is not part of it."""
    if os.stat(path).st_mode & 0o007:
        raise WireError(INPUT, f"key file {path}: everybody may use it")
    with open(path, "rb") as f:
        key = f.read(KEY_BYTES[-1] + 2)
    key = key[:-1] if key.endswith(b"\n") else key
    if len(key) not in KEY_BYTES:
        raise WireError(INPUT, f"key file {path}: {len(key)} bytes, 16 to 4096 are possible")
    return key


class Connection:
    """One end over a connected socket, which it owns. `role` is PRODUCER or CONSUMER."""

    def __init__(self, sock, role, key=None, level=1, takes=0, heartbeat_s=1.0, dead_s=10.0):
        self.sock, self.role, self.key, self.takes = sock, role, key, takes
        self.heartbeat_s, self.dead_s = heartbeat_s, dead_s
        self.auth = level if key else 0
        self.level, self.proven = 0, not key
        self.in_seq = self.out_seq = 0
        self.last_out = time.monotonic()
        self.death = None
        self.key_in = self.key_out = None
        self.lock = threading.Lock()
        self.frames = queue.Queue()
        self.began = time.monotonic()
        sock.settimeout(dead_s)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    # ---- life

    def open(self):
        """Exchange HELLO and, with a key, the proof."""
        try:
            mine = HELLO_BODY.pack(1, 1, self.role, self.auth, 0, int(self.heartbeat_s * 1e9),
                                   int(self.dead_s * 1e9), os.urandom(32), self.takes)
            self.send(HELLO, 0, mine)
            first = self._read_frame(hello=False)
            if first.type == BYE:
                raise read_reason(first.control)
            self._greet(mine, first.control)
            if self.level:
                self.send(HEARTBEAT, 0)
                while not self.proven:
                    frame = self._read_frame()
                    if frame.type == BYE:
                        raise read_reason(frame.control)
        except WireError as e:
            self.close(e)
            raise
        threading.Thread(target=self._reader, daemon=True).start()
        threading.Thread(target=self._heart, daemon=True).start()
        return self

    def _greet(self, mine, theirs):
        least, most, role, auth, zero, beat, dead, _, self.peer_takes = HELLO_BODY.unpack(theirs)
        if least > 1 or most < 1 or least > most:
            raise WireError(MISMATCH, f"wire version: this end speaks 1, the peer {least} to {most}")
        if role != PRODUCER + CONSUMER - self.role:
            raise WireError(MISMATCH, "both ends have the same role")
        if auth > 2:
            raise WireError(UNSUPPORTED, f"the peer wants authentication {auth}")
        if bool(auth) != bool(self.auth):
            raise WireError(MISMATCH, "one end has a key and the other has none")
        if zero or beat >= self.dead_s * 1e9 or self.heartbeat_s * 1e9 >= dead:
            raise WireError(MISMATCH, "HELLO with heartbeats that are too rare")
        self.level = max(auth, self.auth)
        if self.level:
            hellos = mine + theirs if self.role == PRODUCER else theirs + mine
            label = {PRODUCER: b"baton handoff 1 producer\0", CONSUMER: b"baton handoff 1 consumer\0"}
            keys = {r: hmac.digest(self.key, text + hellos, "sha256") for r, text in label.items()}
            self.key_out = keys[self.role]
            self.key_in = keys[PRODUCER + CONSUMER - self.role]

    def close(self, why=None):
        """BYE with a reason, once, and the end of the stream."""
        why = why or WireError(CANCELLED, "connection closed")
        with self.lock:
            first, self.death = self.death is None, self.death or why
        if first:
            try:
                self._write(BYE, 0, reason(why.code, str(why)), b"", 0)
                self.sock.shutdown(socket.SHUT_WR)
            except OSError:
                pass
        self.sock.close()

    def _heart(self):
        while self.death is None:
            time.sleep(self.heartbeat_s / 4)
            try:
                if time.monotonic() - self.last_out > self.heartbeat_s * 0.7:
                    self.send(HEARTBEAT, 0)
            except WireError:
                return

    # ---- out

    def send(self, type, request, control=b"", payload=b"", check_payload=False):
        if self.death:
            raise self.death
        try:
            self._write(type, request, control, payload, FLAG_PAYLOAD if check_payload else 0)
        except OSError as e:
            self.death = self.death or WireError(PEER, f"the peer is gone: {e}")
            raise self.death from None

    def _write(self, type, request, control, payload, flags):
        with self.lock:
            tagged = self.level and self.key_out and type != HELLO
            if tagged:
                flags |= FLAG_TAG
            check = body_check(flags, control, payload)
            head = HEADER.pack(b"BATN", 1, type, flags, len(control), len(payload), request,
                               self.out_seq, check, 0)[:40]
            head += struct.pack("<Q", xxhash.xxh3_64_intdigest(head))
            self.out_seq += 1
            tag = self._tag(self.key_out, head, control, payload) if tagged else b""
            self.sock.sendall(b"".join((head, control, payload, tag)))
            self.last_out = time.monotonic()

    def _tag(self, key, head, control, payload):
        return hmac.digest(key, head + control + (payload if self.level == 2 else b""), "sha256")[:16]

    # ---- in

    def take(self, timeout=None):
        """The next frame that is neither a heartbeat nor BYE; None after `timeout` seconds."""
        try:
            frame = self.frames.get(timeout=timeout) if timeout != 0 else self.frames.get_nowait()
        except queue.Empty:
            return None
        if isinstance(frame, WireError):
            self.frames.put(frame)
            raise frame
        return frame

    def _reader(self):
        try:
            while True:
                frame = self._read_frame()
                if frame.type == BYE:
                    raise read_reason(frame.control)
                if frame.type != HEARTBEAT:
                    self.frames.put(frame)
        except WireError as e:
            self.close(e)
            self.frames.put(self.death)

    def _read(self, n):
        parts = []
        while n:
            try:
                part = self.sock.recv(min(n, 1 << 20))
            except TimeoutError:
                raise WireError(PEER, f"the peer was silent for {self.dead_s:g} s") from None
            except (OSError, ValueError) as e:
                raise self.death or WireError(PEER, f"the peer is gone: {e}") from None
            if not part:
                raise self.death or WireError(PEER, "the peer ended the stream")
            if not self.proven and time.monotonic() - self.began > self.dead_s:
                raise WireError(PEER, "the peer did not prove that it has the key")
            parts.append(part)
            n -= len(part)
        return b"".join(parts)

    def _read_frame(self, hello=True):
        """A frame, checked in the document's order; `hello`: the peer's was read."""
        head = self._read(HEADER.size)
        magic, version, type, flags, n, m, request, seq, check, head_check = HEADER.unpack(head)
        if magic != b"BATN":
            raise WireError(PEER, "not a baton stream")
        if head_check != xxhash.xxh3_64_intdigest(head[:40]):
            raise WireError(INTEGRITY, "a frame's header does not match its check")
        if version != 1:
            raise WireError(MISMATCH, f"a frame of wire version {version}, this end speaks 1")
        if type not in BOUNDS:
            raise WireError(PEER, f"unknown frame type {type}")
        name = NAMES[type - 1]
        sender, of_request, least, most, payload_most = BOUNDS[type]
        if not sender & (PRODUCER + CONSUMER - self.role):
            raise WireError(PEER, f"{name} from the wrong role")
        if not least <= n <= most or m > payload_most or (type == LOGITS and not m):
            raise WireError(PEER, f"{name} of {n} and {m} bytes")
        if request and not of_request:
            raise WireError(PEER, f"{name} for a request")
        if flags & ~(FLAG_PAYLOAD | FLAG_TAG) or (flags & FLAG_PAYLOAD and not m):
            raise WireError(PEER, f"{name} with flags {flags:#x}")
        if seq != self.in_seq:
            raise WireError(PEER, f"frame {seq} where frame {self.in_seq} was due")
        self.in_seq += 1
        self._admit(type, name, bool(flags & FLAG_TAG), hello)
        control, payload = self._read(n), self._read(m)
        if flags & FLAG_TAG:
            tag = self._read(16)
            if not hmac.compare_digest(tag, self._tag(self.key_in, head, control, payload)):
                raise WireError(INTEGRITY, "the peer has another key than this end"
                                if not self.proven else f"{name} does not match its tag")
            self.proven = True
        if body_check(flags, control, payload) != check:
            raise WireError(INTEGRITY, f"{name} does not match its check")
        return Frame(type, request, control, payload, flags)

    def _admit(self, type, name, tagged, hello):
        early = type in (HELLO, BYE)
        if not hello and not early:
            raise WireError(PEER, f"{name} before HELLO")
        if hello and type == HELLO:
            raise WireError(PEER, "a second HELLO")
        if tagged and (not self.level or type == HELLO):
            raise WireError(PEER, f"{name} with a tag where none was agreed on")
        if self.level and not tagged and (self.proven or not early):
            raise WireError(INTEGRITY, f"{name} without a tag")
        if self.level and not self.proven and not early and type != HEARTBEAT:
            raise WireError(PEER, f"{name} before the peer proved that it has the key")


def dial(address, timeout_s=10.0):
    host, _, port = address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), timeout_s)


def listen(address, key):
    """A listening socket; off loopback it takes a key."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.create_server((host, int(port)), family=family)
    bound = sock.getsockname()[0]
    if not key and not (bound.startswith("127.") or bound == "::1"):
        sock.close()
        raise WireError(USAGE, f"{address} can be reached from other machines: a key is needed")
    return sock
