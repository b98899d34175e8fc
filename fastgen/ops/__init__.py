"""Operators: modules with their schemas, their references in plain torch and the choice of backend.

Importing this package is cheap. An operator's module imports torch, so only code that needs the operator imports it:

    from fastgen.ops.no_repeat_ngram import no_repeat_ngram_
"""

from __future__ import annotations

from importlib import import_module

OPERATORS = {
    "approximate_logits": ("approximate_logits", "largest_output_out"),
    "attention": ("attention", "decode_attention_out"),
    "best_candidates": ("search_step", "best_candidates_out"),
    "elementwise": ("elementwise", "elementwise"),
    "exact_cast": ("linear", "exact_cast_out"),
    "fingerprint": ("fingerprint", "fingerprint"),
    "kv_write": ("kv_write", "kv_write"),
    "linear.choose": ("linear.choose", "backend()"),
    "linear.experts": ("linear", "expert_linear_out"),
    "linear.grouped": ("linear", "grouped_linear_out"),
    "linear.kernels": ("linear", "gemm_out"),
    "linear.panels": ("linear", "panels_gemm_batch_out"),
    "no_repeat_ngram": ("no_repeat_ngram", "no_repeat_ngram_"),
    "packed_attention": ("packed_attention", "packed_attention"),
    "quantized_linear": ("linear.choose", "precisions()"),
    "rms_norm": ("rms_norm", "rms_norm_out"),
    "search_step": ("search_step", "take_beams_"),
    "sort_rows": ("search_step", "sort_rows_out"),
    "stored_topk": ("stored_topk", "stored_topk"),
    "top_p": ("search_step", "sort_rows_out"),
    "top_two": ("search_step", "top_two_out"),
}
"""By name: the module that defines them, and an operator whose kernels stand for all, or a function of the module that
tells what serves them ("name()").
"""


def backends() -> dict[str, str]:
    """Returns what serves each of `OPERATORS`: `{"no_repeat_ngram": "C++ (csrc)", ...}`, or "torch reference" and why.

    Imports torch and the operators.
    """
    from fastgen.ops import _library

    modules = {name: import_module(f"{__name__}.{module}") for name, (module, _) in OPERATORS.items()}
    return {
        name: getattr(modules[name], which[:-2])() if which.endswith("()") else _library.backend(f"fastgen::{which}")
        for name, (_, which) in OPERATORS.items()
    }
