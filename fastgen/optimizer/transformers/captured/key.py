"""What calls must agree on to share a captured step, and what a call begins from."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastgen.ops.gpu import power_of_two
from fastgen.optimizer.transformers.captured.sizes import Sizes

# Masks, which are among the inputs of the model.
MASKS = ("attention_mask", "decoder_attention_mask")
# Greedy search and sampling have room for so many tokens that end a sequence, at least.
_ENDS = 4
# Inputs of the model that go up by one in every step.
POSITIONS = ("position_ids", "decoder_position_ids")


class DraftKey(NamedTuple):
    """What of a draft is frozen in a captured step."""

    kind: Hashable
    samples: bool  # it draws its tokens, as the model does
    together: bool  # all rows take as many tokens as each other
    records: bool = False  # scores and logits are kept for who returns them
    is_rated: bool = False  # how probable each drafted token is, is kept
    is_ragged: bool = False  # rows have different numbers of tokens to verify


@dataclass(frozen=True)
class Key:
    """All that is frozen in a captured step: calls that agree on it can share one."""

    batch: int
    per_input: int
    sizes: Sizes
    width: int  # positions that a step stores; with a draft, the most that it verifies
    encoder: tuple[type, int] | None  # the class that its output comes in, and the width of that
    source_in_front: bool  # K and V of the encoder's output are those of self-attention, in front of the sequences'
    early_stopping: bool | str | None  # of beam search; None for sequences that are continued for themselves
    samples: bool  # tokens are drawn
    ends: int  # as many tokens may end a sequence
    processors: tuple[Hashable, ...] | None  # signatures; None if the host runs the processors
    has_criteria: bool  # there are stopping criteria, which the host runs, besides the search's own
    kept: tuple[str, ...]  # what the call returns of every step: scores, logits
    tensors: tuple[str, ...]  # names of the model's inputs that are in buffers
    constants: tuple[tuple[str, Hashable], ...]  # the others, by name
    kv: Hashable  # shapes and dtypes of K and V of each layer
    windows: tuple[int | None, ...]  # the sliding window of each layer; None for one that sees everything
    draft: Any = None  # a `DraftKey`, where the step verifies what is drafted
    slots: bool = False  # inputs come and go while others go on: each row has a length of its own

    @property
    def rows(self) -> int:
        return self.batch * self.per_input

    @property
    def waits_for_host(self) -> bool:
        """Whether the host does a part of each step: processors, criteria, or keeping what the call returns."""
        return self.processors is None or self.has_criteria or bool(self.kept)

    def is_sequences_mask(self, name: str) -> bool:
        """Whether an input is a mask of the sequences, and not of what the encoder has read."""
        return name == ("attention_mask" if self.encoder is None else "decoder_attention_mask")

    @property
    def has_own_lengths(self) -> bool:
        """Whether the model computes positions from a length of each row: it may have none behind a row's limit."""
        is_each = self.slots if self.draft is None else not self.draft.together
        return is_each and {*POSITIONS}.isdisjoint(self.tensors)


@dataclass
class Prompt:
    """What a step begins from: the result of the prefill, one row per input."""

    tokens: Tensor  # [inputs, N], int64
    new_tokens: int  # to generate, at the most
    cached: int  # positions of self-attention that the prefill has left
    # K and V of each layer, [inputs, heads, cached, dim]; with a sliding window maybe only the last of these positions.
    own: list[tuple[Tensor, Tensor]]
    cross: list[tuple[Tensor, Tensor]]  # [inputs, heads, encoder positions, dim]; empty without cross-attention
    span: tuple[Tensor, Tensor]  # [inputs] starts and ends of the positions that count
    cross_span: tuple[Tensor, Tensor] | None
    tensors: dict[str, Tensor]  # the model's inputs of the first step, [inputs, ...], by name
    logits: Tensor  # [inputs * per_input, vocabulary]: of the last position of the prompt
    eos: tuple[int, ...] = ()  # tokens that end a sequence

    @property
    def inputs(self) -> int:
        return self.tokens.shape[0]

    @property
    def bytes_per_position(self) -> tuple[int, int]:
        """Of K and V of all layers of self-attention, for one row; and of cross-attention."""
        own, cross = (
            sum(part.shape[1] * part.shape[3] * part.itemsize for pair in pairs for part in pair)
            for pairs in (self.own, self.cross)
        )
        return own, cross

    def only(self, number: int, per_input: int, new_tokens: int, first: int) -> Prompt:
        """That of one input, which may generate so many tokens, without its `first` positions."""
        one, rows = slice(number, number + 1), slice(number * per_input, (number + 1) * per_input)
        tensors = {name: tensor[one] for name, tensor in self.tensors.items()}
        cross, cross_span, own_mask = self.cross, self.cross_span, "attention_mask"
        if cross_span is not None:  # the source is padded, too
            source, own_mask = slice(*(int(bound[number]) for bound in cross_span)), "decoder_attention_mask"
            cross = [(keys[one, :, source], values[one, :, source]) for keys, values in cross]
            length = torch.tensor([source.stop - source.start])
            cross_span = torch.zeros_like(length), length
            if "attention_mask" in tensors:
                tensors["attention_mask"] = tensors["attention_mask"][:, source]
        if own_mask in tensors:
            tensors[own_mask] = tensors[own_mask][:, first:]
        own = [(k[one, :, self._left(k, first) :], v[one, :, self._left(v, first) :]) for k, v in self.own]
        return replace(
            self,
            tokens=self.tokens[one, first:],
            new_tokens=new_tokens,
            cached=self.cached - first,
            own=own,
            cross=cross,
            span=(self.span[0][one] - first, self.span[1][one] - first),
            cross_span=cross_span,
            tensors=tensors,
            logits=self.logits[rows],
        )

    def _left(self, layer: Tensor, first: int) -> int:
        """Of the first positions so many are in what a layer has stored, maybe only behind a sliding window."""
        return max(first - (self.cached - layer.shape[2]), 0)


def room_for_ends(eos: tuple[int, ...]) -> int:
    """Of greedy search and sampling, which have room for more tokens that end a sequence than there are."""
    return power_of_two(max(len(eos), _ENDS)) if eos else 0
