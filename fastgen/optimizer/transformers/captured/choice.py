"""From logits to the chosen tokens: processors, criteria and the search, split into pieces if the host takes part."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from fastgen import releases
from fastgen.decoding.captured import graph
from fastgen.decoding.captured.beam_search import BeamSearch
from fastgen.decoding.captured.graph import Piece, run_pieces
from fastgen.decoding.captured.search import NOTHING, Search
from fastgen.decoding.kv.view import CannotBeCaptured
from fastgen.decoding.program_memory import Growing
from fastgen.decoding.speculation.speculative_search import SpeculativeSearch
from fastgen.optimizer.transformers import user_code
from fastgen.optimizer.transformers.call import Call
from fastgen.optimizer.transformers.captured.key import Key, Sizes
from fastgen.optimizer.transformers.captured.rewritten_processors import CapturedProcessor, StepTokens

# Tensors that a call may return of every step.
RECORDS = ("scores", "logits")

# Classes of criteria that wrote into the tokens of beams. A captured search has no such tokens for each candidate.
_writers: weakref.WeakSet[Any] = weakref.WeakSet()
_WRITES = "a criterion writes into the tokens of beams"


def search_of(key: Key, sizes: Sizes, device: torch.device, growing: Growing | None = None) -> Search:
    """Returns a search of the key's kind. Each call sets the tokens that end a sequence."""
    given = key.batch, key.per_input, sizes.prompt, sizes.new, device, [NOTHING] * key.ends
    if key.draft is not None:
        return SpeculativeSearch(*given, samples=key.samples, width=key.width, together=key.draft.together)
    if key.early_stopping is None:
        return Search(*given, samples=key.samples, growing=growing)
    sorts, stops = key.samples and releases.sorts_drawn_candidates(), key.early_stopping
    return BeamSearch(*given, early_stopping=stops, samples=key.samples, sorts=sorts, growing=growing)


class Choice:
    """Chooses the next tokens of a search, and holds the buffers through which the device and the host exchange data.

    Args:
        vocabulary: number of scores of each row.
        processors: the captured processors; None if the host runs the call's.
        record: gets logits or scores, [rows, vocabulary], with 1 before the processors and 0 after them.
    """

    def __init__(
        self,
        key: Key,
        vocabulary: int,
        search: Search,
        processors: Sequence[CapturedProcessor] | None,
        record: Callable[[Tensor, int], None] | None = None,
    ) -> None:
        self._search, self.processors, self._record = search, processors, record
        self.vocabulary, self._per_input, self._has_criteria = vocabulary, key.per_input, key.has_criteria
        self._device = device = search.tokens.device
        self._size = size = key.rows, vocabulary
        self._scores = self._zeros(size if processors is None else (0,))
        sizes = {"logits": (key.rows * key.codebooks.copies, vocabulary)}
        self.kept = {name: self._zeros(sizes.get(name, size)) for name in key.kept}
        self._proposal: tuple[Tensor, ...] = ()
        self._stops = torch.zeros(0, dtype=torch.bool, device=device)
        self._written: list[tuple[slice, int, Tensor]] = []  # what criteria have written over the last tokens

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in (*self.kept.values(), self._scores, *self._proposal))

    def pieces(self, logits: Callable[[], Tensor], end: Callable[[], None]) -> list[Piece]:
        """Returns the pieces of a step that computes logits, [rows, vocabulary], chooses, and ends with `end`."""
        pieces: list[Piece] = []
        if self.processors is None:
            pieces.append((partial(self._put_scores, logits), self._process))
        if self._has_criteria:
            pieces.append((partial(self._put_proposal, logits), self._stop))
            pieces.append((partial(self._take, end), self._write_last))
        else:
            pieces.append((partial(self._choose, logits, end), self._keep if self.kept else None))
        return pieces

    def first(self, logits: Tensor, end: Callable[[], None], turns: Sequence[Turn]) -> None:
        """Chooses the first tokens from the logits of prompts, [rows, vocabulary]."""
        pieces = self.pieces(lambda: logits, end)
        run_pieces([(graph.capturable(run), then) for run, then in pieces], (turns,))

    def prepare(self) -> None:
        """Makes the buffers of criteria for a step with slots, whose inputs get their first tokens elsewhere."""
        if self._has_criteria and not self._proposal:
            self._make_proposal(self._search.propose(self._zeros(self._size), False))

    def take_over(self, other: Choice) -> None:
        """Makes the buffers that `other` has, the choice of a step of this key, maybe for another number of inputs."""
        if not self._proposal and other._proposal:
            times = len(self._search.length), len(other._search.length)
            sizes = [(part.shape[0] * times[0] // times[1], *part.shape[1:]) for part in other._proposal]
            like = zip(other._proposal, sizes, strict=True)
            self._make_proposal(tuple(part.new_empty(size) for part, size in like))

    def _zeros(self, size: tuple[int, ...]) -> Tensor:
        return torch.zeros(size, dtype=torch.float32, device=self._device)

    # ---- what is captured

    def _normalised(self, logits: Tensor) -> Tensor:
        """Returns the input of processors in float32: log-probabilities in beam search, otherwise the logits."""
        if isinstance(self._search, BeamSearch):
            return torch.log_softmax(logits, dim=-1, dtype=torch.float32)
        return logits.float()

    def _put_kept(self, name: str, made: Tensor) -> None:
        """Copies a tensor for the host if the call returns it."""
        if name in self.kept:
            self.kept[name].copy_(made)

    def _put_scores(self, logits: Callable[[], Tensor]) -> None:
        """Copies the scores that the host's processors get."""
        found = logits()
        self._put_kept("logits", found)
        self._scores.copy_(self._normalised(found))

    def _processed(self, logits: Callable[[], Tensor]) -> tuple[Tensor, bool]:
        """Returns the scores that the search chooses from, and whether they have to be normalised."""
        if self.processors is None:  # the host has run them
            self._put_kept("scores", self._scores)
            return self._scores, False
        found = logits()
        self._put_kept("logits", found)
        if self._record is not None:
            self._record(found, 1)  # before processors, which may write into it
        if not self.processors and "scores" not in self.kept:
            scores, normalise = found, True
        else:
            scores, normalise = self._normalised(found), False
            tokens = StepTokens.of(self._search)
            for processor in self.processors:
                scores = processor(scores, tokens)
        self._put_kept("scores", scores)
        if self._record is not None:
            self._record(scores, 0)
        return scores, normalise

    def _choose(self, logits: Callable[[], Tensor], end: Callable[[], None]) -> None:
        self._search.choose(*self._processed(logits))
        end()

    def _put_proposal(self, logits: Callable[[], Tensor]) -> None:
        proposal = self._search.propose(*self._processed(logits))
        if not self._proposal:  # at the first token, which is not captured
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
            # Copies, as in the library's loop each step has new tensors: a processor may keep them.
            given = sequences.clone()
            scores = self._scores[rows].clone()
            self._scores[rows] = host.process(given, scores)
            if "logits" in self.kept and not isinstance(self._search, BeamSearch):
                self.kept["logits"][rows] = scores  # the library returns the tensor that processors may have written to
            if not torch.equal(sequences, given):  # a processor wrote into the tokens, which the library keeps, too
                sequences.copy_(given)

    def _keep(self, turns: Sequence[Turn]) -> None:
        for host, inputs, *_ in turns:
            rows = self._rows(inputs)  # of logits: all, if guidance combines them
            kept = {name: each[rows] if len(each) == self._size[0] else each for name, each in self.kept.items()}
            host.keep(kept)

    def _stop(self, turns: Sequence[Turn]) -> None:
        self._keep(turns)
        search, self._written = self._search, []
        self._stops.fill_(False)  # for inputs without criteria
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
        """Writes the last tokens that criteria have changed. Their original values decide whether sequences end."""
        for rows, end, tokens in self._written:
            self._search.running_tokens[rows, end] = self._search.tokens.view(-1)[rows] = tokens


# ---- what the host does for a call in its steps; it may be the user's code


class Host(NamedTuple):
    """What the host does in a step: processors, stopping criteria, and keeping what the call returns of every step."""

    process: Callable[[Tensor, Tensor], Tensor]  # (tokens [rows, length], scores [rows, vocabulary]) -> scores
    stops: Callable[[Tensor], Tensor]  # tokens [continuations, length] -> [continuations], bool
    keep: Callable[[dict[str, Tensor]], None]  # copies what the call returns of a step, by name: [rows, vocabulary]


class Turn(NamedTuple):
    """Inputs of a step that are adjacent and equally long, and what the host does for them."""

    host: Host
    inputs: slice
    start: int  # where their sequences begin and end in the buffers of the search
    end: int


class Written(CannotBeCaptured):
    """A criterion has written into the tokens of beams during this call."""


class HostCode:
    """Code of one call that runs between the pieces of a step.

    Attributes:
        criteria: the stopping criteria that the host evaluates.
        kept: what the call returns of every step, by name.
        raised: the exception that the user's code has raised.
    """

    def __init__(self, call: Call, arguments: dict[str, Any]) -> None:
        self._device, self._in_inference_mode = call.model.device, call.in_inference_mode
        self._config = arguments["generation_config"]
        self._processors, self._input_ids = arguments["logits_processor"], arguments["input_ids"]
        self.raised: Exception | None = None
        self.criteria = [each for each in arguments["stopping_criteria"] if self.asks(each)]
        names = RECORDS if self._config.return_dict_in_generate else ()
        self.kept: dict[str, list[Tensor]] = {name: [] for name in names if getattr(self._config, f"output_{name}")}
        if any(user_code.says(each, "releases_scores") for each in self.criteria):  # no scores are kept then
            self.criteria = [each for each in self.criteria if not user_code.says(each, "releases_scores")]
            self.kept.pop("scores", None)

    def asks(self, criterion: Any) -> bool:
        """Whether the host evaluates a criterion. The search itself applies end tokens and the call's own maximum
        length, but no other length.
        """
        limit = self._config.max_length
        is_own = type(criterion) in (EosTokenCriteria, MaxLengthCriteria)
        return not is_own or getattr(criterion, "max_length", limit) != limit

    def check(self) -> None:
        """Raises CannotBeCaptured if a criterion is known to write where a captured search has no tokens."""
        if self._config.num_beams > 1 and any(user_code.kind_of(each) in _writers for each in self.criteria):
            raise CannotBeCaptured(_WRITES)

    def keep(self, made: dict[str, Tensor]) -> None:
        """Keeps copies of what the call returns of a step."""
        with self._mode():
            append(self.kept, made)

    def process(self, tokens: Tensor, scores: Tensor) -> Tensor:
        """Returns the scores, [rows, vocabulary], after the call's processors."""
        # In its first step the library's loop passes the prompt itself, into which a processor may write.
        is_prompt = tokens.shape == self._input_ids.shape and self._config.num_beams == 1
        with self.running():
            processed = self._processors(self._input_ids if is_prompt else tokens, scores)
        if is_prompt:
            tokens.copy_(self._input_ids)
        # The library draws and compares in this dtype. It adds beams' scores to others in float32 first.
        is_drawn = self._config.do_sample and self._config.num_beams == 1
        dtype = processed.dtype if is_drawn else torch.promote_types(processed.dtype, torch.float32)
        if dtype is not torch.float32:
            raise CannotBeCaptured(f"scores in {processed.dtype} from a processor")
        return processed

    def stops(self, tokens: Tensor, scores: tuple[Tensor, ...] | None = None) -> Tensor:
        """Returns [rows], bool: the sequences that a criterion ends."""
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
        """Runs the user's code: its exceptions are not failures of the step, and calls that it waits for run meanwhile.

        The code runs in the call's own mode: only inference mode may write to tensors that were made in it.
        """
        try:
            with graph.stepped_aside(self._device), self._mode():
                yield
        except Exception as error:
            self.raised = error
            raise

    def _mode(self) -> contextlib.AbstractContextManager[Any]:
        """Returns the mode that the call was made in; tensors made in inference mode are inference tensors."""
        return torch.inference_mode() if self._in_inference_mode else contextlib.nullcontext()


def append(kept: dict[str, list[Tensor]], made: dict[str, Tensor]) -> None:
    """Keeps copies of a step's tensors, by name, of those names that `kept` has."""
    for name, each in kept.items():
        each.append(made[name].clone())
