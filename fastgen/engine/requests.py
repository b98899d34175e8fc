"""What a request is: one input and its options, as `model.generate` takes them, and the future of its result."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Hashable, Iterable, Mapping
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from fastgen.optimizer.transformers import user_code
from fastgen.optimizer.transformers.captured.forms import FormProcessor

# Options of `generate` that are code of the user's.
_USER_CODE = (*user_code.ARGUMENTS, "custom_generate", "monitor_progress")
_ASKED = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn")
_LOOKUP = "prompt_lookup_num_tokens"


class EngineFull(RuntimeError):
    """As many requests wait as the engine lets wait."""


class RequestFuture(Future[Any]):
    """The result of a request. `cancel` works until there is one, also while the request runs.

    Attributes:
        begun: when it began to run, as `time.perf_counter` says; None before.
    """

    begun: float | None = None

    def running(self) -> bool:
        """Whether the request is being run."""
        return self.begun is not None and not self.done()

    def settle(self, result: Any) -> None:
        """Takes the result, or the exception that the request ended with, unless it has one or was cancelled."""
        with contextlib.suppress(InvalidStateError):
            if isinstance(result, BaseException):
                self.set_exception(result)
            else:
                self.set_result(result)

    def _invoke_callbacks(self) -> None:
        """Those who are told are let go. Some of them have the request, which has this: such a ring of a few hundred
        objects and tensors would stay until Python looks for garbage among all of its objects, which it seldom does.
        """
        super()._invoke_callbacks()  # type: ignore[misc]
        self._done_callbacks: list[Any] = []

    def give_up(self, error: BaseException) -> None:
        """In a forked process, where the thread that would have settled this is not there, nor one that looks at it."""
        self._condition = threading.Condition()
        self._done_callbacks = []
        self.settle(error)


@dataclass(eq=False)
class Request:
    """One input and its options.

    Attributes:
        inputs: the arguments of `generate` that are the model's inputs, of one row.
        options: its other arguments, as they were given.
        seed: of what it draws; None for torch's generator as it is.
        loop: the event loop whose tasks wait for it; None for threads.
        tokens: the input [length], on the CPU, where it is one of tokens.
        mask: its attention mask [length], where there is one.
        has_other_inputs: the model reads more of it than tokens and their mask, such as pictures.
        config: the generation config that the options come to; None for a model that has a `generate` of its own.
        rows: rows that it takes in a batch: beams, or sequences to return.
        prompt: tokens that the result begins with: of the input, or the one that a decoder starts with.
        new_tokens: the most that come behind; None where that is not known.
        alone: why it must not share a batch; None where it may, as far as the request goes.
        group: requests with equal ones may share a batch. By default it is this one's alone.
        adapter: of peft, that it has of its own, beside others; None for those that are active.
        prefill_group: requests with equal ones may share a prefill, whatever their lengths; None for one alone.
        is_static: it has no slots any more, as it could not go on in them, or with others.
        asks_library: it is of a model whose own `generate` asks the library's for tokens: that may be run in slots.
        generate: what runs it; None for the model's `generate`.
        repeats: so often it has begun again.
        failures: so often it has met a step that failed, or a model that has changed.
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
    asks_library: bool = False
    generate: Callable[..., Any] | None = None
    repeats: int = 0
    failures: int = 0
    future: RequestFuture = field(default_factory=RequestFuture)

    @property
    def length(self) -> int:
        """Tokens of the input; 0 for another kind of input."""
        return 0 if self.tokens is None else self.tokens.shape[0]

    @property
    def prompt_positions(self) -> int:
        """Positions that a decoder stores of the input: of embeddings in place of tokens, too."""
        embedded = self.inputs.get("inputs_embeds", self.options.get("inputs_embeds"))
        if isinstance(embedded, Tensor) and embedded.dim() > 1:
            return max(self.length, embedded.shape[-2])
        return self.length

    @property
    def start_positions(self) -> int:
        """Positions that a decoder behind an encoder stores of what it starts with."""
        start = self.inputs.get("decoder_input_ids", self.options.get("decoder_input_ids"))
        return start.shape[-1] if isinstance(start, Tensor) else 1

    @cached_property
    def token_list(self) -> list[int]:
        """The input, where it is one of tokens."""
        return [] if self.tokens is None else self.tokens.tolist()

    @property
    def search(self) -> Hashable:
        """Those with equal ones are likely to be in one step: greedy requests and such that sample may be."""
        return self.rows, getattr(self.config, "num_beams", None)

    @property
    def lookup(self) -> int | None:
        """Tokens that it asks to be looked up at once; None where it does not say. Its tokens are the same without. The
        library draws others than without, and has code of the user's process what is drafted, too: both are left to a
        call of its own.
        """
        asked: int | None = None if self.config is None else self.config.prompt_lookup_num_tokens
        return None if asked and (self.config.do_sample or self._is_asked_in_each_step) else asked

    @property
    def options_in_slots(self) -> dict[str, Any]:
        """Its options where rows that are free verify what is looked up: a call of the plain search."""
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
        """Whether code of the user's sees the request run: it must not run twice."""
        return self._runs(_USER_CODE)

    @property
    def _is_asked_in_each_step(self) -> bool:
        """Whether code of the user's says what comes next, or whether it ends: it may count its calls."""
        return self._runs(_ASKED)

    def _runs(self, names: Iterable[str]) -> bool:
        given = [(name, value) for name in names if (value := self.options.get(name)) is not None]
        if self.generate is not None:  # the model's own code passes some of the library's
            given = [(name, value) for name, value in given if not _is_the_librarys(value)]
        return any(not is_of_the_engine(name, value) for name, value in given)

    @property
    def may_begin_again(self) -> bool:
        """Whether its tokens are the same then, and nobody has seen any."""
        is_drawn_anew = self.config is not None and self.config.do_sample and self.seed is None
        return not (self.runs_user_code or is_drawn_anew)


def is_of_the_engine(name: str, value: Any) -> bool:
    """Whether an argument of `generate` is code that the engine knows, and may run again: the form of a result; or
    criteria that only let go what the call keeps, so that they need not run.
    """
    if name == "logits_processor":
        return is_form(value)
    return name == "stopping_criteria" and all(user_code.says(each, "releases_scores") for each in value)


def _is_the_librarys(value: Any) -> bool:
    return isinstance(value, list) and not user_code.has_own(value)


def is_form(processors: Any) -> bool:
    """Whether processors of a request are the form of its result alone."""
    return processors is not None and len(processors) == 1 and type(processors[0]) is FormProcessor


def with_own_forms(processors: Any) -> Any:
    """These, where each form knows this request's sequences alone: others may be given the same objects."""
    if type(processors) not in (list, tuple, LogitsProcessorList):
        return processors
    return type(processors)(each.anew() if type(each) is FormProcessor else each for each in processors)


def inputs_of(model: Any, inputs: Any) -> dict[str, Any]:
    """An input as arguments of `generate`: copies, as the caller may go on to change them.

    Raises:
        ValueError: it is empty, or not of one row.
    """
    if not isinstance(inputs, (Mapping, list, tuple, range, Tensor)):
        raise ValueError(f"an input is token ids or a mapping of the model's inputs, no {type(inputs).__name__}")
    is_named = isinstance(inputs, Mapping)
    named: Mapping[str, Any] = inputs if isinstance(inputs, Mapping) else {"inputs": inputs}
    # Weights that are elsewhere until they are needed are on none that keeps numbers; hooks move inputs to theirs.
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
    """The only row of the first of these inputs that there is, on the CPU; None where it is no row of whole numbers."""
    value = next((given[name] for name in names if name in given), None)
    if not isinstance(value, Tensor) or value.dim() != 2 or value.is_floating_point():
        return None
    return value[0].long().cpu()


def _as_row(value: Any, device: torch.device) -> Any:
    """A list of numbers, or a tensor of one dimension, as a tensor of one row."""
    if isinstance(value, Tensor):
        value = value.detach().clone()
    elif isinstance(value, (list, tuple, range)):
        try:
            value = torch.tensor(value, device=device)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"an input is not a list of numbers: {error}") from None
    return value.unsqueeze(0) if isinstance(value, Tensor) and value.dim() == 1 else value
