"""A greedy loop as short as gpt-fast's: static cache, position on the device, one compiled function per step.

It shows what is left for a model of Llama's kind if nothing but greedy search of one prompt without padding is asked
for: no processors, no stopping, no attention mask. The idea is that of pytorch-labs/gpt-fast; the weights are those of
the model in Transformers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fastgen
from benchmarks.backends.base import Backend, Job, Unsupported


class CompiledLoop(Backend):
    """Greedy search by Llama."""

    compiles = True
    _step: Any = None

    def setup(self, job: Job) -> None:
        super().setup(job)
        options = job.workload.options
        if job.model.config.model_type != "llama":
            raise Unsupported(f"the loop is written for Llama, not for {type(job.model).__name__}")
        if set(options) - {"do_sample"} or options.get("do_sample"):
            raise Unsupported("the loop is greedy and knows no options")
        if not bool(job.inputs["attention_mask"].all()):
            raise Unsupported("the loop knows no padding")
        config, device = job.model.config, job.model.device
        rows, prompt = job.inputs["input_ids"].shape
        self._capacity = prompt + job.workload.new_tokens
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        size = (rows, config.num_key_value_heads, self._capacity, head)
        self._cache = [
            tuple(torch.zeros(size, dtype=job.model.dtype, device=device) for _ in range(2))
            for _ in range(config.num_hidden_layers)
        ]
        self._positions = torch.arange(self._capacity, device=device)
        ends = job.model.generation_config.eos_token_id
        self._ends = torch.tensor(ends if isinstance(ends, list) else [ends], device=device)
        # Without a GPU there is nothing to be had from graphs, and compiling is not what tests look at.
        self._step = self._next
        if device.type == "cuda":
            # A graph copies its inputs in, unless they are known to stay where they are.
            for tensor in (self._positions, *(part for layer in self._cache for part in layer)):
                torch._dynamo.mark_static_address(tensor)
            self._step = torch.compile(self._next, mode="reduce-overhead", fullgraph=True)

    def warm_up(self) -> None:
        for _ in range(2):  # compiled by the first, captured by the second
            self.run(min(4, self.job.workload.new_tokens))

    def run(self, new_tokens: int) -> Tensor:
        tokens = self.job.inputs["input_ids"]
        length = tokens.shape[1]
        with torch.no_grad(), fastgen.disabled():
            found = [self._next(tokens, self._positions[:length])]
            position = self._positions[length : length + 1].clone()
            for _ in range(new_tokens - 1):
                torch.compiler.cudagraph_mark_step_begin()
                # The next replay writes to where the token of this one lies.
                found.append(self._step(found[-1], position).clone())
                position += 1
        return torch.cat([tokens, *found], dim=1)

    def _next(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """The tokens [rows, 1] that follow `tokens` [rows, T], which are at `positions` [T]."""
        model = self.job.model
        hidden = model.model.embed_tokens(tokens)
        cos, sin = (part.unsqueeze(1) for part in model.model.rotary_emb(hidden, positions.unsqueeze(0)))
        seen = self._positions <= positions.unsqueeze(1)
        for layer, (keys, values) in zip(model.model.layers, self._cache, strict=True):
            attention, normed = layer.self_attn, layer.input_layernorm(hidden)
            query, key, value = (
                project(normed).unflatten(2, (-1, attention.head_dim)).transpose(1, 2)
                for project in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            keys.index_copy_(2, positions, _rotate(key, cos, sin))
            values.index_copy_(2, positions, value)
            context = F.scaled_dot_product_attention(
                _rotate(query, cos, sin), keys, values, attn_mask=seen, enable_gqa=True
            )
            hidden = hidden + attention.o_proj(context.transpose(1, 2).flatten(2))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        scores = model.lm_head(model.model.norm(hidden[:, -1]))
        # No sequence ends early.
        return scores.index_fill(1, self._ends, float("-inf")).argmax(dim=1, keepdim=True)

    def close(self) -> None:
        if self._step is not None:
            self._step, self._cache = None, []
            torch.compiler.reset()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions, in halves as Llama has them in Transformers."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
