"""Hugging Face Transformers: the functions that are hooked.

`generate` opens a call and repeats it with the original code should anything go wrong; `_prefill`, which every decoding
loop calls before its first step, runs on one row per input and puts FastGen's K/V store into the cache. Loops, other
processors and criteria stay the library's.
"""

from __future__ import annotations

from fastgen.patching import Condition, Patch, has, takes

# The releases that the equivalence tests run against; others are used when their functions look the same.
TESTED_VERSIONS = ("5.4", "5.23")


def patches() -> list[Patch]:
    """Every patch that FastGen applies to Transformers."""

    def generation(method: str, wrapper: str, condition: Condition, former: str | None = None) -> Patch:
        target, former = f"GenerationMixin.{method}", former and f"GenerationMixin.{former}"
        return Patch("transformers.generation.utils", target, f"{__name__}.{wrapper}", condition, former)

    def processors(target: str, wrapper: str, condition: Condition) -> Patch:
        return Patch("transformers.generation.logits_process", target, f"{__name__}.{wrapper}", condition)

    def prophetnet(target: str, wrapper: str, condition: Condition) -> Patch:
        module = "transformers.models.prophetnet.modeling_prophetnet"
        return Patch(module, target, f"{__name__}.captured.prophetnet:{wrapper}", condition)

    scores = "self input_ids scores"
    loop = ("captured.loop:decode", has("input_ids logits_processor stopping_criteria generation_config"))
    return [
        generation(
            "generate",
            "generate:generate",
            has("inputs generation_config streamer assistant_model custom_generate kwargs"),
        ),
        generation(
            "_prefill", "prefill:prefill", takes("self input_ids generation_config model_kwargs is_first_iteration")
        ),
        generation("_beam_search", *loop),
        generation("_sample", *loop),
        generation(
            "_prepare_text_encoder_decoder_kwargs_for_generation",
            "buckets:encode",
            has("inputs_tensor model_kwargs model_input_name generation_config"),
            former="_prepare_encoder_decoder_kwargs_for_generation",
        ),
        generation("prepare_inputs_for_generation", "loop_hooks:prepare_inputs", has("input_ids")),
        generation("_update_model_kwargs_for_generation", "loop_hooks:update_kwargs", has("outputs model_kwargs")),
        generation(
            "_check_early_stop_heuristic", "loop_hooks:early_stop", has("beam_scores is_sent_finished early_stopping")
        ),
        Patch(
            "transformers.generation.stopping_criteria",
            "StoppingCriteriaList.__call__",
            f"{__name__}.loop_hooks:stopping_criteria",
            has(scores),
        ),
        processors("LogitsProcessorList.__call__", "scores:process", has(scores)),
        processors(
            "EncoderNoRepeatNGramLogitsProcessor.__init__", "logits:remember_encoder_tokens", has("encoder_input_ids")
        ),
        *(
            processors(f"{name}LogitsProcessor.__call__", f"logits:{wrapper}", takes(scores, uses=uses))
            for name, wrapper, uses in (
                ("NoRepeatNGram", "no_repeat_ngram", "ngram_size"),
                ("EncoderNoRepeatNGram", "no_repeat_ngram", "ngram_size batch_size"),
                ("MinLength", "min_length", "min_length eos_token_id"),
                ("MinNewTokensLength", "min_length", "min_new_tokens prompt_length_to_skip eos_token_id"),
            )
        ),
        prophetnet("ProphetNetPositionalEmbeddings.forward", "embed_positions", has("past_key_values")),
        prophetnet(
            "ProphetNetNgramSelfAttention.forward",
            "attend",
            has(
                "hidden_states past_key_values position_ids main_relative_position_buckets "
                "predict_relative_position_buckets"
            ),
        ),
    ]
