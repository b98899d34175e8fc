"""Checks whether this installation accelerates: runs a model of two layers both ways, and compares the tokens."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

from fastgen import counters, patching, releases, settings
from fastgen.counters import CAPTURED_STEP, GENERATE

_DECODING: dict[str, dict[str, Any]] = {"greedy search": {}, "beam search": {"num_beams": 2}}
_NEW_TOKENS = 12


class Finding(NamedTuple):
    """The result of the two runs."""

    accelerates: bool
    detail: str
    """What was accelerated, or why nothing was."""


def run() -> Finding:
    """Generates with a random model of two layers, with the original code and with FastGen.

    Leaves `fastgen.stats()` unchanged, and measures and keeps nothing.
    """
    if not patching.is_active():
        return Finding(False, "FastGen is disabled (fastgen.disable(), or FASTGEN_DISABLE=1)")
    captured_step = "never" if settings.current().captured_step == "never" else "always"
    with (
        counters.set_aside(),
        settings.changed(strict=False, captured_step=captured_step, weight_dtype="fp32"),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        return _compared()


def _compared() -> Finding:
    import torch

    model = _model()
    prompt = torch.arange(3, 23).unsqueeze(0)
    for name, options in _DECODING.items():
        counters.reset()
        arguments = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt), "do_sample": False, **options}
        arguments |= {"max_new_tokens": _NEW_TOKENS, "min_new_tokens": _NEW_TOKENS}
        with patching.suspended():
            expected = model.generate(**arguments)
        found = model.generate(**arguments)
        stats = counters.snapshot()
        if not stats.get(GENERATE, {}).get("accelerated"):
            reasons = stats.get(GENERATE, {}).get("fallback") or {"generate is not hooked": 1}
            return Finding(False, f"{name} runs on the original code: {next(iter(reasons))}")
        if not torch.equal(expected, found):
            return Finding(False, f"{name} gives other tokens than the original code: please report this")
    captured: Any = stats.get(CAPTURED_STEP, {})
    if captured.get("accelerated"):
        return Finding(True, "hooks and captured steps, same tokens")
    is_never = settings.current().captured_step == "never"
    missing = "captured_step is never" if is_never else "the decoding loops are not hooked"
    reason = next(iter(captured.get("not used", {})), missing)
    return Finding(True, f"hooks, same tokens; no captured steps: {reason}")


def _model() -> Any:
    """Returns a random Llama of two layers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval()


def line() -> tuple[str, bool]:
    """Returns the first line of `python -m fastgen`, and whether it is positive."""
    try:
        import transformers
    except ImportError as error:
        return f"FastGen does not accelerate here: Transformers cannot be imported ({error})", False
    try:
        found = run()
    except Exception as error:  # this line tells the user that something is wrong
        found = Finding(False, f"a model of two layers fails with {type(error).__name__}: {error}")
    release = f"Transformers {transformers.__version__}"
    if not releases.is_tested(transformers.__version__):
        release += f" (not tested: {' to '.join(releases.TESTED)} are)"
    if found.accelerates:
        import torch

        from fastgen.ops import _library

        missing = _library.load("CPU")
        if missing and not _library.is_disabled() and not torch.cuda.is_available():
            hardly = "FastGen runs here WITHOUT its compiled operators, and hardly accelerates"
            return f"{hardly} ({missing}): {release}, {found.detail}", False
        without = f", without compiled operators ({missing})" if missing else ""
        return f"FastGen accelerates here{without}: {release}, {found.detail}", True
    return f"FastGen does NOT accelerate here: {release}, {found.detail}", False
