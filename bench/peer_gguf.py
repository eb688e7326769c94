#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""peer_gguf.py SHAPE FILE: a GGUF file of random bf16 weights and no vocabulary, so that llama.cpp's
llama-bench runs the same shapes as `-m shape:NAME`. Format: llama.cpp, docs of ggml's gguf.md, version 3.
Needs numpy alone."""
import struct
import sys

import numpy

SHAPES = {  # as src/model/shape.c has them
    "qwen3-0.6b": dict(arch="qwen3", layers=28, hidden=1024, inner=3072, vocab=151936, heads=16, kv=8, dim=128,
                       theta=1e6, ctx=40960),
    "gemma-3-1b": dict(arch="gemma3", layers=26, hidden=1152, inner=6912, vocab=262144, heads=4, kv=1, dim=256,
                       theta=1e6, ctx=32768, window=512),
}
U32, F32, BOOL, STRING = 4, 6, 7, 8
TYPE_F32, TYPE_BF16 = 0, 30
ALIGN = 32


def string(s):
    return struct.pack("<Q", len(s)) + s.encode()


def value(v):
    if isinstance(v, str):
        return struct.pack("<I", STRING) + string(v)
    if isinstance(v, float):
        return struct.pack("<If", F32, v)
    return struct.pack("<II", U32, v)


def metadata(s):
    a = s["arch"]
    m = {"general.architecture": a, "general.name": "random", "tokenizer.ggml.model": "no_vocab",
         f"{a}.vocab_size": s["vocab"], f"{a}.block_count": s["layers"], f"{a}.context_length": s["ctx"],
         f"{a}.embedding_length": s["hidden"], f"{a}.feed_forward_length": s["inner"],
         f"{a}.attention.head_count": s["heads"], f"{a}.attention.head_count_kv": s["kv"],
         f"{a}.attention.key_length": s["dim"], f"{a}.attention.value_length": s["dim"],
         f"{a}.attention.layer_norm_rms_epsilon": 1e-6, f"{a}.rope.freq_base": s["theta"],
         f"{a}.rope.dimension_count": s["dim"]}
    if "window" in s:
        m[f"{a}.attention.sliding_window"] = s["window"]
    return m


def tensors(s):  # name, shape as [rows, columns] or [n]
    h, q, kv, n = s["hidden"], s["heads"] * s["dim"], s["kv"] * s["dim"], s["inner"]
    yield "token_embd.weight", [s["vocab"], h]
    yield "output_norm.weight", [h]
    for i in range(s["layers"]):
        b = f"blk.{i}."
        yield b + "attn_norm.weight", [h]
        for name, shape in (("attn_q", [q, h]), ("attn_k", [kv, h]), ("attn_v", [kv, h]), ("attn_output", [h, q]),
                            ("ffn_gate", [n, h]), ("ffn_up", [n, h]), ("ffn_down", [h, n])):
            yield f"{b}{name}.weight", shape
        yield b + "attn_q_norm.weight", [s["dim"]]
        yield b + "attn_k_norm.weight", [s["dim"]]
        yield b + "ffn_norm.weight", [h]
        if s["arch"] == "gemma3":
            yield b + "post_attention_norm.weight", [h]
            yield b + "post_ffw_norm.weight", [h]


def size(shape):  # norms are f32, matrices bf16
    return int(numpy.prod(shape)) * (2 if len(shape) == 2 else 4)


def main(name, path):
    s = SHAPES[name]
    listed, meta = list(tensors(s)), metadata(s)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(listed), len(meta))
    head += b"".join(string(k) + value(v) for k, v in meta.items())
    offset = 0
    for tensor, shape in listed:
        head += string(tensor) + struct.pack("<I", len(shape))
        head += b"".join(struct.pack("<Q", d) for d in reversed(shape))
        head += struct.pack("<IQ", TYPE_BF16 if len(shape) == 2 else TYPE_F32, offset)
        offset += -(-size(shape) // ALIGN) * ALIGN
    random = numpy.random.default_rng(1)
    with open(path, "wb") as f:
        f.write(head + bytes(-len(head) % ALIGN))
        for tensor, shape in listed:
            if len(shape) == 2:
                x = random.standard_normal(shape, dtype=numpy.float32) * numpy.float32(0.02)
                data = (x.view(numpy.uint32) >> 16).astype(numpy.uint16).tobytes()
            else:
                data = numpy.ones(shape, numpy.float32).tobytes()
            f.write(data + bytes(-len(data) % ALIGN))


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in SHAPES:
        sys.exit(f"usage: peer_gguf.py {{{'|'.join(SHAPES)}}} FILE")
    main(*sys.argv[1:])
