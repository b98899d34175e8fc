"""ProphetNet as its paper defines it: one sentence, one position, one head at a time, everything anew for each token.

It works on the names of the authors' checkpoints and shares no code with the model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class Reference:
    """
    Attributes:
        state: {name in the authors' checkpoints: weight}.
        args: of the model.
        pad: the token that stands for none.
    """

    state: dict[str, Tensor]
    args: Any
    pad: int

    def linear(self, name: str, x: Tensor) -> Tensor:
        return self.state[f"{name}.weight"] @ x + self.state[f"{name}.bias"]

    def norm(self, name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape, self.state[f"{name}.weight"], self.state[f"{name}.bias"])

    def feed_forward(self, name: str, x: Tensor) -> Tensor:
        activation = {"relu": F.relu, "gelu": F.gelu}[self.args.activation_fn]
        y = self.linear(f"{name}.fc2", activation(self.linear(f"{name}.fc1", x)))
        return self.norm(f"{name}.final_layer_norm", x + y)

    def attend(self, name: str, x: Tensor, memory: Sequence[Tensor], heads: int) -> tuple[Tensor, Tensor]:
        """Attention of one position to all of `memory`, and its weights, on average over the heads."""
        q = self.linear(f"{name}.q_proj", x).chunk(heads)
        k = [self.linear(f"{name}.k_proj", y).chunk(heads) for y in memory]
        v = [self.linear(f"{name}.v_proj", y).chunk(heads) for y in memory]
        context, weights = [], []
        for head in range(heads):
            scores = torch.stack([q[head] @ key[head] for key in k]) / math.sqrt(len(q[head]))
            weights.append(scores.softmax(0))
            context.append(sum(w * value[head] for w, value in zip(weights[-1], v, strict=True)))
        return self.linear(f"{name}.out_proj", torch.cat(context)), torch.stack(weights).mean(0)

    def encode(self, tokens: Sequence[int]) -> list[Tensor]:
        table, positions = self.state["encoder.embed_tokens.weight"], self.state["encoder.embed_positions.weight"]
        x = [
            self.norm("encoder.emb_layer_norm", table[token] + positions[self.pad + 1 + place])
            for place, token in enumerate(tokens)
        ]
        for layer in range(self.args.encoder_layers):
            name = f"encoder.layers.{layer}"
            attended = [self.attend(f"{name}.self_attn", y, x, self.args.encoder_attention_heads)[0] for y in x]
            x = [self.norm(f"{name}.self_attn_layer_norm", y + a) for y, a in zip(x, attended, strict=True)]
            x = [self.feed_forward(name, y) for y in x]
        return x

    def decode(self, source: Sequence[Tensor], tokens: Sequence[int]) -> Tensor:
        """The scores that each predicting stream gives behind each of the tokens, [streams, T, vocabulary]."""
        return self.decode_and_look(source, tokens)[0]

    def decode_and_look(self, source: Sequence[Tensor], tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """As `decode`; and how much the stream of the next token attends to the source in the last layer, [T, S]."""
        table, positions = self.state["decoder.embed_tokens.weight"], self.state["decoder.embed_positions.weight"]
        ngram = self.state["decoder.ngram_input_embed.weight"]
        count, length = len(ngram), len(tokens)
        # The first stream, of the next token, has the last of the embeddings.
        start = [[table[token] + positions[self.pad + 1 + i] for i, token in enumerate(tokens)]]
        start += [[ngram[s - 1] + positions[self.pad + 2 + i] for i in range(length)] for s in range(count)]
        streams = [[self.norm("decoder.emb_layer_norm", x) for x in stream] for stream in start]
        for layer in range(self.args.decoder_layers):
            name = f"decoder.layers.{layer}"
            attended = self.attend_streams(f"{name}.ngram_self_attn", streams)
            weights: list[list[Tensor]] = [[] for _ in streams]
            for s, stream in enumerate(streams):
                for i, x in enumerate(stream):
                    y = self.norm(f"{name}.self_attn_layer_norm", x + attended[s][i])
                    z, weight = self.attend(f"{name}.encoder_attn", y, source, self.args.decoder_attention_heads)
                    weights[s].append(weight)
                    streams[s][i] = self.feed_forward(name, self.norm(f"{name}.encoder_attn_layer_norm", y + z))
        output = self.state.get("decoder.embed_out", table)
        scores = torch.stack([torch.stack([output @ x for x in stream]) for stream in streams[1:]])
        return scores, torch.stack(weights[1])

    def attend_streams(self, name: str, streams: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        weight, bias = self.state[f"{name}.in_proj_weight"], self.state[f"{name}.in_proj_bias"]
        projected = [[(weight @ x + bias).chunk(3) for x in stream] for stream in streams]
        attended: list[list[Tensor]] = []
        for s, stream in enumerate(streams):
            attended.append([])
            for i, x in enumerate(stream):
                # What is visible: K, V and how far back it is from the token that this position stands for.
                if s == 0:
                    seen = [(*projected[0][j][1:], i - j) for j in range(i + 1)]
                else:
                    seen = [(*projected[0][j][1:], i + 1 - j) for j in range(max(i - (s - 1), 0) + 1)]
                    seen.append((*projected[s][i][1:], 0))
                attended[-1].append(self.attend_related(name, x, projected[s][i][0], seen))
        return attended

    def attend_related(self, name: str, x: Tensor, q: Tensor, seen: Sequence[tuple[Tensor, Tensor, int]]) -> Tensor:
        heads = self.args.decoder_attention_heads
        size = len(q) // heads
        related = self.linear(f"{name}.relative_linear", x).view(self.args.num_buckets, heads)
        context = []
        for head in range(heads):
            part = slice(head * size, (head + 1) * size)
            scores = [q[part] @ k[part] / math.sqrt(size) + related[self.bucket(far), head] for k, _, far in seen]
            weights = torch.stack(scores).softmax(0)
            context.append(sum(w * v[part] for w, (_, v, _) in zip(weights, seen, strict=True)))
        return self.linear(f"{name}.out_proj", torch.cat(context))

    def bucket(self, distance: int) -> int:
        count, exact = self.args.num_buckets, self.args.num_buckets // 2
        if distance < exact:
            return distance
        octaves = math.log(distance / exact) / math.log(self.args.relative_max_distance / exact)
        return min(exact + int(octaves * (count - exact)), count - 1)
