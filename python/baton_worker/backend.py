# SPDX-License-Identifier: Apache-2.0
"""What computes, behind the protocol. docs/bring-up.md goes through it for the owner of a card.

Arrays of the cache are numpy uint16: the bits of bfloat16, [kv_heads, positions, head_dim], keys
after rotation (half order: dimension i turns with i + head_dim / 2). A row of logits is numpy
float32 [vocab].
"""
import abc


class Backend(abc.ABC):
    """One model on one device. Calls come from one thread at a time."""

    name = "?"
    vocab = 0
    geometry = None  # layout.Geometry

    @abc.abstractmethod
    def prefill(self, ids, give):
        """Compute the prompt. Call give(layer, k, v) once a layer, in any order and as early as
        they are there, with exactly the positions that the layer retains:
        [geometry.first(layer, len(ids)), len(ids)). Return the row of logits after the last id."""

    @abc.abstractmethod
    def load(self, ids, layers):
        """A cache that came: layers[l] = (k, v) as `give` has them. Return a state for `step`."""

    @abc.abstractmethod
    def step(self, state, token):
        """Feed one token at the state's next position; return the row of logits after it."""


def open_backend(name, folder):
    """By the name on the command line."""
    if name in ("torch-cpu", "torch-cuda"):
        from .torch_backend import TorchBackend
        return TorchBackend(folder, name.split("-")[1])
    raise ValueError(f"no back-end '{name}'; there are: torch-cpu, torch-cuda")
