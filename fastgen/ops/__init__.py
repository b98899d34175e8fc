"""Operators: one module each, with its schema, its reference in plain torch and the choice of backend.

Importing this package is cheap. An operator's module imports torch, so only code that needs the operator imports it:

    from fastgen.ops.no_repeat_ngram import no_repeat_ngram_

Every operator module defines `backend() -> str`, a short phrase that tells what serves the operator in this process.
"""

from __future__ import annotations

from importlib import import_module

OPERATORS = (
    "approximate_logits",
    "attention",
    "best_candidates",
    "elementwise",
    "exact_cast",
    "fingerprint",
    "kv_write",
    "linear.choose",
    "linear.experts",
    "linear.grouped",
    "linear.kernels",
    "linear.panels",
    "no_repeat_ngram",
    "packed_attention",
    "quantized_linear",
    "rms_norm",
    "search_step",
    "sort_rows",
    "top_p",
    "top_two",
)
"""The operators by name, which is also the name of their module in this package."""


def backends() -> dict[str, str]:
    """Returns what serves each operator: `{"no_repeat_ngram": "C++ (csrc)", ...}`, or "torch reference" and the reason.

    Imports torch and the operators.
    """
    return {name: import_module(f"{__name__}.{name}").backend() for name in OPERATORS}
