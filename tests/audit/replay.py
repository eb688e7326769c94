# SPDX-License-Identifier: Apache-2.0
"""`baton replay`: a record is met again bit by bit, and where it was edited the first verb that differs is named.

usage: replay.py (BATON_BINARY: the program, BATON_SOURCE_ROOT: the tree)
"""
import json
import os
import shutil
import subprocess

from evidence import BATON, SMALL, TEMP, Editor, baton, keep, leaves, main, model, write


def replay(status, record, *args):
    r = baton(status, "replay", record, "--json", *args)
    return json.loads(r.stdout) if status < 2 else r.stderr


def changed(text):
    return ("0" if text[0] != "0" else "1") + text[1:]


def expect_same(doc, requests, lanes):
    assert doc["verdict"] == "pass" and doc["first"] is None and doc["control"] is None, doc
    assert doc["binding"]["requests"] == requests and doc["binding"]["lanes"] == lanes, doc
    assert min(doc["compared"].values()) > 0, doc


def checks(rng):
    """Each recorded output of the computation, edited alone and together with later ones."""
    folder = keep(0, "check", "-m", SMALL, "--tokens", "20", "-n", "4", "--reference", "off", "--repeats", "1",
                  "--mode", "stream", "--prefill", "npu:rngd")
    doc = replay(0, folder + "/raw/0000.json", "-m", SMALL)
    expect_same(doc, 1, 1)
    assert doc["binding"]["mode"] == "stream" and doc["binding"]["emulated"] == {"prefill": True, "decode": False}
    copy_ = os.path.join(TEMP, "edited")
    # in the order of the computation: what is edited, and what is to be said of it
    outputs = [(("slots", 2, "want"), ("prefill", "kv_append", 1, "k", None)),
               (("slots", 5, "want"), ("prefill", "kv_append", 2, "v", None)),
               (("slots", 0, "have"), ("handoff", "import", 0, "k", None)),
               (("slots", 7, "have"), ("handoff", "import", 3, "v", None)),
               (("rows_sha256", 0), ("prefill", "logits", None, None, 0)),
               (("rows_sha256", 2), ("decode", "logits", None, None, 2)),
               (("ids", 3), ("decode", "choice", None, None, 3))]
    for i, (first, said) in enumerate(outputs):
        e = Editor(folder, copy_)
        run = next(r for r in e.raw["raw/0000.json"]["runs"] if r["run"] == "handoff")
        for path in [first] + [p for p, _ in outputs[i + 1:] if rng.random() < 0.5]:
            at = run
            for k in path[:-1]:
                at = at[k]
            at[path[-1]] = at[path[-1]] + 1 if path[0] == "ids" else changed(at[path[-1]])
        e.save()
        doc = replay(1, copy_ + "/raw/0000.json", "-m", SMALL)
        f = doc["first"]
        assert (f["phase"], f["verb"], f["layer"], f["tensor"], f["step"]) == said, (first, f)
        assert f["lane"] == 0 and f["between"] and doc["control"] is None, f


def faults(rng):
    """A planted flip that the replay does not plant is the import; a faulty device fails alike each time."""
    folder = keep(1, "check", "-m", SMALL, "--tokens", "20", "-n", "4", "--reference", "off", "--repeats", "1",
                  "--fault", "import-flip")
    assert replay(1, folder + "/raw/0000.json", "-m", SMALL)["first"]["verb"] == "import"
    folder = keep(1, "check", "-m", SMALL, "--tokens", "20", "-n", "4", "--reference", "off", "--repeats", "1",
                  "--prefill", "npu:rngd,fault=noncausal")
    expect_same(replay(0, folder + "/raw/0000.json", "-m", SMALL), 1, 1)


def cells(rng):
    """All requests of a cell at once; of several that differ the earliest in the computation is named."""
    config = os.path.join(TEMP, "config.json")
    write(TEMP, "config.json", json.dumps({
        "schema": 1, "models": [{"name": "small", "path": SMALL}], "routes": ["native", "whole"], "reference": False,
        "consumers": [{"name": "b4", "device": "cpu", "producer": "cpu", "lanes": 4}],
        "lengths": [5, 9, 40, 66], "n": 16, "repeats": 2}).encode())
    folder = keep(0, "matrix", "--config", config)
    for i in range(2):
        expect_same(replay(0, f"{folder}/raw/000{i}.json", "-m", SMALL), 4, 4)
    e = Editor(folder, os.path.join(TEMP, "edited"))
    for name, doc in e.raw.items():
        outputs = doc["repeats"][0]["outputs"]
        outputs[0]["rows_sha256"][1] = changed(outputs[0]["rows_sha256"][1])
        key = "have" if name == "raw/0000.json" else "want"
        outputs[1]["slots"][6][key] = changed(outputs[1]["slots"][6][key])
        outputs[3]["slots"][3][key] = changed(outputs[3]["slots"][3][key])
    e.save()
    for name in e.raw:
        f = replay(1, os.path.join(e.folder, name), "-m", SMALL)["first"]
        assert (f["request"], f["verb"], f["layer"], f["tensor"], f["lane"]) == (3, "kv_append", 1, "v", None), f


def runs(rng):
    doc = json.loads(baton(0, "run", "-m", model("qwen3-tiny"), "-p", "The capital of", "-n", "6", "--ignore-eos",
                           "--json").stdout)
    write(TEMP, "run.json", json.dumps(doc).encode())
    same = replay(0, TEMP + "/run.json")
    assert same["compared"] == {"slots": 0, "rows": 0, "ids": 6} and same["kind"] == "run", same
    doc["ids"][2] += 1
    write(TEMP, "run.json", json.dumps(doc).encode())
    f = replay(1, TEMP + "/run.json", "-m", model("qwen3-tiny"))["first"]
    assert (f["verb"], f["step"]) == ("choice", 2), f
    assert "another model" in replay(2, TEMP + "/run.json", "-m", SMALL)


def refusals(rng):
    folder = keep(0, "check", "-m", SMALL, "--tokens", "5", "-n", "2", "--reference", "off", "--repeats", "1")
    record = folder + "/raw/0000.json"
    assert "-m is missing" in replay(2, record)
    assert "another model" in replay(2, record, "-m", model("qwen3-tiny"))
    assert "no-such" in replay(2, TEMP + "/no-such.json")
    assert "neither" in replay(2, folder + "/summary.json")
    copy_ = os.path.join(TEMP, "edited")
    e = Editor(folder, copy_)
    next(r for r in e.raw["raw/0000.json"]["runs"] if r["run"] == "handoff")["holds"]["numerics"] = "cpu-other-7"
    e.save()
    assert "another binding" in replay(2, copy_ + "/raw/0000.json", "-m", SMALL)
    shutil.copy(record, TEMP + "/alone.json")
    assert "evidence folder" in replay(2, TEMP + "/alone.json", "-m", SMALL)
    with open(copy_ + "/raw/0000.json", "ab") as f:
        f.write(b" ")
    assert "hash" in replay(2, copy_ + "/raw/0000.json", "-m", SMALL)
    with open(folder + "/cases.jsonl", "rb") as f:
        lines = f.read()
    write(copy_, "cases.jsonl", lines.replace(b'"prev":"', b'"prev":"0', 1))
    assert '"prev"' in replay(2, copy_ + "/raw/0000.json", "-m", SMALL)
    os.unlink(copy_ + "/cases.jsonl")
    assert "cases.jsonl" in replay(2, copy_ + "/raw/0000.json", "-m", SMALL)
    for _ in range(20):  # of any shape: said, never a crash
        e = Editor(folder, copy_)
        doc = rng.choice([e.raw["raw/0000.json"], e.raw["raw/0000.json"], e.lines[0]])
        path = rng.choice([p for p in leaves(doc) if p[0] not in ("prev", "kind")])
        path = path[:rng.randrange(1, len(path) + 1)]
        at = doc
        for k in path[:-1]:
            at = at[k]
        at[path[-1]] = rng.choice([None, [], {}, "", -1, 1 << 40, [[]], True, "x" * 300])
        e.save()
        r = subprocess.run([BATON, "replay", copy_ + "/raw/0000.json", "-m", SMALL, "--json"], capture_output=True)
        assert r.returncode in (0, 1, 2, 3), (path, r)
        json.loads(r.stdout)


if __name__ == "__main__":
    try:
        main([checks, faults, cells, runs, refusals])
    finally:
        shutil.rmtree(TEMP)
