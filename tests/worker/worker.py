# SPDX-License-Identifier: Apache-2.0
"""Hugging Face transformers as a producer and as a consumer of baton's handoff, over TCP.

usage: worker.py (BATON_BINARY: the program, BATON_SOURCE_ROOT: the tree)

For each shipped model, at 7 and at 700 tokens (past the window of Gemma's local layers), baton runs
natively; then torch prefills and baton decodes, and baton prefills and torch decodes, along the
native run's tokens. 32 steps: the same choice wherever the native margin exceeds 0.4. Then what must
be refused: another key, a slot that is not what its digest says, other weights; in both directions.

BATON_PYTHON names the Python to use and promises that it has tests/requirements.txt; without it, and
without the packages, the test is skipped (exit 77), and failed where BATON_REQUIRE_PYTHON is 1.
"""
import json
import os
import subprocess
import sys
import tempfile
import threading
import warnings

sys.path.insert(0, os.path.join(os.environ["BATON_SOURCE_ROOT"], "tests"))
from cases import need

need("torch", "transformers", "safetensors", "numpy")
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", PYTHONWARNINGS="ignore")
ROOT = os.environ["BATON_SOURCE_ROOT"]
BATON = os.environ["BATON_BINARY"]
sys.path.insert(0, f"{ROOT}/python")
import torch
import transformers
from safetensors.torch import load_file
from baton_worker import consumer, producer, wire
from baton_worker.backend import open_backend
from baton_worker.identity import read_identity

STEPS = 32
MARGIN = 0.4  # from which bf16 devices must agree
MODELS = ("qwen3-tiny", "koni-tiny", "gemma3-tiny", "qwen3-small")
LEAST_SURE = {7: 8, 700: 16}  # steps beyond the margin, or the comparison says little
KEY = b"a key that both ends were given"


def fail(text):
    sys.exit(f"FAILED: {text}")


def baton(*args):
    r = subprocess.run([BATON, *args, "--json"], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                       timeout=600)
    return r.returncode, r.stdout, r.stderr


def good(*args):
    code, out, err = baton(*args)
    if code:
        fail(f"baton {' '.join(args)[:300]}: exit {code}\n{err[-2000:]}")
    return json.loads(out)


def text(ids):
    return ",".join(map(str, ids))


class Worker:
    """One connection's worth of a worker, in a thread: what it said and what it decoded."""

    def __init__(self, backend, identity, role, key=KEY, force=()):
        self.backend, self.identity, self.role, self.key = backend, identity, role, key
        self.force, self.said, self.decoded = force, [], []
        self.listener = wire.listen("127.0.0.1:0", key)
        self.device = f"remote:127.0.0.1:{self.listener.getsockname()[1]}"
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def deliver(self, offer, layers, row):
        self.decoded = list(consumer.decode(self.backend, offer, layers, row, STEPS, self.force))

    def run(self):
        takes = wire.TAKES_ASK if self.role == wire.PRODUCER else 0
        conn = None
        try:
            sock, _ = self.listener.accept()
            conn = wire.Connection(sock, self.role, self.key, takes=takes).open()
            if self.role == wire.PRODUCER:
                producer.Producer(conn, self.backend, self.identity, threading.Lock(),
                                  self.said.append).serve()
            else:
                consumer.Consumer(conn, self.backend, self.identity,
                                  self.said.append).serve(self.deliver)
        except Exception as e:  # what ended it is what the test looks at
            self.said.append(str(e))
            if conn:
                conn.close(e if isinstance(e, wire.WireError) else None)

    def end(self):
        self.thread.join(300)
        self.listener.close()
        return " | ".join(self.said)


# ---- the same tokens -------------------------------------------------------------------------------


def compare(what, n, native_rows, argmax):
    top = native_rows.topk(2, dim=-1)
    sure = (top.values[:, 0] - top.values[:, 1]) > MARGIN
    wrong = (top.indices[:, 0] != torch.tensor(argmax)) & sure
    print(f"{what}: {int(sure.sum())} of {len(argmax)} steps with a margin over {MARGIN}, "
          f"{int(wrong.sum())} wrong", flush=True)
    if len(argmax) != STEPS or wrong.any() or int(sure.sum()) < LEAST_SURE[n]:
        fail(f"{what}: differs at {wrong.nonzero().flatten().tolist()}")


def check_routes(name, backend, identity, ids, key_file, tmp):
    path, logits, n = f"{ROOT}/models/{name}", f"{tmp}/logits.safetensors", len(ids)
    common = ["run", "-m", path, "--ids", text(ids)]
    native = good(*common, "--mode", "native", "--ignore-eos", "-n", str(STEPS), "--logits", logits)
    rows = load_file(logits)["logits"]
    force = native["ids"]

    w = Worker(backend, identity, wire.PRODUCER)
    run = good(*common, "--prefill", w.device, "--kv-key-file", key_file, "--force", text(force),
               "--logits", logits)
    if run["handoff"]["verdict"] != "verified" or "acknowledged" not in w.end():
        fail(f"{name}: {run['handoff']}, {w.said}")
    compare(f"{name}, {n} tokens, torch -> baton", n, rows, load_file(logits)["argmax"].tolist())

    w = Worker(backend, identity, wire.CONSUMER, force=force)
    good(*common, "--decode", w.device, "--kv-key-file", key_file, "-n", str(STEPS))
    if "verified" not in w.end():
        fail(f"{name}: {w.said}")
    compare(f"{name}, {n} tokens, baton -> torch", n, rows, [a for _, a, _ in w.decoded])


# ---- what must be refused --------------------------------------------------------------------------


def refused(what, worker, path, key_file, word):
    side = "--prefill" if worker.role == wire.PRODUCER else "--decode"
    code, out, err = baton("run", "-m", path, "--ids", "3,4,5,6,7,8,9", side, worker.device, "-n", "2",
                           "--kv-key-file", key_file)
    said = worker.end()
    if code == 0 or word not in out + err or worker.decoded:
        fail(f"{what}: exit {code}, no '{word}' in: {err[-500:]}{out[-500:]} (the worker: {said})")
    print(f"{what} ({side}): refused", flush=True)


def check_refusals(path, backend, identity, key_file):
    other = dict(identity, weights=bytes(32))
    whole = producer.SlotDigest.final
    landed = consumer.read_block
    for role in (wire.PRODUCER, wire.CONSUMER):
        refused("another key", Worker(backend, identity, role, b"a key that the other end has not"),
                path, key_file, "key")
        refused("no key", Worker(backend, identity, role, None), path, key_file, "key")
        refused("other weights", Worker(backend, other, role), path, key_file, "weights")
    try:
        producer.SlotDigest.final = lambda self: bytes(32) if self.which else whole(self)
        refused("a wrong digest", Worker(backend, identity, wire.PRODUCER), path, key_file, "digest")
    finally:
        producer.SlotDigest.final = whole
    try:
        consumer.read_block = lambda g, count, payload: landed(g, count, payload) ^ 1
        refused("a flipped bit", Worker(backend, identity, wire.CONSUMER), path, key_file, "digest")
    finally:
        consumer.read_block = landed


def main():
    warnings.simplefilter("ignore")
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)  # several only wait for each other on models as small as these
    with tempfile.TemporaryDirectory() as tmp:
        key_file = f"{tmp}/key"
        with open(os.open(key_file, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as f:
            f.write(KEY + b"\n")
        for name in MODELS:
            path = f"{ROOT}/models/{name}"
            with open(f"{tmp}/identity", "w", encoding="utf-8") as f:
                json.dump(good("model", "hash", "-m", path), f)
            identity = read_identity(f"{tmp}/identity", path)
            backend = open_backend("torch-cpu", path)
            golden = load_file(f"{ROOT}/tests/golden/{name}/golden.safetensors")
            for n in (7, 700):
                check_routes(name, backend, identity, golden[f"p{n}.input_ids"].tolist(), key_file, tmp)
            if name == MODELS[0]:
                check_refusals(path, backend, identity, key_file)
    print(f"{len(MODELS)} models passed")


main()
