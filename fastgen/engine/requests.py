"""Defines a request: one input and its options, as `model.generate` takes them, and the future of its result."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Hashable, Iterable, Mapping
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from fastgen.interrupts import cached_property
from fastgen.optimizer.transformers import user_code
from fastgen.optimizer.transformers.captured.forms import FormProcessor

# Options of `generate` that are user code.
_USER_CODE = (*user_code.ARGUMENTS, "custom_generate", "monitor_progress")
_ASKED = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn")
_LOOKUP = "prompt_lookup_num_tokens"


class EngineFull(RuntimeError):
    """`max_waiting` requests wait already."""


class RequestFuture(Future[Any]):
    """The result of a request. `cancel` works until there is a result, even while the request runs.

    Attributes:
        begun: `time.perf_counter()` when the request began to run; None before.
    """

    begun: float | None = None

    def running(self) -> bool:
        """Whether the request is being run."""
        return self.begun is not None and not self.done()

    def settle(self, result: Any) -> None:
        """Sets the result, or the exception that the request ended with, unless the future is done already."""
        with contextlib.suppress(InvalidStateError):
            if isinstance(result, BaseException):
                self.set_exception(result)
            else:
                self.set_result(result)

    def _invoke_callbacks(self) -> None:
        """Drops the callbacks after calling them. Some refer to the request, which refers to this future: such a cycle
        of a few hundred objects and tensors would stay until Python's full garbage collection, which seldom runs.
        """
        super()._invoke_callbacks()  # type: ignore[misc]
        self._done_callbacks: list[Any] = []

    def give_up(self, error: BaseException) -> None:
        """Fails the future in a forked process, which has neither the engine's thread nor the threads that wait."""
        self._condition = threading.Condition()
        self._done_callbacks = []
        self.settle(error)


@dataclass(eq=False)
class Request:
    """One input and its options.

    Attributes:
        inputs: the arguments of `generate` that are inputs of the model, with one row.
        options: its other arguments, as given.
        seed: seed of its sampling; None for torch's generator in its present state.
        loop: the event loop whose tasks wait for it; None for threads.
        tokens: the input [length], on the CPU, if it consists of tokens.
        mask: its attention mask [length], if there is one.
        has_other_inputs: the model reads more than tokens and their mask, such as images.
        config: the generation config that the options yield; None for a model with its own `generate`.
        rows: rows that it takes in a batch: beams, or sequences to return.
        prompt: tokens that the result begins with: the input's, or the one that the decoder starts with.
        new_tokens: limit of new tokens; None if unknown.
        alone: why it must not share a batch; None if it may, as far as the request is concerned.
        group: requests with an equal value may share a batch. Unique by default.
        adapter: the peft adapter that it names for itself; None for the active ones.
        prefill_group: requests with an equal value may share a prefill, whatever their lengths; None for none.
        is_static: it does not use slots any more, because it could not continue in them, or with others.
        has_inner_requests: its model's own `generate` calls the library's, and those calls may run in slots.
        generate: the function that runs it; None for the model's `generate`.
        repeats: how often it has begun again.
        failures: how often its step has failed, or its model has changed.
    """

    inputs: dict[str, Any]
    options: dict[str, Any]
    seed: int | None = None
    loop: Any = None
    tokens: Tensor | None = None
    mask: Tensor | None = None
    has_other_inputs: bool = False
    config: Any = None
    rows: int = 1
    prompt: int = 0
    new_tokens: int | None = None
    alone: str | None = None
    group: Hashable = field(default_factory=object)
    prefill_group: Hashable = None
    adapter: str | None = None
    is_static: bool = False
    has_inner_requests: bool = False
    generate: Callable[..., Any] | None = None
    repeats: int = 0
    failures: int = 0
    future: RequestFuture = field(default_factory=RequestFuture)

    @property
    def length(self) -> int:
        """Number of tokens of the input; 0 for another kind of input."""
        return 0 if self.tokens is None else self.tokens.shape[0]

    @property
    def prompt_positions(self) -> int:
        """Number of positions that a decoder stores for the input, including embeddings given in place of tokens."""
        embedded = self.inputs.get("inputs_embeds", self.options.get("inputs_embeds"))
        if isinstance(embedded, Tensor) and embedded.dim() > 1:
            return max(self.length, embedded.shape[-2])
        return self.length

    @property
    def start_positions(self) -> int:
        """Number of positions that the decoder of an encoder-decoder model stores for its start tokens."""
        start = self.inputs.get("decoder_input_ids", self.options.get("decoder_input_ids"))
        return start.shape[-1] if isinstance(start, Tensor) else 1

    @cached_property
    def token_list(self) -> list[int]:
        """The tokens of the input; empty for another kind of input."""
        return [] if self.tokens is None else self.tokens.tolist()

    @property
    def search(self) -> Hashable:
        """A key: requests with an equal one are likely to share a step, even greedy ones and ones that sample."""
        return self.rows, getattr(self.config, "num_beams", None)

    @property
    def lookup(self) -> int | None:
        """Tokens to look up at once as a draft; None if unset, and for requests that need a call of their own.

        Lookup does not change the tokens of a greedy request without user code. But with lookup the library draws other
        tokens when sampling, and passes drafts to user code, too: only a call of its own does the same.
        """
        asked: int | None = None if self.config is None else self.config.prompt_lookup_num_tokens
        return None if asked and (self.config.do_sample or self._is_asked_in_each_step) else asked

    @property
    def options_in_slots(self) -> dict[str, Any]:
        """Its options without prompt lookup, if free slots verify the drafts: the call is then a plain search."""
        config = self.options.get("generation_config")
        if self.lookup is None or (config is None and _LOOKUP not in self.options):
            return self.options
        found = {name: value for name, value in self.options.items() if name != _LOOKUP}
        if config is not None:
            found["generation_config"] = config = copy.copy(config)
            setattr(config, _LOOKUP, None)
        return found

    @property
    def runs_user_code(self) -> bool:
        """Whether user code sees the request run: it must not run twice."""
        return self._runs(_USER_CODE)

    @property
    def _is_asked_in_each_step(self) -> bool:
        """Whether user code chooses the next tokens or when to stop: it may count its calls."""
        return self._runs(_ASKED)

    def _runs(self, names: Iterable[str]) -> bool:
        given = [(name, value) for name in names if (value := self.options.get(name)) is not None]
        if self.generate is not None:  # the model's own code passes some of the library's
            given = [(name, value) for name, value in given if not _is_the_librarys(value)]
        return any(not is_of_the_engine(name, value) for name, value in given)

    @property
    def may_begin_again(self) -> bool:
        """Whether it would generate the same tokens again, and nobody has seen any."""
        is_drawn_anew = self.config is not None and self.config.do_sample and self.seed is None
        return not (self.runs_user_code or is_drawn_anew)


def is_of_the_engine(name: str, value: Any) -> bool:
    """Whether an argument of `generate` is code that the engine knows and may run again: the form of a result, or
    criteria that only release what the call keeps, and need not run.
    """
    if name == "logits_processor":
        return is_form(value)
    return name == "stopping_criteria" and all(user_code.says(each, "releases_scores") for each in value)


def _is_the_librarys(value: Any) -> bool:
    return isinstance(value, list) and not user_code.has_own(value)


def is_form(processors: Any) -> bool:
    """Whether the processors of a request consist of the form of its result alone."""
    return processors is not None and len(processors) == 1 and type(processors[0]) is FormProcessor


def with_own_forms(processors: Any) -> Any:
    """Returns the processors with new forms: a form tracks one request's sequences, and callers may share it."""
    if type(processors) not in (list, tuple, LogitsProcessorList):
        return processors
    return type(processors)(each.anew() if type(each) is FormProcessor else each for each in processors)


def inputs_of(model: Any, inputs: Any) -> dict[str, Any]:
    """Returns an input as arguments of `generate`: copies, because the caller may change them later.

    Raises:
        ValueError: it is empty, or does not have one row.
    """
    if not isinstance(inputs, (Mapping, list, tuple, range, Tensor)):
        raise ValueError(f"an input is token ids or a mapping of the model's inputs, no {type(inputs).__name__}")
    is_named = isinstance(inputs, Mapping)
    named: Mapping[str, Any] = inputs if isinstance(inputs, Mapping) else {"inputs": inputs}
    # Offloaded weights are on the meta device, which stores nothing; hooks move the inputs to the weights' device.
    device = torch.device("cpu") if model.device.type == "meta" else model.device
    given = {name: _as_row(value, device) for name, value in named.items() if value is not None}
    if not given:
        raise ValueError("the input is empty")
    for name in ("input_ids", "attention_mask") if is_named else ("inputs",):
        value, said = given.get(name), name if is_named else "the input"
        if isinstance(value, Tensor) and value.numel() == 0:
            raise ValueError(f"{said} is empty")
        if isinstance(value, Tensor) and (value.dim() != 2 or value.shape[0] != 1):
            raise ValueError(f"{said} has the shape {tuple(value.shape)}: a request has one row")
    if not is_named and (given["inputs"].is_floating_point() or given["inputs"].dtype is torch.bool):
        raise ValueError(f"token ids are whole numbers, not {given['inputs'].dtype}: give other inputs in a mapping")
    return given


def row_of(given: dict[str, Any], *names: str) -> Tensor | None:
    """Returns the only row of the first of these inputs that is given, on the CPU; None if not one row of integers."""
    value = next((given[name] for name in names if name in given), None)
    if not isinstance(value, Tensor) or value.dim() != 2 or value.is_floating_point():
        return None
    return value[0].long().cpu()


def _as_row(value: Any, device: torch.device) -> Any:
    """Returns a list of numbers, or a one-dimensional tensor, as a tensor of one row."""
    if isinstance(value, Tensor):
        value = value.detach().clone()
    elif isinstance(value, (list, tuple, range)):
        try:
            value = torch.tensor(value, device=device)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"an input is not a list of numbers: {error}") from None
    return value.unsqueeze(0) if isinstance(value, Tensor) and value.dim() == 1 else value
