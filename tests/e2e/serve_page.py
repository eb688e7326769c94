# SPDX-License-Identifier: Apache-2.0
"""The page of `baton serve` and the document that it polls; in Chromium too, where there is one.

usage: serve_page.py (BATON_BINARY: the program, BATON_SOURCE_ROOT: the tree)
"""
import base64
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.environ["BATON_SOURCE_ROOT"], "tests"))
from cases import Skip, main
from serve_rig import Server

STATUS, COMPLETIONS = "/baton/v1/status", "/v1/completions"
EVIL = "<script>document.title='run'</script>"


def page_is_self_contained(rng):
    with Server() as s:
        status, text, headers = s.ask("/")
        assert status == 200 and headers["Content-Type"] == "text/html; charset=utf-8"
        assert headers["X-Content-Type-Options"] == "nosniff"
        policy = dict(p.strip().split(" ", 1) for p in headers["Content-Security-Policy"].split(";"))
        assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'", policy
        assert policy["frame-ancestors"] == "'none'"
        for tag in "script", "style":
            inner = re.search(f"<{tag}>(.*?)</{tag}>", text, re.S)[1]
            digest = base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode()
            assert policy[tag + "-src"] == f"'sha256-{digest}'", tag
        assert not re.search(r"""(src|href)=(?!"data:,")""", text), "an external resource"
        assert "innerHTML" not in text and " style=" not in text and " onclick=" not in text
        assert s.ask("/", b"x")[0] == 405


def document_says_what_runs(rng):
    n, m = rng.randrange(2, 60), rng.randrange(2, 20)
    with Server("gemma3-tiny", "--lanes", "2") as s:
        d = s.good(STATUS)
        assert d["schema"] == 1 and d["role"] == "both" and d["model"] == "gemma3-tiny", d
        assert d["device"].startswith("cpu") and d["emulated"] is False and d["tickets"] is None
        assert d["lanes"] == {"n": 2, "used": 0, "steps_by_lanes": [0, 0]}, d["lanes"]
        assert d["queue"]["waiting"] == 0 and d["kv"]["used"] == 0 and d["kv"]["blocks"] > 0
        assert d["running"] == d["requests"] == [] and d["running_left_off"] == 0
        s.ask(COMPLETIONS, {"prompt": [300] * n, "max_tokens": m, "ignore_eos": True},
              {"X-Request-Id": EVIL})
        # its line of the log is the longest there is
        status, _, _ = s.ask(COMPLETIONS, {"prompt": "a", "temperature": EVIL}, {"X-Request-Id": "x" * 95})
        assert status == 400
        # a client may have its answer before the server has noted that it went out
        s.wait("both lines", lambda: len(s.good(STATUS)["requests"]) == 2)
        d = s.good(STATUS)
        refused, done = d["requests"]
        assert refused["status"] == 400 and "temperature" in refused["error"]["message"], refused
        assert done["request_id"] == EVIL and done["prompt_tokens"] == n and done["output_tokens"] == m
        assert done["ms"]["ttft"] > 0 and done["ms"]["e2e"] >= done["ms"]["ttft"] and done["handoff"] is None
        assert d["totals"]["finished"] == 1 and d["totals"]["refused"] == 1
        for name, total in ("ttft", 1), ("itl", m - 1):
            h = d[name]
            assert len(h["counts"]) == len(h["le_s"]) + 1 and sum(h["counts"]) == total, (name, h)


def document_shows_lanes_and_queue(rng):
    """Two of five run, the others wait; those that are over are kept up to a bound."""
    with Server("gemma3-tiny", "--lanes", "2") as s:
        clients = []
        for i in range(7):
            c = s.connect()
            c.request("POST", COMPLETIONS, '{"prompt": [300, 301], "max_tokens": 4000, "ignore_eos": true, "stream": true}',
                      {"X-Request-Id": f"r{i}"})
            clients.append(c)
        s.wait("two lanes and a queue", lambda: s.good(STATUS)["lanes"]["used"] == 2
               and len(s.good(STATUS)["running"]) == 7
               and sum(r["state"] == "decode" for r in s.good(STATUS)["running"]) == 2)
        d = s.good(STATUS)
        assert {r["request_id"] for r in d["running"]} == {f"r{i}" for i in range(7)}
        assert d["queue"]["waiting"] == 5 and d["kv"]["used"] > 0
        assert [r["state"] for r in d["running"]][-3:] == ["queued"] * 3, d["running"]
        for c in clients:
            c.close()
        s.wait_idle()
        for _ in range(30):
            s.good(COMPLETIONS, {"prompt": [300], "max_tokens": 1})
        s.wait("nothing runs", lambda: s.good(STATUS)["running"] == [])
        d = s.good(STATUS)
        assert len(d["requests"]) == 24
        assert all(r["output_tokens"] == 1 for r in d["requests"])


def document_wants_the_key(rng):
    with tempfile.NamedTemporaryFile("w") as f:
        f.write("secret\n")
        f.flush()
        with Server("gemma3-tiny", "--api-key-file", f.name) as s:
            assert s.ask(STATUS)[0] == 401
            assert s.ask(STATUS, headers={"Authorization": "Bearer secret"})[0] == 200
            assert s.ask("/")[0] == 200


def chromium_draws_it(rng):
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if not browser:
        raise Skip("skipped: no chromium here")
    with Server("gemma3-tiny", "--lanes", "2", "--served-name", "<b>name</b>") as s:
        s.ask(COMPLETIONS, {"prompt": "The capital of France", "max_tokens": 9, "ignore_eos": True}, {"X-Request-Id": EVIL})
        s.wait("its line", lambda: len(s.good(STATUS)["requests"]) == 1)
        with tempfile.TemporaryDirectory() as d:
            r = subprocess.run([browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={d}",
                                "--virtual-time-budget=3000", "--dump-dom", f"http://{s.host}:{s.port}/"],
                               capture_output=True, text=True, timeout=600)
        dom = re.sub(r"<script>.*?</script>", "", r.stdout, flags=re.S)
        assert "&lt;b&gt;name&lt;/b&gt; on cpu" in dom, (r.stdout[-3000:], r.stderr[-1000:])
        assert "&lt;script&gt;document.title" in dom and "<b>name" not in dom
        assert "up to " in dom and "finished 1," in dom
        s.wait_idle()


main([page_is_self_contained, document_says_what_runs, document_shows_lanes_and_queue, document_wants_the_key,
      chromium_draws_it])
