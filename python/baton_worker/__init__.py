# SPDX-License-Identifier: Apache-2.0
"""A second implementation of baton's wire format (docs/wire.md), in Python.

    wire.py       frames, their checks and tags; one connection
    layout.py     what a cache looks like; bodies of frames; digests
    identity.py   who a model is
    backend.py    what computes: the interface, for owners of a card (docs/bring-up.md)
    torch_backend.py   ... and the one of transformers
    producer.py   prefill for who asks
    consumer.py   take an offered cache and decode
    __main__.py   the command line

It is the reference for other languages and the bridge for frameworks: simple and checked rather
than fast, one request at a time.
"""
