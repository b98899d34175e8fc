"""What the host does in a call's steps: running processors and criteria, keeping what the call returns of each step."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from fastgen.decoding.captured import graph
from fastgen.decoding.kv.view import CannotBeCaptured
from fastgen.optimizer.transformers import user_code
from fastgen.optimizer.transformers.call import Call

# Tensors that a call may return of every step.
RECORDS = ("scores", "logits")

# Classes of criteria that wrote into the tokens of beams. A captured search has no such tokens for each candidate.
_writers: weakref.WeakSet[Any] = weakref.WeakSet()
_WRITES = "a criterion writes into the tokens of beams"


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
    """Code of one call that runs between the parts of a step; it may be the user's.

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
