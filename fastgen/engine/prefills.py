"""How requests are prefilled that enter slots: behind beginnings that are known, and in chunks while others wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from fastgen.decoding.kv.prefixes import BLOCK, PrefixCache
from fastgen.decoding.kv.view import CannotBeCaptured
from fastgen.decoding.sources import Sources
from fastgen.engine.planning import mean
from fastgen.engine.requests import Request
from fastgen.memory import free_host_memory
from fastgen.ops import fingerprint
from fastgen.optimizer.transformers.captured import graph_cache
from fastgen.optimizer.transformers.captured.entering_decoding import EnteringDecoding
from fastgen.optimizer.transformers.entering import Entering

# Beginnings are worth a prefill of their own from so many tokens on.
LEAST_SHARED = 4 * BLOCK
# K and V of beginnings may take this part of the memory that is free; so many bytes where nothing may depend on that.
SHARE_OF_MEMORY, PREFIX_BYTES = 0.05, 2**28
# Encoder outputs take so many bytes, at the most.
SOURCE_BYTES = 2**26
# Tokens of a chunk, at least: a pass reads all weights.
LEAST_CHUNK = 64
# The part of the stall that may be which a chunk takes, by what tokens have taken on average: late ones in long prompts
# take longer, as they see all before them, and there is work around the passes.
SHARE_OF_CHUNK = 0.4
# Requests that are prefilled together take this part of the stall that may be, if they are short enough. More of
# them would wait for each other's first tokens, and gain little: a pass over that many is bound by arithmetic.
SHARE_OF_STALL = 0.25


class Prefills:
    """Plans prefills, and keeps what they have in common, as long as the model is the one that it is of: what `plan` is
    told of it, what recordings take for granted (hooks, settings, functions), and the contents of its weights. Reading
    these takes as long as a step: that is done where something is found, once in a turn.

    Args:
        model: that is called.
        shares: prompts may share beginnings: K and V of a token do not depend on what follows, nor on padding.
        has_encoder: sources that have been encoded are kept.
        max_stall: seconds that requests in slots may wait for a prefill; None for any number, and nothing depends on
            the clock, nor on the memory that is free.

    Attributes:
        chunks: passes after which requests in slots have gone on before the prefill was over.
    """

    def __init__(self, model: Any, shares: bool, has_encoder: bool, max_stall: float | None) -> None:
        self._model, self.max_stall, self.chunks = model, max_stall, 0
        most = PREFIX_BYTES if max_stall is None else int(SHARE_OF_MEMORY * free_host_memory())
        self.prefixes = PrefixCache(most) if shares and not has_encoder else None
        self.sources = Sources(min(most, SOURCE_BYTES), self._has_contents) if has_encoder else None
        self._state: Any = None  # of the model that they are of
        self._guarded: Hashable = None
        self._contents: list[int] | None = None  # None before something is kept
        self._has_looked = False  # at the contents, in this turn
        self._seconds: float | None = None  # of a token

    @property
    def shared_positions(self) -> int:
        """Positions of prompts that others had prefilled."""
        return 0 if self.prefixes is None else self.prefixes.reused

    @property
    def shared_sources(self) -> int:
        """Sources that others had."""
        return 0 if self.sources is None else self.sources.reused

    def forget(self) -> None:
        """The model may have changed in a way that its state does not tell."""
        self._state = None

    def begin_turn(self) -> None:
        """Weights may have been written to."""
        self._has_looked = False

    def _clear(self) -> None:
        for kept in (self.prefixes, self.sources):
            if kept is not None:
                kept.clear()

    def _has_contents(self) -> bool:
        """Whether the weights are those that what is kept is of; nothing is kept any more where they are not."""
        if not self._has_looked:
            self._has_looked, now = True, _contents(self._model)
            if now != self._contents:
                self._clear()
                self._contents = now
                return False
        return True

    def _is_guarded(self, model: Any) -> bool:
        """Whether anything may be kept of a model as it is in a call: what is of another one goes."""
        try:
            guarded = graph_cache.state(model)
        except CannotBeCaptured:
            return False
        if guarded != self._guarded:
            self._clear()
            self._guarded = guarded
        return True

    def alone(self, first: Request, waiting: Sequence[Request]) -> bool:
        """Whether a request is better prefilled alone: its beginning is known, or others that wait have it, too."""
        tokens = self._tokens(first)
        if self.prefixes is None or not self._is_long(first):
            return False
        if self._knows(tokens, first.adapter):
            return True
        beginning = tokens[:LEAST_SHARED]
        return any(self._tokens(other)[:LEAST_SHARED] == beginning for other in waiting if other is not first)

    def fitting(self, batch: list[Request]) -> list[Request]:
        """Those of a batch, from the first one on, that are prefilled together: one at least."""
        most, longest = self._most(SHARE_OF_STALL), 0
        if most is None or self._seconds is None:
            return batch
        for count, request in enumerate(batch):
            longest = max(longest, request.length)
            if count and longest * (count + 1) > most:
                return batch[:count]
        return batch

    def _most(self, share: float) -> int | None:
        """Tokens of a pass that takes this part of the stall that may be, if so few are worth a pass; None for any
        number. As few as may be, where nobody knows how long they take.
        """
        if self.max_stall is None:
            return None
        return LEAST_CHUNK if self._seconds is None else max(int(share * self.max_stall / self._seconds), LEAST_CHUNK)

    def plan(
        self,
        batch: Sequence[Request],
        state: Any,
        others_wait: bool,
        take: Callable[[EnteringDecoding], None],
        step: Callable[[], None],
    ) -> Entering:
        """The prefill of a batch.

        Args:
            state: of the model.
            others_wait: there are requests in slots.
            take: gets the call behind it.
            step: makes a decode step of those.
        """
        if self._state != state:
            self._clear()
            self._state, self._contents, self._has_looked = state, None, False
        if self._contents is None and (self.sources is not None or any(map(self._is_long, batch))):
            self._has_contents()
        given, find, known = (self._tokens(batch[0]), batch[0].adapter), None, 0
        if self.prefixes is not None and len(batch) == 1 and self._knows(*given) and self._has_contents():
            find = partial(self.prefixes.take, *given)
            known = self.prefixes.match(*given)
        begin, chunks = time.perf_counter(), self.chunks

        def between() -> None:
            nonlocal begin
            self.chunks, before = self.chunks + 1, time.perf_counter()
            step()
            begin += time.perf_counter() - before

        def taken(decoding: EnteringDecoding) -> None:
            count = sum(request.length - known for request in batch)
            if count >= LEAST_CHUNK:  # fewer do not say what more of them take
                self._seconds = mean(self._seconds, (time.perf_counter() - begin) / count)
            self._keep(batch, decoding)
            if self.chunks > chunks:  # entering takes as long as a chunk, and may have a step recorded
                step()
            take(decoding)

        chunk = self._most(SHARE_OF_CHUNK) if others_wait else None
        return Entering(taken, find, chunk, between, self.sources, self._is_guarded)

    def _keep(self, batch: Sequence[Request], decoding: EnteringDecoding) -> None:
        """Keeps the beginnings of prompts that have been prefilled."""
        if self.prefixes is None or not (any(map(self._is_long, batch)) and self._is_guarded(decoding.model)):
            return
        prompt = decoding.prompt
        if any(keys.shape[2] != prompt.cached for keys, _ in prompt.own):
            return  # a sliding window has dropped them
        if prompt.states:
            return  # they are those of the whole prompt
        for row, request in enumerate(batch):
            tokens, begin = self._tokens(request), prompt.cached - request.length
            if self._is_long(request):
                one = slice(row, row + 1)
                own = [(k[one, :, begin:], v[one, :, begin:]) for k, v in prompt.own]
                self.prefixes.put(tokens, own, request.adapter)

    def _is_long(self, request: Request) -> bool:
        """Whether its beginning is kept."""
        return len(self._tokens(request)) > LEAST_SHARED

    def _knows(self, tokens: list[int], adapter: str | None) -> bool:
        return self.prefixes is not None and self.prefixes.match(tokens, adapter) >= LEAST_SHARED

    def _tokens(self, request: Request) -> list[int]:
        """Those of a prompt without padding, where K and V are of nothing else; none of another one."""
        if request.tokens is None or request.has_other_inputs or not (request.mask is None or bool(request.mask.all())):
            return []
        return request.token_list


def _contents(model: Any) -> list[int]:
    """What tells the contents of a model's weights and buffers from others."""
    if not fingerprint.is_available():
        return []
    held = chain(model.parameters(), model.buffers())
    plain = (each for each in held if type(each) in (Tensor, Parameter) and each.device.type == "cpu")
    return [fingerprint.fingerprint(each.detach().contiguous()) for each in plain if each.layout == torch.strided]
