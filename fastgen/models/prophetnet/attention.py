"""Self-attention of the main stream and of the predicting streams (Qi et al. 2020, section 3.2).

Position i of the main stream attends to the main stream up to i. Position i of the predicting stream s = 0, 1, ...
predicts the token at i + 1. It attends to the main stream up to i - s, and to itself, with a K and V of its own that no
other position sees. All streams therefore share the main stream's K and V, with one additional column for themselves;
only the main stream's K and V are cached.

Each score has a term that depends on the query and on the distance of the key. Distances are bucketed: exactly for the
first half of the buckets, then logarithmically up to a maximal distance. Between the main stream and a predicting
stream the distance is one more, because that stream stands for the next token.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from fairseq.incremental_decoding_utils import FairseqIncrementalState
from fairseq.modules import FairseqDropout
from torch import Tensor, nn

from fastgen.models.prophetnet.pretrained import store_as


class Relations(NamedTuple):
    """The relations of T new positions of each stream to the S positions of the main stream, and, last, to themselves.

    Attributes:
        buckets: [streams, T, S + 1], int64; of the distance.
        mask: [streams, T, S + 1]; 0 where a position may attend, -inf elsewhere.
    """

    buckets: Tensor
    mask: Tensor


def relate(predictions: int, new: int, length: int, num_buckets: int, max_distance: int, like: Tensor) -> Relations:
    """Returns the relations of the last `new` of `length` positions, in the main and `predictions` predicting streams.

    The mask has the dtype of `like`, and both are on its device.
    """
    keys = torch.arange(length, device=like.device)
    distance = keys[length - new :, None] - keys
    table = distance_buckets(torch.arange(length + 1, device=like.device), num_buckets, max_distance)
    own_main, own = distance.new_zeros(new, 1, dtype=torch.bool), distance.new_ones(new, 1, dtype=torch.bool)
    buckets, visible = [table[distance.clamp(min=0)]], [torch.cat([distance >= 0, own_main], dim=1)]
    for stream in range(predictions):
        buckets.append(table[(distance + 1).clamp(min=0)])
        # Every position sees the first token.
        visible.append(torch.cat([(distance >= stream) | (keys == 0), own], dim=1))
    hidden = ~torch.stack(visible)
    mask = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, -math.inf)
    return Relations(F.pad(torch.stack(buckets), (0, 1)), mask)  # a position itself is in bucket 0


def distance_buckets(distance: Tensor, num_buckets: int, max_distance: int) -> Tensor:
    """Returns the bucket of each backward distance, int64; a distance below zero counts as zero."""
    exact = num_buckets // 2
    distance = distance.clamp(min=0)
    octaves = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    far = (exact + octaves * (num_buckets - exact)).clamp(max=num_buckets - 1).long()
    return torch.where(distance < exact, distance, far)


class NgramSelfAttention(FairseqIncrementalState, nn.Module):
    """Self-attention of all streams at once.

    Args:
        dim: of the model; a multiple of `heads`.
        dropout: probability of dropping an attention weight in training.
        num_buckets: of the distances.
    """

    def __init__(self, dim: int, heads: int, dropout: float, num_buckets: int) -> None:
        super().__init__()
        if dim % heads:
            raise ValueError(f"a decoder of {dim} dimensions cannot have {heads} heads: choose a divisor")
        self.num_heads = heads
        self.head_dim = dim // heads
        self.num_buckets = num_buckets
        self.scaling = self.head_dim**-0.5
        self.dropout_module = FairseqDropout(dropout, module_name=type(self).__name__)
        self.in_proj = nn.Linear(dim, 3 * dim)
        self.relative_linear = nn.Linear(dim, num_buckets * heads)
        self.out_proj = nn.Linear(dim, dim)
        store_as(self, {"in_proj.weight": "in_proj_weight", "in_proj.bias": "in_proj_bias"})

    def forward(
        self, query: Tensor, attn_mask: Relations, incremental_state: dict[str, Any] | None = None, **unused: Any
    ) -> tuple[Tensor, None]:
        """Computes attention. FairSeq's decoder layer calls it.

        Args:
            query: [streams * T, rows, dim], the streams one after another, the main stream first.
            attn_mask: the relations of these streams and positions.
            incremental_state: FairSeq's state between steps; with it, `query` has the positions after the cached ones.

        Returns:
            As `query`; and no weights.
        """
        x, relations = query, attn_mask
        streams = relations.mask.shape[0]
        q, k, v = (self._heads(part, streams) for part in self.in_proj(x).chunk(3, dim=-1))
        q = q * self.scaling
        keys, values = self.extend(k[:, :, 0], v[:, :, 0], incremental_state)
        of_main = torch.matmul(q.flatten(2, 3), keys.transpose(-1, -2)).unflatten(2, q.shape[2:4])
        of_own = (q * k).sum(dim=-1, keepdim=True)
        scores = torch.cat([of_main, of_own], dim=-1) + self._relative(x, relations.buckets) + relations.mask
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).type_as(scores)
        weights = self.dropout_module(weights)
        context = torch.matmul(weights[..., :-1].flatten(2, 3), values).unflatten(2, q.shape[2:4])
        context = context + weights[..., -1:] * v
        return self.out_proj(context.permute(2, 3, 0, 1, 4).flatten(3).flatten(0, 1)), None

    def _heads(self, x: Tensor, streams: int) -> Tensor:
        """Reshapes [streams * T, rows, dim] -> [rows, heads, streams, T, head dim]."""
        return x.unflatten(0, (streams, -1)).unflatten(3, (self.num_heads, -1)).permute(2, 3, 0, 1, 4)

    def _relative(self, x: Tensor, buckets: Tensor) -> Tensor:
        """Returns the relative terms of the scores, [rows, heads, streams, T, S + 1]."""
        streams = buckets.shape[0]
        terms = self.relative_linear(x).unflatten(0, (streams, -1)).unflatten(3, (self.num_buckets, self.num_heads))
        terms = terms.permute(2, 4, 0, 1, 3)  # [rows, heads, streams, T, buckets]
        return terms.gather(4, buckets.expand(*terms.shape[:2], *buckets.shape))

    def extend(self, keys: Tensor, values: Tensor, incremental_state: dict[str, Any] | None) -> tuple[Tensor, Tensor]:
        """Appends new K and V of the main stream to the cached ones, and returns all, [rows, heads, S, head dim]."""
        if incremental_state is None:
            return keys, values
        saved = self._get_input_buffer(incremental_state)
        if saved is not None:
            keys = torch.cat([saved["prev_key"], keys], dim=2)
            values = torch.cat([saved["prev_value"], values], dim=2)
        self._set_input_buffer(incremental_state, {"prev_key": keys, "prev_value": values})
        return keys, values

    def reorder_incremental_state(self, incremental_state: dict[str, Any], new_order: Tensor) -> None:
        """Makes row r continue row `new_order[r]`."""
        saved = self._get_input_buffer(incremental_state)
        if saved is not None:
            saved = {name: part.index_select(0, new_order) for name, part in saved.items()}
            self._set_input_buffer(incremental_state, saved)

    def _get_input_buffer(self, incremental_state: dict[str, Any] | None) -> dict[str, Tensor] | None:
        return FairseqIncrementalState.get_incremental_state(self, incremental_state, "attn_state")

    def _set_input_buffer(self, incremental_state: dict[str, Any], buffer: dict[str, Tensor]) -> None:
        FairseqIncrementalState.set_incremental_state(self, incremental_state, "attn_state", buffer)
