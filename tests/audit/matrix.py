# SPDX-License-Identifier: Apache-2.0
"""`baton matrix`: cells that pass, that are not run and why, a planted fault, going on.

usage: matrix.py (BATON_BINARY: the program, BATON_SOURCE_ROOT: the tree)
"""
import glob
import json
import os
import shutil
import tempfile

from evidence import (AS_SAID, ROOT, SMALL, TEMP, Editor, baton, change, expect_found, expect_good,
                      hostile_folders, leaves, main, model, read)

CONFIG = {"schema": 1, "models": [{"name": "small", "path": SMALL}],
          "routes": ["native", "whole", "stream"],
          "consumers": [{"name": "b4", "device": "cpu", "producer": "cpu", "lanes": 4},
                        {"name": "b1", "device": "cpu", "producer": "npu:rngd", "lanes": 1},
                        {"name": "gone", "device": "cpu,isa=none", "producer": "cpu", "lanes": 1}],
          "lengths": [5, 9, 40, 66], "n": 40, "repeats": 2}


def config(**changes):
    path = os.path.join(TEMP, f"config-{len(os.listdir(TEMP))}.json")
    with open(path, "w") as f:
        json.dump(dict(CONFIG, **changes), f)
    return path


def run(status, path, *args):
    doc = json.loads(baton(status, "matrix", "--config", path, "--json", *args).stdout)
    return doc, {c["name"]: c for c in doc["cells"]}


def folder_of(parent):
    return max(glob.glob(parent + "/*"))


def cells(rng):
    parent = tempfile.mkdtemp(dir=TEMP)
    doc, by = run(0, config(), "--evidence", parent)
    assert doc["verdict"] == "pass" and len(by) == 9 and doc["path"] == "engine", doc
    for name, c in by.items():
        if "gone" in name:
            assert c["verdict"] == "not_run" and c["depends_on"] == "cpu,isa=none" and c["why"], c
            continue
        assert c["verdict"] == c["within_route"] == "pass" and c["why"] is None, c
        assert c["full_lane_steps"] > 0 and c["lanes_active_max"] == c["lanes"], c
        if c["producer"] == "cpu":
            assert c["vs_native"] == "equal", c
    assert by["small/whole/b4"]["producer"] == "cpu" and by["small/whole/b4"]["lanes"] == 4
    assert all(by[f"small/{r}/b4"]["vs_reference"] in ("equal", "differs") for r in CONFIG["routes"])
    folder = folder_of(parent)
    expect_good(folder)
    assert TEMP.encode() not in read(folder, "summary.json")
    copy_ = os.path.join(TEMP, "edited")
    for i in range(20):
        e = Editor(folder, copy_)
        if i % 2:
            line = rng.choice([x for x in e.lines if x["kind"] == "case" and x["raw"]])
            where = rng.choice([p for p in leaves(line["result"])
                                if not (AS_SAID | {"depends_on"}) & set(p)])
            change(rng, line["result"], where)
        else:
            doc = e.raw[rng.choice(sorted(e.raw))]
            r, k = rng.randrange(2), rng.randrange(4)
            where = rng.choice([
                ("repeats", r, "outputs", k, "ids", 3), ("repeats", r, "outputs", k, "margins", 3),
                ("repeats", r, "outputs", k, "slots", 1, "have"), ("native", k, "ids", 2),
                ("repeats", r, "outputs", k, "rows_sha256", 0), ("cell", "model"),
                ("repeats", r, "outputs", k, "holds", "positions_ok"), ("reference", k, "ids", 0),
                ("repeats", r, "steps_by_lanes", doc["cell"]["lanes"] - 1), ("n",)])
            change(rng, doc, where)
        e.save()
        expect_found(copy_, where)
    hostile_folders(rng, folder)


def flip(rng):
    """Exactly the cells that import fail."""
    doc, by = run(1, config(consumers=CONFIG["consumers"][:2]), "--fault", "import-flip")
    assert doc["verdict"] == "fail"
    for name, c in by.items():
        assert c["verdict"] == ("pass" if "native" in name else "fail"), c
        assert c["why"] is None or "producer" in c["why"], c
    _, by = run(1, config(models=[{"name": "g", "path": model("gemma3-tiny")}], routes=["stream"],
                          lengths=[12, 20], repeats=2, reference=False,
                          consumers=[dict(CONFIG["consumers"][0], lanes=2)]),
                "--fault", "import-flip")
    assert by["g/stream/b4"]["vs_reference"] == "not_run" and by["g/stream/b4"]["lanes"] == 2


def going_on(rng):
    """What did not pass is tried again beside its first attempt; what passed stays as it is."""
    parent = tempfile.mkdtemp(dir=TEMP)
    path = config(reference=False, consumers=CONFIG["consumers"][1:])
    run(0, path, "--evidence", parent)
    folder = folder_of(parent)
    before = read(folder, "cases.jsonl")
    # as an interruption leaves it: three lines, no summary, no seal
    lines = before.splitlines(keepends=True)
    with open(folder + "/cases.jsonl", "wb") as f:
        f.write(b"".join(lines[:3]))
    for name in ("summary.json", "seal.txt", "raw/0002.json"):
        os.unlink(os.path.join(folder, name))
    doc, by = run(0, path, "--evidence", parent, "--resume")
    assert len(by) == 6 and doc["evidence"] == folder and doc["verdict"] == "pass"
    expect_good(folder)
    after = read(folder, "cases.jsonl")
    assert after.startswith(b"".join(lines[:3])), "a line was rewritten"
    # once more: cells that can't run are attempts again, those that passed are not
    run(0, path, "--evidence", parent, "--resume")
    expect_good(folder)
    kept = [json.loads(x) for x in read(folder, "cases.jsonl").splitlines()]
    assert read(folder, "cases.jsonl").startswith(after)
    assert [x["supersedes"] for x in kept if x["kind"] == "case"] == [None] * 6 + [3, 4, 5]
    summary = json.loads(read(folder, "summary.json"))
    assert summary["attempts"]["total"] == 9 and summary["verdict"] == "pass"
    r = baton(2, "matrix", "--config", config(n=65), "--evidence", parent, "--resume")
    assert '"config"' in r.stderr, r.stderr
    with open(folder + "/cases.jsonl", "ab") as f:
        f.write(b'{"kind":"case"')
    r = baton(2, "matrix", "--config", path, "--evidence", parent, "--resume")
    assert "not written whole" in r.stderr, r.stderr


def refusals(rng):
    for word, path in [
            ("--config", None), ("no-such", TEMP + "/no-such"), ("models", config(models=[])),
            ("two models", config(models=CONFIG["models"] * 2)),
            ("routes", config(routes=["native", "native"])), ("lengths", config(lengths=[5, 5])),
            ("lanes", config(lengths=[5, 9])), ('"n"', config(n=3)), ('"schema"', config(schema=2)),
            ('"repeats"', config(repeats=1)), ("two consumers",
                                               config(consumers=CONFIG["consumers"][:1] * 2)),
            ("producer", config(consumers=[{"name": "a", "device": "cpu", "lanes": 1}]))]:
        r = baton(2, "matrix", *(["--config", path] if path else []))
        assert word in r.stderr, (word, r.stderr)
    r = baton(2, "matrix", "--config", config(), "--fault", "noncausal")
    assert "import-flip" in r.stderr
    baton(2, "matrix", "--config", config(), "--resume")
    doc, by = run(3, config(models=[{"name": "none", "path": "nowhere"}], routes=["native"]))
    assert doc["verdict"] == "not_run" and by["none/native/b4"]["depends_on"] == "none"


def shipped(rng):
    """The shipped configuration is read, and has the cells that it is for."""
    with open(os.path.join(ROOT, "bench/matrix.json"), encoding="utf-8") as f:
        c = json.load(f)
    assert len(c["models"]) * len(c["routes"]) * len(c["consumers"]) == 36
    for m in c["models"]:
        assert os.path.isdir(os.path.join(ROOT, "bench", m["path"])), m


if __name__ == "__main__":
    try:
        main([cells, flip, going_on, refusals, shipped])
    finally:
        shutil.rmtree(TEMP)
