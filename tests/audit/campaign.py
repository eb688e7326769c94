# SPDX-License-Identifier: Apache-2.0
"""`baton campaign`: neighbours of cancelled requests are untouched, and a device that touches them is found.

usage: campaign.py (BATON_BINARY: the program, BATON_SOURCE_ROOT: the tree)
"""
import json

from evidence import SMALL, baton, main


def campaign(status, *args):
    r = baton(status, "campaign", "-m", SMALL, "--json", *args)
    return json.loads(r.stdout) if status < 2 else r.stderr


def expect_counts(doc, rounds, lanes, n):
    v = doc["victims"]
    assert v["cancelled"] == v["lanes_reused"] == v["replacements"] == rounds, v
    assert v["survivors"] == rounds * (lanes - 1) and v["survivor_tokens"] == v["survivors"] * n, v
    assert v["replacement_tokens"] == rounds * n and v["steps_by_lanes"][lanes - 1] > 0, v
    assert set(doc["cleanup"].values()) == {0}, doc["cleanup"]


def untouched(rng):
    lanes, n = rng.randrange(2, 9), rng.randrange(16, 32)
    doc = campaign(0, "--lanes", str(lanes), "--rounds", "5", "-n", str(n), "--mode", rng.choice(["whole", "stream"]),
                   "--prefill", rng.choice(["cpu", "npu:rngd"]), "--seed", str(rng.randrange(1 << 32)), "--no-kills")
    assert doc["verdict"] == "pass" and doc["kills"] is None, doc
    expect_counts(doc, 5, lanes, n)
    assert doc["victims"]["survivor_tokens_equal"] == doc["victims"]["survivor_tokens"]
    assert doc["victims"]["replacement_tokens_equal"] == doc["victims"]["replacement_tokens"]


def killed(rng):
    mode = rng.choice(["whole", "stream"])
    doc = campaign(0, "--lanes", "2", "--rounds", "1", "-n", "16", "--mode", mode, "--decode",
                   rng.choice(["cpu", "npu:atom-b4"]))
    assert doc["kills"] == {"layers": 4, "killed": 4, "local_prefill": 4, "tokens": 64, "tokens_equal": 64}, doc


def touched(rng):
    """A decoder that mixes its lanes up: counted, named by the exit code, and cleaned up all the same."""
    fault = rng.choice(["lane-bleed", "lane-swap"])
    doc = campaign(1, "--decode", "npu:atom-b4,fault=" + fault, "--rounds", "2", "--no-kills")
    assert doc["verdict"] == "fail", doc
    expect_counts(doc, 2, 4, 24)
    assert doc["victims"]["survivor_tokens_equal"] < doc["victims"]["survivor_tokens"], doc


def refusals(rng):
    for word, args in (("native", ["--mode", "native"]), ("lanes", ["--decode", "npu:atom-b1"]), ("--lanes", ["--lanes", "1"]),
                       ("-n", ["-n", "8"]), ("nothing", ["--prefill", "nothing"])):
        assert word in campaign(2, *args), args
    assert "-m" in baton(2, "campaign").stderr


if __name__ == "__main__":
    main([untouched, killed, touched, refusals])
