# SPDX-License-Identifier: Apache-2.0
"""page.py BATON OUT.1...: manual pages that say what `baton --help` and `baton COMMAND --help` say.

Of the help's layout this much is known: what follows "usage:" is the synopsis; a line that begins in
column 0 before indented ones is a heading, another one text; "  TERM   description" is a list
item, whose description may go on below in its own column; other indented lines stand as they are.
"""
import re
import subprocess
import sys

ITEM = re.compile(r"  (\S+(?: \S+)*?)(\s{2,})(\S.*)")


def roff(text):
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq").replace("`", "\\(ga")
    return "\\&" + text if text.startswith((".", "\\(aq")) else text


def blocks(lines):
    """Lists of neighbouring lines: a blank line ends one."""
    block = []
    for line in lines + [""]:
        if line:
            block.append(line)
        elif block:
            yield block
            block = []


def section(title):
    return ".SH " + roff(f'"{title if len(title) > 30 else title.upper()}"')


def as_it_stands(lines):
    return [".PP", ".nf", ".ft CR", *map(roff, lines), ".ft", ".fi"]


def items(lines):
    """Indented lines: list items, and what is no item as it stands."""
    out, column = [], None
    for line in lines:
        item = ITEM.fullmatch(line)
        indent = len(line) - len(line.lstrip())
        if not item and indent > 2 and (column or indent >= 8):
            column = column or indent
            out += [roff(line.strip())]
        elif item:
            column = item.start(3)
            out += [".TP", ".B " + roff(item[1]), roff(item[3])]
        else:
            column = 2 if indent == 2 else None
            out += [".TP", ".B " + roff(line.strip())] if indent == 2 else [roff(line)]
    return out


def body(lines):
    out, described = [], False
    for block in blocks(lines):
        while block:
            n = next((i for i, l in enumerate(block) if l.startswith(" ")), len(block))
            if n == len(block) or n > 1:  # text, up to the line that may head what is indented
                text, block = (block, []) if n == len(block) else (block[:n - 1], block[n - 1:])
                out += [] if described else [section("description")]
                out += [".PP", *map(roff, text)]
                described = True
                continue
            head, rest = (block[0], block[1:]) if n == 1 else (None, block)
            m = next((i for i, l in enumerate(rest) if not l.startswith(" ")), len(rest))
            out += [section(head.rstrip(":"))] if head else [".PP"]
            described = True
            out += as_it_stands(rest[:m]) if (head or "").startswith("example") else items(rest[:m])
            block = rest[m:]
    return out


def page(name, summary, text, others):
    lines = text.splitlines()
    first = next(blocks(lines))
    synopsis = [re.sub(r"^usage: |^ {7}", "", l) for l in first]
    out = [f'.TH {roff(name.upper())} 1 "" "" "baton"', section("name"), f"{roff(name)} \\- {roff(summary)}",
           section("synopsis"), *as_it_stands(synopsis), *body(lines[len(first):]), section("see also")]
    out += [".BR " + roff(o) + " (1)" + ("," if o != others[-1] else "") for o in others]
    return "\n".join(['.\\" SPDX-License-Identifier: Apache-2.0', *out]) + "\n"


def shown(*args):
    return subprocess.run([sys.argv[1], *args, "--help"], capture_output=True, text=True)


overview = shown().stdout
summaries = dict(re.findall(r"^  (\S+) +(.*)$", overview.split("commands:")[1], re.M))
for path in sys.argv[2:]:
    command = re.search(r"baton(?:-(\w+))?\.1$", path)[1]
    if command:
        text, summary, others = shown(command).stdout, summaries[command], ["baton"]
    else:
        text, others = overview, ["baton-" + c for c in summaries]
        summary = "prefill on one device, decode on another"
    if not text:  # a command that this build has not
        text = f"usage: baton {command}\n\nThis build is without it.\n"
    with open(path, "w", encoding="utf-8") as f:
        f.write(page("baton-" + command if command else "baton", summary, text, others))
