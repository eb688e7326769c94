# SPDX-License-Identifier: Apache-2.0
"""`baton bench`: what it prints follows from its samples, and it prints no ratio where none is fair.

usage: bench.py (BATON_BINARY: the program, BATON_SOURCE_ROOT: the tree)
"""
import json
import math
import statistics

from evidence import baton, main, model


def bench(status, *args):
    return json.loads(baton(status, "bench", "-m", model("qwen3-tiny"), "--prompt-tokens", "70",
                            "-n", "5", "--json", *args).stdout)


def expect_medians(arm, pairs, lanes):
    assert len(arm["samples"]) == pairs
    for name, value in arm["median_ms"].items():
        assert math.isclose(value, statistics.median(s["ms"][name] for s in arm["samples"]), rel_tol=1e-6), name
    for s in arm["samples"]:
        steps = s["steps_by_lanes"]
        assert sum(n * k for k, n in enumerate(steps)) == 4 * lanes, steps  # token 1 needs no step
        assert s["ms"]["wall"] >= s["ms"]["ttft"] > 0


def two_arms(rng):
    doc = bench(0, "--a", "--mode whole", "--b", "--mode stream", "--lanes", "2")
    assert doc["same_tokens"] and not doc["exploratory"] and doc["why"] is None
    assert doc["left"] == {"lanes": 0, "blocks": 0, "tickets": 0}
    for arm in ("a", "b"):
        expect_medians(doc[arm], 6, 2)
    for name, r in doc["ratio_b_to_a"].items():
        pairs = zip(doc["a"]["samples"], doc["b"]["samples"])
        logs = [math.log(b["ms"][name] / a["ms"][name]) for a, b in pairs]
        assert math.isclose(r["estimate"], math.exp(statistics.mean(logs)), rel_tol=1e-6), name
        assert r["interval"][0] <= r["estimate"] <= r["interval"][1]


def few_pairs(rng):
    doc = bench(0, "--a", "--threads 1", "--b", "--threads 1 --mode stream", "--pairs", "2")
    assert doc["exploratory"] and all(r["interval"] is None for r in doc["ratio_b_to_a"].values())
    assert doc["a"]["threads"] == 1


def unlike_arms(rng):
    """Other devices, other threads: times, and no ratio. An emulated one is called so."""
    doc = bench(0, "--a", "", "--b", "--prefill npu:rngd --mode whole", "--pairs", "1")
    assert doc["ratio_b_to_a"] is None and "devices" in doc["why"]
    assert doc["b"]["emulated"] and not doc["a"]["emulated"]
    assert bench(0, "--a", "--threads 1", "--b", "", "--pairs", "1")["ratio_b_to_a"] is None


def other_tokens(rng):
    """A faster arm with other tokens is no faster arm."""
    doc = bench(1, "--a", "", "--b", "--prefill npu:rngd,fault=norm-offset --mode whole", "--pairs", "1")
    assert not doc["same_tokens"] and doc["ratio_b_to_a"] is None and "not equivalent" in doc["why"]


def one_arm(rng):
    doc = bench(0, "--single", "--mode stream", "--pairs", "3")
    expect_medians(doc["a"], 3, 1)
    assert doc["ratio_b_to_a"] is None and "b" not in doc


def refusals(rng):
    for args, word in ((("--a", ""), "--b"), (("--single", "--mode foo"), "foo"),
                       (("--single", "x"), "'x'"), (("--single", "", "--pairs", "257"), "257"),
                       (("--single", "--decode nothing"), "nothing"),
                       (("--single", "", "--lanes", "9"), "--lanes"),
                       (("--single", " --mode native" * 20), "too many")):
        out = baton(2, "bench", "-m", model("qwen3-tiny"), *args)
        assert word in out.stderr, (args, out.stderr)


if __name__ == "__main__":
    main([two_arms, few_pairs, unlike_arms, other_tokens, one_arm, refusals])
