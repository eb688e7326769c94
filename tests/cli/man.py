# SPDX-License-Identifier: Apache-2.0
"""man.py FOLDER: the manual pages there say what `--help` says, word for word, and groff takes them.

Words are compared in their order, so neither can have an option that the other has not. BATON_BINARY: the program.
"""
import os
import re
import shutil
import subprocess
import sys

folder = sys.argv[1]
failed = []


def words(text):
    return re.findall(r"\S+", text)


def plain(source):
    """The words of a page's text: no headings, no requests."""
    out = []
    for line in source.splitlines():
        if line.startswith(".SH "):
            line = line[4:].strip('"')
        elif line.startswith(".B "):
            line = line[3:]
        elif line.startswith("."):
            continue
        for mark, character in (("\\&", ""), ("\\(aq", "'"), ("\\(ga", "`"), ("\\-", "-"), ("\\e", "\\")):
            line = line.replace(mark, character)
        out += words(line)
    return out


def differs(command, source):
    r = subprocess.run([os.environ["BATON_BINARY"], *command, "--help"], capture_output=True, text=True)
    text = source.split("SYNOPSIS")[1].split('.SH "SEE ALSO"')[0]
    page = [w.lower().rstrip(":") for w in plain(text) if w not in ('"', "DESCRIPTION")]
    want = [w.lower().rstrip(":") for w in words(r.stdout) if w != "usage:"]
    if r.stdout and page != want:
        at = next((i for i, (a, b) in enumerate(zip(page, want)) if a != b), min(len(page), len(want)))
        return f"the page says {page[at:at + 8]} where --help says {want[at:at + 8]}"
    return ""


def complaints(path):
    if not shutil.which("groff"):
        return ""
    r = subprocess.run(["groff", "-man", "-ww", "-Tutf8", "-z", path], capture_output=True, text=True)
    return r.stderr


pages = sorted(os.listdir(folder))
pages = [p for p in pages if p.endswith(".1")]
help_text = subprocess.run([os.environ["BATON_BINARY"], "--help"], capture_output=True, text=True).stdout
commands = re.findall(r"^  (\S+) ", help_text, re.M)
if pages != sorted(["baton.1"] + [f"baton-{c}.1" for c in commands]):
    failed.append(f"pages {pages} for commands {commands}")
for name in pages:
    source = open(os.path.join(folder, name), encoding="utf-8").read()
    command = re.fullmatch(r"baton(?:-(\w+))?\.1", name)[1]
    for why in (differs([command] if command else [], source), complaints(os.path.join(folder, name))):
        if why:
            failed.append(f"{name}: {why}")
print(f"{len(pages)} pages" + ("" if shutil.which("groff") else ", groff is not there"))
print(*failed, sep="\n")
sys.exit(1 if failed else 0)
