"""Hugging Face Transformers: the functions that are hooked.

A few hooks carry everything. `generate` opens a call and repeats it with the original code should anything go wrong;
`_prefill`, which every decoding loop calls before its first step, runs on one row per input and puts FastGen's K/V
store into the cache; one runs the encoder on groups of inputs of about the same length; four let inputs that are
finished leave the batch; the two n-gram processors use FastGen's operator, and those that wait for a length no copies.
Loops, other processors and criteria stay the library's.
"""

from __future__ import annotations

import inspect
from types import CodeType
from typing import Any

from fastgen.patching import Patch

# The releases that the equivalence tests run against; others are used when their functions look the same.
TESTED_VERSIONS = ("5.4", "5.23")

_PREFILL_PARAMETERS = ["self", "input_ids", "generation_config", "model_kwargs", "is_first_iteration"]
_GENERATE_PARAMETERS = {"inputs", "generation_config", "streamer", "assistant_model", "custom_generate", "kwargs"}


def _check_prefill(original: Any) -> str | None:
    found = list(inspect.signature(original).parameters)
    if found != _PREFILL_PARAMETERS:
        return f"GenerationMixin._prefill takes ({', '.join(found)}), expected ({', '.join(_PREFILL_PARAMETERS)})"
    return None


def _check_generate(original: Any) -> str | None:
    missing = _GENERATE_PARAMETERS - set(inspect.signature(original).parameters)
    return f"GenerationMixin.generate has no parameter {', '.join(sorted(missing))}" if missing else None


def _check_parameters(*names: str) -> Any:
    """The function must have these parameters."""

    def check(original: Any) -> str | None:
        original = getattr(original, "__func__", original)  # of a static method
        missing = set(names) - set(inspect.signature(original).parameters)
        return f"{original.__qualname__} has no parameter {', '.join(sorted(missing))}" if missing else None

    return check


def _check_processor(attributes: set[str]) -> Any:
    """The processor's __call__ must take (input_ids, scores), and use the attributes that the replacement reads."""

    def check(original: Any) -> str | None:
        found = list(inspect.signature(original).parameters)
        if found != ["self", "input_ids", "scores"]:
            return f"{original.__qualname__} takes ({', '.join(found)}), expected (self, input_ids, scores)"
        missing = attributes - _names(original.__code__)
        return f"{original.__qualname__} does not use {', '.join(sorted(missing))}" if missing else None

    return check


def _names(code: CodeType) -> set[str]:
    """The attributes and globals that a function reads, comprehensions inside it included."""
    nested = (_names(part) for part in code.co_consts if isinstance(part, CodeType))
    return set(code.co_names).union(*nested)


def patches() -> list[Patch]:
    """Every patch that FastGen applies to Transformers."""
    generation = "transformers.generation.utils"
    processors = "transformers.generation.logits_process"
    adapters = __name__
    return [
        Patch(generation, "GenerationMixin.generate", f"{adapters}.generate:generate", _check_generate),
        Patch(generation, "GenerationMixin._prefill", f"{adapters}.prefill:prefill", _check_prefill),
        *(
            Patch(
                generation,
                f"GenerationMixin.{loop}",
                f"{adapters}.captured.loop:decode",
                _check_parameters("input_ids", "logits_processor", "stopping_criteria", "generation_config"),
            )
            for loop in ("_beam_search", "_sample")
        ),
        Patch(
            generation,
            "GenerationMixin._prepare_text_encoder_decoder_kwargs_for_generation",
            f"{adapters}.encoder:encode",
            _check_parameters("inputs_tensor", "model_kwargs", "model_input_name", "generation_config"),
            former="GenerationMixin._prepare_encoder_decoder_kwargs_for_generation",
        ),
        Patch(
            generation,
            "GenerationMixin.prepare_inputs_for_generation",
            f"{adapters}.loop_hooks:prepare_inputs",
            _check_parameters("input_ids"),
        ),
        Patch(
            generation,
            "GenerationMixin._update_model_kwargs_for_generation",
            f"{adapters}.loop_hooks:update_kwargs",
            _check_parameters("outputs", "model_kwargs"),
        ),
        Patch(
            generation,
            "GenerationMixin._check_early_stop_heuristic",
            f"{adapters}.loop_hooks:early_stop",
            _check_parameters("beam_scores", "is_sent_finished", "early_stopping"),
        ),
        Patch(
            "transformers.generation.stopping_criteria",
            "StoppingCriteriaList.__call__",
            f"{adapters}.loop_hooks:stopping_criteria",
            _check_parameters("input_ids", "scores"),
        ),
        Patch(
            processors,
            "LogitsProcessorList.__call__",
            f"{adapters}.scores:process",
            _check_parameters("input_ids", "scores"),
        ),
        Patch(
            processors,
            "NoRepeatNGramLogitsProcessor.__call__",
            f"{adapters}.logits:no_repeat_ngram",
            _check_processor({"ngram_size"}),
        ),
        Patch(
            processors,
            "EncoderNoRepeatNGramLogitsProcessor.__init__",
            f"{adapters}.logits:remember_encoder_tokens",
        ),
        Patch(
            processors,
            "EncoderNoRepeatNGramLogitsProcessor.__call__",
            f"{adapters}.logits:encoder_no_repeat_ngram",
            _check_processor({"ngram_size", "batch_size"}),
        ),
        Patch(
            processors,
            "MinLengthLogitsProcessor.__call__",
            f"{adapters}.logits:min_length",
            _check_processor({"min_length", "eos_token_id"}),
        ),
        Patch(
            "transformers.models.prophetnet.modeling_prophetnet",
            "ProphetNetPositionalEmbeddings.forward",
            f"{adapters}.captured.prophetnet:embed_positions",
            _check_parameters("past_key_values"),
        ),
        Patch(
            "transformers.models.prophetnet.modeling_prophetnet",
            "ProphetNetNgramSelfAttention.forward",
            f"{adapters}.captured.prophetnet:attend",
            _check_parameters(
                "hidden_states",
                "past_key_values",
                "position_ids",
                "main_relative_position_buckets",
                "predict_relative_position_buckets",
            ),
        ),
        Patch(
            processors,
            "MinNewTokensLengthLogitsProcessor.__call__",
            f"{adapters}.logits:min_new_tokens",
            _check_processor({"min_new_tokens", "prompt_length_to_skip", "eos_token_id"}),
        ),
    ]
