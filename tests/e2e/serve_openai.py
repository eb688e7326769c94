# SPDX-License-Identifier: Apache-2.0
"""`baton serve` under the official OpenAI client: chat, streams, log-probabilities, stop, errors, cancellation.

usage: serve_openai.py (BATON_BINARY: the program, BATON_SOURCE_ROOT: the tree)

BATON_PYTHON names the Python to use and promises that it has tests/requirements.txt; without it, and without
the package, the test is skipped (exit 77), and failed where BATON_REQUIRE_PYTHON is 1.
"""
import asyncio
import os
import sys
import tempfile

sys.path.insert(0, os.path.join(os.environ["BATON_SOURCE_ROOT"], "tests"))
from cases import main, need

need("openai")
import openai

from serve_rig import Server, native

MODEL = "gemma3-tiny"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def client(s, key="none", kind=openai.OpenAI):
    return kind(base_url=f"http://{s.host}:{s.port}/v1", api_key=key, max_retries=0)


def refusal(kind, call):
    try:
        call()
    except kind as e:
        return e
    raise AssertionError(f"no {kind.__name__}")


def chat_whole_and_streamed(rng):
    with Server(MODEL) as s:
        c = client(s)
        assert [m.id for m in c.models.list()] == [MODEL]
        whole = c.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0)
        text = whole.choices[0].message.content
        assert "Paris" in text and whole.choices[0].message.role == "assistant"
        assert whole.choices[0].finish_reason == "stop" and whole.object == "chat.completion"
        chunks = list(c.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, stream=True,
                                                stream_options={"include_usage": True}))
        assert "".join(k.choices[0].delta.content or "" for k in chunks if k.choices) == text
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[-1].usage == whole.usage and whole.usage.completion_tokens > 1
        two = c.chat.completions.create(model=MODEL, messages=QUESTION, n=2, temperature=1, seed=7, max_tokens=8)
        assert [k.index for k in two.choices] == [0, 1]


def completions_are_native(rng):
    ids = [rng.randrange(300, 2000) for _ in range(40)]
    want = native(MODEL, ids, 24, "--ignore-eos")
    with Server(MODEL) as s:
        r = client(s).completions.create(model=MODEL, prompt=ids, max_tokens=24, temperature=0,
                                         extra_body={"ignore_eos": True, "return_token_ids": True})
        assert r.choices[0].token_ids == want["ids"] and r.choices[0].text == want["text"]
        assert r.choices[0].finish_reason == "length"


def log_probabilities_and_stop(rng):
    with Server(MODEL) as s:
        c = client(s)
        r = c.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, logprobs=True, top_logprobs=3)
        for t in r.choices[0].logprobs.content:
            assert len(t.top_logprobs) == 3 and t.top_logprobs[0].token == t.token and t.logprob <= 0
        text = r.choices[0].message.content
        r = c.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, stop=["Paris"])
        assert r.choices[0].message.content == text[:text.index("Paris")]
        r = c.completions.create(model=MODEL, prompt="The capital of France", temperature=0, logprobs=2)
        assert len(r.choices[0].logprobs.tokens) == r.usage.completion_tokens


def errors_are_its_own(rng):
    with tempfile.NamedTemporaryFile("w") as f:
        f.write("secret\n")
        f.flush()
        with Server(MODEL, "--api-key-file", f.name) as s:
            c = client(s, "secret")
            e = refusal(openai.BadRequestError,
                        lambda: c.completions.create(model=MODEL, prompt="a", temperature=9))
            assert e.param == "temperature" and e.type == "invalid_request_error", (e.param, e.type)
            e = refusal(openai.NotFoundError, lambda: c.completions.create(model="other", prompt="a"))
            assert e.code == "model_not_found"
            refusal(openai.AuthenticationError, lambda: client(s, "wrong").models.list())


def leaving_cancels(rng):
    with Server(MODEL, "--lanes", "2") as s:
        stream = client(s).completions.create(model=MODEL, prompt="a", max_tokens=4000, stream=True,
                                              extra_body={"ignore_eos": True})
        for _ in range(5):
            next(stream)
        stream.close()
        s.wait_idle()
        assert s.metric("baton:requests_cancelled_total") == 1

        async def cancelled():
            c = client(s, kind=openai.AsyncOpenAI)
            task = asyncio.create_task(c.completions.create(model=MODEL, prompt="a", max_tokens=4000,
                                                            extra_body={"ignore_eos": True}))
            while s.metric("baton:lanes_active") != 1:
                await asyncio.sleep(0.02)
            task.cancel()
            try:
                await task
            except asyncio.CancelledError:
                pass
            await c.close()

        asyncio.run(cancelled())
        s.wait_idle()
        assert s.metric("baton:requests_cancelled_total") == 2


main([chat_whole_and_streamed, completions_are_native, log_probabilities_and_stop, errors_are_its_own,
      leaving_cancels])
