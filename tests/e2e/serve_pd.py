# SPDX-License-Identifier: Apache-2.0
"""A prefill and a decode server behind the routers that people have: their messages, word by word.

Each case is two `baton serve` processes and what a router would say to them. Answers are compared with
a server of the role both.

usage: serve_pd.py (BATON_BINARY: the program, BATON_SOURCE_ROOT: the tree)
"""
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import uuid

sys.path.insert(0, os.path.join(os.environ["BATON_SOURCE_ROOT"], "tests"))
from cases import Skip, main
from serve_rig import BATON, PATIENCE, Server, model, slow_socket

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = {"prompt": [5, 6, 7, 8], "max_tokens": 4000, "ignore_eos": True, "temperature": 0, "stream": True}
NULLS = {"remote_engine_id": None, "remote_block_ids": None, "remote_host": None, "remote_port": None}


def prefill_params():
    return dict(do_remote_decode=True, do_remote_prefill=False, **NULLS)


def random_ids(rng, n):
    return [rng.randrange(300, 2000) for _ in range(n)]


def greedy(ids, n, **more):
    return dict({"prompt": ids, "max_tokens": n, "temperature": 0, "ignore_eos": True,
                 "return_token_ids": True}, **more)


class Pair:
    """A prefill server and a decode server that may pull from it."""

    def __init__(self, name="gemma3-tiny", prefill=(), decode=()):
        self.p = Server(name, "--role", "prefill", "--lanes", "2", *prefill)
        try:
            self.d = Server(name, "--role", "decode", "--lanes", "2", *decode)
        except BaseException:
            self.p.process.kill()
            raise

    def ticket(self, ask, path=COMPLETIONS):
        """What the prefill server answers for the decode server."""
        doc = self.p.good(path, dict(ask, max_tokens=1, stream=False, kv_transfer_params=prefill_params()))
        return doc["kv_transfer_params"]

    def both(self, ask, path=COMPLETIONS):
        return self.d.good(path, dict(ask, kv_transfer_params=self.ticket(ask, path)))

    def wait_idle(self):
        self.p.wait_idle()
        self.d.wait_idle()
        assert self.p.metric("baton:tickets_open") == self.p.metric("baton:tickets_claimed") == 0

    def __enter__(self):
        return self

    def __exit__(self, *how):
        try:
            self.d.__exit__(*how)
        finally:
            self.p.__exit__(*how)


def check_params(k):
    assert k["do_remote_prefill"] is True and k["do_remote_decode"] is False, k
    assert k["remote_request_id"].startswith("bt1.") and len(k["remote_request_id"]) < 200
    assert isinstance(k["remote_port"], int) and k["remote_host"] == "127.0.0.1" and k["tp_size"] == 1
    assert k["remote_engine_id"] and isinstance(k["remote_block_ids"], list) and k["remote_block_ids"]
    assert all(isinstance(v, str) for v in k["baton"].values()), k
    assert set(k["baton"]) == {"fingerprint", "n_tokens", "ids_hash"}


# ---- routers: (request for the prefill server, its headers), what becomes of its params -------------------

def toy_proxy(ask):
    """vLLM's toy proxy, pull: the budget is 1, max_completion_tokens where there is one."""
    body = dict(ask, kv_transfer_params=prefill_params(), stream=False, max_tokens=1)
    if "max_completion_tokens" in body:
        body["max_completion_tokens"] = 1
    body.pop("stream_options", None)
    return body, {"Authorization": "Bearer None", "X-Request-Id": str(uuid.uuid4())}


def toy_proxy_min_tokens(ask):
    """vllm-rbln's copy of it keeps min_tokens."""
    body, headers = toy_proxy(ask)
    return dict(body, min_tokens=4), headers


def sidecar(ask):
    """llm-d's sidecar: both budgets, min_tokens as it was, all of the client's headers and its own."""
    body = dict(ask, kv_transfer_params=prefill_params(), stream=False, max_tokens=1, max_completion_tokens=1,
                min_tokens=4)
    body.pop("stream_options", None)
    return body, {"x-request-id": str(uuid.uuid4()), "User-Agent": "OpenAI/Python", "Accept-Encoding": "gzip",
                  "X-Stainless-Lang": "python", "x-gateway-model-name": "m", "Forwarded": "for=10.0.0.1"}


def sidecar_later(ask):
    """A later one sets min_tokens to 1."""
    body, headers = sidecar(ask)
    return dict(body, min_tokens=1), headers


def coordinator(ask):
    """llm-d's coordinator: the two booleans alone, below sampling_params."""
    body = dict(ask, stream=False, max_tokens=1, sampling_params={"max_tokens": 1, "extra_args": {
        "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}})
    return body, {"EPP-Profile": "prefill"}


def xargs(ask):
    body, headers = toy_proxy(ask)
    body["vllm_xargs"] = {"kv_transfer_params": body.pop("kv_transfer_params")}
    return body, headers


def stack(ask):
    """production-stack, orchestrated."""
    body = dict(ask, kv_transfer_params=prefill_params(), stream=False, max_tokens=1)
    if "max_completion_tokens" in body:
        body["max_completion_tokens"] = 1
    return body, {"Content-Type": "application/json", "X-Request-Id": "req-1"}


def as_it_is(k):
    return k


def through_go(k):
    """Through a map of Go's: sorted keys, numbers through floating point."""
    return json.loads(json.dumps(k, sort_keys=True), parse_int=lambda s: int(float(s)))


def push_rebuilt(k):
    """The toy push proxy builds the object anew: what it does not know is lost."""
    keep = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port", "tp_size")
    return dict({n: k[n] for n in keep}, do_remote_decode=False, do_remote_prefill=True)


def host_rewritten(k):
    return dict(k, remote_host="localhost")


def mori(k):
    return dict(k, transfer_id="tx1", remote_notify_port=1, remote_handshake_port=2, remote_dp_rank=0,
                remote_dp_size=1, remote_hosts=["a"])


ROUTERS = [(toy_proxy, as_it_is), (toy_proxy, push_rebuilt), (toy_proxy_min_tokens, as_it_is), (sidecar, through_go),
           (sidecar, mori), (sidecar_later, through_go), (coordinator, through_go), (xargs, as_it_is),
           (stack, host_rewritten)]


def in_its_place(router, k):
    if router is coordinator:
        return {"sampling_params": {"extra_args": {"kv_transfer_params": k}}}
    return {"vllm_xargs": {"kv_transfer_params": k}} if router is xargs else {"kv_transfer_params": k}


def every_router_gets_the_same_tokens(rng):
    chat = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0,
            "max_completion_tokens": 20, "return_token_ids": True}
    with Server("gemma3-tiny", "--lanes", "2") as one, Pair() as pair:
        pulled = 0
        for router, change in ROUTERS:
            for path, ask in ((COMPLETIONS, greedy(random_ids(rng, rng.choice([1, 63, 64, 65, 600])), 9)), (CHAT, chat)):
                want = one.good(path, ask)
                body, headers = router(ask)
                status, doc, _ = pair.p.ask(path, body, headers)
                assert status == 200, (router, doc)
                k = doc["kv_transfer_params"]
                check_params(k)
                assert doc["usage"]["completion_tokens"] == 1 and doc["choices"][0]["finish_reason"] == "length"
                assert int(k["baton"]["n_tokens"]) == doc["usage"]["prompt_tokens"] == want["usage"]["prompt_tokens"]
                full = dict(ask, **in_its_place(router, change(k)))
                if rng.random() < 0.5:
                    got = pair.d.good(path, full)
                    ids = got["choices"][0]["token_ids"]
                    source = got["usage"]["baton"]
                else:
                    chunks = pair.d.stream(path, dict(full, stream_options={"include_usage": True}))
                    ids = [i for c in chunks for ch in c["choices"] for i in ch.get("token_ids", [])]
                    source = chunks[-1]["usage"]["baton"]
                assert ids == want["choices"][0]["token_ids"], (router, path, ids, want)
                assert source == {"prompt_source": "external_kv_transfer", "handoff": "verified"}, source
                pulled += want["usage"]["prompt_tokens"]
        by = {s: pair.d.metric("vllm:prompt_tokens_by_source_total", source=s)
              for s in ("local_compute", "external_kv_transfer")}
        assert by == {"local_compute": 0, "external_kv_transfer": pulled}, (by, pulled)
        n = 2 * len(ROUTERS)
        assert pair.d.metric("baton:handoffs_total", verdict="verified") == n
        assert pair.d.metric("baton:handoff_wait_seconds_count") == n
        assert pair.d.metric("baton:handoff_bytes_total") > 0
        assert pair.p.metric("baton:tickets_fetched_total") == n
        pair.wait_idle()


def sampling_is_the_decode_servers(rng):
    """What a router cuts at the prefill server changes nothing: seeds, stops, log-probabilities."""
    with Server("qwen3-tiny") as one, Pair("qwen3-tiny") as pair:
        for _ in range(4):
            ids = random_ids(rng, rng.randrange(1, 200))
            ask = greedy(ids, 12, temperature=1.5, seed=rng.randrange(2**40), top_k=50, logprobs=3, min_tokens=5)
            want, got = one.good(COMPLETIONS, ask), pair.both(ask)
            assert got["choices"] == want["choices"], (got, want)
            stop = want["choices"][0]["token_ids"][6]
            ask["stop_token_ids"] = [stop]
            assert pair.both(ask)["choices"] == one.good(COMPLETIONS, ask)["choices"]
        pair.wait_idle()


def many_at_once(rng):
    """More requests than the two servers hold together: each gets its own tokens."""
    asks = [greedy(random_ids(rng, rng.randrange(1, 150)), rng.randrange(2, 10)) for _ in range(6)]
    got = [None] * 40

    def client(i):
        got[i] = pair.both(asks[i % 6])["choices"][0]["token_ids"]

    with Server("gemma3-tiny") as one, Pair() as pair:
        want = [one.good(COMPLETIONS, a)["choices"][0]["token_ids"] for a in asks]
        threads = [threading.Thread(target=client, args=(i,)) for i in range(len(got))]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        for i, ids in enumerate(got):
            assert ids == want[i % 6], (i, ids, want[i % 6])
        pair.wait_idle()


def alone_it_prefills_itself(rng):
    ask = greedy(random_ids(rng, 70), 8)
    with Server("gemma3-tiny") as one, Pair() as pair:
        want = one.good(COMPLETIONS, ask)["choices"][0]["token_ids"]
        for more in ({}, {"kv_transfer_params": None}, {"kv_transfer_params": {"do_remote_prefill": False, "x": 1}}):
            doc = pair.d.good(COMPLETIONS, dict(ask, **more))
            assert doc["choices"][0]["token_ids"] == want
            assert doc["usage"]["baton"] == {"prompt_source": "local_compute", "handoff": None}
        assert len(pair.d.good(COMPLETIONS, dict(ask, n=3))["choices"]) == 3
        for source, n in (("local_compute", 70 + 3 * 6), ("local_cache_hit", 3 * 64)):
            assert pair.d.metric("vllm:prompt_tokens_by_source_total", source=source) == n
        for prefer in ("if-available", "wait=9, If-Available;x=1"):
            status, doc, _ = pair.d.ask(COMPLETIONS, ask, {"Prefer": prefer, "EPP-Profile": "decode"})
            assert status == 412, (status, doc)
        assert pair.d.ask(COMPLETIONS, ask, {"Prefer": "if-available-x, respond-async"})[0] == 200
        k = pair.ticket(ask)  # what can be pulled is available
        assert pair.d.ask(COMPLETIONS, dict(ask, kv_transfer_params=k), {"Prefer": "if-available"})[0] == 200
        pair.wait_idle()


# ---- failures ---------------------------------------------------------------------------------------------

def refused(server, body, status, code, path=COMPLETIONS, headers=None):
    got, doc, head = server.ask(path, body, headers)
    assert got == status, (got, doc, status)
    assert doc["error"]["code"] == code, (doc, code)
    assert not (head.get("Content-Type") or "").startswith("text/event-stream")
    return doc["error"]


def tickets_that_are_no_good(rng):
    """Forged, replayed, stale: 409, streamed or not, and never another's cache."""
    ask = greedy(random_ids(rng, 50), 4)
    with Pair(prefill=("--lease", "1")) as pair:
        for stream in (False, True):
            ask["stream"] = stream
            k = pair.ticket(ask)
            text = k["remote_request_id"]
            at = rng.randrange(4, 80)
            forged = text[:at] + ("A" if text[at] != "A" else "B") + text[at + 1:]
            for bad in (forged, "bt1.", "", "0f3a-77", text + "A", text[:-1]):
                refused(pair.d, dict(ask, kv_transfer_params=dict(k, remote_request_id=bad)), 409, "stale")
            status, _, _ = pair.d.ask(COMPLETIONS, dict(ask, kv_transfer_params=k))
            assert status == 200
            error = refused(pair.d, dict(ask, kv_transfer_params=k), 409, "stale")
            assert error["param"] == "kv_transfer_params" and "used up" in error["message"], error
            k = pair.ticket(ask)
            pair.p.wait("the lease ends", lambda: pair.p.metric("baton:tickets_open") == 0)
            refused(pair.d, dict(ask, kv_transfer_params=k), 409, "stale")
        assert pair.p.metric("baton:leases_expired_total") == 2
        assert pair.p.metric("baton:tickets_refused_total") >= 4
        assert pair.d.metric("baton:handoff_failures_total", code="stale") >= 4
        pair.wait_idle()


def what_does_not_fit_is_422(rng):
    """Other token ids, another model: told apart from a bad ticket, and the status is that of nothing sent."""
    ids = random_ids(rng, 30)
    other = ids[:-1] + [ids[-1] + 1]
    with Pair() as pair, Server("qwen3-tiny", "--role", "decode") as d:
        for changed in (other, ids[:-1], ids + [5]):
            k = pair.ticket(greedy(ids, 4))
            refused(pair.d, greedy(changed, 4, stream=True, kv_transfer_params=k), 422, "mismatch")
            # the claim was given back: who has the right prompt gets the cache
            assert pair.d.good(COMPLETIONS, greedy(ids, 4, kv_transfer_params=k))["choices"]
        k = pair.ticket(greedy(ids, 4))
        error = refused(d, greedy(ids, 4, kv_transfer_params=k), 422, "mismatch")
        assert "different models" in error["message"], error
        pair.p.wait("the claim is back", lambda: pair.p.metric("baton:tickets_open") == 1)
        assert pair.d.good(COMPLETIONS, greedy(ids, 4, kv_transfer_params=k))["choices"]
        assert pair.d.metric("baton:handoff_failures_total", code="mismatch") == 3
        d.wait_idle()
        pair.wait_idle()


def dead_prefill_servers(rng):
    """Killed before the pull: 502, or computed here where that was asked for."""
    ask = greedy(random_ids(rng, 40), 6)
    with Server("gemma3-tiny") as one:
        want = one.good(COMPLETIONS, ask)["choices"][0]["token_ids"]
    for policy in ("fail", "local-prefill"):
        p = Server("gemma3-tiny", "--role", "prefill")
        with Server("gemma3-tiny", "--role", "decode", "--on-handoff-failure", policy) as d:
            pair = Pair.__new__(Pair)
            pair.p, pair.d = p, d
            assert pair.both(ask)["choices"][0]["token_ids"] == want  # there is a connection
            k = pair.ticket(ask)
            p.process.kill()
            p.process.communicate()
            for _ in range(2):  # over the connection that was there, and a new one
                body = dict(ask, kv_transfer_params=k)
                if policy == "fail":
                    refused(d, dict(body, stream=True), 502, "peer")
                    continue
                doc = d.good(COMPLETIONS, body)
                assert doc["choices"][0]["token_ids"] == want
                assert doc["usage"]["baton"] == {"prompt_source": "local_compute", "handoff": "local-prefill: peer"}
            verdict = "failed" if policy == "fail" else policy
            assert d.metric("baton:handoffs_total", verdict=verdict) == 2
            assert d.metric("baton:handoff_failures_total", code="peer") == 2
            by = d.metric("vllm:prompt_tokens_by_source_total", source="local_compute")
            assert by == (0 if policy == "fail" else 80), by
            d.wait_idle()


def rejection_gives_the_ticket_back(rng):
    """Refused before admission, or left by its client: the prefill server gets its pages back at once, long
    before the lease ends."""
    ask = greedy(random_ids(rng, 40), 4)
    with Pair(prefill=("--lease", "3000"), decode=("--max-queue", "3")) as pair:
        def gone(count):
            pair.p.wait("the ticket is released", lambda: pair.p.metric("baton:tickets_open") == 0)
            assert pair.p.metric("baton:tickets_given_up_total") == count

        for i, (status, change) in enumerate([
                (400, {"temperature": 9}), (400, {"max_tokens": 10**6}), (404, {"model": "other"}), (400, {"n": 2}),
                (400, {"echo": True}), (400, {"prompt": [10**7]}), (400, {"prompt": [[1], [2]]})]):
            k = pair.ticket(ask)
            got, doc, _ = pair.d.ask(COMPLETIONS, dict(ask, kv_transfer_params=k, **change))
            assert got == status, (got, doc)
            gone(i + 1)
        # two lanes run, two more are begun, one waits in the queue: 429 is next
        runs = [slow_socket(pair.d, COMPLETIONS, LONG) for _ in range(4)]
        pair.d.wait("lanes are busy", lambda: pair.d.metric("baton:lanes_active") == 2
                    and pair.d.metric("baton:http_requests_open") == 5)
        k = pair.ticket(ask)
        waits = slow_socket(pair.d, COMPLETIONS, dict(ask, kv_transfer_params=k))
        pair.d.wait("it is renewed", lambda: pair.d.metric("baton:tickets_renewed_total") > 0)
        assert pair.p.metric("baton:tickets_open") == 1
        refused(pair.d, dict(ask, kv_transfer_params=pair.ticket(ask)), 429, "queue_full")
        pair.p.wait("one is released", lambda: pair.p.metric("baton:tickets_given_up_total") == 8)
        waits.close()
        gone(9)
        for r in runs:
            r.close()
        pair.wait_idle()
        assert pair.d.metric("baton:tickets_released_total") == 9


def queued_requests_keep_their_tickets(rng):
    """A short lease, and a request that waits longer than it: renewed until its turn."""
    ask = greedy(random_ids(rng, 40), 4)
    with Pair(prefill=("--lease", "2"), decode=("--lease", "2", "--lanes", "1")) as pair:
        want = pair.both(ask)["choices"][0]["token_ids"]
        runs = [slow_socket(pair.d, COMPLETIONS, LONG) for _ in range(2)]
        pair.d.wait("the lane is busy", lambda: pair.d.metric("baton:http_requests_open") == 3)
        got = []
        k = pair.ticket(ask)
        t = threading.Thread(target=lambda: got.append(pair.d.good(COMPLETIONS, dict(ask, kv_transfer_params=k))))
        t.start()
        renewed = pair.d.metric("baton:tickets_renewed_total")
        pair.d.wait("it is renewed for three leases",
                    lambda: pair.d.metric("baton:tickets_renewed_total") >= renewed + 18 or got)
        assert not got and pair.p.metric("baton:tickets_open") == 1
        for r in runs:
            r.close()
        t.join()
        assert got[0]["choices"][0]["token_ids"] == want
        assert pair.p.metric("baton:leases_expired_total") == 0
        pair.wait_idle()


def clients_that_leave(rng):
    """At either server, whenever: nothing is left behind."""
    with Pair(prefill=("--lease", "2")) as pair:
        pair.both(greedy(random_ids(rng, 9), 3))
        for _ in range(12):
            ask = greedy(random_ids(rng, rng.randrange(1, 900)), 2000, stream=True)
            left = slow_socket(pair.p, COMPLETIONS, dict(ask, max_tokens=1, stream=False,
                                                         kv_transfer_params=prefill_params()))
            reads = slow_socket(pair.d, COMPLETIONS, dict(ask, kv_transfer_params=pair.ticket(ask)))
            if rng.random() < 0.5:
                assert reads.recv(20).startswith(b"HTTP/1.1 200")
            left.close()
            reads.close()
        pair.p.wait("tickets are back", lambda: pair.p.metric("baton:tickets_open") == 0)
        pair.wait_idle()


# ---- flags, hosts, keys -----------------------------------------------------------------------------------

def hosts_are_asked_for(rng):
    """A request can't make the server connect where it was not told to."""
    ask = greedy(random_ids(rng, 9), 3)
    with Pair() as pair:
        k = pair.ticket(ask)
        for host in ("10.0.0.1", "example.org", "0.0.0.0", "::ffff:10.0.0.1", "127.1", "unix:/tmp/x", "",
                     "127.0.0.1:80", "[::1]", "localhost.example.org", "169.254.169.254"):
            refused(pair.d, dict(ask, kv_transfer_params=dict(k, remote_host=host)), 403, "kv_host_not_allowed")
        for change, param in (({"remote_port": 0}, "remote_port"), ({"remote_port": "80"}, "remote_port"),
                              ({"remote_host": 5}, "remote_host"), ({"remote_host": None}, "kv_transfer_params"),
                              ({"remote_request_id": None}, "kv_transfer_params"),
                              ({"do_remote_decode": True}, "kv_transfer_params")):
            status, doc, _ = pair.d.ask(COMPLETIONS, dict(ask, kv_transfer_params=dict(k, **change)))
            assert (status, doc["error"]["param"]) == (400, param), (change, status, doc)
        assert pair.d.ask(COMPLETIONS, dict(ask, kv_transfer_params=dict(k, remote_host="::ffff:127.0.0.1")))[0] == 200
        for server, what in ((pair.d, prefill_params()), (pair.p, dict(k)), (pair.p, None)):
            status, doc, _ = server.ask(COMPLETIONS, dict(ask, kv_transfer_params=what))
            assert (status, doc["error"]["param"]) == (400, "kv_transfer_params"), (status, doc)
        for change, param in (({"stream": True}, "stream"), ({"n": 2}, "n"), ({"prompt": [[1], [2]]}, "prompt")):
            status, doc, _ = pair.p.ask(COMPLETIONS, dict(ask, kv_transfer_params=prefill_params(), **change))
            assert (status, doc["error"]["param"]) == (400, param), (status, doc)
        pair.wait_idle()


def keys_and_flags(rng):
    def fails(word, *args):
        r = subprocess.run([BATON, "serve", "-m", model("gemma3-tiny"), "--port", "0", *args], capture_output=True,
                           text=True, timeout=PATIENCE)
        assert r.returncode == 2 and word in r.stderr, (args, r.returncode, r.stderr)

    fails("--kv-key-file", "--role", "prefill", "--kv-host", "0.0.0.0")
    fails("--kv-key-file", "--role", "prefill", "--kv-host", "192.0.2.1")
    fails("--kv-key-file", "--role", "decode", "--kv-allow", "10.0.0.0/8")
    fails("--kv-key-file", "--role", "decode", "--kv-allow", "prefill.example.org")
    for bad in ("10.0.0.0/33", "10.0.0/8", "a/8", "::/129", "10.0.0.0/", "", "a b", "10.0.0.300"):
        fails("--kv-allow", "--role", "decode", "--kv-allow", bad)
    fails("--kv-host", "--kv-host", "127.0.0.1")
    fails("--kv-allow", "--role", "prefill", "--kv-allow", "127.0.0.1")
    fails("--kv-advertise", "--role", "prefill", "--kv-advertise", "nowhere")
    fails("--on-handoff-failure", "--role", "decode", "--on-handoff-failure", "maybe")
    ask = greedy(random_ids(rng, 20), 3)
    with tempfile.TemporaryDirectory() as tmp:
        keys = [os.path.join(tmp, n) for n in "ab"]
        for path in keys:
            with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "w") as f:
                f.write(os.urandom(16).hex() + "\n")
        fails("--kv-advertise", "--role", "prefill", "--kv-host", "0.0.0.0", "--kv-key-file", keys[0])
        with Pair(prefill=("--kv-key-file", keys[0], "--kv-host", "0.0.0.0", "--kv-advertise", "h.example:7"),
                  decode=("--kv-key-file", keys[0], "--kv-allow", "10.0.0.0/8", "--kv-allow", "127.0.0.0/30")) as pair, \
                Server("gemma3-tiny", "--role", "decode", "--kv-key-file", keys[1]) as d:
            port = int(pair.p.process.stderr.readline().rsplit(":", 1)[1])
            k = pair.ticket(ask)
            assert (k["remote_host"], k["remote_port"]) == ("h.example", 7)
            k = dict(k, remote_host="127.0.0.1", remote_port=port)
            refused(pair.d, dict(ask, kv_transfer_params=dict(k, remote_host="127.0.0.4")), 403, "kv_host_not_allowed")
            status, doc, _ = d.ask(COMPLETIONS, dict(ask, kv_transfer_params=k))
            assert status == 502 and "another key" in doc["error"]["message"], (status, doc)
            assert pair.d.good(COMPLETIONS, dict(ask, kv_transfer_params=k))["usage"]["baton"]["handoff"] == "verified"
            pair.wait_idle()
            d.wait_idle()


def the_log_says_where_time_went(rng):
    ask = greedy(random_ids(rng, 300), 5)
    with tempfile.TemporaryDirectory() as tmp:
        paths = [os.path.join(tmp, n) for n in "pd"]
        with Pair(prefill=("--request-log", paths[0]), decode=("--request-log", paths[1])) as pair:
            k = pair.p.ask(COMPLETIONS, dict(ask, max_tokens=1, kv_transfer_params=prefill_params()),
                           {"X-Request-Id": "r\u00e9-1"})[1]["kv_transfer_params"]
            pair.d.ask(COMPLETIONS, dict(ask, kv_transfer_params=k), {"X-Request-Id": "r-1"})
            pair.d.ask(COMPLETIONS, dict(ask, kv_transfer_params=k), {"X-Request-Id": "r-1"})
            pair.d.ask(COMPLETIONS, dict(ask, temperature=9))
            pair.d.ask(COMPLETIONS, ask)
            pair.wait_idle()
            left = slow_socket(pair.d, COMPLETIONS, dict(LONG, prompt=random_ids(rng, 3000), stream=False))
            pair.d.wait("it computes", lambda: pair.d.metric("baton:lanes_active") == 1)
            left.close()
            pair.wait_idle()
        p, d = [[json.loads(line) for line in open(path)] for path in paths]
    assert len(p) == 1 and p[0]["role"] == "prefill" and p[0]["ms"]["prefill"] > 0, p
    assert [r["status"] for r in d] in ([200, 409, 400, 200, 0], [200, 409, 400, 200, 200]), d
    assert [r["request_id"] for r in d] == ["r-1", "r-1", None, None, None]
    assert [r.get("client_gone") for r in d] == [False, False, None, False, True], d
    good, used, bad, local, _ = d
    ms = good["ms"]
    parts = [ms[n] for n in ("queue", "wait", "transfer", "import", "verify")]
    assert min(parts) >= 0 and abs(sum(parts) - ms["ttft"]) < 0.1 * ms["ttft"] + 5, ms
    assert ms["remote_prefill"] == p[0]["ms"]["prefill"] and ms["e2e"] >= ms["ttft"]
    assert good["handoff"]["verdict"] == "verified" and good["handoff"]["bytes"] > 0
    assert used["handoff"]["verdict"] == "failed: stale" and used["error"]["code"] == "stale"
    assert bad["error"]["message"].startswith("temperature")
    assert local["handoff"] is None and local["ms"]["prefill"] > 0 and local["output_tokens"] == 5


def draining_waits_for_tickets(rng):
    """A prefill server that is told to stop keeps what it has promised, and takes nothing new."""
    ask = greedy(random_ids(rng, 40), 4)
    with Server("gemma3-tiny", "--role", "decode") as d:
        p = Server("gemma3-tiny", "--role", "prefill", "--lease", "3000")
        pair = Pair.__new__(Pair)
        pair.p, pair.d = p, d
        k = pair.ticket(ask)
        p.process.send_signal(signal.SIGTERM)
        try:
            c = socket.create_connection((p.host, p.port), timeout=1)  # until it has closed the port
            c.close()
        except OSError:
            pass
        assert d.good(COMPLETIONS, dict(ask, kv_transfer_params=k))["usage"]["baton"]["handoff"] == "verified"
        out, err = p.process.communicate(timeout=PATIENCE)
        assert p.process.returncode == 0 and json.loads(out)["cleanup"]["tickets"] == 0, (out, err)


main([every_router_gets_the_same_tokens, sampling_is_the_decode_servers, many_at_once, alone_it_prefills_itself,
      tickets_that_are_no_good, what_does_not_fit_is_422, dead_prefill_servers, rejection_gives_the_ticket_back,
      queued_requests_keep_their_tickets, clients_that_leave, hosts_are_asked_for, keys_and_flags,
      the_log_says_where_time_went, draining_waits_for_tickets])
