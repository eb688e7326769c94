# SPDX-License-Identifier: Apache-2.0
"""`baton audit --sensitive`: each kind is found where it was planted, what is meant is counted and no failure.

usage: sensitive.py (BATON_BINARY: the program, BATON_SOURCE_ROOT: the tree)
"""
import ctypes
import glob
import json
import os
import shutil
import subprocess
import tempfile

from evidence import BATON, ROOT, SMALL, TEMP, Editor, keep, main, read, write
from cases import Skip  # which evidence has made importable

USER = "quokkaherder"
# No secret of anybody: put together here, so that this file holds none to be found.
PLANTED = {
    "path": ["/home" + "/quux/models/x.json", "/root" + "/y", "/tmp" + "/z.sock", "C:" + "\\Users\\quux",
             "/data" + "/a/b"],
    "user": ["quux" + "@wombat.org"],
    "host": ["10.1" + ".2.3", "172.16" + ".9.200", "fd00:1:2" + "::17", "52:54:00" + ":12:34:56",
             "box7.lab" + ".internal"],
    "key": ["-----BEGIN RSA " + "PRIVATE KEY-----", "AKIA" + "ABCDEFGHIJKLMNOP", "ghp_" + "a1B2" * 9, "hf_" + "Ab" * 17,
            "sk-" + "a1b2" * 8, "Authorization: " + "Bearer abcdef0123456789", "bt1." + "Ab3_" * 12,
            'api_key = "' + 'Ab12' * 6 + '"'],
    "name": [USER],
}
CLEAN = """127.0.0.1 0.0.0.0 ::1 192.0.2.7 203.0.113.9 2001:db8::1 12:30:59 [::2] a::b version 1.2.3 1.2.3.4.5
x/home/y $HOME/models ../data/x token = next_token(1234567890123456) user@example.com quokkaherders https://a/opt
sha256:0123456789abcdef MODEL EVIDENCE /v1/completions std::string::npos 2026-01-02T03:04:05Z
"""


def audit(status, *args, cwd=ROOT):
    r = subprocess.run([BATON, "audit", "--sensitive", "--json", *args], capture_output=True, text=True, cwd=cwd,
                       env=dict(os.environ, USER=USER), stdin=subprocess.DEVNULL)
    assert r.returncode == status, (args, r.returncode, r.stdout[-800:], r.stderr)
    return json.loads(r.stdout) if status < 2 else r.stderr


def found(doc):
    return {(f["file"], f["line"], f["kind"], f["text"]) for f in doc["sensitive"]["findings"]}


def git(folder, *args):
    subprocess.run(["git", "-C", folder, "-c", "user.name=a", "-c", "user.email=a@example.com", *args], check=True,
                   capture_output=True)


def repository():
    if not shutil.which("git"):
        raise Skip("skipped: no git here")
    folder = tempfile.mkdtemp(dir=TEMP)
    git(folder, "init", "-q")
    write(folder, ".gitignore", b"ignored\n")
    write(folder, "ignored", PLANTED["path"][0].encode())
    write(folder, "clean.txt", CLEAN.encode())
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "a")
    return folder


def every_kind(rng):
    folder = repository()
    assert not found(audit(0, "--tree", cwd=folder)), found(audit(0, "--tree", cwd=folder))
    for kind, texts in PLANTED.items():
        for text in texts:
            lines = ["", "nothing"] * rng.randrange(3)
            before, after = rng.choice([("", ""), ("see ", ", please"), ("(", ")"), ('{"a":"', '"}'), ("x=", "")])
            if "key" in text and before == '{"a":"':
                before = after = ""
            write(folder, "planted.txt", "\n".join(lines + [before + text + after, "end"]).encode())
            doc = audit(1, cwd=folder)
            at = [f for f in found(doc) if f[0] == "planted.txt" and f[1] == len(lines) + 1 and f[2] == kind]
            assert len(at) == 1, (kind, text, found(doc))
            shown = at[0][3]
            if kind == "key":
                assert text not in shown and text.startswith(shown[:-1]), shown  # enough to know which
            elif "\\" not in text:
                assert shown == text, shown
            assert doc["verdict"] == "fail" and doc["sensitive"]["new"] == len(found(doc))


def evidence(rng):
    """An untouched folder holds and shows nothing; a planted text is found and named beside the audit."""
    folder = keep(0, "check", "-m", SMALL, "--tokens", "5", "-n", "2", "--reference", "off", "--repeats", "1")
    doc = audit(0, folder)
    assert not found(doc) and doc["verdict"] == "pass" and doc["sensitive"]["files"] == 5 and doc["checked"], doc
    for committed in glob.glob(os.path.join(ROOT, "docs/results/evidence/*")):
        assert not found(audit(0, committed)), committed
    e = Editor(folder, os.path.join(TEMP, "edited"))
    e.lines[0]["argv"].append(PLANTED["path"][0])
    e.summary["argv"].append(PLANTED["path"][0])
    e.save()
    doc = audit(1, e.folder)
    assert not doc["differences"] and {(f[0], f[2]) for f in found(doc)} == {
        ("cases.jsonl", "path"), ("summary.json", "path")}, doc


def changes(rng):
    """Lines that were added, with their numbers, and no older ones; whatever stands in them."""
    folder = repository()
    write(folder, "old.txt", f"{PLANTED['host'][0]}\nb\nc\n".encode())
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "b")
    assert not found(audit(0, "--changed", "HEAD", cwd=folder))
    write(folder, "old.txt", f"{PLANTED['host'][0]}\nb\nc\n++ b/other.txt\n{PLANTED['path'][1]}".encode())
    write(folder, "clean.txt", f"@@ -1,9 +1,9 @@\n{CLEAN}--- a/x\n+++ b/y\n{PLANTED['key'][0]}\n".encode())
    write(folder, 'with "quotes".txt', PLANTED["user"][0].encode())
    doc = audit(1, "--changed", "HEAD", cwd=folder)
    n = CLEAN.count("\n")
    want = {("old.txt", 5, "path"), ("clean.txt", n + 4, "key"), ('with "quotes".txt', 1, "user")}
    assert {f[:3] for f in found(doc)} == want, found(doc)
    write(folder, ".gitattributes", b"*.txt -diff\n*.bin binary\n")  # of text, and it is searched
    write(folder, "b.bin", PLANTED["path"][0].encode())
    write(folder, "nul.bin", b"\0\n" + PLANTED["path"][0].encode())
    write(folder, "back\\slash\u00e9\x01.txt", PLANTED["path"][2].encode())
    want |= {("b.bin", 1, "path"), ("back\\slash\u00e9?.txt", 1, "path")}
    git(folder, "add", "-A")
    doc = audit(1, "--changed", "HEAD", cwd=folder)  # git's own names of some have quotes
    assert {f[:3] for f in found(doc)} == want and doc["sensitive"]["binary"] == 1, found(doc)
    git(folder, "rm", "-q", "--cached", "old.txt")
    os.unlink(folder + "/old.txt")
    assert len(found(audit(1, "--changed", "HEAD", cwd=folder))) == 4
    assert len(found(audit(1, "--changed", "HEAD~1", cwd=folder))) == 4
    assert "HEAD~9" in audit(2, "--changed", "HEAD~9", cwd=folder)
    assert "no commit" in audit(2, "--changed", "--output=x", cwd=folder)


def odd_files(rng):
    """Lines of thousands of labels are searched; a file that is not is named, and others are searched all the same."""
    folder = repository()
    write(folder, "long.txt", f"x@{'a.' * 5000}\n{'00:1f:' * 2000}\n{'a.' * 5000}b\n{PLANTED['path'][0]}\n".encode())
    doc = audit(1, "--tree", cwd=folder)["sensitive"]
    assert [(f["line"], f["kind"]) for f in doc["findings"]] == [(4, "path")] and doc["unsearched"] == [], doc
    write(folder, "closed.txt", b"")
    os.chmod(folder + "/closed.txt", 0)

    def lose_rights():  # root's, to read what is closed: CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
        for right in (1, 2):
            ctypes.CDLL(None).prctl(24, right, 0, 0, 0)

    for args in (["--tree"], ["--changed", "HEAD"]):
        said = [subprocess.run([BATON, "audit", "--sensitive", *args, *json_], capture_output=True, text=True, cwd=folder,
                               preexec_fn=lose_rights) for json_ in ([], ["--json"])]
        assert [r.returncode for r in said] == [1, 1], said
        assert "closed.txt: not searched: " in said[0].stdout and "long.txt:4: path: " in said[0].stdout, said
        doc = json.loads(said[1].stdout)
        assert [u["file"] for u in doc["sensitive"]["unsearched"]] == ["closed.txt"] and doc["verdict"] == "fail", doc
    os.unlink(folder + "/long.txt")
    assert subprocess.run([BATON, "audit", "--sensitive", "--tree"], capture_output=True, cwd=folder,
                          preexec_fn=lose_rights).returncode == 1  # nothing found, not all searched


def known_ones(rng):
    folder = repository()
    write(folder, "a.txt", f"{PLANTED['path'][0]}\n{PLANTED['path'][0]}\n{PLANTED['host'][0]}\n".encode())
    write(folder, "b.bin", b"\0" + PLANTED["path"][0].encode())
    os.symlink(PLANTED["path"][4], folder + "/link")
    known = os.path.join(TEMP, "known")
    write(TEMP, "known", b"# meant\n\npath\ta.*\t/home/*/x.json\nhost\tb.txt\t*\npath\tlink\t*\n")
    doc = audit(1, "--tree", "--known", known, cwd=folder)["sensitive"]
    assert (doc["new"], doc["known"], doc["binary"]) == (1, 3, 1), doc
    assert doc["unused"] == ["host\tb.txt\t*"], doc
    write(TEMP, "known", b"path\t*\t*\nhost\ta.txt\t10.*\n")
    doc = audit(0, "--tree", "--known", known, cwd=folder)["sensitive"]
    assert doc["known"] == len(doc["findings"]) == 4 and all(f["known"] for f in doc["findings"]), doc
    write(TEMP, "known", b"path\n")
    assert "line 1" in audit(2, "--tree", "--known", known, cwd=folder)


def refusals(rng):
    for word, args in (("one of", ["--tree", "--changed", "HEAD"]), ("one of", [TEMP, "--tree"]),
                       ("one folder", [TEMP, TEMP]), ("--seal", ["--tree", "--seal", "0" * 64]),
                       ("no-such", ["--known", TEMP + "/no-such"])):
        assert word in audit(2, *args), args
    assert "failed" in audit(2, "--tree", cwd=tempfile.mkdtemp(dir=TEMP))  # no repository
    r = subprocess.run([BATON, "audit", "--tree"], capture_output=True, text=True)
    assert r.returncode == 2


def this_tree(rng):
    """What this repository holds is known; scripts/known-sensitive.txt says why."""
    if not os.path.exists(os.path.join(ROOT, ".git")) or not shutil.which("git"):
        raise Skip("skipped: no repository here")
    doc = audit(0, "--tree", "--known", os.path.join(ROOT, "scripts/known-sensitive.txt"))["sensitive"]
    assert doc["files"] > 100 and doc["known"] > 0
    assert [u for u in doc["unused"] if not u.startswith("name")] == [], doc["unused"]


if __name__ == "__main__":
    try:
        main([every_kind, evidence, changes, odd_files, known_ones, refusals, this_tree])
    finally:
        shutil.rmtree(TEMP)
