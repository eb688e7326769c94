# SPDX-License-Identifier: Apache-2.0
"""guidellm, a load generator that people have, completes a small benchmark against `baton serve`.

usage: serve_guidellm.py (BATON_BINARY: the program, BATON_SOURCE_ROOT: the tree)

It needs no network: the tokenizer is the model's folder, the prompts are synthetic. BATON_PYTHON names the
Python to use and promises that it has tests/requirements.txt; without it, and without the package, the test
is skipped (exit 77), and failed where BATON_REQUIRE_PYTHON is 1.
"""
import json
import os
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.environ["BATON_SOURCE_ROOT"], "tests"))
from cases import main, need

need("guidellm")
from serve_rig import PATIENCE, Server, model

MODEL = "qwen3-tiny"
REQUESTS, PROMPT, OUTPUT = 12, 32, 8


def guidellm(server, report):
    """Four streams at once; the report's one benchmark."""
    r = subprocess.run(
        [sys.executable, "-m", "guidellm", "run",
         "--backend", f"kind=openai_http,target=http://{server.host}:{server.port},request_format=/v1/completions",
         "--profile", "kind=concurrent,streams=4", "--constraint", f"kind=max_requests,count={REQUESTS}",
         "--tokenizer", f"kind=hf_auto,model={model(MODEL)}",
         "--data", f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={OUTPUT}",
         "--output", f"kind=json,path={report}", "--disable-console"],
        env=dict(os.environ, HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", GUIDELLM__MAX_WORKER_PROCESSES="1"),
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE)
    assert r.returncode == 0, (r.returncode, r.stdout[-2000:], r.stderr[-2000:])
    with open(report, encoding="utf-8") as f:
        benchmark, = json.load(f)["benchmarks"]
    return benchmark


def a_benchmark_completes(rng):
    with tempfile.TemporaryDirectory() as folder, Server(MODEL) as s:
        benchmark = guidellm(s, os.path.join(folder, "report.json"))
        totals = benchmark["metrics"]["request_totals"]
        assert totals["successful"] == totals["total"] == REQUESTS, totals
        assert totals["errored"] == totals["incomplete"] == 0, totals
        for r in benchmark["requests"]["successful"]:
            assert r["output_tokens"] == OUTPUT, r
        s.wait_idle()
        assert s.metric("vllm:generation_tokens_total") == REQUESTS * OUTPUT
        assert s.metric("baton:requests_cancelled_total") == 0


main([a_benchmark_completes])
