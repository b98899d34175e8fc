"""The forward pass of a decode step, on the buffers of the step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen import releases
from fastgen.decoding import layer_forms
from fastgen.decoding.captured.capturable import Capturable
from fastgen.decoding.captured.search import Search
from fastgen.decoding.kv.view import CannotBeCaptured, OfThisCall
from fastgen.decoding.layer_forms import fused_norms
from fastgen.optimizer.transformers import row_adapters
from fastgen.optimizer.transformers.cache import layers_in
from fastgen.optimizer.transformers.cache_layers import StepStates
from fastgen.optimizer.transformers.captured.buffers import StepBuffers
from fastgen.optimizer.transformers.captured.key import AXES, POSITIONS, Key, Prompt
from fastgen.optimizer.transformers.models import (
    STATES,
    counts_on_the_host,
    pictures_in_front,
    reads_mask_of_tokens,
)


class Forward:
    """Runs the model on the buffers of a step.

    Attributes:
        is_watched: the step has run once while the host could read what masks contain, which it cannot do later.
        is_eager: the model runs as in the library's loop, and is not captured.
    """

    def __init__(self, key: Key, prompt: Prompt, buffers: StepBuffers, search: Search) -> None:
        self._key, self._buffers, self._search = key, buffers, search
        # K and V of the encoder's output are stored. A model that reads the output nevertheless gets NaN, which shows.
        self.nothing = torch.full((1, 1, 1), torch.nan, dtype=prompt.logits.dtype, device=buffers.device)
        self.is_watched = self.is_eager = self._watches = False
        self._refused: CannotBeCaptured | None = None  # while it is watched

    def __call__(self, model: Any, cache: Any, tokens: Tensor, inputs: dict[str, Tensor], width: int) -> Tensor:
        """Returns the logits for `tokens`, [any, width]: [any, width, vocabulary]."""
        adapters = row_adapters.choosing(model, self._key.adapters, inputs.get(row_adapters.NUMBERS))
        given = _inputs_of_model(inputs)
        inputs = model.prepare_inputs_for_generation(
            tokens, next_sequence_length=width, **releases.with_cache(cache), **given, **self._constants(width)
        )
        if reads_mask_of_tokens(model) and "attention_mask" in given:
            inputs["attention_mask"] = _of_all_positions(given["attention_mask"], cache)
        mask = inputs.get("attention_mask")
        if pictures_in_front(model) and (mask is None or mask.dim() == 2):
            raise CannotBeCaptured("a mask that the model widens")
        if any(name in given and inputs.get(name) is None for name in POSITIONS):
            # The model would count positions from the cache, although prompts may be preceded by padding.
            raise CannotBeCaptured("positions that the model does not read")
        # A capture consists of torch's own linear ops, which the graph passes replace.
        products = contextlib.nullcontext() if self.is_eager else layer_forms.plain_linear()
        known = contextlib.nullcontext() if not self.is_eager or self._is_known(model) else Capturable()
        with known, fused_norms(), products, adapters:
            logits: Tensor = model(**inputs, return_dict=True).logits[:, -width:]
            if self._watches and self._key.encoder is not None:
                self._check_source(logits, lambda given: model(**{**inputs, **given}, return_dict=True).logits)
        for layer in layers_in(cache)[0] if self._key.forms else ():
            if isinstance(layer, StepStates):
                layer.check()
        return logits

    def cache(self, model: Any, cache: Any) -> Any:
        """Returns `cache`, or one whose length is an int, which is faster, if the host may know the length."""
        return self._buffers.cache(self._search, int(self._buffers.cache_length)) if self._is_known(model) else cache

    @contextlib.contextmanager
    def watched(self, cache: Any) -> Iterator[None]:
        """Lets the host read what masks contain while this context is open.

        Raises:
            CannotBeCaptured: the model has read something that a captured step does not have.
        """
        kvs = [layer.kv for layers in layers_in(cache) for layer in layers if hasattr(layer, "kv")]
        for kv in kvs:
            kv.host_may_wait = True
        self._watches = True
        try:
            yield
        finally:
            for kv in kvs:
                kv.host_may_wait = False
            refused, self._refused, self._watches = self._refused, None, False
        if refused is not None:
            raise refused
        self.is_watched = True

    def _check_source(self, logits: Tensor, again: Callable[[dict[str, Any]], Tensor]) -> None:
        """Notes whether the model reads the encoder's output, which is NaN here, besides the stored keys and values.

        NaN in the logits may have another cause: then it remains with another encoder output.

        Args:
            again: recomputes the logits of all positions with these arguments replaced.
        """
        found = logits[: self._buffers.rows].isnan()
        if not bool(found.any()):
            return
        zeros = self._source(torch.zeros_like(self.nothing))
        same = again(zeros)[: self._buffers.rows, -logits.shape[1] :].isnan()
        if not torch.equal(found, same):
            self._refused = CannotBeCaptured("the model reads the encoder's output besides the stored keys and values")
        elif bool(found.flatten(1).any(dim=1).all()):  # a row without NaN would show that the output is not read
            self._refused = OfThisCall("scores are NaN, so that nothing shows whether the encoder's output is read")

    def _is_known(self, model: Any) -> bool:
        """Whether the host may know the length of the cache, in an eager step that is not watched."""
        is_one = not self._key.has_own_lengths
        return is_one and self.is_eager and self.is_watched and counts_on_the_host(model)

    def _constants(self, width: int) -> dict[str, Any]:
        """Returns the model's inputs that are in no buffers."""
        found: dict[str, Any] = dict(self._key.constants)
        if "logits_to_keep" in found:
            found["logits_to_keep"] = width
        return {**found, **self._source(self.nothing)}

    def _source(self, filled_with: Tensor) -> dict[str, Any]:
        """Returns the encoder's output for the model, [1, 1, 1] expanded; nothing for a model without encoder."""
        if self._key.encoder is None:
            return {}
        kind_of_output, size = self._key.encoder
        states = filled_with.expand(self._key.rows_of_model, self._buffers.sizes.source, size)
        if kind_of_output is None:
            return {STATES: states}
        return {"encoder_outputs": kind_of_output(last_hidden_state=states)}


def _of_all_positions(mask: Tensor, cache: Any) -> Tensor:
    """Returns a mask of the sequences, [rows, any], with zeros for further positions of the cache."""
    return F.pad(mask, (0, cache.get_mask_sizes(1, 0)[0] - mask.shape[1]))


def _inputs_of_model(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the model's inputs among a step's inputs, without those that only the step uses."""
    found = {name: given for name, given in inputs.items() if name not in (row_adapters.NUMBERS, AXES)}
    for name in POSITIONS if AXES in inputs else ():
        if name in found:
            found[name] = inputs[AXES].t().unsqueeze(2) + found[name].unsqueeze(0)  # [axes, rows, width]
    return found
