"""The model as the engine sees it: which part of it generates, which requests may share a call or run in slots, and
whether it has changed since.

peft's `generate` forwards the call to the model inside, whose layers hold the adapters. For adapters that add tokens,
or that depend on rows or positions, it does more; each request of such a model keeps its own call of peft's `generate`.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from transformers.generation.utils import GenerationMixin

from fastgen import patching, releases, settings
from fastgen.decoding import guards, library_code
from fastgen.decoding.captured import graph
from fastgen.decoding.layer_forms import runs_own_forward
from fastgen.decoding.library_code import modules_of
from fastgen.optimizer.transformers import buckets, cache_layers, row_adapters
from fastgen.optimizer.transformers.captured.entering_decoding import MOST_ADAPTERS
from fastgen.optimizer.transformers.encoders.stacks import way_of
from fastgen.optimizer.transformers.models import (
    ADAPTERS,
    has_independent_rows,
    modules_unsupported,
    parts_that_decode,
    rows_depend_on_each_other,
    text_config,
)
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


# Attributes by which peft's layers, and Transformers' own interface to peft, select the adapters of a forward pass.
_OF_ADAPTERS = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")


def pads(model: Any) -> bool:
    """Whether requests of different lengths may share a batch: padding is known not to change their results."""
    model = model_that_decodes(model)
    if model.config.is_encoder_decoder:
        return way_of(model.get_encoder()) is not None
    return buckets.ignores_padding(model)


def has_slots(model: Any) -> bool:
    """Whether requests of this model run in slots under the present settings."""
    is_on = patching.is_active() and settings.current().captured_step != "never"
    device = model_that_decodes(model).device
    is_served = is_on and device.type == "cpu" and graph.unavailable(device) is None
    return is_served and alone_for_model(model) is None


def what_runs_together(model: Any) -> str:
    """Says, in a sentence, which requests of a model run in slots, or share a static batch."""
    if has_slots(model):
        return "requests enter and leave while others go on"
    reason = alone_for_model(model) or why_by_itself(model_inside(model))
    if reason is not None:
        return f"each request has a call of its own: {reason}"
    return f"requests {'' if pads(model) else 'of one length '}that agree in their options share a call"


def alone_for_model(model: Any) -> str | None:
    """Returns why requests of this model must not share a batch now; None if they may. A whitelist decides."""
    reason = alone_for_adapters(model)
    if reason is not None:
        return reason
    inside, model = model_inside(model), model_that_decodes(model)
    kind = type(model)
    is_known = kind.__module__.startswith("transformers.models.") and kind.__name__ in releases.MODELS
    known = (buckets.is_decoder, cache_layers.states_are_known, has_independent_rows)
    is_known |= all(any(knows(part) for knows in known) for part in parts_that_decode(model))
    if not is_known:
        return f"{kind.__name__} is not known to treat the rows of a batch alike"
    if not (runs_own_forward(model) and library_code.is_own(kind.forward)) or guards.unusual() is not None:
        return "other code in the place of the library's"
    reason = modules_unsupported(inside)
    if reason is None and rows_depend_on_each_other(model):
        reason = "what the model says of an input depends on the others of the batch"
    return reason


def state_of(model: Any) -> list[tuple[Any, ...]]:
    """Returns a list that stays equal while the model keeps its weights, modules, mode and adapters within a call."""
    found: list[tuple[Any, ...]] = []
    for module in modules_of(model):
        own = vars(module)
        found.append((id(module), module.training, *(repr(own[name]) for name in _OF_ADAPTERS if name in own)))
        for weight in module._parameters.values():
            # A forward pass replaces weights that are fetched for it, and position tables that it rebuilds for longer
            # inputs.
            if weight is None or weight.is_meta or (isinstance(module, nn.Embedding) and not weight.requires_grad):
                continue
            place = weight.data_ptr() if type(weight) in (Tensor, nn.Parameter) else 0
            found.append((id(weight), place, weight.requires_grad, 0 if weight.is_inference() else weight._version))
    return found


class ModelState:
    """The state of a model when `has_changed` was last called.

    Attributes:
        latest: the state.
        changes: how often the state has changed.
    """

    def __init__(self, model: Any) -> None:
        self._model, self.changes = model, 0
        self.latest: list[tuple[Any, ...]] | None = None

    def has_changed(self) -> bool:
        """Whether the state differs from that of the previous call."""
        before, self.latest = self.latest, state_of(self._model)
        self.changes += self.latest != before
        return self.latest != before


def why_by_itself(model: Any) -> str | None:
    """Returns why a request of a model that overrides the library's `generate`, as Whisper does, has a call of its own;
    None for other models.
    """
    kind = type(model)
    return None if is_the_librarys(kind, "generate") else f"{kind.__name__} has a generate of its own"


# Names in configurations for the number of positions of a decoder, and of an encoder: the first that exists counts.
_POSITIONS = ("max_decoder_position_embeddings", "max_target_positions", "max_position_embeddings")
_SOURCE_POSITIONS = ("max_encoder_position_embeddings", "max_position_embeddings")


def positions_of(config: Any, of_source: bool = False) -> int | None:
    """Returns how many positions a model's decoder has, or, with `of_source`, its encoder; None for no limit."""
    if not of_source:
        config = text_config(config)
    names = _SOURCE_POSITIONS if of_source else _POSITIONS
    return next((found for name in names if isinstance(found := getattr(config, name, None), int)), None)


def is_the_librarys(kind: type, name: str) -> bool:
    return inspect.getattr_static(kind, name, None) is vars(GenerationMixin)[name]
