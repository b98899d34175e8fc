"""What of a call's steps the host does: the call's processors and criteria, and what it returns of every step."""

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

# What may be returned of every step.
RECORDS = ("scores", "logits")

# Classes of criteria that have written into the tokens of beams. A captured search has none for each candidate.
_writers: weakref.WeakSet[Any] = weakref.WeakSet()
_WRITES = "a criterion writes into the tokens of beams"


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
