"""A model around another, as the engine sees it: which model generates, and when requests can run in slots.

peft's `generate` forwards the call to the model inside, whose layers hold the adapters. For adapters that add tokens,
or that depend on rows or positions, it does more; each request of such a model keeps its own call of peft's `generate`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from transformers.generation.utils import GenerationMixin

from fastgen.decoding import library_code
from fastgen.decoding.library_code import modules_of
from fastgen.optimizer.transformers import row_adapters
from fastgen.optimizer.transformers.captured.entering_decoding import MOST_ADAPTERS
from fastgen.optimizer.transformers.models import ADAPTERS
from fastgen.optimizer.transformers.row_adapters import ACTIVE, Adapters

# peft's option that names the adapter of each row.
ADAPTER_NAMES = "adapter_names"
# Models whose own `generate` is known to leave the model unchanged around its calls of the library's `generate`, of
# itself or of a part, unless it gets an option that changes the model.
_ASK_LIBRARY = frozenset(
    "Blip2ForConditionalGeneration BlipForConditionalGeneration BlipForQuestionAnswering "
    "InstructBlipForConditionalGeneration SeamlessM4TForSpeechToText SeamlessM4TForTextToText "
    "SeamlessM4Tv2ForSpeechToText SeamlessM4Tv2ForTextToText WhisperForConditionalGeneration".split()
)


def is_pefts(model: Any) -> bool:
    """Whether this model's `generate` is peft's own."""
    if not (_is_a(model, "PeftModel") or _is_a(model, "PeftMixedModel")):
        return False
    return "generate" not in vars(model) and library_code.is_of_library(type(model).generate)


def _is_a(model: Any, name: str) -> bool:
    """Whether the model is an instance of this peft class. Does not import peft."""
    return isinstance(model, getattr(sys.modules.get("peft"), name, ()))


def model_inside(model: Any) -> Any:
    """Returns the model that generates: the one inside a peft model, or the model itself."""
    if not is_pefts(model):
        return model
    tuner = model.base_model  # a prompt-learning model has no tuner in between
    inside = tuner if isinstance(tuner, GenerationMixin) else getattr(tuner, "model", None)
    return inside if isinstance(inside, GenerationMixin) else model


def model_that_decodes(model: Any) -> Any:
    """Returns the model whose steps generate the tokens: the model inside, or the part of it that its own `generate`
    calls, such as the language model of BLIP-2.
    """
    inside = model_inside(model)
    parts = inside.children() if asks_library(inside) else ()
    return next((part for part in parts if isinstance(part, GenerationMixin)), inside)


def asks_library(model: Any) -> bool:
    """Whether the model's own `generate` is known to leave the model unchanged while it waits for the library's."""
    kind = type(model)
    is_known = kind.__module__.startswith("transformers.models.") and kind.__name__ in _ASK_LIBRARY
    return is_known and "generate" not in vars(model) and library_code.is_own(kind.generate)


def alone_for_adapters(model: Any) -> str | None:
    """Returns why each request of a peft model needs its own call with the active adapters; None if the requests can
    run on the model inside.
    """
    if not is_pefts(model):
        return None
    for name in model.active_adapters:
        config = model.peft_config.get(name)
        if config is None:
            return f"an adapter that is not there ({name})"
        kind = str(getattr(config.peft_type, "value", config.peft_type)).lower()
        if kind not in ADAPTERS:
            return f"adapters of the kind {kind}"
        if getattr(config, "alora_invocation_tokens", None):
            return "adapters that begin at tokens of the prompt (alora_invocation_tokens)"
    return None


def choose_config(model: Any, inside: Any) -> None:
    """Gives the model inside the generation config that peft's call for a decoder would give it."""
    if _is_a(model, "PeftModelForCausalLM") and inside is not model:
        inside.generation_config = model.generation_config


def arguments_of(model: Any, options: Mapping[str, Any]) -> list[str]:
    """Returns the options of a call that peft consumes itself, such as `adapter_names`, with a value for each row."""
    own = getattr(model, "special_peft_forward_args", ()) if is_pefts(model) else ()
    return [name for name in own if name in options]


def take_adapter(model: Any, inside: Any, options: dict[str, Any]) -> str | None:
    """Returns the adapter that a request names, and removes it from the options, if FastGen can serve it beside others.
    Returns None if the request names none, or if peft's own code has to run it.
    """
    if ADAPTER_NAMES not in arguments_of(model, options):
        return None
    names = options[ADAPTER_NAMES]
    if names is None:
        del options[ADAPTER_NAMES]
    if not isinstance(names, (list, tuple)):
        return None
    known = row_adapters.names_in(inside)
    unknown = [str(name) for name in names if name not in (row_adapters.BASE, *known)] if known else []
    if unknown:
        raise ValueError(f"{ADAPTER_NAMES}: the model has no {', '.join(unknown)}; it has {', '.join(sorted(known))}")
    if len(names) != 1 or inside.device.type != "cpu" or row_adapters.unsupported(inside, names[0]) is not None:
        return None
    return str(options.pop(ADAPTER_NAMES)[0])


def name_tokens(model: Any, inside: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Returns the inputs of a call under the name that peft looks for: it treats some kinds of adapters specially."""
    if model is inside or "inputs" not in given or inside.main_input_name != "input_ids":
        return given
    return {"input_ids" if name == "inputs" else name: value for name, value in given.items()}


@contextlib.contextmanager
def without_hooks_left(model: Any, options: Mapping[str, Any]) -> Iterator[None]:
    """Removes the hooks that a failed call of peft's leaves on the model. They give each row something of its own, such
    as its adapter or the place in the prompt where the adapter starts.
    """
    may_have_hooks = bool(arguments_of(model, options)) or alone_for_adapters(model) is not None
    before = _row_hooks(model) if may_have_hooks else set()
    try:
        yield
    except BaseException:
        for module, number in _row_hooks(model) - before if may_have_hooks else ():
            module._forward_pre_hooks.pop(number)
            module._forward_pre_hooks_with_kwargs.pop(number, None)
        raise


def _row_hooks(model: Any) -> set[tuple[nn.Module, int]]:
    return {(module, number) for module in modules_of(model) for number in library_code.row_hooks(module)}


class Served:
    """The adapters that requests have used, in order of first use."""

    def __init__(self) -> None:
        self._names: list[str | None] = []

    def beside(self, adapter: str | None) -> Adapters:
        """Returns the adapters of the step that serves this one: its group in order of first use, as large as a step
        allows.

        A step is captured for such a group rather than for each mixture of adapters. Requests without an adapter of
        their own get a step without others, unless such a step already serves slots.
        """
        if adapter not in self._names:
            self._names.append(adapter)
        begin = self._names.index(adapter) // MOST_ADAPTERS * MOST_ADAPTERS
        return ACTIVE if adapter is None else tuple(self._names[begin : begin + MOST_ADAPTERS])

    def clear(self) -> None:
        """Forgets all adapters, because the model has changed."""
        self._names.clear()
