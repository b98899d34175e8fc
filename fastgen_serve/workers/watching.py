"""Observes a running request: its new tokens once they are final, and their log-probabilities.

The observers are a streamer, stopping criteria and a logits processor of `generate`. All but `StopTexts` leave the
results unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from fastgen_serve.errors import Failed
from fastgen_serve.jobs import Delta, TokenLogprob

OnDelta = Callable[[Delta], object]
# Tokens of a prompt that are decoded with the new ones.
_CONTEXT = 8


class StopTexts(StoppingCriteria):
    """Ends a sequence when one of these texts ends in its last token. A match lies in the new text, outside the prompt.

    The library's own criterion scans the whole vocabulary in each call, which takes a fraction of a second.

    Args:
        tokenizer: of the model.
        texts: at least one, none of them empty.
        prompt: number of tokens that the sequences begin with.
    """

    def __init__(self, tokenizer: Any, texts: Sequence[str], prompt: int) -> None:
        self._tokenizer, self._texts, self._prompt = tokenizer, texts, prompt
        # A character takes up to four tokens, if they are bytes.
        self._window = 4 * max(map(len, texts)) + 4

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        # Decodes the prompt's last tokens too: they decide whether the first new token begins with a space.
        begin = max(input_ids.shape[1] - self._window, self._prompt - _CONTEXT, 0)
        rows = input_ids[:, begin:].tolist()
        prompt = self._characters(rows[0][: max(self._prompt - begin, 0)])
        return torch.tensor([self._ends(row, prompt) for row in rows], dtype=torch.bool, device=input_ids.device)

    def _ends(self, tokens: list[int], prompt: int) -> bool:
        before, text = self._characters(tokens[:-1]), self._decoded(tokens)
        return any(stop in text[max(before - len(stop) + 1, prompt) :] for stop in self._texts)

    def _characters(self, tokens: list[int]) -> int:
        """Returns the number of characters of the tokens' text, without an incomplete character at the end."""
        return len(self._decoded(tokens).rstrip("\ufffd"))

    def _decoded(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))


@dataclass(frozen=True)
class Ends:
    """The conditions that end a sequence.

    Attributes:
        eos: the tokens that end it.
        stops: the criterion of stop strings; None if there are none.
    """

    eos: frozenset[int]
    stops: Callable[[Tensor, Any], Tensor] | None = None

    def at_last(self, tokens: Tensor) -> list[bool]:
        """Returns whether unfinished sequences [rows, length] end with their last token."""
        ended = [token in self.eos for token in tokens[:, -1].tolist()]
        if self.stops is None:
            return ended
        return [one or other for one, other in zip(ended, self.stops(tokens, None).tolist(), strict=True)]

    def cut(self, row: Tensor, prompt: int, pad: Any) -> tuple[list[int], str, int]:
        """Returns the new tokens of a result [length], without EOS and padding; why it ends; their number, with EOS."""
        new = row[prompt:].tolist()
        end = next((position for position, token in enumerate(new) if token in self.eos), None)
        if self.stops is None:
            return (new, "length", len(new)) if end is None else (new[:end], "stop", end + 1)
        # Padding follows a stop string if other sequences of the request are longer.
        written = new if end is None else new[:end]
        while written and written[-1] == pad and not self._stops(row, prompt + len(written)):
            written = written[:-1]
        if written and self._stops(row, prompt + len(written)):
            return written, "stop", len(written)
        return (new, "length", len(new)) if end is None else (new[:end], "stop", end + 1)

    def _stops(self, row: Tensor, length: int) -> bool:
        assert self.stops is not None
        return bool(self.stops(row[None, :length], None)[0])


class TokenStreamer(BaseStreamer):
    """Passes on the tokens of one sequence. It is the cheapest way: the step is that of requests that do not stream."""

    def __init__(self, eos: frozenset[int], on_delta: OnDelta) -> None:
        self._eos, self._on_delta, self._is_first = eos, on_delta, True

    def put(self, value: Tensor) -> None:
        """Gets the prompt first, and then each token."""
        if self._is_first:
            self._is_first = False
            return
        tokens = tuple(token for token in value.flatten().tolist() if token not in self._eos)
        if tokens:
            self._on_delta(Delta(0, tokens))

    def end(self) -> None:
        """Does nothing: the request's result marks its end."""


def check_numbers(scores: Iterable[float]) -> None:
    """Raises Failed if a score is NaN, which JSON cannot represent."""
    if any(map(math.isnan, scores)):
        raise Failed("the model has failed: scores are not numbers")


def token_logprobs(scores: Tensor, tokens: Sequence[int], count: int) -> list[TokenLogprob]:
    """Returns an entry for each of `tokens` [rows], with the `count` likeliest tokens of its row.

    Args:
        scores: log-probabilities, [rows, vocabulary].

    Raises:
        Failed: the log-probability of a token is NaN.
    """
    chosen = scores.gather(1, torch.tensor(tokens, device=scores.device)[:, None])[:, 0].tolist()
    check_numbers(chosen)
    best = scores.topk(min(count, scores.shape[1]), dim=1)
    tops = [tuple(zip(*pair, strict=True)) for pair in zip(best.indices.tolist(), best.values.tolist(), strict=True)]
    return [TokenLogprob(*each) for each in zip(tokens, chosen, tops, strict=True)]


class Recorder(LogitsProcessor):
    """Holds the log-probabilities of all tokens of a step, until the chosen tokens are known.

    Args:
        count: number of likeliest tokens to keep at each position.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._step: Tensor | None = None
        self._rows: list[list[TokenLogprob]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._step = torch.log_softmax(scores.float(), dim=-1)
        return scores

    def choose(self, position: int, tokens: list[int]) -> list[TokenLogprob]:
        """Returns entries for `tokens` [rows], the step's chosen tokens at this position, and keeps them."""
        assert self._step is not None, "processors run before criteria"
        self._rows = self._rows or [[] for _ in tokens]
        made = token_logprobs(self._step, tokens, self._count)
        for row, each in zip(self._rows, made, strict=True):
            row[position:] = [each]
        return made

    def of(self, row: int) -> list[TokenLogprob]:
        """Returns the entries of a sequence. Those after its end belong to padding."""
        return self._rows[row]


class RowWatcher(StoppingCriteria):
    """Observes the tokens of independent sequences, step by step.

    Args:
        prompt: number of tokens that the sequences begin with.
        on_delta: called with new tokens; None if only log-probabilities are wanted.
        recorder: of log-probabilities; None if they are not wanted.
    """

    def __init__(self, prompt: int, ends: Ends, on_delta: OnDelta | None, recorder: Recorder | None) -> None:
        self._prompt, self._ends, self._on_delta, self._recorder = prompt, ends, on_delta, recorder
        self._told = 0  # tokens of each sequence: a call that begins again repeats them
        self._over: set[int] = set()

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        position, tokens = input_ids.shape[1] - self._prompt - 1, input_ids[:, -1].tolist()
        logprobs = None if self._recorder is None else self._recorder.choose(position, tokens)
        if self._on_delta is not None and position >= self._told:
            self._told = position + 1
            self._tell(input_ids, tokens, logprobs, self._on_delta)
        return torch.zeros(len(tokens), dtype=torch.bool, device=input_ids.device)

    def _tell(self, rows: Tensor, tokens: list[int], logprobs: list[TokenLogprob] | None, on_delta: OnDelta) -> None:
        ended = self._ends.at_last(rows)
        for row, token in enumerate(tokens):
            if row not in self._over and token not in self._ends.eos:
                on_delta(Delta(row, (token,), None if logprobs is None else (logprobs[row],)))
        self._over |= {row for row, is_over in enumerate(ended) if is_over}


class BeamWatcher(StoppingCriteria):
    """Observes the candidates of a beam search, and passes on the final tokens of its best sequence.

    The result descends from a candidate, or is a sequence that has ended. It therefore begins with the tokens that all
    of these share.

    Args:
        prompt: number of tokens that the sequences begin with.
        beams: of the search. Only this many of the best candidates can end; the others only continue.
    """

    def __init__(self, prompt: int, beams: int, ends: Ends, on_delta: OnDelta) -> None:
        self._prompt, self._beams, self._ends, self._on_delta = prompt, beams, ends, on_delta
        self._told = 0
        self._certain: list[int] | None = None  # common prefix of the ended ones; None while there are none

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        rows = input_ids[:, self._prompt :].tolist()
        common = _common(rows if self._certain is None else [self._certain, *rows])
        if len(common) > self._told:
            self._on_delta(Delta(0, tuple(common[self._told :])))
            self._told = len(common)
        ended = self._ends.at_last(input_ids[: self._beams])
        finished = [self._text(row) for row, is_over in zip(rows, ended, strict=False) if is_over]
        if finished:
            self._certain = _common(finished if self._certain is None else [self._certain, *finished])
        return torch.zeros(len(rows), dtype=torch.bool, device=input_ids.device)

    def _text(self, row: list[int]) -> list[int]:
        return row[:-1] if row[-1] in self._ends.eos else row


def _common(rows: Iterable[list[int]]) -> list[int]:
    """Returns the common prefix of the rows."""
    common: list[int] = []
    for tokens in zip(*rows, strict=False):
        if any(token != tokens[0] for token in tokens):
            break
        common.append(tokens[0])
    return common
