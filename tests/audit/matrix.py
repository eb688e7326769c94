# SPDX-License-Identifier: Apache-2.0
"""`baton matrix`: cells that pass, that are not run and why, a planted fault, going on.

usage: matrix.py (BATON_BINARY: the program, BATON_SOURCE_ROOT: the tree)
"""
import glob
import html.parser
import json
import os
import shutil
import subprocess
import tempfile
import xml.etree.ElementTree

from evidence import (AS_SAID, BATON, ROOT, SMALL, TEMP, Editor, baton, change, expect_found, expect_good,
                      hostile_folders, leaves, main, model, read, second)
from cases import Skip  # which evidence has made importable

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
    return max(glob.glob(parent if "*" in parent else parent + "/*"))


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


class Page(html.parser.HTMLParser):
    """The elements of a page that loads nothing, closed in order; its tables as rows of text."""
    KNOWN = {"html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "ul", "li", "section", "div", "table",
             "tr", "th", "td", "small", "b", "span", "code", "svg", "rect", "line", "circle"}
    VOID = {"meta"}

    def __init__(self, text):
        super().__init__()
        self.open, self.tables, self.classes, self.text, self.title = [], {}, [], "", ""
        assert text.startswith("<!doctype html>") and "url(" not in text and "<script" not in text
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        assert tag in self.KNOWN, tag
        names = {k for k, _ in attrs}
        assert not names & {"src", "href", "style"} and not any(k.startswith("on") for k in names), attrs
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "h2":
            self.title = ""
        if tag == "table":
            self.tables[self.title] = []
        if tag == "tr":
            self.tables[self.title].append([])
        if tag in ("td", "th"):
            self.tables[self.title][-1].append("")
            self.classes.append((self.title, dict(attrs).get("class")))

    def handle_startendtag(self, tag, attrs):
        assert tag in ("rect", "line", "circle")

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, tag

    def handle_data(self, data):
        self.text += data
        if self.open and self.open[-1] == "h2":
            self.title += data
        if {"td", "th"} & set(self.open):
            self.tables[self.title][-1][-1] += data


def expect_suite(path, doc):
    suite = xml.etree.ElementTree.parse(path).getroot()
    want = {"pass": None, "fail": "failure", "error": "error", "not_run": "skipped"}
    counts = {v: sum(c["verdict"] == v for c in doc["cells"]) for v in want}
    assert [int(suite.get(k)) for k in ("tests", "failures", "errors", "skipped")] == \
        [len(doc["cells"]), counts["fail"], counts["error"], counts["not_run"]]
    assert [t.get("name") for t in suite] == [c["name"] for c in doc["cells"]]
    for t, c in zip(suite, doc["cells"]):
        assert [x.tag for x in t] == [w for w in [want[c["verdict"]]] if w], c
        assert all(x.get("message") == c["why"] for x in t), c
    return counts


def expect_markdown(path, doc, counts):
    with open(path, encoding="utf-8") as f:
        rows = f.read().splitlines()
    assert rows[0].startswith(f"**baton matrix: {doc['verdict']}** ({counts['pass']} pass, {counts['fail']} fail,")
    assert len(rows) == 4 + len(doc["cells"]) and all(row.count("|") == 8 for row in rows[2:]), rows
    for row, c in zip(rows[4:], doc["cells"]):
        parts = [x.strip() for x in row.split("|")]
        assert parts[4:7] == [c["verdict"], c["vs_native"], c["vs_reference"]], row
        assert ("emulated" in parts[2]) == c["producer"].startswith("npu:"), row


def expect_page(path, doc):
    with open(path, encoding="utf-8") as f:
        page = Page(f.read())
    assert page.text.lstrip().startswith("baton matrix: " + doc["verdict"])
    rows = {r[0]: r for r in page.tables["All cells"][1:]}
    for c in doc["cells"]:
        row = rows[c["name"]]
        assert row[3:6] == [c["verdict"], c["vs_native"], c["vs_reference"]], row
        assert ("emulated" in row[1]) == c["producer"].startswith("npu:"), row
        assert not c["why"] or c["why"] in page.text, c
    grid = page.tables["Matrix"]
    assert sum(len(r) - 1 for r in grid[1:]) == len(doc["cells"])
    for r in grid[1:]:
        for head, cell in zip(grid[0][1:], r[1:]):
            found = [c for c in doc["cells"] if c["name"].startswith(r[0] + "/") and
                     head.startswith(c["name"][len(r[0]) + 1:])]
            assert any(cell.startswith(c["verdict"]) for c in found), (r, head, cell)
    return page


EVIL = "a|b<&\"'c<script>alert(1)</script>"


def files(rng):
    """Page, JUnit and Markdown say of each cell what the document says; a name may quote anything."""
    parent = tempfile.mkdtemp(dir=TEMP)
    names = [os.path.join(parent, "m." + x) for x in ("html", "xml", "md")]
    out = [x for pair in zip(("--html", "--junit", "--md"), names) for x in pair]
    path = config(models=[{"name": "small", "path": SMALL}, {"name": EVIL, "path": "none"}],
                  reference=False, routes=["native", "whole"], consumers=CONFIG["consumers"][:2])
    evidence = glob.glob(os.path.join(ROOT, "docs/results/evidence/*"))
    with open(parent + "/bench.json", "w", encoding="utf-8") as f:
        f.write(baton(0, "bench", "-m", model("qwen3-tiny"), "--prompt-tokens", "70", "-n", "3", "--json",
                      "--a", "--mode whole", "--b", "--mode stream").stdout)
    doc, by = run(1, path, "--fault", "import-flip", "--evidence", parent, *out,
                  *[x for e in evidence + [parent + "/bench.json"] for x in ("--with", e)])
    counts = expect_suite(names[1], doc)
    assert min(counts[v] for v in ("pass", "fail", "not_run")) > 0, counts
    expect_markdown(names[2], doc, counts)
    page = expect_page(names[0], doc)
    assert doc["holds"] and page.text.count("all hold.") == 1 + len(evidence)
    assert {r[0] for r in page.tables["Handoff timings"][1:]} == {
        n + "emulated: host time" * c["producer"].startswith("npu:") for n, c in by.items()
        if "whole" in n and c["verdict"] != "not_run"}
    for title in ("Check: caches read back", "Probes", "Bench: times in pairs, 95 % interval",
                  "What was not run, and why", "What does not hold", "Devices"):
        assert len(page.tables[title]) > 1, title
    assert "probed npu:rngd,fault=pad-leak (emulated)" in page.text and "decode cpu" in page.text
    assert "Limits" in page.text and TEMP not in page.text
    # the same from the folder alone, and from a run without one
    folder = folder_of(parent + "/*-matrix-*")
    again = json.loads(baton(1, "matrix", "--from", folder, "--json", *out).stdout)
    assert again["cells"] == doc["cells"] and again["verdict"] == "fail"
    expect_page(names[0], again)
    expect_suite(names[1], again)
    doc, _ = run(0, config(reference=False, routes=["native"], consumers=CONFIG["consumers"][1:]), *out)
    assert "can't be computed again" in expect_page(names[0], doc).text
    baton(3, "matrix", "--config", path, "--junit", "/no-such-folder/x")
    strange_folders(rng, folder, out)


def strange_folders(rng, folder, out):
    """What a folder says is text, and a folder that does not hold is said to be one."""
    copy_ = os.path.join(TEMP, "edited")
    for i in range(30):
        e = Editor(folder, copy_)
        doc = rng.choice([*e.lines, *[x["result"] for x in e.lines if "result" in x], *e.raw.values()])
        path = rng.choice([p for p in leaves(doc) if p[-1] not in ("kind", "command", "prev", "file", "sha256")])
        at = doc
        for k in path[:-1]:
            at = at[k]
        at[path[-1]] = rng.choice([EVIL, "\u0001\uffff]]>", None, [], {}, 1e300, -1, [[EVIL]], {EVIL: EVIL}])
        try:
            e.save()
        except (TypeError, KeyError, AttributeError):
            continue
        r = subprocess.run([BATON, "matrix", "--from", copy_, "--json", *out], capture_output=True, text=True)
        assert r.returncode in (0, 1, 2, 3), (path, r)
        if r.returncode == 2:
            continue
        doc = json.loads(r.stdout)
        with open(out[1], encoding="utf-8") as f:
            page = Page(f.read())
        suite = xml.etree.ElementTree.parse(out[3]).getroot()
        with open(out[5], encoding="utf-8") as f:
            head = f.readline()
        failed = [t.get("name") for t in suite if t.find("failure") is not None]
        assert int(suite.get("failures")) == len(failed) and int(suite.get("tests")) == len(suite), path
        assert doc["holds"] == ("evidence" not in failed) == ("does not hold" not in head), (path, head)
        assert doc["holds"] or (r.returncode == 1 and doc["verdict"] == "fail" and "do not hold" in page.text), path
        assert doc["holds"] == (not second.Folder(copy_).audit(None)), path


def chromium_draws_it(rng):
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if not browser:
        raise Skip("skipped: no chromium here")
    path = TEMP + "/drawn.html"
    run(0, config(reference=False, routes=["native"], consumers=CONFIG["consumers"][1:]), "--html", path)
    with tempfile.TemporaryDirectory() as d:
        r = subprocess.run([browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={d}",
                            "--window-size=900,1200", f"--screenshot={d}/page.png", "file://" + path],
                           capture_output=True, text=True, timeout=600)
        data = read(d, "page.png")
    assert data.startswith(b"\x89PNG") and len(data) > 20000, (len(data), r.stderr[-500:])


def refusals(rng):
    probe = max(glob.glob(os.path.join(ROOT, "docs/results/evidence/*-probe-*")))
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
    for args, word in ((("--config", config(), "--from", TEMP), "--from"), (("--from", TEMP + "/none"), "none"),
                       (("--from", probe), "no evidence of a matrix"), (("--from", probe, "--with", probe), "--html"),
                       (("--from", probe, "--html", TEMP + "/x", "--with", config()), "baton bench")):
        r = baton(2, "matrix", *args)
        assert word in r.stderr, (args, r.stderr)
    doc, by = run(3, config(models=[{"name": "none", "path": "nowhere"}], routes=["native"]))
    assert doc["verdict"] == "not_run" and by["none/native/b4"]["depends_on"] == "none"


def shipped(rng):
    """The shipped configuration is read, and has the cells that it is for."""
    with open(os.path.join(ROOT, "bench/matrix.json"), encoding="utf-8") as f:
        c = json.load(f)
    assert len(c["models"]) * len(c["routes"]) * len(c["consumers"]) == 36
    for m in c["models"]:
        assert os.path.isdir(os.path.join(ROOT, "bench", m["path"])), m
    with open(os.path.join(ROOT, "bench/real-checkpoints.json"), encoding="utf-8") as f:
        real = json.load(f)
    if any(os.path.exists(os.path.join(ROOT, "bench", m["path"])) for m in real["models"]):
        return  # who has them knows
    doc, by = run(3, os.path.join(ROOT, "bench/real-checkpoints.json"))
    assert len(by) == 36 and doc["verdict"] == "not_run"
    assert {c["depends_on"] for c in by.values()} == {m["name"] for m in real["models"]}


if __name__ == "__main__":
    try:
        main([cells, flip, going_on, files, chromium_draws_it, refusals, shipped])
    finally:
        shutil.rmtree(TEMP)
