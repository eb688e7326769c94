#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""audit.py DIR... [--seal HEX]: a second auditor of evidence folders, written from docs/evidence.md.

It shares no code with `baton audit` and needs nothing but Python. Every difference is printed with
the file and the place; exit 0: all hold, 1: something differs or is missing, 2: no such folder.
"""
import hashlib
import json
import math
import os
import sys

LIMIT = 256 << 20  # bytes of a file that is read
VERDICTS = ("pass", "fail", "error", "not_run", "n/a")
# Relative RMS of logits and of slots, and the margin above which the argmax must be equal.
LIKE_REFERENCE = {"margin": 0.001, "logits": 3e-5, "kv": 6e-5}
BF16 = {"margin": 0.4, "logits": 5e-2, "kv": 1.5e-2}


class Malformed(Exception):
    pass


def need(holds, what):
    if not holds:
        raise Malformed("malformed: " + what)


def reject(word):
    raise ValueError(word + " is no JSON number")


def pairs(items):
    d = dict(items)
    if len(d) != len(items):
        raise ValueError("a key stands twice")
    return d


def parse(data):
    return json.loads(data.decode("utf-8"), parse_constant=reject, object_pairs_hook=pairs)


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def is_int(v):
    return isinstance(v, int) and not isinstance(v, bool) and -2 ** 63 <= v < 2 ** 63


def is_text(v):
    return isinstance(v, str)


def is_real(v):
    return v is None or is_number(v)


def every(values, good):
    return isinstance(values, list) and all(map(good, values))


def is_number(v):
    return isinstance(v, (int, float)) and not isinstance(v, bool)


def number(v):
    """null stands for what is not finite."""
    return float(v) if is_number(v) else math.nan


def real(x):
    return x if math.isfinite(x) else None


def worst(values):
    values = list(values)
    return math.nan if any(math.isnan(v) for v in values) else max(values, default=0.0)


def spread(values):
    if not values:
        return None
    v, n = sorted(values), len(values)
    median = v[n // 2] if n % 2 else (v[n // 2 - 1] + v[n // 2]) / 2
    return {"n": n, "min": v[0], "median": median, "max": v[-1]}


# ---- the raw document of a check ----------------------------------------------------------------

class Check:
    def __init__(self, raw):
        need(isinstance(raw, dict) and isinstance(raw.get("runs"), list), "no document of a check")
        for key in ("prompt_ids", "local"):
            need(every(raw.get(key), is_int), key)
        need(is_int(raw.get("n")) and is_int(raw.get("window")), "n or window")
        self.raw, self.tokens, self.slots = raw, len(raw["prompt_ids"]), 2 * len(raw["local"])
        self.named, self.handoffs = {}, []
        for run in raw["runs"]:
            self.check_run(run)
            self.sort_run(run)

    def check_run(self, run):
        need(isinstance(run, dict) and isinstance(run.get("run"), str), "a run")
        need("error" in run and isinstance(run["error"], (dict, type(None))), "error")
        for key, good in (("ids", is_int), ("argmax", is_int), ("margins", is_real),
                          ("rows_sha256", is_text), ("token_ns", is_int)):
            need(every(run.get(key), good) and len(run[key]) == len(run["ids"]), key)
        need(every(run.get("rows_rel_rms"), is_real), "rows_rel_rms")
        need(len(run["rows_rel_rms"]) <= len(run["ids"]), "rows_rel_rms")
        self.check_caches(run)
        stats = run.get("stats")
        need(isinstance(stats, dict) and is_int(stats.get("prefill_ns")), "stats")
        need(is_int(stats.get("exposed_ns")) and every(stats.get("steps_by_lanes"), is_int), "stats")
        need(len(stats["steps_by_lanes"]) == 8, "steps_by_lanes")
        handed = run["run"] in ("handoff", "second")
        if run["error"] is None:
            need(run["slots"] and run["holds"] and (run["sent"] or not handed), "no caches")
        need(run["slots"] or not run["sent"], "a producer's cache, and no consumer's")

    def check_caches(self, run):
        need(every(run.get("slots"), self.good_slot), "slots")
        need(len(run["slots"]) in (0, self.slots), "slots")
        for end in ("holds", "sent"):
            h = run.get(end, 0)
            need(h is None or isinstance(h, dict) and is_int(h.get("dtype"))
                 and is_text(h.get("numerics")), end)

    @staticmethod
    def good_slot(s):
        return (isinstance(s, dict) and is_int(s.get("first")) and is_int(s.get("n"))
                and is_text(s.get("have")) and is_real(s.get("rel_rms", ""))
                and is_real(s.get("against_rel_rms", "")))

    def sort_run(self, run):
        name, finished = run["run"], run["error"] is None
        if name == "handoff":
            if finished or run.get("sent") is not None:
                self.handoffs.append(run)
            return
        need(name in ("reference", "native", "control", "forced", "second"), "a run's name")
        need(name not in self.named, "two runs of one name")
        self.named[name] = run if finished else None

    # slots

    def whole(self, slot):
        return slot.get("first", 0) + slot.get("n", 0) == self.tokens

    def exact(self, run):
        return [self.whole(s) and isinstance(s.get("have"), str) and s["have"] == s.get("want")
                for s in run["slots"]]

    def positions_ok(self, run, handed=True):
        for end in ("holds", "sent") if handed else ("holds",):
            if not isinstance(run.get(end), dict) or run[end].get("positions_ok") is not True:
                return False
        window = self.raw["window"]
        for i, s in enumerate(run["slots"]):
            slides = self.raw["local"][i // 2] and window and self.tokens >= window
            if s.get("first") != (self.tokens - window + 1 if slides else 0) or not self.whole(s):
                return False
        return True

    def slots_hold(self, run):
        have, sent = run["holds"]["dtype"], run["sent"]["dtype"]
        budget = 0.0 if have == sent or have == 1 else 2.0 ** -8 if have == 3 else 2.0 ** -11
        errors = [worst_slot(run, "rel_rms", i) for i in (0, 1)]
        return (all(self.exact(run)) and all(s.get("finite") is True for s in run["slots"])
                and self.positions_ok(run) and all(e <= budget for e in errors))

    def same_bits(self, a, b):
        slots = all(self.whole(s) and s.get("have") == t.get("have")
                    for s, t in zip(a["slots"], b["slots"]))
        return slots and all(a[k] == b[k] for k in ("ids", "margins", "rows_sha256"))

    def group(self, run, local):
        layers = [i for i, x in enumerate(self.raw["local"]) if (x != 0) == local]
        if not layers:
            return None
        positions = None
        for i in layers:
            s = run["slots"][2 * i]
            if s["n"] > 0:
                positions = [s["first"], s["first"] + s["n"] - 1]
        return {"layers": len(layers), "positions": positions}

    # figures

    def figures(self):
        first = self.handoffs[0] if self.handoffs and self.handoffs[0]["error"] is None else None
        native, control = self.named.get("native"), self.named.get("control")
        second = self.named.get("second")
        done = bool(native and control and first and second)
        out, line = {"tokens": self.tokens, "n": self.raw["n"]}, {"warm_ms": None}
        hs = self.handoffs
        if hs:
            out["slots_total"] = self.slots
            out["slots_exact"] = min(sum(self.exact(r)) for r in hs)
            out["positions_ok"] = all(self.positions_ok(r) for r in hs)
        if not done:
            out["verdict"] = self.judge_early()
            return out, line
        steps = [sum(r["stats"]["steps_by_lanes"][i] for r in hs) for i in range(8)]
        at = first_mismatch(first, native)
        texts = first.get("text"), native.get("text")
        holds, sent = first["holds"], first["sent"]
        out.update({
            "finite": all(s.get("finite") is True for r in hs for s in r["slots"]),
            "k_rel_rms": real(worst(worst_slot(r, "rel_rms", 0) for r in hs)),
            "v_rel_rms": real(worst(worst_slot(r, "rel_rms", 1) for r in hs)),
            "repeats": len(hs), "bit_exact_repeats": all(self.same_bits(r, first) for r in hs[1:]),
            "steps_by_lanes": steps,
            "active_lanes_max": max((i + 1 for i in range(8) if steps[i]), default=0),
            "local": self.group(first, True), "global": self.group(first, False),
            "tokens_match": at is None, "first_mismatch": at,
            "text_match": texts[0] == texts[1] if all(isinstance(t, str) for t in texts) else None,
            "logits_rel_rms": real(worst_row(first, native)),
            "vs_native": {"k_rel_rms": real(worst_slot(first, "against_rel_rms", 0)),
                          "v_rel_rms": real(worst_slot(first, "against_rel_rms", 1))},
            "same_numerics": all(holds[k] == sent[k] for k in ("dtype", "numerics")),
            "control": {
                "native_repeat_mismatch": differing(control, native, "ids"),
                "kv_rel_rms_max": real(worst(worst_slot(control, "against_rel_rms", i)
                                             for i in (0, 1))),
                "logits_rel_rms_max": real(worst_row(control, native)),
                "bit_exact": self.same_bits(control, native)},
            "native_vs_ref": self.versus_reference(),
            "second_consumer": {
                "slots_exact": sum(self.exact(second)), "slots_total": self.slots,
                "positions_ok": self.positions_ok(second),
                "argmax_differs": differing(second, native, "argmax"),
                "argmax_mismatch": beyond_margin(second, native, BF16["margin"])[0],
                "logits_rel_rms": real(worst_row(second, native))},
        })
        times = [(r["stats"]["prefill_ns"] + r["stats"]["exposed_ns"]) / 1e6
                 for r in (hs[1:] if len(hs) > 1 else hs)]
        line["warm_ms"] = spread(times)
        out["prefill_export_ms"] = [min(times), max(times)]
        line["tokens_compared"] = len(first["ids"])
        line["tokens_equal"] = len(first["ids"]) - differing(first, native, "ids")
        out["verdict"] = self.judge(out, first)
        return out, line

    def versus_reference(self):
        ref, forced = self.named.get("reference"), self.named.get("forced")
        if not ref or not forced:
            return None
        like = forced["holds"]["numerics"] == ref["holds"]["numerics"]
        limits = LIKE_REFERENCE if like else BF16
        beyond, below = beyond_margin(forced, ref, limits["margin"])
        return {"argmax_mismatch": beyond, "below_margin": below, "steps": len(forced["ids"]),
                "logits_rel_rms": real(worst_row(forced, ref)),
                "k_rel_rms": real(worst_slot(forced, "against_rel_rms", 0)),
                "v_rel_rms": real(worst_slot(forced, "against_rel_rms", 1)), "limits": limits}

    def judge(self, o, first):
        control, second, ref = o["control"]["bit_exact"], o["second_consumer"], o["native_vs_ref"]
        good = all(self.slots_hold(r) for r in self.handoffs + [self.named["second"]])
        good &= o["bit_exact_repeats"] or not control
        good &= control or first["holds"]["row_invariant"] is not True
        if control and o["same_numerics"]:
            good &= o["tokens_match"] and all(x == 0 for x in (
                o["logits_rel_rms"], o["vs_native"]["k_rel_rms"], o["vs_native"]["v_rel_rms"],
                second["argmax_differs"], second["logits_rel_rms"]))
        good &= second["argmax_mismatch"] == 0
        good &= number(second["logits_rel_rms"]) <= BF16["logits"]
        if ref:
            good &= ref["argmax_mismatch"] == 0 and all(
                number(ref[k]) <= ref["limits"][limit] for k, limit in
                (("logits_rel_rms", "logits"), ("k_rel_rms", "kv"), ("v_rel_rms", "kv")))
        return "pass" if good else "fail"

    def judge_early(self):
        refused = any(isinstance(r["error"], dict) and r["error"].get("code") == "integrity"
                      for r in self.raw["runs"])
        wrong = any(self.whole(s) and not ok for r in self.handoffs
                    for s, ok in zip(r["slots"], self.exact(r)))
        return "fail" if refused or wrong else "error"


def worst_slot(run, key, which):
    return worst(number(s.get(key)) for s in run["slots"][which::2])


def first_mismatch(a, b):
    for i, (x, y) in enumerate(zip(a["ids"], b["ids"])):
        if x != y:
            return i
    return None if len(a["ids"]) == len(b["ids"]) else min(len(a["ids"]), len(b["ids"]))


def differing(a, b, key):
    return sum(x != y for x, y in zip(a[key], b[key]))


def worst_row(run, against):
    at = first_mismatch(run, against)
    rows = run["rows_rel_rms"]
    return worst(number(x) for x in (rows if at is None else rows[:at + 1]))


def beyond_margin(run, want, margin):
    """Steps that chose otherwise though the wanted margin is above; steps whose margin is not."""
    beyond = below = 0
    for mine, theirs, m in zip(run["argmax"], want["argmax"], want["margins"]):
        small = number(m) <= margin
        below += small
        beyond += not small and mine != theirs
    return beyond, below


# ---- by command ---------------------------------------------------------------------------------

def check(raw):
    return Check(raw).figures()


def probe(raw):
    within = is_number(raw.get("value")) and raw["value"] <= number(raw.get("limit"))
    verdict = "n/a" if raw.get("ran") is not True else "pass" if within else "fail"
    same = {k: raw[k] for k in ("name", "metric", "value", "limit", "where", "why") if k in raw}
    return dict(same, verdict=verdict), {}


def strictly_equal(a, b):
    """As JSON has it: 1 is neither 1.0 nor true."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(strictly_equal(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(strictly_equal, a, b))
    return a == b


def stopped(run):
    return run.get("error", 0) is None and run["finish"] == "stop"


def says(run, text):
    return stopped(run) and isinstance(run.get("text"), str) and run["text"] == text


def right_format(due, run):
    if due is None:
        return None
    try:
        return stopped(run) and strictly_equal(parse(run["text"].encode()), due)
    except (ValueError, AttributeError, RecursionError):
        return False


def versus(raw, run):
    ref = raw.get("reference")
    if not isinstance(ref, dict):
        return None
    if not strictly_equal(ref.get("prompt_tokens"), raw["n_prompt"]):
        return "differs"
    if says(run, ref.get("output")):
        return "same"
    margin = ref.get("min_margin")
    return "differs" if is_number(margin) and margin > BF16["margin"] else "below margin"


def quality(raw):
    need(isinstance(raw.get("runs"), list) and is_text(raw.get("id")), "a prompt")
    need(is_text(raw.get("answer")) and is_int(raw.get("n_prompt")), "a prompt")
    need(isinstance(raw.get("prompt_ids"), list), "prompt_ids")
    need(len(raw["prompt_ids"]) == raw["n_prompt"], "n_prompt")
    for run in raw["runs"]:
        need(is_text(run.get("phase")) and is_text(run.get("finish")), "a run")
        need(isinstance(run.get("ids"), list), "ids")
        need(len(run["stats"]["steps_by_lanes"]) == 8, "steps_by_lanes")
    phases = {r["phase"]: r for r in reversed(raw["runs"])}
    seq, con = phases.get("sequential"), phases.get("concurrent")
    ref, full = raw.get("reference"), raw["cohort"]["full_lane_steps"]
    need(seq is not None and is_int(full), "a sequential run")
    need(not isinstance(ref, dict) or isinstance(ref.get("counted"), bool), "counted")
    counted = not isinstance(ref, dict) or ref["counted"]
    exact = says(seq, raw["answer"])
    same = con and strictly_equal(seq["ids"], con["ids"]) and seq["finish"] == con["finish"]
    like = versus(raw, seq)
    if seq.get("error", 0) is not None or con and con.get("error", 0) is not None:
        verdict = "error"
    elif con and not same or like == "differs":
        verdict = "fail"
    elif like is not None:
        verdict = "pass" if like == "same" else "n/a"
    else:
        verdict = "n/a" if not counted else "pass" if exact else "fail"
    out = {"id": raw["id"], "category": raw.get("category"), "counted": int(counted),
           "right": int(counted and exact), "exact": exact, "eos": stopped(seq), "same": same,
           "text": seq.get("text"), "right_concurrent": con and int(counted and says(con, raw["answer"])),
           "format": right_format(raw.get("json"), seq), "reference": like, "verdict": verdict,
           "full_lane_steps": full}
    return out, {"tokens_compared": len(seq["ids"]) if con else 0,
                 "tokens_equal": sum(map(strictly_equal, seq["ids"], con["ids"])) if con else 0}


class Cell:
    """A cell of the matrix."""

    def __init__(self, raw):
        cell, self.raw = raw["cell"], raw
        self.lanes, self.handed = cell["lanes"], cell["route"] != "native"
        need(is_text(cell["route"]) and is_int(self.lanes) and 1 <= self.lanes <= 8, "cell")
        need(every(raw["local"], is_int) and is_int(raw["window"]) and is_int(raw["n"]), "layers")
        need(raw["prompts"] and all(every(p["ids"], is_int) for p in raw["prompts"]), "prompts")
        # a Check of each prompt: the rules of slots are the same
        self.checks = [Check({"prompt_ids": p["ids"], "local": raw["local"], "n": raw["n"],
                              "window": raw["window"], "runs": []}) for p in raw["prompts"]]
        self.repeats = [r["outputs"] for r in raw["repeats"]]
        need(len(self.repeats) >= 2, "fewer than two repeats")
        for outputs in self.repeats + [raw[k] for k in ("native", "reference") if raw[k] is not None]:
            need(isinstance(outputs, list) and len(outputs) == len(self.checks), "outputs")
            for o in outputs:
                need(every(o.get("ids"), is_int) and isinstance(o.get("margins"), list), "ids")
                need(isinstance(o.get("error", 0), (dict, type(None))), "error")
                need(isinstance(o.get("stats"), dict), "stats")
        for r in raw["repeats"]:
            need(every(r["steps_by_lanes"], is_int) and len(r["steps_by_lanes"]) == 8, "steps")
            for o, c in zip(r["outputs"], self.checks):
                c.check_caches(o)

    def holds(self, o, c):
        if len(o["ids"]) != self.raw["n"] or len(o["slots"]) != c.slots:
            return False
        if not self.handed:
            return c.positions_ok(o, False)
        return bool(o["sent"]) and c.slots_hold(o) and o["stats"].get("verdict") == "verified"

    def faulty(self, o, first, c):
        if o["error"] is None:
            same = first["error"] is not None or (
                all(strictly_equal(o.get(k), first.get(k))
                    for k in ("ids", "margins", "rows_sha256"))
                and [s["have"] for s in o["slots"]] == [s["have"] for s in first["slots"]])
            return not self.holds(o, c) or not same
        return o["error"].get("code") == "integrity" or bool(
            self.handed and o["sent"] and o["slots"] and not c.slots_hold(o))

    def versus(self, which):
        """word, ids compared, ids equal, first mismatch of each prompt"""
        if not self.raw[which]:
            return "not_run", 0, 0, []
        pairs_ = list(zip(self.repeats[0], self.raw[which]))
        first = [first_mismatch(a, b) for a, b in pairs_]
        word = "equal" if all(x is None for x in first) else "differs"
        equal = sum(x == y for a, b in pairs_ for x, y in zip(a["ids"], b["ids"]))
        return word, sum(len(a["ids"]) for a, _ in pairs_), equal, first

    def figures(self):
        steps = [sum(r["steps_by_lanes"][k] for r in self.raw["repeats"]) for k in range(8)]
        full = steps[self.lanes - 1]
        outputs = [(o, first, c) for outputs in self.repeats
                   for o, first, c in zip(outputs, self.repeats[0], self.checks)]
        missing = not full > 0 or any(o["error"] is not None for o, _, _ in outputs)
        verdict = ("fail" if any(self.faulty(*x) for x in outputs)
                   else "error" if missing else "pass")
        ran, native, ref = verdict != "error", self.versus("native"), self.versus("reference")
        out = {"within_route": verdict if ran else "not_run", "verdict": verdict,
               "vs_native": native[0] if ran else "not_run",
               "vs_reference": ref[0] if ran else "not_run",
               "first_mismatch": {"native": native[3], "reference": ref[3]},
               "steps_by_lanes": steps, "full_lane_steps": full, "repeats": len(self.repeats),
               "lanes_active_max": max((k + 1 for k in range(8) if steps[k]), default=0)}
        out.update({k: self.raw["cell"].get(k)
                    for k in ("model", "route", "producer", "consumer", "lanes")})
        return out, {"tokens_compared": native[1], "tokens_equal": native[2]}


def matrix(raw):
    return Cell(raw).figures()


COMMANDS = {"check": check, "probe": probe, "quality": quality, "matrix": matrix}
TOTALS = ("slots_total", "slots_exact", "tokens_compared", "tokens_equal", "counted", "right",
          "right_concurrent", "full_lane_steps")


def summary(lines, last):
    cases = [x for x in lines if x.get("kind") == "case"]
    ends = [x for x in lines if x.get("kind") == "end"]
    gone = {x["supersedes"] for x in cases if is_int(x.get("supersedes"))}

    def verdict(case):
        return case["result"].get("verdict")

    def count(some):
        return {v: sum(verdict(c) == v for c in some) for v in VERDICTS}

    live = count([c for c in cases if c.get("attempt") not in gone])
    out = {k: v for k, v in lines[0].items() if k not in ("kind", "prev")}
    out["attempts"] = count(cases)
    out["attempts"]["total"] = sum(out["attempts"].values())
    out["cases"] = [dict({k: c[k] for k in ("attempt", "name", "supersedes", "warm_ms") if k in c},
                         verdict=verdict(c)) for c in cases]
    out["totals"] = {}
    for k in TOTALS:
        found = [c["result"].get(k, c.get(k)) for c in cases]
        found = [v for v in found if is_int(v)]
        if found:
            out["totals"][k] = sum(found)
    out["ended"] = ends[-1].get("ended") if ends else None
    out["cleanup"] = ends[-1].get("cleanup") if ends else None
    out["chain"] = {"lines": len(lines), "last": last}
    order = ("fail", "error", "pass", "not_run")
    out["verdict"] = next((v for v in order if live[v]), "n/a")
    return out


# ---- the folder ---------------------------------------------------------------------------------

class Folder:
    def __init__(self, path):
        self.path, self.found, self.elsewhere = path, [], []
        self.files = [n for n in os.listdir(path) if n != "raw"]
        if os.path.isdir(os.path.join(path, "raw")):
            self.files += ["raw/" + n for n in os.listdir(os.path.join(path, "raw"))]

    def differ(self, file, where, why):
        self.found.append(": ".join(x for x in (file, where, why) if x))

    def read(self, name):
        """The bytes, or None with a difference."""
        full = os.path.join(self.path, name)
        try:
            if ".." in name.split("/") or name.startswith("/") or not os.path.isfile(full):
                raise OSError("no file of this folder")
            if os.path.getsize(full) > LIMIT:
                raise OSError("too large")
            with open(full, "rb") as f:
                return f.read()
        except OSError as why:
            self.differ(name, "", f"can't be read: {why}")
            return None

    def load(self, name, data):
        try:
            return parse(data)
        except (ValueError, RecursionError) as why:
            self.differ(name, "", str(why))
            return None

    def compare(self, want, have, file, where, exact):
        if isinstance(want, dict) and isinstance(have, dict):
            for k, v in want.items():
                self.compare(v, have.get(k, "nothing"), file, f"{where}.{k}", exact)
            for k in have if exact else ():
                if k not in want:
                    self.differ(file, f"{where}.{k}", "nothing stands behind this")
        elif isinstance(want, list) and isinstance(have, list) and len(want) == len(have):
            for i, (v, h) in enumerate(zip(want, have)):
                self.compare(v, h, file, f"{where}[{i}]", exact)
        elif not (want == have if is_number(want) and is_number(have)
                  else type(want) is type(have) and want == have):
            self.differ(file, where, f"claimed {have!r:.80}, recomputed {want!r:.80}")

    def check_seal(self, published):
        data = self.read("seal.txt")
        if data is None:
            return
        lines, sealed, before = data.decode("utf-8", "replace").splitlines(keepends=True), {}, b""
        for i, text in enumerate(lines):
            digest, name = text[:64], text[66:].rstrip("\n")
            if text[64:66] != "  " or not text.endswith("\n") or name in sealed:
                self.differ("seal.txt", f"line {i + 1}", "no line of a seal")
            sealed[name] = digest
            if i == len(lines) - 1:
                if name != "seal.txt" or digest != sha256(before):
                    self.differ("seal.txt", "last line", "is not the hash of the lines before it")
                if published and digest != published.lower():
                    self.differ("seal.txt", "last line", "is not the seal that was given")
            else:
                content = self.read(name)
                if content is not None and sha256(content) != digest:
                    self.differ(name, "", "is not what was sealed")
            before += text.encode("utf-8", "replace")
        if not lines:
            self.differ("seal.txt", "last line", "the seal's own line is missing")
        for name in self.files:
            if name not in sealed:
                self.differ(name, "", "is not sealed")

    def read_external(self):
        for text in (self.read("external.txt") or b"").decode("utf-8", "replace").splitlines():
            parts = text.split(" ", 2)
            if len(parts) < 3 or len(parts[0]) != 64 or not parts[2]:
                self.differ("external.txt", "", "not 'sha256 size where'")
            self.elsewhere.append(text)

    def read_chain(self):
        """The lines and the hash of the last one; None where the chain does not hold."""
        data = self.read("cases.jsonl")
        if data is None:
            return None
        lines, last = [], "0" * 64
        if not data.endswith(b"\n"):
            self.differ("cases.jsonl", "", "is empty, or its last line was not written whole")
            return None
        for i, text in enumerate(data[:-1].split(b"\n")):
            line = self.load(f"cases.jsonl line {i + 1}", text)
            if not isinstance(line, dict) or line.get("prev") != last or \
                    (i == 0) != (line.get("kind") == "begin"):
                self.differ("cases.jsonl", f"line {i + 1}", "does not follow the line before")
                return None
            lines.append(line)
            last = sha256(text)
        return lines, last

    def check_case(self, line, attempt, command, used):
        where, raw, by = f"attempt {attempt}", line.get("raw"), line.get("supersedes")
        result = line.get("result")
        if line.get("attempt") != attempt or not isinstance(result, dict):
            self.differ("cases.jsonl", where, "is not numbered so, or has no result")
            return
        if by is not None and not (is_int(by) and 0 <= by < attempt):
            self.differ("cases.jsonl", where, "supersedes no earlier attempt")
        if raw is None:
            if result.get("verdict") not in ("error", "not_run"):
                self.differ("cases.jsonl", where, "a verdict without raw data")
            return
        raw = raw if isinstance(raw, dict) else {}
        file, digest = raw.get("file"), raw.get("sha256")
        if not isinstance(file, str) or not file.startswith("raw/") or file in used:
            self.differ("cases.jsonl", where, "names no file of raw/, or another attempt's")
            return
        used.add(file)
        if file not in self.files and any(x.startswith(str(digest)) for x in self.elsewhere):
            return
        data = self.read(file)
        if data is None:
            return
        if sha256(data) != digest:
            self.differ(file, "", "is not the document of its line: SHA-256")
        doc = self.load(file, data)
        try:
            need(isinstance(doc, dict), "no object")
            due, beside = COMMANDS[command](doc)
        except Malformed as why:
            self.differ("cases.jsonl", where, str(why))
            return
        except (KeyError, TypeError, AttributeError, ValueError, IndexError) as why:
            self.differ(file, where, f"malformed: {why!r}")
            return
        self.compare(due, result, "cases.jsonl", where + " result", False)
        self.compare(beside, line, "cases.jsonl", where, False)

    def audit(self, published):
        self.check_seal(published)
        self.read_external()
        chain = self.read_chain()
        if not chain:
            return self.found
        lines, last = chain
        used, attempt = set(), 0
        for i, line in enumerate(lines[1:]):
            if line.get("kind") == "case":
                self.check_case(line, attempt, lines[0].get("command"), used)
                attempt += 1
            elif line.get("kind") != "end":
                self.differ("cases.jsonl", f"line {i + 2}", "is of no known kind")
        if lines[-1].get("kind") != "end":
            self.differ("cases.jsonl", "", "the run did not end")
        for name in self.files:
            if name.startswith("raw/") and name not in used:
                self.differ(name, "", "no attempt names this file")
        data = self.read("summary.json")
        claimed = None if data is None else self.load("summary.json", data)
        if claimed is not None:
            try:
                due = summary(lines, last)
            except (KeyError, TypeError, AttributeError, ValueError, IndexError) as why:
                self.differ("cases.jsonl", "", f"malformed: {why!r}")
            else:
                self.compare(due, claimed, "summary.json", "", True)
        return self.found


def main(args):
    seal = None
    if "--seal" in args:
        at = args.index("--seal")
        seal = args[at + 1] if at + 1 < len(args) else ""
        del args[at:at + 2]
    if not args or any(not os.path.isdir(a) for a in args):
        print(__doc__ if not args else "audit.py: no such folder", file=sys.stderr)
        return 2
    bad = 0
    for path in args:
        folder = Folder(path)
        found = folder.audit(seal)
        for text in found:
            print(text)
        for text in folder.elsewhere:
            print("not available:", text)
        print(f"{path}: {len(found)} differences" if found else f"{path}: all hold")
        bad += bool(found)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
