"""FastGen makes sequence generation in Hugging Face Transformers faster without changing the result.

    import fastgen          # before or after transformers: that is all
    model.generate(...)     # same tokens, a fraction of the time

Importing it enables it, unless FASTGEN_DISABLE=1 is set. The import itself is light: the patches are applied when
Transformers is imported. `python -m fastgen` tells whether this installation accelerates.
"""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from fastgen import _conflict, counters, memory, patching, settings  # noqa: F401 (the first one looks when imported)
from fastgen._version import __version__
from fastgen.counters import FallbackError, Stats
from fastgen.engine import patches as _engine_patches
from fastgen.optimizer import fairseq as _fairseq
from fastgen.optimizer import transformers as _transformers
from fastgen.settings import KeepBits

if TYPE_CHECKING:
    from fastgen.comparison import Comparison
    from fastgen.engine.engine import Engine as Engine
    from fastgen.engine.engine import EngineFull as EngineFull
    from fastgen.grammar import Grammar as Grammar
    from fastgen.optimizer.transformers.generate import decode as decode
    from fastgen.report import Status

__all__ = [
    "Engine", "EngineFull", "FallbackError", "Grammar", "KeepBits", "__version__", "compare", "decode", "disable",
    "disabled", "enable", "reset_stats", "stats", "status",
]  # fmt: skip

_patches = patching.all_patches(lambda: [*_transformers.patches(), *_engine_patches(), *_fairseq.patches()])


# Names whose modules import torch and Transformers.
_LAZY = {
    "Engine": "engine.engine",
    "EngineFull": "engine.engine",
    "Grammar": "grammar",
    "decode": "optimizer.transformers.generate",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"fastgen.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def enable(
    *,
    strict: bool | None = None,
    packed_weights: str | None = None,
    weight_dtype: str | None = None,
    weight_group_size: int | None = None,
    keep_bits: bool | None = None,
    activations: str | None = None,
    linear_products: str | None = None,
    captured_step: str | None = None,
    padding: str | None = None,
    self_speculation: str | None = None,
    assisted_sampling: str | None = None,
    few_bits_inputs: str | None = None,
    cpu_weights: str | None = None,
) -> None:
    """Applies FastGen's patches to the toolkits imported now and later. May be called repeatedly.

    Settings that are not given keep their values. Initially these are the defaults, or the values of the environment
    variables (FASTGEN_STRICT, FASTGEN_PACKED_WEIGHTS, ...). `fastgen.settings.Settings` describes each in detail.

    Args:
        strict: raise `FallbackError` if a call would fall back to the original code.
        packed_weights: how long quantised copies of a model's weights live: "call" (the default), "keep" or "never".
        weight_dtype: the type that linear layers multiply with: "fp32" (the default: the model's own), or copies in
            "int8", "int4" or "bf16", whose results differ from those of the model's weights. On a GPU, only "int8" and
            "int4" copies exist.
        linear_products: deprecated, without effect.
        captured_step: whether decode steps are captured and replayed: "auto" (the default), "always" or "never".
        padding: what encoder results hold in padded positions: "exact" (the default) or "zero".
        self_speculation: whether the model's own weights in "int8" or "int4" draft tokens; "off" by default.
        assisted_sampling: who samples in assisted generation: "library" (the default) or "fastgen".
        weight_group_size: how many inputs of a layer share a scale in "int8" and "int4": 32, 64 (the default) or 128.
        keep_bits: `from_pretrained` keeps the weights of low-bit checkpoints in their bits: `KeepBits` for all calls.
        activations: what such weights are multiplied with on the CPU: "float" (the default) or "int8".
        few_bits_inputs: the old name of `activations`, with "exact" for "float", deprecated.
        cpu_weights: the old name of `weight_dtype`, deprecated.

    Raises:
        TypeError: a setting is given by its old and its new name.
        ValueError: a value is invalid, or two values contradict each other.
    """
    given = settings.renamed({name: value for name, value in locals().items() if value is not None})
    before = settings.current()
    now = settings.change(**given, explicit=before.explicit | given.keys())
    if before.kept_weights not in (None, now.kept_weights):
        memory.free_all()  # otherwise a model that never generates again would hold its copies
    _patches.enable()


def disable() -> None:
    """Removes FastGen's patches: the toolkits get back the very objects that they had before."""
    _patches.disable()
    memory.free_all()


def disabled() -> AbstractContextManager[None]:
    """Returns a context manager: inside the block, calls made by this thread run the original code.

    Other threads are not affected. The patches stay in place and pass the calls through.
    """
    return patching.suspended()


def status() -> Status:
    """Returns versions, every patch (applied, or why not) and every operator (its backend). Prints as a table."""
    from fastgen.report import collect

    return collect(_patches)


def stats() -> Stats:
    """Returns what was accelerated and what fell back since the start or the last `reset_stats()`. Prints as a table.

    Returns:
        {entry point: {"accelerated": calls, "fallback": {reason: calls}}}, a dict. "fallback" counts calls that ran on
        the original code. An optional entry point, such as "transformers.captured_step", also has "not used": {reason:
        calls}, for calls that did without it and were accelerated all the same. Speculative decoding adds sums of
        tokens: "drafted", "accepted", "verifies", "near_ties".
    """
    return counters.snapshot()


def reset_stats() -> None:
    """Resets the counts of `stats()` to zero."""
    counters.reset()


def compare(model: Any, inputs: Any, *, tokenizer: Any = None, **generate_kwargs: Any) -> Comparison:
    """Generates with the original code and with FastGen, and compares the results, the times and the memory.

    After a short warm-up, each side makes a first call. Once FastGen's calls capture nothing more, both sides make
    later calls, interleaved. All calls start from the same random state. There are at least five calls, and a warm-up.

    Args:
        model: a Transformers model, or a pipeline that generates.
        inputs: a mapping that is passed to `generate` as keywords (what a tokenizer returns), a tensor that is passed
            as its first argument, or a text or a list of texts. For a pipeline, whatever it takes.
        tokenizer: tokenizer for texts. For decoder-only models, texts are padded on the left.
        **generate_kwargs: passed to `generate`, or to the pipeline.

    Returns:
        A `Comparison`: `identical`, `first_difference`, `first_speedup`, `speedup`, seconds and peak memory of both
        sides; prints as a table.

    Raises:
        TypeError: texts are given without a tokenizer.
        ValueError: the pipeline does not generate.
    """
    from fastgen.comparison import compare as run

    return run(model, inputs, tokenizer, generate_kwargs)


if not settings.current().disabled:
    enable()
