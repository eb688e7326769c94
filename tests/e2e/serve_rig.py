# SPDX-License-Identifier: Apache-2.0
"""A server under test and its clients; shared by the serve_*.py tests."""
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

ROOT = os.environ["BATON_SOURCE_ROOT"]
BATON = os.environ["BATON_BINARY"]
PATIENCE = 600  # seconds until something that does not come counts as a hang


def model(name):
    return os.path.join(ROOT, "models", name)


class Server:
    """`baton serve` on a free port. Closing it asserts that it ended well and left nothing."""

    def __init__(self, name="gemma3-tiny", *args):
        self.start([BATON, "serve", "-m", model(name), "--port", "0", "--json", *args])

    def start(self, command):
        self.process = subprocess.Popen(command, text=True, stdin=subprocess.DEVNULL,
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        line = ""
        while "serving" not in line:
            line = self.process.stderr.readline()
            assert line, f"the server ended: exit {self.process.wait()}"
        self.host, port = re.search(r"://([0-9.]+):(\d+)", line).groups()
        self.port = int(port)

    def connect(self):
        return http.client.HTTPConnection(self.host, self.port, timeout=PATIENCE)

    def ask(self, path, body=None, headers=None, connection=None):
        """(status, document or text, headers); body: a document, bytes, or None for GET."""
        c = connection or self.connect()
        data = body if body is None or isinstance(body, bytes) else json.dumps(body)
        c.request("GET" if body is None else "POST", path, data, headers or {})
        r = c.getresponse()
        text = r.read()
        if not connection:
            c.close()
        if (r.getheader("Content-Type") or "").startswith("application/json"):
            return r.status, json.loads(text), r.headers
        return r.status, text.decode(), r.headers

    def good(self, path, body=None):
        status, doc, _ = self.ask(path, body)
        assert status == 200, (status, doc)
        return doc

    def stream(self, path, body):
        """The documents of a stream, which must end with [DONE] or an error document."""
        c = self.connect()
        c.request("POST", path, json.dumps(dict(body, stream=True)))
        r = c.getresponse()
        assert r.status == 200, (r.status, r.read())
        assert r.getheader("Content-Type").startswith("text/event-stream")
        events = [e for e in r.read().decode().split("\n\n") if e]
        c.close()
        assert all(e.startswith("data: ") for e in events), events
        assert events[-1] == "data: [DONE]", events[-1]
        return [json.loads(e[6:]) for e in events[:-1]]

    def metric(self, name, **labels):
        for line in self.good("/metrics").splitlines():
            m = re.match(r"([\w:]+)(?:\{(.*)\})? (\S+)$", line)
            if m and m[1] == name and all(f'{k}="{v}"' in (m[2] or "") for k, v in labels.items()):
                return float(m[3])
        raise AssertionError(f"no metric {name} {labels}")

    def wait(self, what, condition):
        end = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < end, f"waited in vain: {what}"
            time.sleep(0.02)

    def wait_idle(self):
        self.wait("nothing runs", lambda: self.metric("vllm:num_requests_running") == 0
                  and self.metric("vllm:num_requests_waiting") == 0
                  and self.metric("baton:kv_blocks_used") == 0
                  and self.metric("baton:http_requests_open") == 1)  # this one

    def close(self, status=0):
        self.process.send_signal(signal.SIGTERM)
        out, err = self.process.communicate(timeout=PATIENCE)
        assert self.process.returncode == status, (self.process.returncode, err[-2000:])
        doc = json.loads(out)
        assert doc["cleanup"] == {"lanes": 0, "blocks": 0, "tickets": 0}, doc
        return doc

    def __enter__(self):
        return self

    def __exit__(self, kind, value, tb):
        if kind is None:
            self.close()
        elif self.process.poll() is None:
            self.process.kill()
            print(self.process.communicate()[1][-3000:], file=sys.stderr)


def native(name, ids, n, *flags):
    """The greedy tokens of `baton run` for these ids."""
    r = subprocess.run([BATON, "run", "-m", model(name), "--mode", "native", "--json", "-n", str(n),
                        "--ids", ",".join(map(str, ids)), *flags],
                       stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
    return json.loads(r.stdout)


def slow_socket(server, path, body):
    """Sends a request and reads nothing; the kernel may keep little for it."""
    s = socket.socket()
    s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    s.settimeout(PATIENCE)
    s.connect((server.host, server.port))
    data = json.dumps(body).encode()
    s.sendall(b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s"
              % (path.encode(), len(data), data))
    return s
