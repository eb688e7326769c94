# SPDX-License-Identifier: Apache-2.0
"""transformers as a producer and a consumer.

It computes in float32 from the checkpoint's own bfloat16 weights. Only the cache is rounded to
bfloat16, once, when it leaves: baton's cpu device keeps its cache so. Gemma's embedding scale is
then not rounded either, as in baton.
"""
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from .backend import Backend
from .layout import Geometry


def to_bits(x):
    """float32 [1, heads, n, dim] -> the bits of bfloat16."""
    return x[0].to(torch.bfloat16).contiguous().cpu().view(torch.int16).numpy().view("uint16")


class TorchBackend(Backend):
    def __init__(self, folder, device):
        self.name, self.device = f"torch-{device}", device
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32,
                                                          attn_implementation="eager").to(device)
        self.model.eval()
        c = self.config = self.model.config.get_text_config()
        kinds = getattr(c, "layer_types", None) or ["full_attention"] * c.num_hidden_layers
        local = tuple(k == "sliding_attention" for k in kinds)
        dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        self.vocab = c.vocab_size
        self.geometry = Geometry(c.num_hidden_layers, c.num_key_value_heads, dim,
                                 c.sliding_window if any(local) else 0, local)

    @torch.no_grad()
    def prefill(self, ids, give):
        out = self.model(torch.tensor([ids], device=self.device), use_cache=True, logits_to_keep=1)
        for l, layer in enumerate(out.past_key_values.layers):
            keep = len(ids) - self.geometry.first(l, len(ids))
            give(l, to_bits(layer.keys[:, :, -keep:]), to_bits(layer.values[:, :, -keep:]))
        return out.logits[0, -1].float().cpu().numpy()

    def load(self, ids, layers):
        cache = DynamicCache(config=self.config)
        for layer, kv in zip(cache.layers, layers):
            k, v = (torch.from_numpy(x.view("int16").copy()).view(torch.bfloat16)[None].float()
                    .to(self.device) for x in kv)
            layer.update(k, v)
            if layer.is_sliding:  # it keeps the absolute position apart
                layer.cumulative_length = len(ids)
        return [cache, len(ids)]

    @torch.no_grad()
    def step(self, state, token):
        cache, position = state
        at = torch.tensor([[position]], device=self.device)
        out = self.model(torch.tensor([[token]], device=self.device), past_key_values=cache,
                         position_ids=at)
        state[1] += 1
        return out.logits[0, -1].float().cpu().numpy()
