# SPDX-License-Identifier: Apache-2.0
"""Who a model is (docs/wire.md, Identity).

Weights and tokenizer are hashed here, from the files that the back-end reads. What a configuration
means is baton's to say: `baton model hash --json` prints all parts, and that file is what the
worker is given. Where its weights or tokenizer are not those of the folder, the worker does not
start.
"""
import hashlib
import json
import os
import struct

from .layout import PARTS
from .wire import MISMATCH, WireError


def tensors(folder):
    """(name, dtype, shape, bytes) of each tensor in the folder's safetensors files."""
    for file in sorted(f for f in os.listdir(folder) if f.endswith(".safetensors")):
        with open(os.path.join(folder, file), "rb") as f:
            (n,) = struct.unpack("<Q", f.read(8))
            head = json.loads(f.read(n))
            for name, t in head.items():
                if name != "__metadata__":
                    begin, end = t["data_offsets"]
                    f.seek(8 + n + begin)
                    yield name, t["dtype"], t["shape"], f.read(end - begin)


def weights_hash(folder):
    h = hashlib.sha256()
    lines = []
    for name, dtype, shape, data in tensors(folder):
        dims = ", ".join(map(str, shape))
        lines.append((name, f"{name} {dtype} [{dims}] {hashlib.sha256(data).hexdigest()}\n"))
    for _, line in sorted(lines):
        h.update(line.encode())
    return h.digest()


def tokenizer_hash(folder):
    path = os.path.join(folder, "tokenizer.json")
    if not os.path.exists(path):
        return bytes(32)
    with open(path, "rb") as f:
        return hashlib.sha256(f.read()).digest()


def read_identity(path, folder):
    with open(path, encoding="utf-8") as f:
        parts = json.load(f)
    identity = {p: bytes.fromhex(parts[p]) for p in PARTS}
    for part, have in (("weights", weights_hash(folder)), ("tokenizer", tokenizer_hash(folder))):
        if identity[part] != have:
            raise WireError(MISMATCH, f"{path} speaks of other {part} than {folder} has")
    return identity
