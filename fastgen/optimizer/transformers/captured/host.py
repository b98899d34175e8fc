"""What of a call's steps the host does: the call's processors and criteria, and what it returns of every step.

A step is cut into pieces there, with buffers between the device's part and the host's.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from fastgen.decoding.captured import graph
from fastgen.decoding.captured.beam_search import BeamSearch
from fastgen.decoding.captured.part import Piece
from fastgen.decoding.captured.search import Search
from fastgen.decoding.kv.view import CannotBeCaptured
from fastgen.optimizer.transformers import user_code
from fastgen.optimizer.transformers.call import Call
from fastgen.optimizer.transformers.captured.key import Key

# What may be returned of every step.
RECORDS = ("scores", "logits")

# Classes of criteria that have written into the tokens of beams. A captured search has none for each candidate.
_writers: weakref.WeakSet[Any] = weakref.WeakSet()
_WRITES = "a criterion writes into the tokens of beams"
# What a search chooses from, and whether it has to be normalised: the arguments of its `propose`.
Scores = tuple[Tensor, bool]


class Host(NamedTuple):
    """What of a step the host does: the processors, the stopping criteria, and what is returned of every step."""

    process: Callable[[Tensor, Tensor], Tensor]  # (tokens [rows, length], scores [rows, vocabulary]) -> scores
    stops: Callable[[Tensor], Tensor]  # tokens [continuations, length] -> [continuations], bool
    keep: Callable[[dict[str, Tensor]], None]  # copies what the call returns of a step, by name: [rows, vocabulary]


class Turn(NamedTuple):
    """Some inputs of a step, next to each other and as long as each other, and what the host does for them."""

    host: Host
    inputs: slice
    start: int  # where their sequences begin and end in the buffers of the search
    end: int


class Written(CannotBeCaptured):
    """A criterion has written into the tokens of beams, in this call."""


class HostCode:
    """The code of one call that runs between the parts of a step, maybe the user's.

    Attributes:
        criteria: the stopping criteria that the host asks.
        kept: what the call returns of every step, by name.
        raised: what the user's code has raised.
    """

    def __init__(self, call: Call, arguments: dict[str, Any]) -> None:
        self._device, self._in_inference_mode = call.model.device, call.in_inference_mode
        self._config = arguments["generation_config"]
        self._processors, self._input_ids = arguments["logits_processor"], arguments["input_ids"]
        self.raised: Exception | None = None
        self.criteria = [each for each in arguments["stopping_criteria"] if self.asks(each)]
        names = RECORDS if self._config.return_dict_in_generate else ()
        self.kept: dict[str, list[Tensor]] = {name: [] for name in names if getattr(self._config, f"output_{name}")}
        if any(user_code.says(each, "releases_scores") for each in self.criteria):  # which is not kept then
            self.criteria = [each for each in self.criteria if not user_code.says(each, "releases_scores")]
            self.kept.pop("scores", None)

    def asks(self, criterion: Any) -> bool:
        """Whether the host asks a criterion. The search stops at some by itself: not at a length that is less than the
        call's.
        """
        limit = self._config.max_length
        is_own = type(criterion) in (EosTokenCriteria, MaxLengthCriteria)
        return not is_own or getattr(criterion, "max_length", limit) != limit

    def check(self) -> None:
        """Raises CannotBeCaptured for criteria that have written where a captured search has nothing."""
        if self._config.num_beams > 1 and any(user_code.kind_of(each) in _writers for each in self.criteria):
            raise CannotBeCaptured(_WRITES)

    def keep(self, made: dict[str, Tensor]) -> None:
        """Keeps copies of what the call returns of a step."""
        with self._mode():
            append(self.kept, made)

    def process(self, tokens: Tensor, scores: Tensor) -> Tensor:
        """The scores, [rows, vocabulary], as the call's processors make them of these."""
        # The first step of the library's loop has the prompt itself, into which somebody may write.
        is_prompt = tokens.shape == self._input_ids.shape and self._config.num_beams == 1
        with self.running():
            processed = self._processors(self._input_ids if is_prompt else tokens, scores)
        if is_prompt:
            tokens.copy_(self._input_ids)
        # The library draws and compares in that type. Scores of beams are added to others in float32 first.
        is_drawn = self._config.do_sample and self._config.num_beams == 1
        dtype = processed.dtype if is_drawn else torch.promote_types(processed.dtype, torch.float32)
        if dtype is not torch.float32:
            raise CannotBeCaptured(f"scores in {processed.dtype} from a processor")
        return processed

    def stops(self, tokens: Tensor, scores: tuple[Tensor, ...] | None = None) -> Tensor:
        """[rows], bool: which sequences a criterion ends."""
        done = torch.zeros(tokens.shape[0], dtype=torch.bool, device=tokens.device)
        if scores is None and "scores" in self.kept:
            scores = tuple(self.kept["scores"])
        for criterion in self.criteria:
            before = tokens.clone() if self._config.num_beams > 1 else None
            with self.running():
                done = done | criterion(tokens, scores)
            if before is not None and not torch.equal(tokens, before):
                _writers.add(user_code.kind_of(criterion))
                raise Written(_WRITES)
        return done

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """What the user's code raises is not the step's failure; what it waits for must not wait for this call. It runs
        in the mode that the call was made in: of inference, its own tensors are such as only that may write to.
        """
        try:
            with graph.stepped_aside(self._device), self._mode():
                yield
        except Exception as error:
            self.raised = error
            raise

    def _mode(self) -> contextlib.AbstractContextManager[Any]:
        """The mode that the call was made in: of inference, its tensors are such."""
        return torch.inference_mode() if self._in_inference_mode else contextlib.nullcontext()


def append(kept: dict[str, list[Tensor]], made: dict[str, Tensor]) -> None:
    """Keeps copies of what was made in a step, by name: of what somebody asks for."""
    for name, each in kept.items():
        each.append(made[name].clone())


class HostWork:
    """Cuts a step into pieces, and has the buffers between them and the host.

    Args:
        vocabulary: scores of each row.
    """

    def __init__(self, key: Key, vocabulary: int, search: Search) -> None:
        self._search, self._per_input = search, key.per_input
        self._device = device = search.tokens.device
        self._has_criteria, self._has_processors = key.has_criteria, key.processors is None
        self._size = size = key.rows, vocabulary
        self.scores = torch.zeros(size if self._has_processors else (0,), device=device)
        self.kept = {name: torch.zeros(size, device=device) for name in key.kept}
        self._proposal: tuple[Tensor, ...] = ()
        self._stops = torch.zeros(0, dtype=torch.bool, device=device)
        self._written: list[tuple[slice, int, Tensor]] = []  # what criteria have written over the last tokens

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in (*self.kept.values(), self.scores, *self._proposal))

    def pieces(
        self, put_scores: Callable[[], None], scores: Callable[[], Scores], end: Callable[[], None]
    ) -> list[Piece]:
        """A step from the logits to the chosen tokens, and what ends it; cut where the host does something.

        Args:
            put_scores: has `self.scores` hold what processors on the host get.
            scores: what the search chooses from.
        """
        pieces: list[Piece] = []
        if self._has_processors:
            pieces.append((put_scores, self._process))
        if self._has_criteria:
            pieces.append((partial(self._put_proposal, scores), self._stop))
            pieces.append((partial(self._take, end), self._write_last))
        else:
            pieces.append((partial(self._choose, scores, end), self._keep if self.kept else None))
        return pieces

    def keep(self, name: str, made: Tensor) -> None:
        """For the host, if the call returns it. Is captured."""
        if name in self.kept:
            self.kept[name].copy_(made)

    def prepare(self) -> None:
        """Makes the buffers of criteria, for inputs that come from a step without: they make no first token here."""
        if self._has_criteria and not self._proposal:
            self._make_proposal(self._search.propose(torch.zeros(self._size, device=self._device), False))

    def take_over(self, other: HostWork) -> None:
        """Goes on where another one is, of a step of the same key, but maybe for another number of inputs."""
        if not self._proposal and other._proposal:
            times = len(self._search.length), len(other._search.length)
            sizes = [(part.shape[0] * times[0] // times[1], *part.shape[1:]) for part in other._proposal]
            like = zip(other._proposal, sizes, strict=True)
            self._make_proposal(tuple(part.new_empty(size) for part, size in like))

    # ---- what is captured

    def _choose(self, scores: Callable[[], Scores], end: Callable[[], None]) -> None:
        self._search.choose(*scores())
        end()

    def _put_proposal(self, scores: Callable[[], Scores]) -> None:
        proposal = self._search.propose(*scores())
        if not self._proposal:  # for the first token, which is not captured
            self._make_proposal(proposal)
        for buffer, part in zip(self._proposal, proposal, strict=True):
            buffer.copy_(part)

    def _make_proposal(self, like: tuple[Tensor, ...]) -> None:
        self._proposal = tuple(torch.zeros_like(part) for part in like)
        self._stops = torch.zeros(like[0].numel(), dtype=torch.bool, device=self._device)

    def _take(self, end: Callable[[], None]) -> None:
        self._search.take(self._proposal, self._stops)
        end()

    # ---- what the host does

    def _rows(self, inputs: slice) -> slice:
        return slice(inputs.start * self._per_input, inputs.stop * self._per_input)

    def _process(self, turns: Sequence[Turn]) -> None:
        for host, inputs, start, end in turns:
            rows = self._rows(inputs)
            sequences = self._search.running_tokens[rows, start:end]
            # Copies, as in the library's loop every step has tensors of its own: a processor may keep them.
            given = sequences.clone()
            scores = self.scores[rows].clone()
            self.scores[rows] = host.process(given, scores)
            if "logits" in self.kept and not isinstance(self._search, BeamSearch):
                self.kept["logits"][rows] = scores  # the library returns what it gives to processors, which may write
            if not torch.equal(sequences, given):  # somebody has written there, which counts in the library's loop, too
                sequences.copy_(given)

    def _keep(self, turns: Sequence[Turn]) -> None:
        for host, inputs, *_ in turns:
            host.keep({name: buffer[self._rows(inputs)] for name, buffer in self.kept.items()})

    def _stop(self, turns: Sequence[Turn]) -> None:
        self._keep(turns)
        search, self._written = self._search, []
        self._stops.fill_(False)  # of inputs that have no criteria
        stops = self._stops.view(len(search.length), -1)
        for host, inputs, start, end in turns:
            tokens = search.proposed(self._proposal, inputs, start, end)
            given = tokens.clone()
            stops[inputs] = host.stops(given).view_as(stops[inputs])
            if not torch.equal(tokens, given):
                rows = self._rows(inputs)
                search.running_tokens[rows, start:end] = given[:, :-1]
                self._written.append((rows, end, given[:, -1]))

    def _write_last(self, turns: Sequence[Turn]) -> None:
        """The token that a criterion has written: what it was decides whether the sequence ends."""
        for rows, end, tokens in self._written:
            self._search.running_tokens[rows, end] = self._search.tokens.view(-1)[rows] = tokens
