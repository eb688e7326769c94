# SPDX-License-Identifier: Apache-2.0
"""`baton quality`: what is right, what is not, what is refused, and its evidence.

usage: quality.py (BATON_BINARY: the program, BATON_SOURCE_ROOT: the tree)
"""
import glob
import hashlib
import json
import os
import shutil
import tempfile

from evidence import (AS_SAID, ROOT, TEMP, Editor, baton, change, expect_found, expect_good,
                      hostile_folders, keep, leaves, main, model, read)

FROZEN = os.path.join(ROOT, "tests/quality/frozen36.jsonl")
REFERENCE = os.path.join(ROOT, "tests/quality/reference-qwen3-tiny.json")
LINES = [json.loads(x) for x in open(FROZEN, encoding="utf-8")]


def freeze(name, lines):
    path = os.path.join(TEMP, name)
    data = "".join(json.dumps(x, ensure_ascii=False) + "\n" for x in lines).encode()
    with open(path, "wb") as f:
        f.write(data)
    with open(path + ".sha256", "w") as f:
        f.write(f"{hashlib.sha256(data).hexdigest()}  {name}\n")
    return path


def run(status, path, *args):
    return json.loads(baton(status, "quality", "-m", model("qwen3-tiny"), "--set", path, "--json",
                            *args).stdout)


def whole_set(rng):
    """Every answer that the reference is sure of, alone and beside eleven others in four lanes."""
    parent = tempfile.mkdtemp(dir=TEMP)
    doc = run(0, FROZEN, "--reference", REFERENCE, "--mode", "stream", "--evidence", parent)
    s = doc["score"]
    assert (s["prompts"], s["counted"], s["right"], s["right_concurrent"]) == (36, 34, 34, 34), s
    assert s["concurrent"] == {"same": 36, "of": 36} and s["reference"]["differs"] == 0, s
    expect_good(glob.glob(parent + "/*")[0])
    again = json.loads(baton(0, "quality", "--set", FROZEN, "--rescore", parent, "--json").stdout)
    assert again["runs"][0]["score"] == s


def rescore(rng):
    """Folders of one set and two routes below one another; one of them then answers otherwise."""
    parent = tempfile.mkdtemp(dir=TEMP)
    path = freeze("four.jsonl", [LINES[i] for i in (0, 10, 21, 30)])
    run(0, path, "--evidence", parent)
    run(0, path, "--evidence", parent, "--mode", "whole", "--concurrency", "1")
    args = ["quality", "--set", path, "--rescore", parent]
    doc = json.loads(baton(0, *args, "--json").stdout)
    assert [r["score"]["right"] for r in doc["runs"]] == [4, 4] and doc["differences"] == []
    assert sorted(r["score"]["concurrent"] is None for r in doc["runs"]) == [False, True]
    table = baton(0, *args).stdout
    assert "native cpu B4" in table and "whole cpu>cpu B1" in table, table
    second = sorted(glob.glob(parent + "/*"))[1]
    e = Editor(second, second + "-edited")
    e.raw["raw/0001.json"]["runs"][0]["text"] = "81"
    e.save()
    shutil.rmtree(second)
    doc = json.loads(baton(1, *args, "--json").stdout)
    assert [d["id"] for d in doc["differences"]] == [LINES[10]["id"]], doc["differences"]
    assert sorted(r["score"]["right"] for r in doc["runs"]) == [3, 4]


def lanes_are_used(rng):
    """Long answers of short prompts: both lanes must have been active together."""
    path = freeze("counting.jsonl", [x for x in LINES if x["category"] in ("counting", "echo")])
    doc = run(0, path, "--cohort", "5", "--concurrency", "2")
    assert doc["score"]["full_lane_steps"] > 0, doc["score"]
    assert doc["score"]["concurrent"] == {"same": 5, "of": 5}


def wrong_answers(rng):
    good, late = dict(LINES[0]), dict(LINES[33])
    trailing = dict(LINES[1], answer=LINES[1]["answer"] + " ")
    form = dict(LINES[10], answer="81", json={"answer": 81.5})
    path = freeze("wrong.jsonl", [good, trailing, form, late])
    doc = run(1, path, "-n", "20", "--concurrency", "2")
    right = [(p["right"], p["format"], p["eos"], p["verdict"]) for p in doc["prompts"]]
    assert right == [(1, True, True, "pass"), (0, True, True, "fail"), (0, False, True, "fail"),
                     (0, None, False, "fail")], right
    assert doc["verdict"] == "fail"
    table = baton(1, "quality", "-m", model("qwen3-tiny"), "--set", path, "-n", "20").stdout
    assert "fail q01-lookup" in table and "1/4" in table, table


def edits_are_found(rng):
    path = freeze("few.jsonl", [LINES[i] for i in (0, 10, 21)])
    folder = keep(0, "quality", "-m", model("qwen3-tiny"), "--set", path, "--concurrency", "2")
    expect_good(folder)
    assert TEMP.encode() not in read(folder, "summary.json")
    copy_ = os.path.join(TEMP, "edited")
    for i in range(30):
        e = Editor(folder, copy_)
        if i % 2:
            line = rng.choice([x for x in e.lines if x["kind"] == "case"])
            where = rng.choice([p for p in leaves(line["result"]) if not AS_SAID & set(p)])
            change(rng, line["result"], where)
        else:
            doc = e.raw[rng.choice(sorted(e.raw))]
            where = rng.choice([("answer",), ("json", "answer"), ("runs", 0, "text"),
                                ("runs", 0, "finish"), ("runs", 1, "text"), ("runs", 1, "ids", 2),
                                ("runs", 0, "ids", 0), ("runs", 1, "error"), ("n_prompt",),
                                ("cohort", "full_lane_steps"), ("category",), ("id",)])
            change(rng, doc, where)
        e.save()
        expect_found(copy_, where)
    hostile_folders(rng, folder)
    # a stored answer that was edited is not judged, nor one to another set
    e = Editor(folder, copy_)
    with open(copy_ + "/raw/0000.json", "ab") as f:
        f.write(b" ")
    r = baton(2, "quality", "--set", path, "--rescore", copy_)
    assert "not what its line says" in r.stderr, r.stderr
    r = baton(2, "quality", "--set", FROZEN, "--rescore", folder)
    assert "another set" in r.stderr, r.stderr


def refusals(rng):
    path = freeze("edited.jsonl", LINES[:2])
    with open(path, "a") as f:
        f.write("\n")
    loose = os.path.join(TEMP, "loose.jsonl")
    shutil.copy(FROZEN, loose)
    m = ["-m", model("qwen3-tiny")]
    twice, no_answer = freeze("twice.jsonl", [LINES[0]] * 2), freeze("bad.jsonl", [{"id": "a"}])
    for status, word, args in [
            (2, "edited", m + ["--set", path]), (2, "not frozen", m + ["--set", loose]),
            (2, "second prompt", m + ["--set", twice]), (2, '"prompt"', m + ["--set", no_answer]),
            (2, "no-such", m + ["--set", TEMP + "/no-such"]), (2, "--set", m),
            (2, "-m", ["--set", FROZEN]), (2, "--cohort", m + ["--cohort", "0"]),
            (2, "no tokenizer", ["-m", "shape:qwen3-0.6b", "--set", FROZEN]),
            (2, "outputs", m + ["--set", freeze("x.jsonl", LINES[:1]), "--reference", REFERENCE]),
            (2, "asks nothing", m + ["--set", FROZEN, "--rescore", TEMP]),
            (2, "no evidence", ["--set", FROZEN, "--rescore", os.path.join(ROOT, "docs")]),
            (2, "not built", m + ["--set", FROZEN, "--url", "http://127.0.0.1:1"])]:
        r = baton(status, "quality", *args)
        assert word in r.stderr, (args, r.stderr)


if __name__ == "__main__":
    try:
        main([whole_set, rescore, lanes_are_used, wrong_answers, edits_are_found, refusals])
    finally:
        shutil.rmtree(TEMP)
