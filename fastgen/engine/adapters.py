"""A model of peft as the engine sees it: the model that its `generate` calls, and when that runs requests in slots.

peft's `generate` hands a call on to that of the model inside, whose layers have the adapters. What it does besides is
for kinds of adapters that add tokens, or see rows and positions: those keep a call of peft's for each request.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from transformers.generation.utils import GenerationMixin

from fastgen.decoding import library_code
from fastgen.decoding.modules import modules_of
from fastgen.optimizer.transformers import row_adapters
from fastgen.optimizer.transformers.captured.kind import MOST_ADAPTERS
from fastgen.optimizer.transformers.models import ADAPTERS
from fastgen.optimizer.transformers.row_adapters import ACTIVE, Adapters

# peft's option: the adapter of each row.
ADAPTER_NAMES = "adapter_names"


def is_pefts(model: Any) -> bool:
    """Whether `generate` of this model is peft's own."""
    if not (_is_a(model, "PeftModel") or _is_a(model, "PeftMixedModel")):
        return False
    return "generate" not in vars(model) and library_code.is_of_library(type(model).generate)


def _is_a(model: Any, name: str) -> bool:
    """Whether a model is of this class of peft's, which is not imported for that."""
    return isinstance(model, getattr(sys.modules.get("peft"), name, ()))


def model_inside(model: Any) -> Any:
    """The model that generates: the one inside a model of peft; any other itself."""
    if not is_pefts(model):
        return model
    tuner = model.base_model  # with a learned prompt, there is none between the two
    inside = tuner if isinstance(tuner, GenerationMixin) else getattr(tuner, "model", None)
    return inside if isinstance(inside, GenerationMixin) else model


def alone_for_adapters(model: Any) -> str | None:
    """Why each request of a model of peft has a call of its own, with the adapters that are active; None where requests
    run as the model inside has them.
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
    """Has the model inside the generation config that a call of peft's for a decoder gives it."""
    if _is_a(model, "PeftModelForCausalLM") and inside is not model:
        inside.generation_config = model.generation_config


def arguments_of(model: Any, options: Mapping[str, Any]) -> list[str]:
    """The options of a call that peft keeps for itself, such as `adapter_names`: something for each row."""
    own = getattr(model, "special_peft_forward_args", ()) if is_pefts(model) else ()
    return [name for name in own if name in options]


def take_adapter(model: Any, inside: Any, options: dict[str, Any]) -> str | None:
    """The adapter that a request names for itself, taken out of its options where FastGen has it beside others; None
    where it names none, and where peft's own code has to run it.

    Raises:
        ValueError: the model has no such adapter.
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
    """The inputs of a call, with the name that peft looks for: it has more to do for some kinds of adapters."""
    if model is inside or "inputs" not in given or inside.main_input_name != "input_ids":
        return given
    return {"input_ids" if name == "inputs" else name: value for name, value in given.items()}


@contextlib.contextmanager
def without_hooks_left(model: Any, options: Mapping[str, Any]) -> Iterator[None]:
    """A call of peft's that fails leaves the hooks on the model that hand something to each row, such as its adapter,
    or where in its prompt that begins: they go.
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
    """The adapters that requests have had, in the order in which they came first."""

    def __init__(self) -> None:
        self._names: list[str | None] = []

    def beside(self, adapter: str | None) -> Adapters:
        """Those of a step that serves this one: those that came first with it, as many as a step may have.

        A step is recorded for these, and not for each mixture that there may be. Requests without one of their own have
        no others beside them, unless there are such in slots.
        """
        if adapter not in self._names:
            self._names.append(adapter)
        begin = self._names.index(adapter) // MOST_ADAPTERS * MOST_ADAPTERS
        return ACTIVE if adapter is None else tuple(self._names[begin : begin + MOST_ADAPTERS])

    def clear(self) -> None:
        """The model has changed."""
        self._names.clear()
