# SPDX-License-Identifier: Apache-2.0
"""What others build against an installed baton: the sample device plugin and the embedding example.

usage: plugin.py BUILD SANITIZE (BATON_BINARY: the program, BATON_SOURCE_ROOT: the tree)

BUILD is installed into an empty folder and the examples are copied out of the tree; they see the
installed headers, the library and pkg-config, nothing else. SANITIZE is meson's b_sanitize.
"""
import json
import os
import shutil
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.environ["BATON_SOURCE_ROOT"], "tests"))
from cases import main

ROOT, BATON = os.environ["BATON_SOURCE_ROOT"], os.environ["BATON_BINARY"]
BUILD, SANITIZE = sys.argv[1:3]
IDS = 24


def call(*args, status=0, env=None, cwd=None):
    p = subprocess.run(args, capture_output=True, text=True, env=env, cwd=cwd, timeout=1800)
    assert p.returncode == status, f"{args}: exit {p.returncode}\n{p.stdout}{p.stderr}"
    return p.stdout, p.stderr


def build(folder):
    call("meson", "install", "-C", BUILD, "--no-rebuild", "--quiet",
         env={**os.environ, "DESTDIR": f"{folder}/root"})
    pc = next(d for d, _, names in os.walk(f"{folder}/root") if "baton.pc" in names)
    flags = "-O2 -Wall -Wextra -Werror" + ("" if SANITIZE == "none" else f" -fsanitize={SANITIZE}")
    env = {**os.environ, "PKG_CONFIG_PATH": pc, "PKG_CONFIG_SYSROOT_DIR": f"{folder}/root"}
    for name, cflags in ("plugin", "-O2 -Wall -Wextra -Werror"), ("embed", flags):
        shutil.copytree(f"{ROOT}/examples/{name}", f"{folder}/{name}")
        call("make", f"CFLAGS={cflags}", cwd=f"{folder}/{name}", env=env)
    return f"plugin:{folder}/plugin/sample.so", f"{folder}/embed/embed", os.path.dirname(pc)


def run(model, ids, *args):
    out, _ = call(BATON, "run", "-m", f"{ROOT}/models/{model}", "--ids",
                  ",".join(map(str, ids)), "-n", str(IDS), "--ignore-eos", "--probe", "never",
                  "--json", *args)
    return json.loads(out)


def route(model, plugin, rng):
    """float32 at both ends: the very tokens of the reference, KV in host pages and in lanes."""
    ids = [rng.randrange(10, 300) for _ in range(rng.randrange(60, 90))]
    want = run(model, ids, "--mode", "native", "--decode", "cpu:ref")["ids"]
    ends = [plugin, plugin + ",kv=own", "cpu:ref"]
    for n, (a, b) in enumerate(((0, 2), (1, 2), (2, 0), (2, 1), (1, 1))):
        got = run(model, ids, "--mode", "stream" if n % 2 else "whole", "--prefill", ends[a],
                  "--decode", ends[b])
        assert got["ids"] == want, (model, ends[a], ends[b], got["ids"], want)
        assert got["handoff"]["verdict"] == "verified", got["handoff"]
    assert run(model, ids, "--mode", "native", "--decode", plugin)["ids"] == want
    call(BATON, "check", "-m", f"{ROOT}/models/{model}", "--prefill", "cpu:ref", "--decode", ends[1],
         "--tokens", "70", "-n", "4", "--repeats", "1", "-q")


# What a broken plugin does -> exit status of a run, words of its message.
BROKEN = {"strides": (2, "is compiled with stride"), "logits": (3, "were not written"),
          "layers": (3, "out of order"), "silent": (3, "does not say why"),
          "lost": (3, "fell off the bus")}
PROBED = {"noncausal": "causality", "lanes": "lanes"}  # plausible numbers: a probe must find it


def broken(plugin, rng):
    ids = [rng.randrange(10, 300) for _ in range(12)]
    for name, (status, words) in BROKEN.items():
        _, err = call(BATON, "run", "-m", f"{ROOT}/models/qwen3-tiny", "--mode", "stream", "--ids",
                      ",".join(map(str, ids)), "-n", "2", "--decode", "cpu", "--prefill",
                      f"{plugin},break={name}", "--probe", "never", status=status)
        assert words in err, (name, err)
    # Where the two first meet the probes run by themselves, in a process of their own.
    _, err = call(BATON, "run", "-m", f"{ROOT}/models/qwen3-tiny", "--ids", "11,12", "-n", "2",
                  "--prefill", f"{plugin},break=noncausal", status=1)
    assert "fails the probe of causality" in err, err
    for name in ["none", *PROBED]:
        probe = PROBED.get(name, "all")
        out, _ = call(BATON, "probe", probe, "-m", f"{ROOT}/models/qwen3-tiny", "--device",
                      f"{plugin},kv=own,break={name}", "--json", status=int(name != "none"))
        verdicts = {p["name"]: p["verdict"] for p in json.loads(out)["probes"]}
        assert ("fail" in verdicts.values()) == (name != "none"), (name, verdicts)


def refused(plugin, folder):
    not_elf, other = f"{folder}/text.so", f"{folder}/other.so"
    with open(not_elf, "w", encoding="ascii") as f:
        f.write("no object\n")
    call("cc", "-shared", "-fPIC", "-x", "c", "/dev/null", "-o", other)
    for name, words in ((f"plugin:{not_elf}", "text.so"), (f"plugin:{other}", "no device plugin"),
                        ("plugin:/no/such.so", "/no/such.so"), ("plugin", "plugin:PATH"),
                        (f"{plugin},kv=mine", "kv=host|own"),
                        (f"{plugin},artifact=/no/such", "/no/such")):
        p = subprocess.run([BATON, "run", "-m", f"{ROOT}/models/qwen3-tiny", "--ids", "11,12", "-n",
                            "1", "--prefill", name], capture_output=True, text=True, timeout=600)
        assert p.returncode in (2, 3) and words in p.stderr, (name, p.returncode, p.stderr)


def window(plugin, rng):
    """Copies are whole grains; what a local layer holds begins within one, and is read back so."""
    call(BATON, "check", "-m", f"{ROOT}/tests/golden/edge/gemma3-window8-headdim256", "--prefill", "cpu",
         "--decode", f"{plugin},kv=own", "--tokens", str(rng.randrange(20, 80)), "-n", "2", "--repeats", "1", "-q")


def embed(program, lib, plugin):
    env = {**os.environ, "LD_LIBRARY_PATH": lib}
    model = f"{ROOT}/models/qwen3-tiny"
    want, _ = call(BATON, "run", "-m", model, "-p", "The quick brown fox", "-n", "32", "--mode",
                   "native", "-q")
    for devices in ("cpu", "cpu"), (plugin, "cpu"):
        out, _ = call(program, model, "The quick brown fox", *devices, env=env)
        text, _, record = out.rstrip("\n").rpartition("\n")
        assert text == want.rstrip("\n"), (devices, text, want)
        assert record.endswith("8 layers handed over, verified"), record
    _, err = call(program, "/no/model", "x", env=env, status=1)
    assert "/no/model" in err, err


with tempfile.TemporaryDirectory() as temp:
    sample, embedding, libraries = build(temp)
    main([("route_" + m, lambda rng, m=m: route(m, sample, rng)) for m in ("qwen3-tiny", "koni-tiny", "gemma3-tiny")] +
         [("broken", lambda rng: broken(sample, rng)), ("window", lambda rng: window(sample, rng)),
          ("refused", lambda rng: refused(sample, temp)),
          ("embed", lambda rng: embed(embedding, libraries, sample))])
