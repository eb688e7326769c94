# SPDX-License-Identifier: Apache-2.0
"""KV files and Hugging Face transformers, both ways: the second implementation of what they mean.

usage: hf_interop.py (BATON_BINARY: the program, BATON_SOURCE_ROOT: the tree)

For each family, on a short prompt and on one of 700 tokens (past the window of Gemma's local layers; for
Gemma on one of exactly that window too):
  ours    baton saves the cache of a prompt, transformers continues from it
  theirs  transformers prefills, its cache is written as a KV file, baton continues from it
The continuation is teacher-forced with the producer's own greedy tokens; 32 steps are compared. Device
cpu (bfloat16 against float32): the same token wherever the producer's margin exceeds 0.4, logits of the
median step within 5e-2 (relative RMS; the prompts are continued past their answers, where single steps
stray further), cache slots within 1.5e-2. Device cpu:ref (float32), at 700 tokens: margin 0.001, logits
of every step within 3e-5, slots within 6e-5. A cache one position off must fail: that is tried too.

BATON_PYTHON names the Python to use and promises that it has tests/requirements.txt; without it, and
without the packages, the test is skipped (exit 77), and failed where BATON_REQUIRE_PYTHON is 1.
"""
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import warnings

sys.path.insert(0, os.path.join(os.environ["BATON_SOURCE_ROOT"], "tests"))
from cases import need

need("torch", "transformers", "safetensors")
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", PYTHONWARNINGS="ignore")
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache

ROOT = os.environ["BATON_SOURCE_ROOT"]
BATON = os.environ["BATON_BINARY"]
STEPS = 32
# device: margin from which tokens must agree, limits of logits (and of which step), of cache slots
LIMITS = {"cpu": (0.4, 5e-2, "median", "1.5e-2"), "cpu:ref": (0.001, 3e-5, "worst", "6e-5")}


def baton(*args, status=0):
    r = subprocess.run([BATON, *args, "--json"], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if r.returncode != status:
        sys.exit(f"FAILED: baton {' '.join(args)[:300]}: exit {r.returncode}\n{r.stderr[-2000:]}")
    return json.loads(r.stdout)


def text(ids):
    return ",".join(map(str, ids))


# ---- the file, as docs/kv-file.md tells it ---------------------------------------------------------


def read_cache(path, config, shift=0):
    """A KV file as a cache of transformers. A sliding layer keeps the absolute position apart."""
    t = load_file(path)
    cache = DynamicCache(config=config)
    for l, layer in enumerate(cache.layers):
        layer.update(t[f"k.{l}"][None].float(), t[f"v.{l}"][None].float())
        if layer.is_sliding:
            layer.cumulative_length = int(t[f"positions.{l}"][-1]) + 1 + shift
    return cache


def write_cache(path, cache, ids, identity, dtype, logits=None):
    """A cache of transformers after `ids` as a KV file."""
    n, t = len(ids), {"ids": torch.tensor(ids, dtype=torch.int32)}
    for l, layer in enumerate(cache.layers):
        held = layer.keys.shape[2]  # the last ones: all, or window - 1
        t[f"k.{l}"] = layer.keys[0].to(dtype).contiguous()
        t[f"v.{l}"] = layer.values[0].to(dtype).contiguous()
        t[f"positions.{l}"] = torch.arange(n - held, n, dtype=torch.int32)
    if logits is not None:
        t["logits"] = logits.clone()
    digest = hashlib.sha256(t["ids"].numpy().astype("<i4").tobytes()).hexdigest()
    save_file(t, path,
              metadata={"format": "baton-kv-1", "n_tokens": str(n), "ids_hash": digest, **identity})


# ---- transformers ----------------------------------------------------------------------------------


@torch.no_grad()
def prefill(model, ids):
    out = model(torch.tensor([ids]), use_cache=True)
    return out.past_key_values, out.logits[0, -1]


@torch.no_grad()
def feed(model, cache, ids, position):
    """One token a step; the row of logits after each."""
    rows = []
    for i, token in enumerate(ids):
        at = torch.tensor([[position + i]])
        rows.append(model(torch.tensor([[token]]), past_key_values=cache, position_ids=at).logits[0, -1])
    return torch.stack(rows)


@torch.no_grad()
def greedy(model, cache, row, n_prompt):
    """STEPS + 1 rows and their tokens, from the row after the prompt on."""
    rows = [row]
    while len(rows) <= STEPS:
        token = int(rows[-1].argmax())
        rows.append(feed(model, cache, [token], n_prompt + len(rows) - 1)[0])
    return torch.stack(rows), [int(r.argmax()) for r in rows]


# ---- comparison ------------------------------------------------------------------------------------


def rel_rms(a, b):
    return (a - b).norm(dim=-1) / b.norm(dim=-1)


def compare(what, device, want, got):
    """Rows of the producer and of who continued."""
    margin, limit, which, _ = LIMITS[device]
    top = want.topk(2, dim=-1).values
    sure = (top[:, 0] - top[:, 1]) > margin
    wrong = (want.argmax(-1) != got.argmax(-1)) & sure
    error = rel_rms(got, want)
    judged = float(error.median() if which == "median" else error.max())
    print(f"{what}: {int(sure.sum())} of {len(want)} steps with a margin over {margin}, "
          f"{int(wrong.sum())} wrong; logits: median {float(error.median()):.2g}, "
          f"worst {float(error.max()):.2g}")
    if len(want) != STEPS or wrong.any() or not judged < limit or int(sure.sum()) < STEPS // 2:
        sys.exit(f"FAILED: {what}: differs at {wrong.nonzero().flatten().tolist()}, error {judged:.3g}")


def ours(name, path, device, model, ids, tmp):
    """baton's cache, continued by transformers."""
    kv, logits = f"{tmp}/ours.safetensors", f"{tmp}/logits.safetensors"
    run = baton("run", "-m", path, "--ids", text(ids), "--mode", "native", "--decode", device,
                "--ignore-eos", "-n", str(STEPS + 1), "--logits", logits, "--kv-save", kv)
    again = baton("kv", "import", "-m", path, "--device", device, "-n", str(STEPS + 1), kv)
    if run["ids"] != again["ids"] or again["loaded_tokens"] != len(ids):
        sys.exit(f"FAILED: {name}: kv import continues otherwise than run")
    rows = load_file(logits)["logits"][1:]
    got = feed(model, read_cache(kv, model.config), run["ids"][:STEPS], len(ids))
    compare(f"{name} on {device}: ours, {len(ids)} tokens", device, rows, got)
    return kv, rows, run["ids"]


def theirs(name, path, device, model, ids, identity, dtype, tmp):
    """transformers' cache, continued by baton: with its logits, and without them from a longer prompt."""
    kv, bare, logits = f"{tmp}/theirs.safetensors", f"{tmp}/bare.safetensors", f"{tmp}/logits.safetensors"
    cache, row = prefill(model, ids)
    write_cache(kv, cache, ids, identity, dtype, row)
    write_cache(bare, cache, ids, identity, dtype)
    rows, tokens = greedy(model, cache, row, len(ids))
    common = ["run", "-m", path, "--mode", "native", "--decode", device, "--logits", logits]
    run = baton(*common, "--kv-load", kv, "--ids", text(ids), "--force", text(tokens))
    got = load_file(logits)["logits"]
    if run["loaded_tokens"] != len(ids) or not torch.equal(got[0], row):
        sys.exit(f"FAILED: {name}: the file was not continued")
    what = f"{name} on {device}: theirs ({str(dtype)[6:]}), {len(ids)} tokens"
    compare(what, device, rows[1:], got[1:])
    baton(*common, "--kv-load", bare, "--ids", text(ids + tokens[:1]), "--force", text(tokens[1:]))
    compare(what + ", no logits", device, rows[1:], load_file(logits)["logits"])
    return kv


def check_family(name, cases, tmp):
    path = f"{ROOT}/models/{name}"
    golden = load_file(f"{ROOT}/tests/golden/{name}/golden.safetensors")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    model.eval()
    h = baton("model", "hash", "-m", path)
    identity = {"architecture": h["arch"], "weights": h["weights"], "tokenizer": h["tokenizer"]}
    prompts = {n: golden[f"p{n}.input_ids"].tolist() for n in (7, 700)}
    prompts[512] = prompts[700][:512]
    for n, device, dtype in cases:
        ids = prompts[n]
        a, rows, tokens = ours(name, path, device, model, ids, tmp)
        b = theirs(name, path, device, model, ids, identity, dtype, tmp)
        d = baton("kv", "diff", a, b, "--limit", LIMITS[device][3])
        print(f"{name} on {device}: {d['slots_total']} slots, K within {d['k_rel_rms']:.2g}, "
              f"V within {d['v_rel_rms']:.2g}")
    # The last case is cpu:ref's. One position further than it is: this must be seen.
    error = rel_rms(feed(model, read_cache(a, model.config, 1), tokens[:STEPS], n + 1), rows)
    print(f"{name}: one position off: logits {float(error.min()):.2g} to {float(error.max()):.2g}")
    if not float(error.max()) > 100 * LIMITS["cpu:ref"][1]:
        sys.exit(f"FAILED: {name}: a cache at wrong positions passes")


def main():
    warnings.simplefilter("ignore")
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)  # several only wait for each other on models as small as these
    f32, f16, bf16 = torch.float32, torch.float16, torch.bfloat16
    last = (700, "cpu:ref", f32)
    with tempfile.TemporaryDirectory() as tmp:
        check_family("qwen3-tiny", ((7, "cpu", f32), (700, "cpu", bf16), last), tmp)
        check_family("koni-tiny", ((7, "cpu", bf16), (700, "cpu", f16), last), tmp)
        check_family("gemma3-tiny", ((7, "cpu", f16), (512, "cpu", bf16), (700, "cpu", f32), last), tmp)
    print("3 families passed")


main()
