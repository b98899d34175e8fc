"""Verifies drafts in which each row has its own number of tokens, so that the rows with the best drafts get more.

A row without a draft has one token, and a finished row has none. Serves greedy search on a CPU with drafts that are
found in a text, which rows have at different times.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastgen.decoding.kv.rows import RaggedState
from fastgen.decoding.kv.symbolic_length import SymbolicLength
from fastgen.decoding.speculation.speculative_search import best_tokens
from fastgen.optimizer.transformers.cache import cache_of
from fastgen.optimizer.transformers.captured.key import POSITIONS, Key, Prompt
from fastgen.optimizer.transformers.captured.step import DecodeStep
from fastgen.optimizer.transformers.speculation.drafting import Drafting


def serves(key: Key, device: torch.device) -> bool:
    """Whether steps of this key can verify in this way."""
    is_plain = not (key.samples or key.processors or key.encoder or any(key.windows) or key.draft.records)
    return device.type == "cpu" and key.rows > 1 and is_plain and not {*POSITIONS}.isdisjoint(key.tensors)


class RaggedDrafting(Drafting):
    """Verifies a total number of drafted tokens over all rows."""

    def __init__(self, step: DecodeStep, prompt: Prompt) -> None:
        super().__init__(step, prompt)
        self._of_tokens: dict[int, tuple[RaggedState, Any]] = {}
        self._length_by_tokens = torch.zeros_like(self._cache_length)

    def tokens_of(self, length: int) -> int:
        return self.key.rows + length

    def verify(self, model: Any, drafted: int) -> None:
        if not drafted:
            super().verify(model, 0)
            return
        state, cache = self._with_tokens(self.tokens_of(drafted))
        unfinished = self.search.unfinished.flatten().tolist()
        state.spread(
            [count + 1 if goes_on else 0 for count, goes_on in zip(self.counts.tolist(), unfinished, strict=True)]
        )
        self._run_part(drafted + 1, cache, lambda: self._verify_tokens(model, state, cache))

    def _with_tokens(self, tokens: int) -> tuple[RaggedState, Any]:
        if tokens not in self._of_tokens:
            state = RaggedState(tokens, self._buffers.position)
            own = [kv.view(state) for kv in self._buffers.own]
            prefix = self._buffers.sizes.cached
            bounds = prefix, prefix + self._buffers.position.capacity
            self._of_tokens[tokens] = state, cache_of(own, [], SymbolicLength.of(self._length_by_tokens, *bounds))
        return self._of_tokens[tokens]

    def _verify_tokens(self, model: Any, state: RaggedState, cache: Any) -> None:
        state.locate()
        # Models' masks are for the longest row, and hide nothing that attention would not exclude by itself.
        self._length_by_tokens.copy_(self._cache_length + self.key.width - 1)
        logits = self._forward(model, cache, self._ids_of(state), self._inputs_of(state), 1)
        chosen, near = (self._by_row(found, state) for found in best_tokens(logits.float(), self._products))
        self.search.commit(chosen, self.counts, self.accepted, near, self.near_ties)
        self._advance()
        self._flag.send(self.search.done)

    def _ids_of(self, state: RaggedState) -> Tensor:
        at = self.search.length.view(-1) - 1
        return self.search.running_tokens[state.row_map, at[state.row_map] + state.offsets].unsqueeze(1)

    def _inputs_of(self, state: RaggedState) -> dict[str, Tensor]:
        found = {name: buffer.index_select(0, state.row_map) for name, buffer in self._buffers.inputs.items()}
        left = (self.search.limit - self.search.length - 1).view(-1)[state.row_map]
        for name, given in found.items():
            if name in POSITIONS:
                found[name] = given + torch.minimum(state.offsets, left).unsqueeze(1)
            elif self.key.is_sequences_mask(name):
                own = self._buffers.sizes.cached + state.position.unsqueeze(1)
                found[name] = given.masked_fill(torch.arange(given.shape[1], device=self.device) > own, 0)
        return found

    def _by_row(self, found: Tensor, state: RaggedState) -> Tensor:
        """Returns [rows, width] from [tokens, 1], with zeros for positions without a token."""
        none = found.new_zeros(self.key.rows, self.key.width)
        return none.index_put((state.row_map, state.offsets), found.squeeze(1))
