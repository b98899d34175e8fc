"""sentence-transformers: its models are a Transformer and a pooling of its states, which masks padding."""

from __future__ import annotations

from abc import ABC
from collections.abc import MutableMapping
from contextvars import ContextVar
from typing import Any

from fastgen import counters, patching, settings
from fastgen.decoding.layer_forms import runs_own_forward
from fastgen.optimizer.transformers.encoders import call

# Modules after the pooling, which process one vector for each text.
_OF_VECTORS = ("Dense", "Dropout", "LayerNorm", "Normalize")
_OF_LIBRARY = "sentence_transformers."
_VECTOR = "sentence_embedding"


class _OfEveryClass(ABC):
    """Has the names that Python gives every class, which differ between its versions."""

    annotated: int


# What a user's class may override: names of every class, and methods that only call what is looked at.
_OF_USERS = frozenset(vars(_OfEveryClass)) | {"__init__", "encode", "encode_query", "encode_document"}

# Only modules that mask padding read the model's states.
_states_are_masked: ContextVar[bool] = ContextVar("fastgen_masked_states", default=False)


def encode(wrapped: Any, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps `SentenceTransformer.encode`."""
    bound = patching.bound(wrapped, args, kwargs)
    if bound is None:
        return wrapped(*args, **kwargs)
    bound.apply_defaults()
    shown = bound.arguments["output_value"]
    found = None if call.is_left_alone() else counters.decided(call.ENTRY_POINT, _encoder, model, shown)
    if found is None:
        return wrapped(*args, **kwargs)
    encoder, are_masked = found
    with patching.held(_states_are_masked, are_masked), call.layers_of_passes(encoder):
        return wrapped(*args, **kwargs)


def _encoder(model: Any, shown: Any) -> tuple[Any, bool] | None:
    """Returns the model that a SentenceTransformer runs, and whether only masked states affect the value `shown`; None
    if the model is not encoder-only.
    """
    encoder = getattr(next(model.children(), None), "model", None)
    if not hasattr(encoder, "base_model") or call.known_of(encoder).stack is None:
        return None
    return encoder, shown == _VECTOR and _pools(model)


def _pools(model: Any) -> bool:
    """Whether the modules are the library's: a Transformer, a pooling, and modules that process its vectors."""
    modules = list(model.children())
    kinds = [type(module).__name__ for module in modules]
    return (
        all(type(module).__module__.startswith(_OF_LIBRARY) for module in modules)
        and _runs_library_code(type(model))
        and kinds[:2] == ["Transformer", "Pooling"]
        and not _reads_padding(modules[0], modules[1])
        and set(kinds[2:]) <= set(_OF_VECTORS)
        and all(getattr(each, "module_input_name", _VECTOR) == _VECTOR for each in modules[2:])
        and all(map(runs_own_forward, (model, *modules)))
        and not any(module._forward_hooks or module._forward_pre_hooks for module in (model, *modules))
    )


def _runs_library_code(kind: type) -> bool:
    """Whether a model's class is the library's, or differs from it in nothing that `encode` calls: a user's `encode`
    calls that of the library, and names that the library does not know are never read.
    """
    for number, base in enumerate(kind.__mro__):
        if base.__module__.startswith(_OF_LIBRARY):
            users = {name for each in kind.__mro__[:number] for name in vars(each)}
            return all(name in _OF_USERS or not hasattr(base, name) for name in users)
    return False


def _reads_padding(transformer: Any, pooling: Any) -> bool:
    """Whether the first column, which releases before 6 take as the first token, may be padding."""
    takes_first = getattr(pooling, "pooling_mode_cls_token", False) or "cls" in getattr(pooling, "pooling_mode", ())
    return takes_first and getattr(getattr(transformer, "tokenizer", None), "padding_side", None) != "right"


def forward(wrapped: Any, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps `Transformer.forward(features)`, which calls the model's forward pass, not the model."""
    is_ours = not call.is_left_alone() and counters.decided(call.ENTRY_POINT, _is_encoder, module, args)
    if not is_ours:
        return wrapped(*args, **kwargs)
    model = module.model
    features, *others = args
    padding = "unseen" if _states_are_masked.get() else settings.current().padding
    # A repeated pass must not see what the first attempt has added to the features.
    result = call.run(lambda: wrapped(dict(features), *others, **kwargs), model, {**features, **kwargs}, padding)
    features.update(result)
    return features


def _is_encoder(module: Any, args: tuple[Any, ...]) -> bool:
    """Whether a Transformer that gets such arguments has an encoder-only model."""
    model = getattr(module, "model", None)
    is_called = bool(args) and isinstance(args[0], MutableMapping) and hasattr(model, "base_model")
    return is_called and call.known_of(model).stack is not None
