# SPDX-License-Identifier: Apache-2.0
"""`baton proxy` in front of real servers, whose tokens are a lone server's, and of scripted ones, which fail as they
are told to.

usage: serve_proxy.py (BATON_BINARY: the program, BATON_SOURCE_ROOT: the tree)
"""
import http.server
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading

sys.path.insert(0, os.path.join(os.environ["BATON_SOURCE_ROOT"], "tests"))
from cases import main
from serve_rig import BATON, PATIENCE, Server, slow_socket

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = {"prompt": [5, 6, 7, 8], "max_tokens": 4000, "ignore_eos": True, "temperature": 0, "stream": True}
NULLS = {"remote_engine_id": None, "remote_block_ids": None, "remote_host": None, "remote_port": None}


def random_ids(rng, n):
    return [rng.randrange(300, 2000) for _ in range(n)]


def greedy(ids, n, **more):
    return dict({"prompt": ids, "max_tokens": n, "temperature": 0, "ignore_eos": True, "return_token_ids": True}, **more)


def url(server):
    return f"http://127.0.0.1:{server.port}"


class Proxy(Server):
    def __init__(self, prefill, decode, *args):
        servers = [w for flag, side in (("--prefill", prefill), ("--decode", decode)) if side
                   for w in (flag, *map(url, side))]
        self.start([BATON, "proxy", *servers, "--port", "0", "--json", *args])

    def close(self, status=0):
        self.process.send_signal(signal.SIGTERM)
        out, err = self.process.communicate(timeout=PATIENCE)
        assert self.process.returncode == status, (self.process.returncode, err[-2000:])
        return json.loads(out)

    def wait_open(self, n):
        self.wait(f"{n} requests are open", lambda: self.metric("baton:proxy_requests_open") == n + 1)

    def prompts(self):
        return [self.metric("baton:proxy_prompts_total", prefill=w) for w in ("remote", "local", "fallback")]

    def up(self, server):
        return self.metric("baton:proxy_member_up", url=url(server))


class Member:
    """A server that says what it is told: answer(request's document) -> list of bytes to send, or a (status,
    document). A list is a stream; None in it: wait for `go`; it ends with the connection."""

    def __init__(self, answer):
        member = self
        self.asked, self.headers, self.go, self.left = [], [], threading.Event(), threading.Event()

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args):
                pass

            def send(self, status, doc):
                data = json.dumps(doc).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self):
                self.send(200, {})

            def do_POST(self):
                doc = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                member.asked.append(doc)
                member.headers.append(dict(self.headers))
                said = answer(doc)
                if isinstance(said, tuple):
                    return self.send(*said)
                self.close_connection = True
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream; charset=utf-8")
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                try:
                    for part in said:
                        if part is None:
                            member.go.wait(PATIENCE)
                        elif part == b"":  # cut off here, without a last chunk
                            return self.connection.shutdown(socket.SHUT_RDWR)
                        else:
                            self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
                    self.wfile.write(b"0\r\n\r\n")
                except OSError:
                    member.left.set()

        class Quiet(http.server.ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, request, client_address):
                pass  # who asked has left

        self.server = Quiet(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self):
        self.go.set()
        self.server.shutdown()
        self.server.server_close()

    def __enter__(self):
        return self

    def __exit__(self, *how):
        self.close()


KV = {"do_remote_prefill": True, "do_remote_decode": False, "remote_request_id": "x", "remote_block_ids": [[1]], "new": 2**53 + 1}


def good_prefill(doc):
    return 200, {"choices": [], "kv_transfer_params": KV}


def good_decode(doc):
    return [b"data: {}\n\n", b"data: [DONE]\n\n"] if doc.get("stream") else (200, {"ok": True})


def failing(status, message="no"):
    return lambda doc: (status, {"error": {"message": message, "type": "t", "param": None, "code": "c"}})


# ---- real servers -----------------------------------------------------------------------------------------

class Fleet:
    """Two prefill servers, two decode servers, and one of the role both to compare with."""

    def __enter__(self):
        self.servers = []
        for role in ("prefill", "prefill", "decode", "decode", "both"):
            self.servers.append(Server("gemma3-tiny", "--role", role, "--lanes", "2"))
        self.p, self.d, self.one = self.servers[:2], self.servers[2:4], self.servers[4]
        return self

    def __exit__(self, *how):
        for s in self.servers:
            if s.process.poll() is None:
                s.__exit__(*how)


def same_tokens_as_one_server(rng):
    """Both APIs, streamed and not; the load is spread; many at once; a member that is killed loses no request."""
    with Fleet() as f, Proxy(f.p, f.d) as proxy:
        chat = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0,
                "max_completion_tokens": 12, "return_token_ids": True, "min_tokens": 3}
        n = 0
        for path, ask in [(COMPLETIONS, greedy(random_ids(rng, k), 9)) for k in (1, 65, 300)] + [(CHAT, chat)]:
            want = f.one.good(path, ask)
            got = proxy.good(path, ask)
            assert got["choices"] == want["choices"], (got, want)
            assert got["usage"]["baton"]["prompt_source"] == "external_kv_transfer", got
            chunks = proxy.stream(path, ask)
            ids = [i for c in chunks for choice in c["choices"] for i in choice.get("token_ids") or []]
            assert ids == want["choices"][0]["token_ids"], (ids, want)
            n += 2
        assert proxy.prompts() == [n, 0, 0]
        for s in f.p + f.d:  # by turns, as they are equally idle
            assert proxy.metric("baton:proxy_member_requests_total", url=url(s)) == n / 2
        assert proxy.good("/v1/models") == f.d[0].good("/v1/models") or \
            proxy.good("/v1/models")["data"][0]["id"] == "gemma3-tiny"
        assert proxy.good("/tokenize", {"prompt": "a b"}) == f.one.good("/tokenize", {"prompt": "a b"})
        # what is not to be handed over is computed on a decode server
        assert len(proxy.good(COMPLETIONS, dict(greedy([5, 6], 3), n=2))["choices"]) == 2
        assert len(proxy.good(COMPLETIONS, greedy([[5, 6], [7]], 3))["choices"]) == 2
        assert proxy.prompts() == [n, 2, 0]
        # a refusal is the server's own words
        bad = dict(greedy([5], 3), temperature=9)
        assert proxy.ask(COMPLETIONS, bad)[:2] == f.one.ask(COMPLETIONS, bad)[:2]
        many_at_once(rng, f, proxy)
        for s in f.servers:
            s.wait_idle()
        clients_that_leave(f, proxy)
        a_decode_server_dies(rng, f, proxy)
        a_prefill_server_dies(rng, f, proxy)


def many_at_once(rng, f, proxy):
    asks = [greedy(random_ids(rng, rng.randrange(1, 100)), rng.randrange(2, 8)) for _ in range(6)]
    want = [f.one.good(COMPLETIONS, a)["choices"][0]["token_ids"] for a in asks]
    got = [None] * 30

    def client(i):
        got[i] = proxy.good(COMPLETIONS, asks[i % 6])["choices"][0]["token_ids"]

    threads = [threading.Thread(target=client, args=(i,)) for i in range(len(got))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert got == [want[i % 6] for i in range(len(got))]


def clients_that_leave(f, proxy):
    """While it waits for a lane, and in the middle of its stream."""
    runs = [slow_socket(proxy, COMPLETIONS, LONG) for _ in range(6)]
    proxy.wait("lanes are busy", lambda: sum(d.metric("baton:lanes_active") for d in f.d) == 4)
    proxy.wait_open(6)
    for r in runs:
        r.close()
    for s in f.d + f.p:
        s.wait_idle()
    proxy.wait_open(0)
    assert proxy.metric("baton:proxy_requests_total", result="cancelled") == 6


def a_decode_server_dies(rng, f, proxy):
    """In the middle of a stream: an error event, no [DONE]. Before: the other one answers."""
    dead = f.d[0]
    streams = []
    for _ in range(2):  # one on each
        c = proxy.connect()
        c.request("POST", COMPLETIONS, json.dumps(LONG))
        streams.append((c, c.getresponse()))
    assert all(r.readline().startswith(b"data: ") for _, r in streams)
    dead.process.kill()
    dead.process.communicate()
    ask = greedy(random_ids(rng, 50), 5)
    want = f.one.good(COMPLETIONS, ask)["choices"][0]["token_ids"]
    for _ in range(4):
        assert proxy.good(COMPLETIONS, ask)["choices"][0]["token_ids"] == want
    assert proxy.up(dead) == 0 and proxy.up(f.d[1]) == 1
    last = [r.read().decode().split("\n\n")[-2][6:] for _, r in streams]
    assert sorted(x == "[DONE]" for x in last) == [False, True], last
    error = json.loads(last[0] if last[1] == "[DONE]" else last[1])["error"]
    assert error["code"] == "upstream_lost" and url(dead) in error["message"], error
    for c, _ in streams:
        c.close()


def a_prefill_server_dies(rng, f, proxy):
    """One: the other is asked. Both: the decode server computes the prompt."""
    ask = greedy(random_ids(rng, 50), 5)
    want = f.one.good(COMPLETIONS, ask)["choices"][0]["token_ids"]
    before = proxy.prompts()
    for dead in f.p:
        dead.process.kill()
        dead.process.communicate()
        for _ in range(2):
            assert proxy.good(COMPLETIONS, ask)["choices"][0]["token_ids"] == want
    assert proxy.prompts() == [before[0] + 2, before[1], before[2] + 2], (before, proxy.prompts())


# ---- messages ---------------------------------------------------------------------------------------------

def the_contract_word_by_word(rng):
    """What the two servers are asked, and that numbers and unknown members pass unchanged."""
    with Member(good_prefill) as p, Member(good_decode) as d, Proxy([p], [d]) as proxy:
        ask = {"prompt": "ab" * 9, "max_tokens": 7, "max_completion_tokens": 7, "min_tokens": 5, "stream": True,
               "stream_options": {"include_usage": True}, "temperature": 0.1 + 0.2, "seed": 2**63 - 1, "x": {"é\n": [None]}}
        head = {"Authorization": "Bearer k1", "X-Request-Id": "id-7"}
        status, text, headers = proxy.ask(COMPLETIONS, dict(ask, kv_transfer_params={"do_remote_prefill": True}), head)
        assert (status, text) == (200, "data: {}\n\ndata: [DONE]\n\n"), (status, text)
        assert headers["Content-Type"] == "text/event-stream; charset=utf-8"
        asked = dict(ask, max_tokens=1, max_completion_tokens=1, min_tokens=1, stream=False,
                     kv_transfer_params=dict(do_remote_decode=True, do_remote_prefill=False, **NULLS))
        del asked["stream_options"]
        assert p.asked == [asked], p.asked
        assert d.asked == [dict(ask, kv_transfer_params=KV)], d.asked
        for h in p.headers + d.headers:
            assert h["Authorization"] == "Bearer k1" and h["X-Request-Id"] == "id-7", h
            assert h["Content-Type"] == "application/json" and "Expect" not in h, h
        assert proxy.good(CHAT, {"messages": []}) == {"ok": True}  # no prompt: the decode server says what it thinks
        assert len(p.asked) == 1 and "Authorization" not in d.headers[-1]
        proxy.good(CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]})
        assert p.asked[-1]["max_tokens"] == 1 and not {"min_tokens", "max_completion_tokens"} & set(p.asked[-1])
        assert p.headers[-1]["X-Request-Id"] == d.headers[-1]["X-Request-Id"] != d.headers[-2]["X-Request-Id"]


def short_prompts_stay_on_the_decode_server(rng):
    with Member(good_prefill) as p, Member(good_decode) as d, Proxy([p], [d], "--min-remote-tokens", "10") as proxy:
        for remote, body in [(0, {"prompt": [1] * 9}), (1, {"prompt": [1] * 10}), (0, {"prompt": "a" * 36}),
                             (1, {"prompt": ["a" * 37]}), (1, {"prompt": [[1] * 10]}), (0, {"prompt": [[1] * 10] * 2}),
                             (0, {"messages": [{"content": "a" * 18}] * 1}), (1, {"messages": [{"content": "a" * 18}] * 2})]:
            n = len(p.asked)
            proxy.good(CHAT if "messages" in body else COMPLETIONS, body)
            assert len(p.asked) - n == remote, body
            assert ("kv_transfer_params" in d.asked[-1]) == bool(remote)


def policies(rng):
    """least-loaded goes where less is under way; round-robin does not look."""
    waits = lambda doc: [b"data: {}\n\n", None, b"data: [DONE]\n\n"] if doc.get("wait") else good_decode(doc)
    for policy, want in (("least-loaded", [0, 4]), ("round-robin", [2, 2])):
        with Member(waits) as a, Member(waits) as b, Proxy([], [a, b], "--policy", policy) as proxy:
            c = proxy.connect()
            c.request("POST", COMPLETIONS, json.dumps({"prompt": "a", "stream": True, "wait": True}))
            r = c.getresponse()
            busy, idle = (a, b) if a.asked else (b, a)
            for _ in range(4):
                proxy.good(COMPLETIONS, {"prompt": "a"})
            assert [len(busy.asked) - 1, len(idle.asked)] == want, policy
            busy.go.set()
            assert r.read() == b"data: {}\n\ndata: [DONE]\n\n"
            c.close()


# ---- failures ---------------------------------------------------------------------------------------------

def what_fails_is_tried_elsewhere(rng):
    """Before anything was given to the client, whole or streamed; each member once."""
    cut_early, cut_inside = [b""], [b"data: {}", b""]
    for bad in (failing(500), failing(503), failing(429), failing(302), failing(204), lambda doc: cut_early,
                lambda doc: cut_inside):
        for stream in (False, True):
            with Member(good_prefill) as p, Member(bad) as x, Member(good_decode) as d, Proxy([p], [x, d]) as proxy:
                for _ in range(2):  # x was asked in one of them
                    status, text, _ = proxy.ask(COMPLETIONS, {"prompt": "a", "stream": stream})
                    assert status == 200 and (not stream or text.endswith("data: [DONE]\n\n")), (status, text)
                assert len(x.asked) in (1, 2) and len(d.asked) == 2, (x.asked, d.asked)
                assert len(p.asked) == 2 + len(x.asked)  # a new cache each time
                assert proxy.metric("baton:proxy_retries_total") == len(x.asked)
                assert proxy.prompts() == [2, 0, 0]
                proxy.wait_open(0)
                assert proxy.metric("baton:proxy_requests_total", result="finished") == 2
    for bad in (failing(500), lambda doc: cut_early, lambda doc: (200, {"choices": []}), lambda doc: (200, []),
                failing(302), failing(204)):
        with Member(bad) as x, Member(good_decode) as d, Proxy([x], [d]) as proxy:
            assert proxy.ask(COMPLETIONS, {"prompt": "a"})[0] == 200
            assert "kv_transfer_params" not in d.asked[0] and proxy.prompts() == [0, 0, 1]


def a_cache_that_is_lost_is_computed_again(rng):
    """409, or 502, of the decode server is the prefill server's fault."""
    for status in (409, 502):
        once = []

        def decode(doc):
            once.append(1)
            return failing(status)(doc) if len(once) == 1 else good_decode(doc)

        with Member(good_prefill) as a, Member(good_prefill) as b, Member(decode) as d, Proxy([a, b], [d]) as proxy:
            assert proxy.good(COMPLETIONS, {"prompt": "a"}) == {"ok": True}
            assert len(a.asked) == len(b.asked) == 1 and len(d.asked) == 2
    with Member(good_prefill) as p, Member(failing(409, "stale")) as d, Proxy([p], [d]) as proxy:
        # it goes on without a cache, and this server has the last word
        status, doc, _ = proxy.ask(COMPLETIONS, {"prompt": "a"})
        assert status == 409 and doc["error"]["message"] == "stale", doc
        assert len(d.asked) == 2 and "kv_transfer_params" not in d.asked[1]


def errors_have_names(rng):
    with Member(failing(429, "full")) as full, Member(failing(422, "other ids")) as d, \
            Member(failing(503, "why")) as x:
        with Proxy([full], [d]) as proxy:
            status, doc, headers = proxy.ask(COMPLETIONS, {"prompt": "a"})
            assert status == 429 and "full" in doc["error"]["message"] and headers["Retry-After"], doc
            assert not d.asked and url(full) in doc["error"]["message"]
        with Proxy([], [d]) as proxy:
            assert proxy.ask(COMPLETIONS, {"prompt": "a"})[:2] == failing(422, "other ids")(None)
            for body in (b"{", b"[]", b"", b'{"a":"\xff"}', b"[" * 9999):
                assert proxy.ask(COMPLETIONS, body)[0] == 400, body
            c = proxy.connect()
            c.putrequest("POST", COMPLETIONS)
            c.putheader("Content-Length", "9000000")
            c.endheaders()
            assert c.getresponse().status == 413
            c.close()
            assert proxy.ask("/v1/nothing", {})[0] == 404 and proxy.ask(COMPLETIONS)[0] == 405
            proxy.wait_open(0)
            assert proxy.metric("baton:proxy_requests_total", result="refused") == 8
        with Proxy([], [x]) as proxy:
            status, doc, _ = proxy.ask(COMPLETIONS, {"prompt": "a"})
            assert status == 503 and url(x) in doc["error"]["message"] and "why" in doc["error"]["message"], doc
            assert proxy.ask("/tokenize", {"prompt": "a"})[0] == 503
    dead = Member(good_decode)
    dead.close()
    with Proxy([], [dead]) as proxy:
        status, doc, _ = proxy.ask(COMPLETIONS, {"prompt": "a"})
        assert status == 503 and doc["error"]["code"] == "no_member", doc
        assert proxy.ask("/health")[0] == 503 and proxy.up(dead) == 0


def never_twice(rng):
    """After the first event the client has got output: it is not tried again, and it is told."""
    begun = b'data: {"a": 1}\n\n'
    with Member(lambda doc: [begun, None, b"data: {", b""]) as x, Proxy([], [x]) as proxy:
        c = proxy.connect()
        c.request("POST", COMPLETIONS, json.dumps({"prompt": "a", "stream": True}))
        r = c.getresponse()
        assert r.status == 200 and r.readline() + r.readline() == begun
        x.go.set()
        error = json.loads(r.read()[6:])["error"]
        assert error["code"] == "upstream_lost" and url(x) in error["message"] and len(x.asked) == 1, error
        c.close()
        proxy.wait_open(0)
        assert proxy.metric("baton:proxy_requests_total", result="failed") == 1
        assert proxy.metric("baton:proxy_member_failures_total", url=url(x)) == 1


def streams_that_only_stop(rng):
    """Ended in good order, but inside an event or without [DONE]: the client is told."""
    begun = b'data: {"a": 1}\n\n'
    for rest in ([b"data: {"], []):
        with Member(lambda doc: [begun, *rest]) as x, Proxy([], [x]) as proxy:
            status, text, _ = proxy.ask(COMPLETIONS, {"prompt": "a", "stream": True})
            assert status == 200 and text.startswith(begun.decode()) and "upstream_lost" in text, text
            assert "[DONE]" not in text and text.count("data: ") == 2, text
            proxy.wait_open(0)
            assert proxy.metric("baton:proxy_requests_total", result="failed") == 1


    with Member(lambda doc: []) as x, Proxy([], [x]) as proxy:
        status, error, _ = proxy.ask(COMPLETIONS, {"prompt": "a", "stream": True})
        assert status == 502 and error["error"]["code"] == "upstream_lost", error


def clients_name_no_peer(rng):
    """Where a cache is pulled from is the proxy's to say, wherever a server would look for it."""
    theirs = {"kv_transfer_params": {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 9}}
    with Member(good_decode) as x, Proxy([], [x]) as proxy:
        assert proxy.ask(COMPLETIONS, {"prompt": "a", **theirs, "vllm_xargs": {"a": 1, **theirs},
                                       "sampling_params": {"extra_args": dict(theirs)}})[0] == 200
        assert "kv_transfer_params" not in json.dumps(x.asked) and x.asked[0]["vllm_xargs"] == {"a": 1}, x.asked
        assert proxy.ask(COMPLETIONS, {"prompt": "a"}, {"Authorization": "Bearer a\x01"})[0] == 400
        assert len(x.asked) == 1


def long_events_pass_whole(rng):
    """Events longer than any buffer, in pieces of any size, with either kind of line end."""
    end = rng.choice([b"\n\n", b"\r\n\r\n"])
    text = b"".join(b"data: " + (b"[DONE]" if n == 6 else bytes(rng.randrange(97, 123) for _ in range(n))) + end
                    for n in (1, 70000, 5, 16384, 3, 6))
    parts, at = [], 0
    while at < len(text):
        n = rng.choice([1, 2, 1000, 20000])
        parts.append(text[at:at + n])
        at += n
    with Member(lambda doc: parts) as x, Proxy([], [x]) as proxy:
        status, got, _ = proxy.ask(COMPLETIONS, {"prompt": "a", "stream": True})
        assert status == 200 and got.encode() == text, (len(got), len(text))


def hung_members(rng):
    """One that takes connections and says nothing: given up after some health checks, before its first event and
    in the middle of a stream; then nothing goes there."""
    hang = threading.Event()

    def silent(doc):
        if not doc.get("stream"):
            hang.wait(PATIENCE)
        return [b'data: {"a": 1}\n\n', None]

    with Member(silent) as x, Member(good_decode) as d, Proxy([], [x, d], "--policy", "round-robin") as proxy:
        streams = [proxy.connect() for _ in range(2)]
        for c in streams:
            c.request("POST", COMPLETIONS, json.dumps({"prompt": "a", "stream": True}))
        answers = [c.getresponse() for c in streams]
        got = []
        threads = [threading.Thread(target=lambda: got.append(proxy.good(COMPLETIONS, {"prompt": "a"})))
                   for _ in range(2)]
        for t in threads:
            t.start()
        proxy.wait("one waits", lambda: len(got) == 1 and len(x.asked) == 2)
        x.server.shutdown()  # the socket still takes connections, as a stopped process does
        for t in threads:
            t.join()
        assert got == [{"ok": True}] * 2 and len(d.asked) == 3
        texts = sorted(a.read() for a in answers)
        assert b'"upstream_lost"' in texts[0] and texts[1].endswith(b"[DONE]\n\n"), texts
        assert proxy.up(x) == 0 and proxy.up(d) == 1
        hang.set()
        threading.Thread(target=x.server.serve_forever, args=(0.02,), daemon=True).start()
        proxy.wait("it is back", lambda: proxy.up(x) == 1)


def clients_cancel(rng):
    """A client that leaves before an answer is there takes its request along, at either side."""
    for waiting in ("prefill", "decode"):
        stop = threading.Event()

        def wait(doc):
            stop.wait(PATIENCE)
            return [b"data: {}\n\n"] * 2000

        with Member(wait if waiting == "prefill" else good_prefill) as p, Member(wait) as d, Proxy([p], [d]) as proxy:
            s = slow_socket(proxy, COMPLETIONS, {"prompt": "a", "stream": True})
            x = p if waiting == "prefill" else d
            proxy.wait("it is there", lambda: len(x.asked) == 1)
            s.close()
            proxy.wait_open(0)
            stop.set()
            proxy.wait("the connection is closed", x.left.is_set)
            assert proxy.metric("baton:proxy_requests_total", result="cancelled") == 1
            assert proxy.metric("baton:proxy_member_active", url=url(x)) == 0


# ---- life -------------------------------------------------------------------------------------------------

def draining(rng):
    """SIGTERM: what runs is finished, nothing new is taken. A second one cuts off."""
    slow = lambda doc: [b'data: {"a": 1}\n\n', None, b"data: [DONE]\n\n"]
    for hurry in (False, True):
        with Member(slow) as d:
            proxy = Proxy([], [d])
            c = proxy.connect()
            c.request("POST", COMPLETIONS, json.dumps({"prompt": "a", "stream": True}))
            r = c.getresponse()
            assert r.readline() == b'data: {"a": 1}\n'
            proxy.process.send_signal(signal.SIGTERM)

            def refused():
                try:
                    proxy.connect().connect()
                except OSError:
                    return True

            proxy.wait("new connections are refused", refused)
            assert proxy.process.poll() is None
            if hurry:
                proxy.process.send_signal(signal.SIGTERM)
            else:
                d.go.set()
                assert r.read() == b"\ndata: [DONE]\n\n"
            out, err = proxy.process.communicate(timeout=PATIENCE)
            assert proxy.process.returncode == 0, err
            assert json.loads(out)["requests"]["cancelled" if hurry else "finished"] == 1, out
            c.close()


def members_from_a_file(rng):
    """SIGHUP: who is new is asked, who is gone finishes what it has; a bad file changes nothing."""
    slow = lambda doc: [b'data: {"a": 1}\n\n', None, b"data: [DONE]\n\n"] if doc.get("stream") else (200, {"who": "a"})
    with tempfile.NamedTemporaryFile("w") as f, Member(slow) as a, Member(lambda doc: (200, {"who": "b"})) as b:
        def write(text):
            f.seek(0)
            f.truncate()
            f.write(text)
            f.flush()

        def hangup():
            proxy.process.send_signal(signal.SIGHUP)
            line = proxy.process.stderr.readline()
            while "again" not in line and "stay" not in line:
                assert line
                line = proxy.process.stderr.readline()
            return line

        write(json.dumps({"decode": [url(a)], "min_remote_tokens": 3, "policy": "round-robin"}))
        with Proxy([], [], "--config", f.name) as proxy:
            assert proxy.good(COMPLETIONS, {"prompt": "a"}) == {"who": "a"}
            c = proxy.connect()
            c.request("POST", COMPLETIONS, json.dumps({"prompt": "a", "stream": True}))
            r = c.getresponse()
            write(json.dumps({"decode": [url(b)]}))
            assert "again" in hangup()
            assert proxy.good(COMPLETIONS, {"prompt": "a"}) == {"who": "b"}  # at once
            for bad in ("", "{", '{"decode": []}', '{"decode": ["ftp://x"]}', '{"decoder": []}'):
                write(bad)
                assert "stay as they were" in hangup(), bad
                assert proxy.good(COMPLETIONS, {"prompt": "a"}) == {"who": "b"}
            a.go.set()
            assert r.read() == b'data: {"a": 1}\n\ndata: [DONE]\n\n'
            c.close()


def the_page_and_its_document(rng):
    """The same page as a server's; what it reads."""
    with Member(good_prefill) as p, Member(good_decode) as d, Proxy([p], [d], "--min-remote-tokens", "9") as proxy:
        status, page, headers = proxy.ask("/")
        assert status == 200 and "default-src 'none'" in headers["Content-Security-Policy"]
        assert headers["Content-Type"] == "text/html; charset=utf-8" and 'id="members"' in page
        proxy.good(COMPLETIONS, {"prompt": [1] * 9})
        proxy.wait_open(0)
        doc = proxy.good("/baton/v1/status")
        one = {"up": True, "leaving": False, "active": 0, "requests": 1, "failures": 0}
        assert doc["members"] == [dict(one, role="prefill", url=url(p)), dict(one, role="decode", url=url(d))], doc
        assert doc["schema"] == 1 and doc["role"] == "proxy" and doc["min_remote_tokens"] == 9, doc
        assert doc["requests"].pop("open") in (1, 2), doc  # the look before may not be over yet
        assert doc["requests"] == {"finished": 1, "refused": 0, "failed": 0, "cancelled": 0}, doc
        assert doc["prompts"] == {"remote": 1, "local": 0, "fallback": 0} and doc["retries"] == 0, doc
        browser = shutil.which("chromium") or shutil.which("chromium-browser")
        if browser:
            with tempfile.TemporaryDirectory() as home:
                r = subprocess.run([browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={home}",
                                    "--virtual-time-budget=3000", "--dump-dom", url(proxy) + "/"],
                                   capture_output=True, text=True, timeout=PATIENCE)
            assert "proxy of 1 prefill and 1 decode servers" in r.stdout, (r.stdout[-3000:], r.stderr[-1000:])
            assert f"decode {url(d)}" in r.stdout and "finished 1," in r.stdout


def bad_starts(rng):
    """Usage is 2, the environment 3, and each says what is wrong."""
    def start(*args, **env):
        r = subprocess.run([BATON, "proxy", *args], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                           timeout=PATIENCE, env=dict(os.environ, **env))
        return r.returncode, r.stderr

    d = "http://127.0.0.1:1"
    for code, words, args in [(2, "--decode", []), (2, "--decode", ["--prefill", d]), (2, "ftp", ["--decode", "ftp://x"]),
                              (2, "is not http://HOST:PORT", ["--decode", "http://a/b"]),
                              (2, "is not http://HOST:PORT", ["--decode", "http://u@a"]),
                              (2, "is not http://HOST:PORT", ["--decode", d, "--prefill", d, "http://"]),
                              (2, "--policy", ["--decode", d, "--policy", "best"]), (2, "word", ["word"]),
                              (2, "--host", ["--decode", d, "--host", "nowhere"]),
                              (3, "nofile", ["--decode", d, "--config", "nofile"])]:
        status, err = start(*args)
        assert status == code and words in err, (args, status, err)
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "libcurl.so.4"), "w", encoding="ascii") as f:
            f.write("no library")
        status, err = start("--decode", d, LD_LIBRARY_PATH=folder)
        assert status == 3 and "libcurl" in err, (status, err)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        status, err = start("--decode", d, "--port", str(s.getsockname()[1]))
        assert status == 3 and str(s.getsockname()[1]) in err, (status, err)


if __name__ == "__main__":
    main([same_tokens_as_one_server, the_contract_word_by_word, short_prompts_stay_on_the_decode_server, policies,
          what_fails_is_tried_elsewhere, a_cache_that_is_lost_is_computed_again, errors_have_names, never_twice,
          streams_that_only_stop, clients_name_no_peer, long_events_pass_whole, hung_members, clients_cancel, draining, members_from_a_file,
          the_page_and_its_document, bad_starts])
