# SPDX-License-Identifier: Apache-2.0
"""python -m baton_worker: one role of a route of baton's, in Python.

It listens; baton connects. As producer (baton run --prefill remote:HOST:PORT) it prefills what it
is asked for. As consumer (--decode remote:HOST:PORT) it takes the cache, decodes, and prints one
JSON line a request on stdout. `baton model hash -m FOLDER --json` makes the identity file.
"""
import argparse
import json
import sys
import threading

from . import wire
from .backend import open_backend
from .consumer import Consumer, decode
from .identity import read_identity
from .producer import Producer


def arguments():
    p = argparse.ArgumentParser(prog="baton_worker", description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("-m", "--model", required=True, help="Hugging Face folder")
    p.add_argument("--identity", required=True, help="what `baton model hash --json` printed of it")
    p.add_argument("--role", choices=("prefill", "decode"), required=True)
    p.add_argument("--backend", default="torch-cpu", help="torch-cpu (default) or torch-cuda")
    p.add_argument("--listen", default="127.0.0.1:0", help="HOST:PORT; port 0 picks one")
    p.add_argument("--kv-key-file", help="the secret that both ends have; needed off loopback")
    p.add_argument("--tag-payload", action="store_true", help="the payload is under the tags too")
    p.add_argument("--threads", type=int, default=0, help="of torch")
    p.add_argument("--connections", type=int, default=0, help="end after so many; 0 = never")
    p.add_argument("-n", type=int, default=0, help="decode: most tokens; 0 = as the offer says")
    p.add_argument("--force", default="", help="decode: teacher forcing, ids with commas")
    p.add_argument("--ignore-eos", action="store_true")
    return p.parse_args()


def log(text):
    print(f"baton_worker: {text}", file=sys.stderr, flush=True)


def end_tokens(backend):
    config = getattr(getattr(backend, "model", None), "generation_config", None)
    ids = getattr(config, "eos_token_id", None) or ()
    return (ids,) if isinstance(ids, int) else tuple(ids)


def print_decoded(args, backend, turn):
    force = tuple(map(int, args.force.split(","))) if args.force else ()
    stop = () if args.ignore_eos else end_tokens(backend)

    def deliver(offer, layers, row):
        n = min(args.n or offer.max_new, offer.max_new or args.n)
        with turn:
            out = list(decode(backend, offer, layers, row, n, force, stop))
        ids, argmax, margins = map(list, zip(*out)) if out else ([], [], [])
        print(json.dumps({"prompt_ids": offer.ids, "ids": ids, "argmax": argmax,
                          "margins": margins}), flush=True)
    return deliver


def serve(sock, args, backend, identity, key, turn):
    """One connection. The back-end takes one request at a time, whoever it is from."""
    role = wire.PRODUCER if args.role == "prefill" else wire.CONSUMER
    takes = wire.TAKES_ASK if role == wire.PRODUCER else 0
    try:
        conn = wire.Connection(sock, role, key, 2 if args.tag_payload else 1, takes).open()
        try:
            if role == wire.PRODUCER:
                Producer(conn, backend, identity, turn, log).serve()
            else:
                Consumer(conn, backend, identity, log).serve(print_decoded(args, backend, turn))
        except wire.WireError as e:
            conn.close(e)
            raise
        except Exception as e:
            conn.close(wire.WireError(wire.INTERNAL, f"{backend.name}: {e}"))
            raise
    except wire.WireError as e:
        log(f"connection ended: {e}")


def main():
    args = arguments()
    try:
        key = wire.read_key(args.kv_key_file) if args.kv_key_file else None
        identity = read_identity(args.identity, args.model)
        backend = open_backend(args.backend, args.model)
        if args.threads:
            import torch
            torch.set_num_threads(args.threads)
        listener = wire.listen(args.listen, key)
    except (wire.WireError, ValueError, OSError, KeyError) as e:
        log(str(e))
        return 2
    host, port = listener.getsockname()[:2]
    log(f"listens on {host}:{port}")
    turn, threads = threading.Lock(), []
    while not args.connections or len(threads) < args.connections:
        sock, _ = listener.accept()
        threads.append(threading.Thread(target=serve, daemon=not args.connections,
                                        args=(sock, args, backend, identity, key, turn)))
        threads[-1].start()
        if not args.connections:
            threads = [t for t in threads if t.is_alive()]
    for t in threads:
        t.join()
    return 0


sys.exit(main())
