# SPDX-License-Identifier: Apache-2.0
"""Same ids, same text: tokdump against Hugging Face's tokenizers package on a random corpus, and the
chat formats against the templates themselves where jinja2 is there.

usage: tokenizer_corpus.py TOKDUMP [N]

Compared are the three shipped tokenizers, made-up ones, and the real ones that lie packed in
$BATON_SHARED/tokenizers (default: ../shared beside the source tree), where they are there. Seed:
BATON_TEST_SEED, else the clock; printed. BATON_PYTHON names the Python to use and promises that it has
the package; without it and without the package the test is skipped (exit 77).
"""
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.environ["BATON_SOURCE_ROOT"], "tests"))
from cases import need, seeded

need("tokenizers")
import tokenizers
from tokenizers import Tokenizer

WORDS = """the quick brown fox jumps over lazy dog Hello World it's don't I'LL we've THEY'RE you'd
def return for while int main void struct static const import self None True {} [] () => -> :: ;; //
/* */ <!-- --> #include 안녕하세요 대한민국 서울 김치찌개 훈민정음해례본 中文 测试 你好世界 東京 ひらがな カタカナ
مرحبا العالم السلام שלום עולם Привет мир Ελληνικά ไทย हिन्दी தமிழ் ქართული 😀 👩‍👩‍👧‍👦 🇰🇷 👍🏽 ❤️ é é ñ ñ Å
ﬁ ﬀ ß ſ İ ı Ǆ 가 각 각 ½ ² Ⅷ ٣ ৪ 12 345 6789 3.14159 1,000,000 0x1F 1e-9 a_b snake_case CamelCase
http://example.com/?q=1&r=2#x user@example.com \\n \\t \\u0041 'tis 'S 'ſ 'Ll""".split()
ALPHABETS = [
    (0x00, 0x20), (0x20, 0x7F), (0x80, 0x100), (0x100, 0x250), (0x2B0, 0x370), (0x370, 0x530),
    (0x590, 0x700), (0x900, 0xE00), (0x1100, 0x1200), (0x1AB0, 0x1B00), (0x1DC0, 0x1E00),
    (0x2000, 0x2070), (0x20D0, 0x2100), (0x2150, 0x2190), (0x3000, 0x3100), (0x4E00, 0x9FFF),
    (0xAC00, 0xD7A4), (0xE000, 0xE100), (0xFB00, 0xFE00), (0xFE00, 0xFE30), (0xFFF0, 0x10000),
    (0x1D160, 0x1D170), (0x1F300, 0x1FAFF), (0xE0000, 0xE0200), (0x10000, 0x110000),
]
SPACES = " \t\n\r\u00a0\u2003\u3000\u0085\u180e\u200b\u2028\x0b\x0c\x1c"
MARKS = [chr(c) for a, b in ((0x300, 0x370), (0x591, 0x5BE), (0x64B, 0x660), (0x93C, 0x93D),
                             (0x3099, 0x309B), (0x1AB0, 0x1ACF), (0x302A, 0x3030), (0x1DF5, 0x1E00),
                             (0x16FF0, 0x16FF2), (0x11930, 0x11936)) for c in range(a, b)]


def char(r):
    while True:
        a, b = r.choice(ALPHABETS)
        c = r.randrange(a, b)
        if not 0xD800 <= c < 0xE000:
            return chr(c)


def fragment(r, special):
    kind = r.randrange(12)
    n = r.choice((1, 1, 2, 3, 5, 9))
    if kind < 3:
        return r.choice(("", " ", "  ", "\n")).join(r.choice(WORDS) for _ in range(n))
    if kind == 3:
        return "".join(char(r) for _ in range(n))
    if kind == 4:
        return r.choice(SPACES) * r.choice((1, 2, 3, 7, 31, 32, 40))
    if kind == 5:
        return "".join(r.choice(SPACES) for _ in range(n))
    if kind == 6:
        return str(r.randrange(10 ** r.randrange(1, 25)))
    if kind == 7:
        return r.choice(special)
    if kind == 8:
        return r.choice("aeiouAnكकか가ᄀ=") + "".join(r.choice(MARKS) for _ in range(n))
    if kind == 9:
        return "".join(chr(r.choice((r.randrange(1, 32), 127, r.randrange(128, 160)))) for _ in range(n))
    if kind == 10:
        return r.choice(("▁", "\n", "ab", "=", "-", "#", "<0x0A>", "<", "</", "한", "💥")) * r.choice((1, 2, 5, 33, 60))
    return r.choice(special)[: r.randrange(1, 12)] + r.choice(("", " ", "|>"))


def text(r, special):
    return "".join(fragment(r, special) for _ in range(r.choice((1, 1, 2, 4, 8, 20))))


def fixed(special):
    """What must be there whatever the seed: every code point, long runs, every special token."""
    cps = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    yield ""
    for i in range(0, len(cps), 997):
        yield "".join(cps[i:i + 997])
    for i in range(0, len(cps), 257):  # as words, so that each stands beside a letter and a space
        if i < 0x3000 or i % 8 == 0:
            yield " a".join(cps[i:i + 257])
    for s in (" ", "\n", "a", "가", "\u0301", "▁", "💥", "'s", " \n", "é"):
        yield s * 5000
    for s in special:
        yield f"x{s}y {s} {s}\n{s}"


class Tokdump:
    def __init__(self, tool, folder):
        self.p = subprocess.Popen([tool, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def ask(self, **what):
        self.p.stdin.write(json.dumps(what).encode() + b"\n")
        self.p.stdin.flush()
        return json.loads(self.p.stdout.readline())

    def close(self):
        self.p.stdin.close()
        return self.p.wait()


class Differs(Exception):
    pass


def same(what, ours, theirs, source):
    if ours != theirs:
        raise Differs(f"{what} differ for {source!r}\n ours   {ours!r}\n theirs {theirs!r}")


class Panic(Exception):
    """The package gave up: parts that it cannot put together, at random."""


def encode(t, s, special):
    try:
        return t.encode(s, add_special_tokens=special).ids
    except BaseException as why:  # PanicException derives from BaseException
        if type(why).__name__ != "PanicException":
            raise
        raise Panic(str(why)) from None


def check_text(t, d, s, special, decode=True):
    theirs = encode(t, s, special)
    ours = d.ask(text=s, special=special)
    same("ids", ours.get("ids", ours), theirs, s)
    if not decode:
        return
    same("texts", ours["keep"], t.decode(theirs, skip_special_tokens=False), s)
    same("texts without special tokens", ours["skip"], t.decode(theirs), s)


def check_ids(t, d, ids):
    ours = d.ask(ids=ids)
    same("texts", ours["keep"], t.decode(ids, skip_special_tokens=False), ids)
    same("texts without special tokens", ours["skip"], t.decode(ids), ids)


def random_ids(r, size, bytes_at):
    """Any ids; some lists made of byte tokens mostly, so that characters break in all ways."""
    if r.random() < 0.5:
        return [r.randrange(size) for _ in range(r.randrange(1, 30))]
    return [r.choice(bytes_at) if r.random() < 0.9 else r.randrange(size) for _ in range(r.randrange(1, 30))]


def compare(name, tool, folder, r, n):
    t = Tokenizer.from_file(os.path.join(folder, "tokenizer.json"))
    d = Tokdump(tool, folder)
    about = d.ask(about=True)
    added = [a.content for a in t.get_added_tokens_decoder().values()]
    some = r.sample(added, min(len(added), 60))
    size = max(t.get_vocab().values()) + 1
    one_byte = [i for i in range(size) if (s := t.id_to_token(i)) and (len(s) == 1 or s.startswith("<0x"))]
    count = 0
    for s in list(fixed(some)) + [text(r, added) for _ in range(n)]:
        check_text(t, d, s, r.random() < 0.5)
        count += 1
    for _ in range(n):
        check_ids(t, d, random_ids(r, size, one_byte))
    if d.close() != 0:
        raise Differs("tokdump ended badly")
    print(f"{name}: {count} texts and {n} lists of ids are the same; loaded in {about['seconds']:.2f} s, "
          f"{about['private'] / 1e6:.1f} MB kept, {about['peak'] / 1e6:.1f} MB at most")


# ---- made-up tokenizers: every flag and behaviour, at random -----------------------------------------

def made_up(r):
    letters = list("abcdefxyz <|>▁.\n") + ["é", "가", "\u0301", "Ā", "Ċ", "Ġ"]
    vocab = {c: i for i, c in enumerate(letters)}
    merges = []
    for _ in range(r.randrange(1, 40)):
        a, b = r.choice(list(vocab)), r.choice(list(vocab))
        if a + b not in vocab and (len(a + b)) < 12:
            vocab[a + b] = len(vocab)
        if a + b in vocab and (a, b) not in merges:
            merges.append((a, b))
    fallback = r.random() < 0.5
    if fallback:
        for b in range(256):
            if r.random() < 0.97:
                vocab[f"<0x{b:02X}>"] = len(vocab)
    unk = r.choice((None, "<unk>"))
    if unk:
        vocab[unk] = len(vocab)
    added = []
    for s in r.sample(["<a>", "<ab>", "ab", "a", "x y", "  ", "<|", "<|x|>", " z", "é", "cd", "\n\n", "가"],
                      r.randrange(0, 8)):
        flag = lambda p: r.random() < p
        added.append({"id": vocab.get(s, -1), "content": s, "single_word": flag(.3), "lstrip": flag(.3),
                      "rstrip": flag(.3), "normalized": flag(.4), "special": flag(.5)})
    # The package numbers those that are not in the vocabulary: special ones of a run first or not, it
    # goes by the order of the list.
    nxt = len(vocab)
    for a in added:
        if a["id"] < 0:
            a["id"], nxt = nxt, nxt + 1
    norms = r.sample([{"type": "NFC"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
                      {"type": "Replace", "pattern": {"String": "ab"}, "content": "c"},
                      {"type": "Prepend", "prepend": "▁"}], r.randrange(0, 4))
    splits = []
    for _ in range(r.randrange(0, 3)):
        pattern = r.choice(({"String": " "}, {"String": "ab"}, {"Regex": r"\s+"}, {"Regex": r"[^\s\p{L}]+|\p{L}+"},
                            {"Regex": r"\p{L}{2,3}|\P{L}"}, {"Regex": "(?i:A|x)"}, {"Regex": r" ?\S+(?!\s)|\s"}))
        splits.append({"type": "Split", "pattern": pattern, "invert": r.random() < 0.3, "behavior": r.choice(
            ("Isolated", "Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous"))})
    if r.random() < 0.4:
        splits.append({"type": "ByteLevel", "add_prefix_space": r.random() < 0.5, "trim_offsets": True,
                       "use_regex": r.random() < 0.5})
    decoder = r.choice(({"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
                        {"type": "Sequence", "decoders": [
                            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                            {"type": "ByteFallback"}, {"type": "Fuse"}]}))
    part = lambda s: {"SpecialToken": {"id": s, "type_id": 0}}
    ids = {s: {"id": s, "ids": [vocab[s]], "tokens": [s]} for s in ("a", "b")}
    template = lambda: {"type": "TemplateProcessing", "special_tokens": ids, "pair": [
        {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}], "single": [
        part(r.choice("ab")) for _ in range(r.randrange(3))] + [{"Sequence": {"id": "A", "type_id": 0}}] + [
        part(r.choice("ab")) for _ in range(r.randrange(3))]}
    post = r.choice((None, template(), {"type": "Sequence", "processors": [
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}, template()]}))
    sequence = lambda key, parts: None if not parts else {"type": "Sequence", key: parts}
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
            "normalizer": sequence("normalizers", norms), "pre_tokenizer": sequence("pretokenizers", splits),
            "post_processor": post, "decoder": decoder,
            "model": {"type": "BPE", "dropout": None, "unk_token": unk, "continuing_subword_prefix": None,
                      "end_of_word_suffix": None, "fuse_unk": r.random() < 0.5, "byte_fallback": fallback,
                      "ignore_merges": r.random() < 0.4, "vocab": vocab,
                      "merges": [list(m) if r.random() < 2 else m for m in merges]}}


def compare_made_up(tool, r, n):
    pieces = ["a", "b", "ab", "c", "d", "x", "y", "z", " ", "  ", "\n", "\n\n", "<a>", "<ab>", "<|", "<|x|>", "é", "e\u0301",
              "가", "▁", ".", "😀", "x y", "cd", "\u00a0", "_", "1", "<0x41>", "ABX", "ü"]
    panics = 0
    for _ in range(n):
        with tempfile.TemporaryDirectory() as folder:
            spec = made_up(r)
            with open(os.path.join(folder, "tokenizer.json"), "w", encoding="utf-8") as f:
                json.dump(spec, f, ensure_ascii=r.random() < 0.5)
            t = Tokenizer.from_file(os.path.join(folder, "tokenizer.json"))
            d = Tokdump(tool, folder)
            size = max(t.get_vocab().values()) + 1
            try:
                # Some versions decode an added token as its normalized content, some as it is written.
                norm = t.normalizer.normalize_str if t.normalizer else str
                decode = all(norm(a["content"]) == a["content"] for a in spec["added_tokens"] if a["normalized"])
                for _ in range(60):
                    s = "".join(r.choice(pieces) for _ in range(r.randrange(0, r.choice((6, 20, 90)))))
                    check_text(t, d, s, r.random() < 0.5, decode)
                    if decode:
                        check_ids(t, d, [r.randrange(size) for _ in range(r.randrange(1, 12))])
            except Panic as why:
                panics += 1
            except Differs as why:
                raise Differs(f"{why}\n with {json.dumps(spec, ensure_ascii=False)}")
            d.close()
    print(f"{n} made-up tokenizers: 60 texts and lists of ids each are the same ({panics} given up by the package)")


# ---- chat formats ----------------------------------------------------------------------------------------

CONTENTS = ["", "Hello", "  two\n\n", "\n\nx\n", "<think>\na\n</think>\n\nb", "a</think>b", "<think>x</think>", "\u00a0y\u3000\x1f",
            "</think>\n\n</think> c", "<tool_response>z</tool_response>", "<tool_response>", "<think>\n\n</think>\n\n",
            "안녕", "p<think>q<think>\nr\n\n</think>\n\ns\n", "\n<think>\nonly"]


def jinja(config):
    """The template as transformers runs it; raises what it raises."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def fail(message):
        raise ValueError(message)

    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    env.globals["raise_exception"] = fail
    template = env.from_string(config["chat_template"])
    return lambda messages, generate, think: template.render(
        messages=messages, add_generation_prompt=generate, enable_thinking=think, bos_token=config.get("bos_token"))


def conversation(r):
    n = r.randrange(1, 7)
    roles = ["user", "assistant"] * 3
    if r.random() < 0.4:
        roles = ["system"] + roles
    if r.random() < 0.2:
        r.shuffle(roles)
    return [{"role": role, "content": r.choice(CONTENTS)} for role in roles[:n]]


def compare_chats(name, tool, folder, r, n):
    try:
        import jinja2  # noqa: F401
    except ImportError:
        print(f"{name}: no jinja2, chats are not compared")
        return
    with open(os.path.join(folder, "tokenizer_config.json"), encoding="utf-8") as f:
        render = jinja(json.load(f))
    d = Tokdump(tool, folder)
    refused = 0
    for _ in range(n):
        messages, generate, think = conversation(r), r.random() < 0.7, r.random() < 0.5
        ours = d.ask(messages=messages, generate=generate, think=think)
        try:
            same("chats", ours.get("text", ours), render(messages, generate, think), messages)
        except ValueError:
            refused += 1
            same("refusals", ours.get("code"), -2, messages)
    d.close()
    print(f"{name}: {n} chats are the same ({refused} refused)")


# ---- all of it ---------------------------------------------------------------------------------------------

def unpack(folder, out):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        subprocess.run(["zstd", "-dqf", os.path.join(folder, name + ".zst"), "-o", os.path.join(out, name)], check=True)


def main():
    tool = sys.argv[1]
    n = int(sys.argv[2]) if len(sys.argv) > 2 else 1500
    print(f"tokenizers {tokenizers.__version__}")
    r = seeded()
    root = os.environ.get("BATON_SOURCE_ROOT", ".")
    for name in ("qwen3-tiny", "koni-tiny", "gemma3-tiny"):
        compare(name, tool, os.path.join(root, "models", name), r, n)
        compare_chats(name, tool, os.path.join(root, "models", name), r, n)
    compare_made_up(tool, r, 60)
    shared = os.path.join(os.environ.get("BATON_SHARED") or os.path.join(root, "..", "shared"), "tokenizers")
    if not os.path.isdir(shared) or not shutil.which("zstd"):
        print("skipped: the real tokenizers (BATON_SHARED) or zstd are absent")
        return 0
    for name in sorted(os.listdir(shared)):
        with tempfile.TemporaryDirectory() as folder:
            unpack(os.path.join(shared, name), folder)
            compare(name, tool, folder, r, n)
            compare_chats(name, tool, folder, r, n)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Differs as why:
        print(f"FAILED: {why}")
        sys.exit(1)
