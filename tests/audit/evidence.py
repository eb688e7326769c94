# SPDX-License-Identifier: Apache-2.0
"""Evidence folders: both auditors accept what the commands write, and both find every edit.

usage: evidence.py (BATON_BINARY: the program, BATON_SOURCE_ROOT: the tree)
"""
import copy
import glob
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile

ROOT = os.environ["BATON_SOURCE_ROOT"]
BATON = os.environ["BATON_BINARY"]
sys.path.insert(0, os.path.join(ROOT, "tests"))
from cases import main

SMALL = os.path.join(ROOT, "tests/golden/edge/gemma3-window8-headdim256")
TEMP = tempfile.mkdtemp(prefix="baton-audit-")
SECOND = importlib.util.spec_from_file_location("audit", os.path.join(ROOT, "tools/audit.py"))
second = importlib.util.module_from_spec(SECOND)
sys.dont_write_bytecode = True
SECOND.loader.exec_module(second)


def model(name):
    return os.path.join(ROOT, "models", name)


def baton(status, *args):
    r = subprocess.run([BATON, *args], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert r.returncode == status, (args, r.returncode, r.stdout[-500:], r.stderr)
    return r


def keep(status, *args):
    """Run a command with --evidence; the folder."""
    parent = tempfile.mkdtemp(dir=TEMP)
    baton(status, *args, "--evidence", parent, "-q")
    return glob.glob(parent + "/*")[0]


def audits(folder, *seal):
    """Differences that each auditor finds."""
    r = subprocess.run([BATON, "audit", folder, "--json", *seal], capture_output=True, text=True)
    assert r.returncode in (0, 1), r
    doc = json.loads(r.stdout)
    assert (r.returncode == 1) == bool(doc["differences"]), doc
    return doc["differences"], second.Folder(folder).audit(seal[1] if seal else None)


def expect_good(folder, *seal):
    first, other = audits(folder, *seal)
    assert not first and not other, (folder, first[:3], other[:3])


def expect_found(folder, what):
    first, other = audits(folder)
    assert first, f"baton audit did not find: {what}"
    assert other, f"audit.py did not find: {what}"


# ---- editing ------------------------------------------------------------------------------------

def read(folder, name):
    with open(os.path.join(folder, name), "rb") as f:
        return f.read()


def write(folder, name, data):
    with open(os.path.join(folder, name), "wb") as f:
        f.write(data)


def dump(doc):
    return json.dumps(doc, separators=(",", ":"), ensure_ascii=False).encode()


def sha(data):
    return hashlib.sha256(data).hexdigest()


def reseal(folder):
    names = [n for n in os.listdir(folder) if n not in ("raw", "seal.txt")]
    names += ["raw/" + n for n in os.listdir(folder + "/raw")]
    text = "".join(f"{sha(read(folder, n))}  {n}\n" for n in sorted(names))
    write(folder, "seal.txt", (text + f"{sha(text.encode())}  seal.txt\n").encode())


class Editor:
    """A copy of a folder whose documents can be changed, and every hash made anew."""

    def __init__(self, folder, to):
        shutil.rmtree(to, ignore_errors=True)
        shutil.copytree(folder, to)
        self.folder = to
        self.lines = [json.loads(x) for x in read(to, "cases.jsonl").splitlines()]
        self.summary = json.loads(read(to, "summary.json"))
        self.raw = {x["raw"]["file"]: json.loads(read(to, x["raw"]["file"]))
                    for x in self.lines if x.get("raw")}

    def save(self):
        last, texts = "0" * 64, []
        for x in self.lines:
            if x.get("raw"):
                data = dump(self.raw[x["raw"]["file"]])
                write(self.folder, x["raw"]["file"], data)
                x["raw"]["sha256"] = sha(data)
            x["prev"] = last
            texts.append(dump(x))
            last = sha(texts[-1])
        write(self.folder, "cases.jsonl", b"".join(t + b"\n" for t in texts))
        if self.summary["chain"]["lines"] == len(self.lines):
            self.summary["chain"]["last"] = last
        write(self.folder, "summary.json", dump(self.summary))
        reseal(self.folder)


def leaves(doc, path=()):
    if isinstance(doc, (dict, list)) and doc:
        for k, v in doc.items() if isinstance(doc, dict) else enumerate(doc):
            yield from leaves(v, path + (k,))
    else:
        yield path


def other(rng, v):
    if isinstance(v, bool):
        return not v
    if isinstance(v, int):
        return v + rng.choice([-1, 1, 1000])
    if isinstance(v, float):
        return v * 1.0001 + 1e-9
    if isinstance(v, str):
        at = rng.randrange(len(v)) if v else 0
        return v[:at] + ("0" if v[at:at + 1] != "0" else "1") + v[at + 1:]
    return 1 if v is None else [1]


def change(rng, doc, path):
    at = doc
    for k in path[:-1]:
        at = at[k]
    at[path[-1]] = other(rng, at[path[-1]])


# Members of a result that nothing is recomputed of: docs/evidence.md, last section.
AS_SAID = {"why", "name", "prompt", "evidence", "fault", "first_slot_mismatch", "error", "against",
           "file", "emulated"}


def edit_summary(rng, e):
    path = rng.choice([p for p in leaves(e.summary) if p[:2] != ("chain", "last")])
    change(rng, e.summary, path)
    return f"summary.json {path}"


def edit_claim(rng, e):
    line = rng.choice([x for x in e.lines if x["kind"] == "case"])
    path = rng.choice([p for p in leaves(line["result"]) if not AS_SAID & set(p)])
    change(rng, line["result"], path)
    return f"result of attempt {line['attempt']}: {path}"


def edit_begin(rng, e):
    line = rng.choice([x for x in e.lines if x["kind"] != "case"])
    path = rng.choice([p for p in leaves(line) if p[0] not in ("prev", "kind")])
    change(rng, line, path)
    return f"{line['kind']}: {path}"


def edit_raw(rng, e):
    """Of a check: something that a figure follows from."""
    name = rng.choice(sorted(e.raw))
    runs = {}
    for r in e.raw[name]["runs"]:
        runs.setdefault(r["run"], []).append(r)
    n = rng.randrange(len(runs["native"][0]["ids"]))
    slot = rng.randrange(len(runs["native"][0]["slots"]))
    hand, warm = rng.choice(runs["handoff"]), rng.choice(runs["handoff"][1:])
    which, doc, path = rng.choice([
        ("native's id", runs["native"][0], ("ids", n)),
        ("a handoff's id", hand, ("ids", n)),
        ("control's id", runs["control"][0], ("ids", n)),
        ("a handoff's text", runs["handoff"][0], ("text",)),
        ("a slot", hand, ("slots", slot, "have")),
        ("what a slot should be", hand, ("slots", slot, "want")),
        ("a position", hand, ("slots", slot, "first")),
        ("the second consumer's slot", runs["second"][0], ("slots", slot, "have")),
        ("the second consumer's choice", runs["second"][0], ("argmax", n)),
        ("the control's slot", runs["control"][0], ("slots", slot, "have")),
        ("an error of a slot", hand, ("slots", slot, "rel_rms")),
        ("an error to native", runs["handoff"][0], ("slots", slot, "against_rel_rms")),
        ("a row's hash", hand, ("rows_sha256", n)),
        ("finite", hand, ("slots", slot, "finite")),
        ("positions", hand, ("holds", "positions_ok")),
        ("a time", warm, ("stats", "prefill_ns")),
        ("steps", hand, ("stats", "steps_by_lanes", rng.randrange(8))),
        ("numerics", runs["handoff"][0], ("sent", "numerics")),
        ("n", e.raw[name], ("n",)),
    ])
    if path == ("text",) and not isinstance(doc["text"], str):
        return edit_raw(rng, e)
    change(rng, doc, path)
    return f"{name}: {which} {path}"


# ---- cases --------------------------------------------------------------------------------------

def folders_hold(rng):
    for folder in [
            keep(0, "check", "-m", SMALL, "--tokens", "1,7,8,9,65", "-n", "4", "--repeats", "1"),
            keep(0, "check", "-m", SMALL, "--tokens", "30", "-n", "4", "--prefill", "cpu:ref"),
            keep(0, "check", "-m", SMALL, "--tokens", "30", "-n", "4", "--decode", "cpu:ref"),
            keep(1, "check", "-m", SMALL, "--tokens", "30", "-n", "4", "--fault", "import-flip"),
            keep(1, "check", "-m", model("qwen3-tiny"), "--prefill", "npu:rngd,fault=noncausal",
                 "--tokens", "30", "-n", "4", "--reference", "off"),
            keep(2, "check", "-m", SMALL, "--tokens", "4000000,5", "-n", "2", "--reference", "off"),
            keep(0, "probe", "all", "-m", SMALL, "--device", "npu:rngd"),
            keep(1, "probe", "all", "-m", SMALL, "--device", "npu:rngd", "--fault", "pad-leak")]:
        expect_good(folder)
        seal = read(folder, "seal.txt").split()[-2].decode()
        expect_good(folder, "--seal", seal)
        first, other_ = audits(folder, "--seal", "0" * 64)
        assert first and other_
        assert not set(json.loads(read(folder, "summary.json"))["cleanup"].values()) - {0, None}
        for name in ("summary.json", "cases.jsonl"):
            assert TEMP.encode() not in read(folder, name) and ROOT.encode() not in \
                read(folder, name), "a path of this machine"


def edits_are_found(rng):
    """Each edit with all hashes made anew, so that only recomputation can find it; then bytes with
    the seal alone made anew."""
    folder = keep(0, "check", "-m", model("qwen3-tiny"), "--tokens", "20,40", "-n", "4")
    copy_ = os.path.join(TEMP, "edited")
    edits = [edit_summary] * 25 + [edit_claim] * 25 + [edit_begin] * 10 + [edit_raw] * 40
    for edit in edits:
        e = Editor(folder, copy_)
        e.save()
        if edit is edits[0]:
            expect_good(copy_)  # an editor that changes nothing is no edit
        before = copy.deepcopy((e.lines, e.summary, e.raw))
        what = edit(rng, e)
        assert before != (e.lines, e.summary, e.raw), what
        e.save()
        expect_found(copy_, what)
    for _ in range(20):
        Editor(folder, copy_)
        name = rng.choice(["cases.jsonl", "raw/0000.json", "raw/0001.json"])
        data = bytearray(read(copy_, name))
        at = rng.randrange(len(data))
        data[at] ^= 1 << rng.randrange(8)
        write(copy_, name, data)
        reseal(copy_)
        expect_found(copy_, f"{name} byte {at}")


def files_are_found(rng):
    """Missing, added, unsealed, reordered, dropped."""
    folder = keep(0, "check", "-m", SMALL, "--tokens", "5,6,7", "-n", "2", "--reference", "off")
    copy_ = os.path.join(TEMP, "edited")
    for name in ("summary.json", "cases.jsonl", "external.txt", "raw/0001.json"):
        for anew in (False, True):
            e = Editor(folder, copy_)
            os.unlink(os.path.join(copy_, name))
            if anew:
                reseal(copy_)
            expect_found(copy_, f"{name} is missing")
    Editor(folder, copy_)
    os.unlink(copy_ + "/seal.txt")
    expect_found(copy_, "no seal")
    for name in ("raw/0003.json", "more.txt"):
        Editor(folder, copy_)
        write(copy_, name, b"{}")
        expect_found(copy_, f"{name} was added")
    Editor(folder, copy_)
    write(copy_, "raw/0003.json", b"{}")
    reseal(copy_)
    expect_found(copy_, "a raw file of no attempt")
    for edit in (lambda x: x.pop(1), lambda x: x.pop(), lambda x: x.insert(1, x[2]),
                 lambda x: x[1].update(attempt=7), lambda x: x[2].update(supersedes=5),
                 lambda x: x[3].update(raw=None)):
        e = Editor(folder, copy_)
        edit(e.lines)
        e.save()
        expect_found(copy_, "lines")
    # Kept elsewhere: said, and not a difference.
    e = Editor(folder, copy_)
    data = read(copy_, "raw/0001.json")
    os.unlink(copy_ + "/raw/0001.json")
    write(copy_, "external.txt", f"{sha(data)} {len(data)} an archive\n".encode())
    reseal(copy_)
    expect_good(copy_)
    assert "not available: " + sha(data) in baton(0, "audit", copy_).stdout


def hostile_folders(rng, quality_folder=None):
    """Documents of other shapes are differences, never a crash."""
    folders = [keep(0, "check", "-m", SMALL, "--tokens", "5", "-n", "2", "--reference", "off"),
               keep(0, "probe", "window", "-m", SMALL)]
    if quality_folder:
        folders = [quality_folder]
    copy_ = os.path.join(TEMP, "edited")
    for _ in range(25):
        folder = rng.choice(folders)
        e = Editor(folder, copy_)
        doc = rng.choice([e.raw["raw/0000.json"], e.lines[1], e.lines[0], e.summary])
        paths = [p[:rng.randrange(1, len(p) + 1)] for p in leaves(doc) if p[0] != "prev"]
        path = rng.choice([p for p in paths if p not in (("kind",), ("chain",), ("raw",))])
        at = doc
        for k in path[:-1]:
            at = at[k]
        was = at[path[-1]]
        at[path[-1]] = rng.choice([None, [], {}, "", -1, 1 << 40, [[]], True])
        try:
            e.save()
        except (TypeError, KeyError, AttributeError):
            continue  # the editor itself could not read it any more
        first, other_ = audits(copy_)
        assert bool(first) == bool(other_), (path, was, at[path[-1]], first[:2], other_[:2])
    Editor(folder, copy_)
    write(copy_, "cases.jsonl", b"[" * 100000 + b"\n")
    write(copy_, "seal.txt", b"x" * 300)
    expect_found(copy_, "nonsense")


def against(rng):
    args = ["check", "-m", SMALL, "--tokens", "5,30", "-n", "3", "--reference", "off", "--repeats",
            "1"]
    folder = keep(0, *args)
    doc = json.loads(baton(0, *args, "--against", folder, "--json").stdout)
    assert all(c["against"] == {"verdict": "equal", "why": None} for c in doc["cases"]), doc
    e = Editor(folder, os.path.join(TEMP, "edited"))
    e.raw["raw/0001.json"]["runs"][-2]["ids"][1] += 1
    e.save()
    doc = json.loads(baton(1, *args, "--against", e.folder, "--json").stdout)
    assert [c["against"]["why"] for c in doc["cases"]] == [None, "token 1 differs"], doc
    assert doc["verdict"] == "pass"
    doc = json.loads(baton(1, *args[:3], "--tokens", "6", *args[5:], "--against", folder,
                           "--json").stdout)
    assert doc["cases"][0]["against"]["why"] == "it has no such prompt"


def refusals(rng):
    file = os.path.join(TEMP, "file")
    write(TEMP, "file", b"")
    check = ["check", "-m", SMALL, "--tokens", "5", "-n", "2"]
    for status, word, args in [
            (3, "evidence folder", check + ["--evidence", file + "/sub"]),
            (3, "evidence folder", check + ["--evidence", file]),
            (2, "no-such", check + ["--against", TEMP + "/no-such"]),
            (2, "no-such", ["audit", TEMP + "/no-such"]),
            (2, "one folder", ["audit"]),
            (2, "SHA-256", ["audit", TEMP, "--seal", "12"])]:
        r = baton(status, *args)
        assert word in r.stderr, (args, r.stderr)
    empty = tempfile.mkdtemp(dir=TEMP)
    expect_found(empty, "an empty folder")


def committed(rng):
    """The folders that are kept with the results."""
    folders = glob.glob(os.path.join(ROOT, "docs/results/evidence/*"))
    assert folders
    for folder in folders:
        expect_good(folder)


if __name__ == "__main__":
    try:
        main([folders_hold, edits_are_found, files_are_found, hostile_folders, against, refusals,
              committed])
    finally:
        shutil.rmtree(TEMP)
