"""A call whose inputs enter slots, and goes no further than its first token; and such an input in a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from fastgen.decoding.captured.search import Search
from fastgen.optimizer.transformers.captured import processors
from fastgen.optimizer.transformers.captured.decoding import Decoding, recorded
from fastgen.optimizer.transformers.captured.host import Host, HostCode, append
from fastgen.optimizer.transformers.captured.key import Prefilled, Prompt


@dataclass(eq=False)
class Slot:
    """An input in a step, or on its way there.

    Attributes:
        new_tokens: the most that it may generate.
        padding: positions in front of its prompt that its prefill was padded with.
        results: what it returns, of a search and its place there.
        host: what the host does in each step; None if that is nothing.
        generator: what its tokens are drawn with; None where none are.
        put: gets each token, [1], as it comes; None without a streamer.
        error: what code of the user's has raised.
        positions, source: of self-attention that are stored, of all its rows; and of cross-attention.
        is_over: it has come to its end.
    """

    new_tokens: int
    padding: int
    results: Callable[[Search, slice], Any]
    host: Host | None = None
    generator: torch.Generator | None = None
    put: Callable[[Tensor], object] | None = None
    error: BaseException | None = None
    place: int = field(default=-1, init=False)
    positions: int = field(default=0, init=False)
    source: int = field(default=0, init=False)
    is_over: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.host = None if self.host is None else self._protected(self.host)

    def _protected(self, host: Host) -> Host:
        """The same, where an exception is noted, and ends this input alone."""

        def process(tokens: Tensor, scores: Tensor) -> Tensor:
            return self.catch(lambda: self._drawable(host.process(tokens, scores)), scores)

        def stops(tokens: Tensor) -> Tensor:
            return self.catch(lambda: host.stops(tokens), torch.ones(len(tokens), dtype=torch.bool))

        return Host(process, stops, host.keep)

    def _drawable(self, scores: Tensor) -> Tensor:
        """Scores that a token can be drawn by: otherwise the error is this input's alone."""
        if self.generator is not None and bool(torch.softmax(scores, dim=-1).isnan().any()):
            raise ValueError("probabilities to draw from are not numbers")
        return scores

    def catch(self, run: Callable[[], Any], otherwise: Any = None) -> Any:
        """What `run` returns; `otherwise` where it raises, or something has raised before."""
        if self.error is not None:
            return otherwise
        try:
            return run()
        except BaseException as error:  # whatever it is, it ends this request alone
            self.error = error
            return otherwise


class _HostCode(HostCode):
    def asks(self, criterion: Any) -> bool:
        # Who stops a call by a time without end takes its inputs out of their slots.
        return super().asks(criterion) and getattr(criterion, "max_time", None) != math.inf


class EnteringDecoding(Decoding):
    """One call after its prefill, as `Slots` takes it."""

    _code_type = _HostCode

    def __init__(self, call: Any, arguments: dict[str, Any], model_kwargs: dict[str, Any]) -> None:
        super().__init__(call, arguments, model_kwargs)
        self.streamer = arguments.get("streamer")

    def _prefilled(self, prefilled: Prefilled) -> tuple[Prompt, list[int | None]]:
        prompt, windows = super()._prefilled(prefilled)
        if prompt.cross:  # in slots, a source has no padding
            prompt.tensors.pop("attention_mask", None)
        return prompt, windows

    def slot(self, new_tokens: int | None, length: int | None, seed: int | None) -> Slot:
        """One of its inputs, as slots see it.

        Args:
            new_tokens: the most that it may generate; None for as many as the call may.
            length: tokens of its prompt; None for as many as the call has.
            seed: of what it draws; None for one that is drawn.
        """
        generator = None
        if self.config.do_sample:
            generator = torch.Generator()
            generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_()) if seed is None else seed)
        is_seen = self.own_key.waits_for_host or self.processors_data is None
        # Criteria, of which there are none where several inputs enter, are given what this call keeps.
        kept = self._code.kept if self.prompt.inputs == 1 else {name: [] for name in self._code.kept}
        host = self.host._replace(keep=partial(append, kept))
        put = None if self.streamer is None else self.streamer.put
        most = self.prompt.new_tokens if new_tokens is None else new_tokens
        padding = 0 if length is None else self.prompt.tokens.shape[1] - length
        results = partial(_results, self._count, kept, self.config, self.output)
        return Slot(most, padding, results, host if is_seen else None, generator, put)

    @property
    def window(self) -> int | None:
        """The shortest sliding window of the model's layers; None if they see everything."""
        return min((window for window in self._windows if window), default=None)

    @cached_property
    def processors_data(self) -> tuple[Hashable, ...] | None:
        """What `refresh` takes over of processors that do the same for any rows; None if not all are such."""
        if not all(processors.is_of_any_rows(each, self._lengths) for each in self._processors):
            return None
        return tuple(processors.data(each, self._lengths) for each in self._processors)


def _results(count: int, kept: dict[str, list[Tensor]], config: Any, output: Any, search: Search, inputs: slice) -> Any:
    """What `generate` returns for an input, but for a cache."""
    sequences = search.results(inputs, count)
    if not config.return_dict_in_generate:
        return sequences
    return output(sequences=sequences, **recorded(search, inputs, count, kept, config))
