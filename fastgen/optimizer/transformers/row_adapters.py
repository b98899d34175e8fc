"""LoRA adapters of peft per row: rows of one forward pass may have different adapters.

peft's own option for this, `adapter_names`, passes its layers a list of names through hooks. Here, the layers ask the
running pass (`choosing`): either all rows have one adapter, as in a prefill, or a buffer holds the number of each
row's adapter, as in a decode step with slots. A row's output of other adapters is computed but not used, so that it
changes no bit.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from fastgen import patching
from fastgen.decoding.kv.view import CannotBeCaptured
from fastgen.decoding.layer_forms import Replacement
from fastgen.decoding.library_code import modules_of

# Names of the adapters that a pass serves. None stands for the active ones, which rows without their own adapter use.
Adapters = tuple[str | None, ...]
ACTIVE: Adapters = (None,)
# peft's name for no adapter at all.
BASE = "__base__"
# Name of the step input that holds the rows' adapter numbers.
NUMBERS = "adapter_numbers"

# By name, for the lifetime of the process: a row keeps its number in other steps.
_numbers: dict[str, int] = {}
_next = itertools.count(1)


class _Choice(NamedTuple):
    """The adapters of a pass.

    Attributes:
        layers: the model's layers with adapters: a draft model may run meanwhile.
        masks: for each adapter, the rows that have it, [rows]; empty if all rows have the only one.
    """

    model: Any
    layers: frozenset[Any]
    adapters: Adapters
    masks: tuple[Tensor, ...]


_choice: ContextVar[_Choice | None] = ContextVar("fastgen_row_adapters", default=None)


def number_of(adapter: str | None) -> int:
    """Returns the number that represents an adapter in a buffer."""
    return 0 if adapter is None else _numbers.setdefault(adapter, next(_next))


def in_order(*adapters: str | None) -> Adapters:
    """Returns each adapter once, in an order that does not depend on who came first."""
    return tuple(sorted({*adapters}, key=lambda name: (name is not None, name or "")))


def choosing(model: Any, adapters: Adapters, numbers: Tensor | None = None) -> AbstractContextManager[None]:
    """A context in which rows of the model have these adapters in the calling thread.

    Args:
        numbers: [rows, 1], the number of each row's adapter, if there are several adapters.

    Raises:
        CannotBeCaptured: some layer with adapters is not run by `LoraForm`.
    """
    if adapters == ACTIVE:
        return contextlib.nullcontext() if _choice.get() is None else patching.held(_choice, None)
    if not has_forms(model):
        raise CannotBeCaptured("layers with adapters have a forward pass of another's")
    masks: list[Tensor] = []
    if len(adapters) > 1:
        assert numbers is not None, "the step has them"
        masks = [numbers.view(-1) == number_of(adapter) for adapter in adapters]
    return patching.held(_choice, _Choice(model, frozenset(layers_of(model)), adapters, tuple(masks)))


def chosen(model: Any) -> str | None:
    """Returns the adapter that all rows of this thread's call have; None for the active ones."""
    choice = _choice.get()
    return None if choice is None or choice.model is not model else choice.adapters[0]


def layers_of(model: nn.Module) -> list[Any]:
    """Returns the linear layers with LoRA adapters."""
    return [module for module in modules_of(model) if _is_lora(module)]


def has_forms(model: nn.Module) -> bool:
    """Whether `LoraForm` runs all of them: nobody has set another forward pass."""
    return all(type(vars(layer).get("forward")) is LoraForm for layer in layers_of(model))


def names_in(model: nn.Module) -> set[str]:
    """Returns the names of the adapters in a model's layers, including layers of other kinds."""
    held = (getattr(module, kind, ()) for module in modules_of(model) for kind in ("lora_A", "lora_embedding_A"))
    return {str(name) for each in held for name in each}


def unsupported(model: nn.Module, adapter: str) -> str | None:
    """Returns why rows with this adapter cannot run beside others, including the active ones; None if they can.

    A whitelist decides: anything else that peft has put into the model stays with peft's own code.
    """
    if adapter not in (BASE, *names_in(model)) or not layers_of(model):
        return "no such adapter, or none of LoRA"
    for module in modules_of(model):
        layer: Any = module
        kind: type = type(layer)
        if not _is_lora(layer):
            if _is_pefts(kind):
                return f"adapters in a {kind.__qualname__}"
            continue
        if layer.merged or layer.training:
            return "merged adapters, or training mode"
        if not {adapter, *layer.active_adapters}.isdisjoint(layer.lora_variant):
            return "adapters that are more than LoRA"
    return None


def form_of(module: nn.Module) -> Replacement | None:
    """Returns the replacement of a layer's forward pass while the model generates; None without such adapters."""
    return LoraForm(module) if _is_lora(module) else None


def _is_lora(module: Any) -> bool:
    kind: type = type(module)
    return _is_kind_of_lora(kind)


@functools.cache
def _is_kind_of_lora(kind: type) -> bool:
    is_linear = kind.__module__ == "peft.tuners.lora.layer" and kind.__qualname__ == "Linear"
    return is_linear and hasattr(kind, "lora_variants")  # earlier releases did not separate them


@functools.cache
def _is_pefts(kind: type) -> bool:
    return any(base.__module__.startswith("peft.") for base in kind.__mro__)


class LoraForm(Replacement):
    """A linear layer that applies the adapters of the running pass; peft's own forward pass if there are none."""

    __slots__ = ()

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        choice, layer = _choice.get(), cast(Any, self._module)
        if choice is None or layer not in choice.layers or layer.disable_adapters:
            return self._plain(*arguments, **named)
        result = base = layer.base_layer(*arguments, **named)
        of_each = [_names(layer, adapter) for adapter in choice.adapters]
        terms = {name: _term(layer, name, arguments[0]) for name in itertools.chain.from_iterable(of_each)}
        for at, (adapter, names) in enumerate(zip(choice.adapters, of_each, strict=True)):
            own = base
            for name in names:
                # As in peft: active adapters are summed before rounding; a row's own is rounded before it is added.
                own = own + (terms[name] if adapter is None else terms[name].to(base.dtype))
            if names:
                result = _taken(choice.masks[at], own.to(base.dtype), result) if choice.masks else own.to(base.dtype)
        return result


def _names(layer: Any, adapter: str | None) -> list[str]:
    """Returns which of an adapter, or of the active ones, a layer has."""
    names: Sequence[str] = layer.active_adapters if adapter is None else [adapter]
    return [name for name in names if name in layer.lora_A]


def _term(layer: Any, name: str, x: Tensor) -> Tensor:
    """Returns the term that an adapter adds."""
    down, up = layer.lora_A[name], layer.lora_B[name]
    term: Tensor = up(down(layer.lora_dropout[name](x.to(down.weight.dtype)))) * layer.scaling[name]
    return term


def _taken(mask: Tensor, own: Tensor, others: Tensor) -> Tensor:
    """Selects the rows of `own` that the mask names, and those of `others` elsewhere, whatever `own` holds there."""
    if own.shape[0] != mask.shape[0]:
        raise CannotBeCaptured("a layer with adapters that does not get a row for each sequence")
    return torch.where(mask.view(-1, *[1] * (own.dim() - 1)), own, others)
