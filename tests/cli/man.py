# SPDX-License-Identifier: Apache-2.0
"""man.py FOLDER: the manual pages there say what `--help` says, word for word, and groff takes them.

Words are compared in their order, so neither can have an option that the other has not. BATON_BINARY: the program.
"""
import os
import re
import shutil
import subprocess
import sys

sys.path.insert(0, os.path.join(os.environ["BATON_SOURCE_ROOT"], "tests"))
from cases import Skip, main

folder = sys.argv[1]


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


def pages():
    return sorted(p for p in os.listdir(folder) if p.endswith(".1"))


def a_page_for_each_command(rng):
    text = subprocess.run([os.environ["BATON_BINARY"], "--help"], capture_output=True, text=True).stdout
    commands = re.findall(r"^  (\S+) ", text, re.M)
    assert pages() == sorted(["baton.1"] + [f"baton-{c}.1" for c in commands]), commands


def pages_say_what_help_says(rng):
    for name in pages():
        source = open(os.path.join(folder, name), encoding="utf-8").read()
        command = re.fullmatch(r"baton(?:-(\w+))?\.1", name)[1]
        why = differs([command] if command else [], source)
        assert not why, f"{name}: {why}"


def groff_takes_them(rng):
    if not shutil.which("groff"):
        raise Skip("groff is not there")
    for name in pages():
        r = subprocess.run(["groff", "-man", "-ww", "-Tutf8", "-z", os.path.join(folder, name)],
                           capture_output=True, text=True)
        assert not r.stderr, r.stderr


main([a_page_for_each_command, pages_say_what_help_says, groff_takes_them])
