# SPDX-License-Identifier: Apache-2.0
"""`baton serve` as plain HTTP clients see it: answers, streams, refusals, clients that leave.

usage: serve.py (BATON_BINARY: the program, BATON_SOURCE_ROOT: the tree)
"""
import http.client
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(0, os.path.join(os.environ["BATON_SOURCE_ROOT"], "tests"))
from cases import Skip, main
from serve_rig import BATON, PATIENCE, Server, model, native, slow_socket

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = {"prompt": [5, 6, 7, 8], "max_tokens": 4000, "ignore_eos": True, "temperature": 0, "stream": True}


def random_ids(rng, n):
    return [rng.randrange(300, 2000) for _ in range(n)]


def sum_of_rows(name):
    """Bytes of a position's K in all layers, bf16."""
    with open(os.path.join(model(name), "config.json")) as f:
        c = json.load(f)
    return 2 * c["num_hidden_layers"] * c["num_key_value_heads"] * c["head_dim"]


def user(text):
    return [{"role": "user", "content": text}]


def ids_of(chunks):
    return [i for c in chunks for ch in c["choices"] for i in ch.get("token_ids", [])]


def text_of(chunks, index=0):
    return "".join(ch["text"] if "text" in ch else ch["delta"].get("content", "")
                   for c in chunks for ch in c["choices"] if ch["index"] == index)


def concurrent_streams_are_native(rng):
    """More clients than lanes; each gets the tokens that it gets alone, and lanes were shared."""
    n_clients, lanes = 12, 4
    asks = [(random_ids(rng, rng.choice([1, 3, 63, 64, 65, 200, 700])), rng.randrange(8, 40))
            for _ in range(n_clients)]
    got = [None] * n_clients

    def client(i):
        ids, n = asks[i]
        got[i] = s.stream(COMPLETIONS, {"prompt": ids, "max_tokens": n, "temperature": 0,
                                        "ignore_eos": True, "return_token_ids": True})

    with Server("gemma3-tiny", "--lanes", str(lanes)) as s:
        threads = [threading.Thread(target=client, args=(i,)) for i in range(n_clients)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        together = s.metric("baton:decode_steps_total", lanes=str(lanes))
        assert together > 0, "no step had all lanes"
        s.wait_idle()
    for (ids, n), chunks in zip(asks, got):
        want = native("gemma3-tiny", ids, n, "--ignore-eos")
        assert ids_of(chunks) == want["ids"], (ids, ids_of(chunks), want["ids"])
        assert chunks[0]["choices"][0]["prompt_token_ids"] == ids
        assert text_of(chunks) == want["text"]


def many_clients_all_get_theirs(rng):
    """200 clients on four lanes, in order: none starves, none gets another's tokens."""
    asks = [(random_ids(rng, rng.randrange(1, 100)), rng.randrange(4, 12)) for _ in range(10)]
    want = [native("gemma3-tiny", ids, n, "--ignore-eos")["ids"] for ids, n in asks]
    got = [None] * 200

    def one(i):
        ids, n = asks[i % 10]
        got[i] = s.stream(COMPLETIONS, {"prompt": ids, "max_tokens": n, "temperature": 0,
                                        "ignore_eos": True, "return_token_ids": True})

    with Server("gemma3-tiny", "--lanes", "4") as s:
        threads = [threading.Thread(target=one, args=(i,)) for i in range(200)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        s.wait_idle()
        steps = [s.metric("baton:decode_steps_total", lanes=str(i)) for i in range(1, 5)]
        assert steps[3] > sum(steps[:3]), steps
    for i in range(200):
        assert ids_of(got[i]) == want[i % 10], (i, asks[i % 10])


def whole_and_stream_agree(rng):
    with Server() as s:
        for path, ask in ((COMPLETIONS, {"prompt": "The capital of France"}),
                          (CHAT, {"messages": user("What is the capital of France?")})):
            ask = dict(ask, temperature=0, max_tokens=20)
            whole = s.good(path, ask)
            chunks = s.stream(path, dict(ask, stream_options={"include_usage": True}))
            choice = whole["choices"][0]
            text = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
            assert "Paris" in text, text
            assert text_of(chunks) == text
            assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]
            assert chunks[-2]["choices"][0]["finish_reason"] == choice["finish_reason"] == "stop"
            assert whole["usage"]["total_tokens"] == (whole["usage"]["prompt_tokens"]
                                                      + whole["usage"]["completion_tokens"])
            assert len({c["id"] for c in chunks}) == 1
        assert s.good("/v1/models")["data"][0]["id"] == "gemma3-tiny"
        # parts of text, as newer clients send them
        parts = s.good(CHAT, {"messages": [{"role": "user", "content": [
            {"type": "text", "text": "What is the capital"}, {"type": "text", "text": " of France?"}]}],
            "temperature": 0})
        assert "Paris" in parts["choices"][0]["message"]["content"]


def choices_and_seeds(rng):
    with Server("qwen3-tiny") as s:
        for _ in range(20):  # behind some random prompts the model is sure of every token
            ask = {"prompt": random_ids(rng, 9), "max_tokens": 12, "temperature": 1.5, "seed": rng.randrange(2**40),
                   "ignore_eos": True, "return_token_ids": True, "n": 3}
            first = s.good(COMPLETIONS, ask)
            ids = [c["token_ids"] for c in first["choices"]]
            if len({tuple(i) for i in ids}) > 1:
                break
        second = s.good(COMPLETIONS, ask)
        assert ids == [c["token_ids"] for c in second["choices"]]
        assert [c["index"] for c in first["choices"]] == [0, 1, 2]
        assert len({tuple(i) for i in ids}) > 1, "choices of one seed are all the same"
        one = s.good(COMPLETIONS, dict(ask, n=1))
        assert one["choices"][0]["token_ids"] == ids[0]
        assert first["usage"]["completion_tokens"] == 36
        # two prompts, two choices each: 0, 1 are the first prompt's
        other = random_ids(rng, 4)
        four = s.good(COMPLETIONS, dict(ask, prompt=[ask["prompt"], other], n=2))
        assert [c["token_ids"] for c in four["choices"][:2]] == ids[:2]
        assert four["choices"][2]["prompt_token_ids"] == other
        streamed = s.stream(COMPLETIONS, ask)
        for i in range(3):
            assert [t for c in streamed for ch in c["choices"] if ch["index"] == i
                    for t in ch["token_ids"]] == ids[i]
        # a penalty changes what greedy repeats
        greedy = dict(ask, temperature=0, n=1, max_tokens=200)
        plain = s.good(COMPLETIONS, greedy)["choices"][0]["token_ids"]
        hard = s.good(COMPLETIONS, dict(greedy, repetition_penalty=50, frequency_penalty=2,
                                        presence_penalty=2))["choices"][0]["token_ids"]
        assert len(set(plain)) < len(plain) and len(set(hard)) == len(hard), (plain, hard)


def prompts_that_begin_alike(rng):
    """What was found of a prompt is told, counted, and changes no token; `off` finds nothing."""
    system, tokens = random_ids(rng, 64 * 3 + 5), {"temperature": 0, "ignore_eos": True, "max_tokens": 70,
                                                   "return_token_ids": True}
    asks, tail = [system + random_ids(rng, 10), system + random_ids(rng, 80)], random_ids(rng, 3)
    for flags in ([], ["--prefix-cache", "off"]):
        with Server("qwen3-tiny", *flags) as s:
            def ask(ids, **more):
                doc = s.good(COMPLETIONS, dict(tokens, prompt=ids, **more))
                return [c["token_ids"] for c in doc["choices"]], doc["usage"]["prompt_tokens_details"]["cached_tokens"]
            (first,), none = ask(asks[0])
            (second,), shared = ask(asks[1])
            turn = asks[0] + first + tail  # the answer's pages were filled by steps
            (third,), chat = ask(turn)
            both, two = ask([asks[0], turn], n=2)
            found = [none, shared, chat, two]
            if not flags:
                want = [first, second, third]
                assert found == [0, 64 * 3, 64 * 4, 64 * 3 + 64 * 4], found
                assert s.good("/baton/v1/status")["kv"]["cached"] == s.metric("baton:kv_blocks_cached") > 0
            else:
                assert [first, second, third] == want and found == [0, 0, 0, 0], found
            assert both == [want[0], want[0], want[2], want[2]]
            # the second choice of a prompt looks its whole beginning up too
            hits = sum(found) + two if not flags else 0
            for name in ("vllm:prefix_cache_hits", "vllm:gpu_prefix_cache_hits_total"):
                assert s.metric(name) == hits, (name, s.metric(name), hits)
            assert s.metric("vllm:prompt_tokens_by_source_total", source="local_cache_hit") == sum(found)
            s.wait_idle()


def little_memory_means_to_wait(rng):
    """A pool for two of the requests that come: they wait for each other, and all are answered."""
    asks = [{"prompt": random_ids(rng, 130), "max_tokens": 120, "temperature": 0, "ignore_eos": True,
             "return_token_ids": True} for _ in range(5)]
    got = [None] * len(asks)

    def one(i):
        got[i] = s.good(COMPLETIONS, asks[i])["choices"][0]["token_ids"]

    with Server("qwen3-tiny", "--ctx", "256", "--lanes", "4") as s:
        label = next(l for l in s.good("/metrics").splitlines() if l.startswith("vllm:cache_config_info"))
        full = int(re.search(r'num_gpu_blocks="(\d+)"', label)[1])
        want = [s.good(COMPLETIONS, a)["choices"][0]["token_ids"] for a in asks]
    page = 2 * 64 * sum_of_rows("qwen3-tiny")
    with Server("qwen3-tiny", "--ctx", "256", "--lanes", "4", "--kv-mem", str(9 * page - 1)) as s:
        label = next(l for l in s.good("/metrics").splitlines() if l.startswith("vllm:cache_config_info"))
        assert int(re.search(r'num_gpu_blocks="(\d+)"', label)[1]) == 8 < full
        threads = [threading.Thread(target=one, args=(i,)) for i in range(len(asks))]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert got == want
        assert s.metric("baton:decode_steps_total", lanes="2") > 0
        assert s.metric("baton:decode_steps_total", lanes="3") == s.metric("baton:decode_steps_total", lanes="4") == 0
        s.wait_idle()


def stop_strings(rng):
    with Server("qwen3-small") as s:
        for _ in range(20):  # some random prompts make it say special tokens, which are no text
            ask = {"prompt": random_ids(rng, 30), "max_tokens": 60, "temperature": 0, "ignore_eos": True}
            text = s.good(COMPLETIONS, ask)["choices"][0]["text"]
            if len(text) > 20:
                break
        assert len(text) > 20, text
        for _ in range(8):
            first = rng.randrange(4, len(text) - 6)
            stop = text[first:first + rng.randrange(1, 6)]
            cut = text[:text.index(stop)]
            whole = s.good(COMPLETIONS, dict(ask, stop=["never there \u00e9", stop]))["choices"][0]
            assert (whole["text"], whole["finish_reason"]) == (cut, "stop"), (stop, whole, text)
            assert whole["stop_reason"] == stop
            chunks = s.stream(COMPLETIONS, dict(ask, stop=stop))
            assert text_of(chunks) == cut, (stop, text_of(chunks), cut)
        whole = s.good(COMPLETIONS, dict(ask, stop="never there"))["choices"][0]
        assert (whole["text"], whole["finish_reason"]) == (text, "length")
        ids = s.good(COMPLETIONS, dict(ask, return_token_ids=True))["choices"][0]["token_ids"]
        at = s.good(COMPLETIONS, dict(ask, return_token_ids=True, stop_token_ids=[ids[20]]))["choices"][0]
        assert at["token_ids"] == ids[:ids.index(ids[20]) + 1] and at["finish_reason"] == "stop"
        s.wait_idle()


def log_probabilities(rng):
    with Server() as s:
        c = s.good(COMPLETIONS, {"prompt": "The capital of France", "temperature": 0, "logprobs": 3,
                                 "max_tokens": 4, "ignore_eos": True})["choices"][0]
        l = c["logprobs"]
        assert len(l["tokens"]) == len(l["token_logprobs"]) == len(l["top_logprobs"]) == 4
        for token, p, top in zip(l["tokens"], l["token_logprobs"], l["top_logprobs"]):
            assert p <= 0 and len(top) == 3 and max(top.values()) == p == top[token]
        c = s.good(CHAT, {"messages": user("What is the capital of France?"), "temperature": 0,
                          "logprobs": True, "top_logprobs": 2})["choices"][0]
        for t in c["logprobs"]["content"]:
            assert [t["logprob"], t["token"]] == [t["top_logprobs"][0]["logprob"], t["top_logprobs"][0]["token"]]
            assert t["top_logprobs"][1]["logprob"] <= t["logprob"]
            assert bytes(t["bytes"]).decode() == t["token"]
        assert "".join(t["token"] for t in c["logprobs"]["content"][:-1]) == c["message"]["content"]


BAD = [  # body, the parameter that is named
    ({"prompt": None}, "prompt"), ({"prompt": ""}, "prompt"), ({"prompt": []}, "prompt"),
    ({"prompt": 7}, "prompt"), ({"prompt": [-1]}, "prompt"), ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [10**7]}, "prompt"), ({"prompt": ["a", [1], 5]}, "prompt"), ({"prompt": [1] * 9000}, "prompt"),
    ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": 1.5}, "max_tokens"), ({"max_tokens": "9"}, "max_tokens"),
    ({"max_tokens": 10**6}, "max_tokens"), ({"min_tokens": 99}, "min_tokens"), ({"n": 0}, "n"), ({"n": 10**9}, "n"),
    ({"temperature": -0.1}, "temperature"), ({"temperature": 2.1}, "temperature"), ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"), ({"top_p": 1.01}, "top_p"), ({"top_k": -2}, "top_k"), ({"min_p": 2}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"), ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": "1"}, "frequency_penalty"), ({"seed": 0.5}, "seed"), ({"stop": 5}, "stop"),
    ({"stop": [""]}, "stop"), ({"stop": ["a"] * 99}, "stop"), ({"logprobs": 99}, "logprobs"),
    ({"stream": 1}, "stream"), ({"stream_options": {}}, "stream_options"), ({"ignore_eos": "no"}, "ignore_eos"),
    ({"logit_bias": {"5": 1}}, "logit_bias"), ({"echo": True}, "echo"), ({"best_of": 2}, "best_of"),
    ({"response_format": {"type": "json_object"}}, "response_format"), ({"stop_token_ids": "5"}, "stop_token_ids"),
    ({"kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params"), ({"model": 5}, "model"),
]


def bad_values_are_named(rng):
    with Server() as s:
        for change, param in BAD:
            status, doc, _ = s.ask(COMPLETIONS, dict({"prompt": "a", "max_tokens": 2}, **change))
            assert status == 400 and doc["error"]["param"] == param, (change, status, doc)
        for change in ({"messages": []}, {"messages": "a"}, {"messages": [{"role": "cat", "content": "a"}]},
                       {"messages": [{"role": "user"}]}, {}, {"messages": [[]]},
                       {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}):
            status, doc, _ = s.ask(CHAT, change)
            assert status == 400 and doc["error"]["param"] == "messages", (change, status, doc)
        status, doc, _ = s.ask(COMPLETIONS, {"prompt": "a", "model": "other"})
        assert status == 404 and doc["error"]["code"] == "model_not_found"
        for body in (b"", b"{", b"[]", b"\xff\xfe", b'{"prompt":"\xc3"}', b"[" * 100000, b'{"a":1,"a":2}',
                     b'{"prompt":"a\\u0000b"}', b'{"prompt":"\\ud800"}', b"nul"):
            status, doc, _ = s.ask(COMPLETIONS, body)
            assert status == 400, (body[:20], status, doc)
        # what nobody knows is ignored, null is as good as absent
        s.good(COMPLETIONS, {"prompt": "a", "max_tokens": 1, "zebra": [1], "user": "me", "stop": None,
                             "kv_transfer_params": None, "temperature": None})
        assert s.metric("vllm:request_success_total", finished_reason="length") == 1


def paths_sizes_and_connections(rng):
    with Server() as s:
        assert s.ask("/nothing")[0] == 404 and s.ask(COMPLETIONS)[0] == 405
        assert s.ask("/health", {"a": 1})[0] == 405
        c = s.connect()
        for _ in range(3):  # one connection
            assert s.ask("/health", connection=c)[0] == 200
            assert s.ask(COMPLETIONS, {"prompt": "a", "max_tokens": 1}, connection=c)[0] == 200
        c.close()
        c = s.connect()
        c.putrequest("POST", COMPLETIONS)
        c.putheader("Content-Length", str(10**12))
        c.endheaders()
        assert c.getresponse().status == 413
        c.close()
        c = s.connect()
        c.request("GET", "/health", headers={"X-Long": "a" * 200000})
        try:
            assert c.getresponse().status in (400, 413, 431)
        except (ConnectionError, OSError):
            pass  # cut off while it was still sending
        c.close()
        text = "Gr\u00fc\u00dfe, \u4f60\u597d \U0001f600"
        tokens = s.good("/tokenize", {"prompt": text, "add_special_tokens": False})
        assert tokens["count"] == len(tokens["tokens"])
        assert s.good("/detokenize", {"tokens": tokens["tokens"]})["prompt"] == text
        chat = s.good("/tokenize", {"messages": user("hello")})
        assert chat["count"] > s.good("/tokenize", {"prompt": "hello"})["count"]
        assert s.ask("/detokenize", {"tokens": "a"})[1]["error"]["param"] == "tokens"
        assert "version" in s.good("/version")


def keys_are_asked_for(rng):
    with tempfile.NamedTemporaryFile("w") as f:
        f.write("first-key\nsecond-key\n")
        f.flush()
        with Server("gemma3-tiny", "--api-key-file", f.name) as s:
            body = {"prompt": "a", "max_tokens": 1}
            for key in (None, "Bearer first", "Bearer first-key2", "first-key", "Bearer "):
                status, doc, _ = s.ask(COMPLETIONS, body, {"Authorization": key} if key else {})
                assert status == 401 and doc["error"]["code"] == "invalid_api_key", (key, status)
            for key in ("Bearer first-key", "bearer second-key"):
                assert s.ask(COMPLETIONS, body, {"Authorization": key})[0] == 200
            assert s.ask("/health")[0] == 200 and s.ask("/v1/models")[0] == 401


def https(rng):
    if not shutil.which("openssl"):
        raise Skip("the openssl program, which makes a certificate, is not installed")
    with tempfile.TemporaryDirectory() as tmp:
        cert, key = os.path.join(tmp, "cert.pem"), os.path.join(tmp, "key.pem")
        subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", cert,
                        "-days", "2", "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"],
                       check=True, capture_output=True)
        with Server("gemma3-tiny", "--tls-cert", cert, "--tls-key", key) as s:
            s.connect = lambda: http.client.HTTPSConnection(
                s.host, s.port, timeout=PATIENCE, context=ssl.create_default_context(cafile=cert))
            ask = {"prompt": "The capital of France", "temperature": 0, "max_tokens": 6}
            whole = s.good(COMPLETIONS, ask)["choices"][0]["text"]
            assert "Paris" in whole and text_of(s.stream(COMPLETIONS, ask)) == whole
            c = s.connect()
            c.request("POST", COMPLETIONS, json.dumps(LONG))
            assert c.getresponse().read(100)
            c.sock.shutdown(socket.SHUT_RDWR)
            c.close()
            s.wait_idle()
            assert s.metric("baton:requests_cancelled_total") == 1


def bad_flags_are_named(rng):
    def refused(status, word, *args):
        r = subprocess.run([BATON, "serve", *args], capture_output=True, text=True, timeout=PATIENCE)
        assert r.returncode == status and word in r.stderr, (args, r.returncode, r.stderr)

    tiny = ("-m", model("gemma3-tiny"), "--port", "0")
    refused(2, "-m")
    refused(2, "--role", *tiny, "--role", "neither")
    refused(2, "--host", *tiny, "--host", "nowhere")
    refused(2, "--served-name", *tiny, "--served-name", 'a"b')
    refused(2, "--tls-cert", *tiny, "--tls-cert", "x")
    refused(2, "--lanes", *tiny, "--lanes", "9")
    refused(2, "--probe", *tiny, "--probe", "sometimes")
    refused(1, "fails the probe of causality", "-m", model("qwen3-tiny"), "--port", "0", "--device",
            "npu:atom-b1,fault=noncausal")
    refused(2, "not built", *tiny, "--audit-sample", "1")
    refused(2, "--kv-mem", *tiny, "--kv-mem", "12X")
    refused(2, "one request", *tiny, "--kv-mem", "100K")
    refused(2, "holds no key", *tiny, "--api-key-file", "/dev/null")
    refused(3, "x.pem", *tiny, "--tls-cert", "x.pem", "--tls-key", "x.pem")
    with Server() as s:
        refused(3, f"port {s.port}", "-m", model("gemma3-tiny"), "--port", str(s.port))


def full_queue_is_429(rng):
    with Server("gemma3-tiny", "--lanes", "1", "--max-queue", "2") as s:
        runs = [slow_socket(s, COMPLETIONS, LONG) for _ in range(3)]
        s.wait("pages are used", lambda: 0 < s.metric("vllm:kv_cache_usage_perc") <= 1)
        s.wait("two wait", lambda: s.metric("vllm:num_requests_waiting") == 2)
        status, doc, headers = s.ask(COMPLETIONS, {"prompt": "a", "max_tokens": 1})
        assert status == 429 and doc["error"]["code"] == "queue_full" and headers["Retry-After"]
        for r in runs:
            r.close()
        s.wait_idle()
        s.good(COMPLETIONS, {"prompt": "a", "max_tokens": 1})


def clients_take_turns(rng):
    """One client's dozen waits when another comes: they alternate from there, each in its order."""
    with tempfile.TemporaryDirectory() as d:
        with open(os.path.join(d, "keys"), "w") as f:
            f.write("key-of-a\nkey-of-b\n")
        for by_key in (False, True):
            log = os.path.join(d, f"log-{by_key}")
            flags = ["--api-key-file", os.path.join(d, "keys")] if by_key else []
            names = [f"a{i}" for i in range(12)] + [f"b{i}" for i in range(3)]
            with Server("gemma3-tiny", "--lanes", "1", "--request-log", log, *flags) as s:
                def one(name):
                    host = "127.0.0.2" if name[0] == "b" and not by_key else "127.0.0.1"
                    c = http.client.HTTPConnection(s.host, s.port, timeout=PATIENCE, source_address=(host, 0))
                    head = {"X-Request-Id": name, "Authorization": f"Bearer key-of-{name[0]}"}
                    status, doc, _ = s.ask(COMPLETIONS, {"prompt": [5, 6], "max_tokens": 3}, head, c)
                    assert status == 200, doc
                    c.close()

                first = s.connect()  # holds the lane until all the others wait
                first.request("POST", COMPLETIONS, json.dumps(LONG), {"Authorization": "Bearer key-of-a"})
                s.wait("it runs", lambda: s.metric("baton:lanes_active") == 1)
                threads = [threading.Thread(target=one, args=(n,)) for n in names]
                for i, t in enumerate(threads):
                    t.start()
                    s.wait("it waits", lambda: s.metric("vllm:num_requests_waiting") == i + 1)
                first.close()
                for t in threads:
                    t.join()
                s.wait_idle()
            with open(log) as f:
                order = [r["request_id"] for r in map(json.loads, f) if r["request_id"]]
            # a0 had begun, as the one that the engine keeps ready; of two that end together either is told first
            want = ["a0", "a1", "b0", "a2", "b1", "a3", "b2"] + names[4:12]
            assert sorted(order) == sorted(want), (by_key, order)
            assert all(abs(order.index(n) - i) < 2 for i, n in enumerate(want)), (by_key, order)


def vanished_clients_leave_nothing(rng):
    with Server("gemma3-tiny", "--lanes", "4", "--max-queue", "400") as s:
        s.good(COMPLETIONS, {"prompt": "a", "max_tokens": 1})
        s.wait_idle()
        fds = s.metric("process_open_fds")
        for _ in range(10):
            clients = [slow_socket(s, COMPLETIONS, dict(LONG, stream=rng.random() < 0.7, n=rng.choice([1, 1, 3])))
                       for _ in range(100)]
            s.wait("all are there", lambda: s.metric("baton:http_requests_open") == 101
                   and s.metric("baton:lanes_active") == 4)
            rng.shuffle(clients)
            for c in clients:
                if rng.random() < 0.3:  # a reset instead of a good end
                    c.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                c.close()
            s.wait_idle()
        s.wait("descriptors are back", lambda: s.metric("process_open_fds") == fds)
        assert s.metric("baton:requests_cancelled_total") == 1000
        ids = random_ids(rng, 20)
        after = s.good(COMPLETIONS, {"prompt": ids, "max_tokens": 8, "temperature": 0, "ignore_eos": True,
                                     "return_token_ids": True})
        assert after["choices"][0]["token_ids"] == native("gemma3-tiny", ids, 8, "--ignore-eos")["ids"]


def slow_readers_hold_no_lane(rng):
    """One lane, and a client that reads nothing of a long stream: others are served meanwhile, and it gets
    all of it in the end."""
    with Server("gemma3-tiny", "--lanes", "1") as s:
        # more bytes than the kernel's buffers hold
        ask = dict(LONG, max_tokens=6000, return_token_ids=True, logprobs=20)
        slow = slow_socket(s, COMPLETIONS, ask)
        s.wait("it runs", lambda: s.metric("baton:lanes_active") == 1)
        s.good(COMPLETIONS, {"prompt": "a", "max_tokens": 1})
        assert s.metric("baton:lanes_active") == 0
        assert s.metric("baton:http_requests_open") == 2
        data = b""
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        while b"data: [DONE]" not in data[-40:]:
            part = slow.recv(65536)
            assert part, data[-200:]
            data += part
        slow.close()
        assert data.count(b'"top_logprobs"') > 1
        assert s.metric("vllm:generation_tokens_total") == 6001
        s.wait_idle()


def draining_finishes_what_runs(rng):
    s = Server("gemma3-tiny", "--lanes", "2")
    got = []
    ask = {"prompt": random_ids(rng, 5), "max_tokens": 150, "temperature": 0, "ignore_eos": True,
           "return_token_ids": True}
    t = threading.Thread(target=lambda: got.append(s.stream(COMPLETIONS, ask)))
    t.start()
    s.wait("it runs", lambda: s.metric("baton:lanes_active") == 1)
    doc = s.close()
    t.join()
    assert len(ids_of(got[0])) == 150 and doc["requests"]["finished"] == 1, doc
    # a second signal does not wait
    s = Server("gemma3-tiny", "--lanes", "1")
    run = slow_socket(s, COMPLETIONS, LONG)
    s.wait("it runs", lambda: s.metric("baton:lanes_active") == 1)
    s.process.send_signal(signal.SIGTERM)
    time.sleep(0.1)
    doc = s.close()
    assert doc["requests"]["finished"] == 0, doc
    run.close()


main([concurrent_streams_are_native, many_clients_all_get_theirs, whole_and_stream_agree, choices_and_seeds, prompts_that_begin_alike, little_memory_means_to_wait,
      stop_strings, log_probabilities,
      bad_values_are_named, paths_sizes_and_connections, keys_are_asked_for, https,
      bad_flags_are_named, full_queue_is_429, clients_take_turns,
      vanished_clients_leave_nothing, slow_readers_hold_no_lane, draining_finishes_what_runs])
