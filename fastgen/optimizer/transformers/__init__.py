"""Hugging Face Transformers: the functions that are hooked.

`generate` opens a call and repeats it with the original code should anything go wrong; `_prefill`, which every decoding
loop calls before its first step, runs on one row per input and puts FastGen's KV cache into the library's. Then a
captured step takes the place of the loop and of the processors that it knows (`loop`, `captured`). Where it does not
serve, the library's loop, processors and criteria run, on hooks. The user's own always run.
"""

from __future__ import annotations

from fastgen import releases
from fastgen.optimizer.transformers import encoders
from fastgen.patching import Condition, Patch, has, takes


def patches() -> list[Patch]:
    """Every patch that FastGen applies to Transformers."""

    def hook(module: str, target: str, wrapper: str, condition: Condition, former: str | None = None) -> Patch:
        path = f"transformers.{module}", target, f"{__name__}.{wrapper}"
        return Patch(*path, condition, former, on_refusal=releases.note_patch)

    def generation(method: str, wrapper: str, condition: Condition, former: str | None = None) -> Patch:
        former = former and f"GenerationMixin.{former}"
        return hook("generation.utils", f"GenerationMixin.{method}", wrapper, condition, former)

    processors, criteria = "generation.logits_process", "generation.stopping_criteria"
    prophetnet, step = "models.prophetnet.modeling_prophetnet", "captured.prophetnet"
    buckets = "main_relative_position_buckets predict_relative_position_buckets"
    attention = f"hidden_states {releases.TAKES_CACHE} position_ids {buckets}"
    scores = "self input_ids scores"
    call = "inputs generation_config streamer assistant_model custom_generate kwargs"
    prefill = "self input_ids generation_config model_kwargs is_first_iteration"
    loop = ("loop:decode", has("input_ids logits_processor stopping_criteria generation_config"))
    return [
        hook(
            "modeling_utils",
            "PreTrainedModel.from_pretrained",
            "quantized.hooks:from_pretrained",
            has("pretrained_model_name_or_path"),
        ),
        hook(
            "modeling_utils",
            "get_hf_quantizer",
            "quantized.hooks:get_hf_quantizer",
            has("config quantization_config device_map user_agent"),
        ),
        hook(
            "modeling_utils",
            "PreTrainedModel.resize_token_embeddings",
            "quantized.hooks:resize_token_embeddings",
            has("new_num_tokens pad_to_multiple_of"),
        ),
        hook(*releases.GGUF_HEADER, "quantized.gguf_hooks:read_gguf", has("gguf_path")),
        Patch("gguf.gguf_reader", "GGUFReader.__init__", f"{__name__}.quantized.gguf_hooks:gguf_reader", has("path")),
        Patch("gguf", "get_tensor_name_map", f"{__name__}.quantized.gguf_hooks:name_map", has("arch n_blocks")),
        generation("generate", "generate:generate", has(call)),
        generation("_prefill", "prefill:prefill", takes(prefill)),
        generation("_beam_search", *loop),
        generation("_sample", *loop),
        generation(
            releases.RUN_ENCODER[0],
            "buckets:encode",
            has("inputs_tensor model_kwargs model_input_name generation_config"),
            former=releases.RUN_ENCODER[1],
        ),
        generation("prepare_inputs_for_generation", "loop_hooks:prepare_inputs", has("input_ids")),
        generation("_update_model_kwargs_for_generation", "loop_hooks:update_kwargs", has("outputs model_kwargs")),
        generation(
            "_check_early_stop_heuristic", "loop_hooks:early_stop", has("beam_scores is_sent_finished early_stopping")
        ),
        hook(criteria, "StoppingCriteriaList.__call__", "loop_hooks:stopping_criteria", has(scores)),
        hook(processors, "LogitsProcessorList.__call__", "scores:process", has(scores)),
        hook(
            processors,
            "EncoderNoRepeatNGramLogitsProcessor.__init__",
            "logits:remember_encoder_tokens",
            has("encoder_input_ids"),
        ),
        *(
            hook(processors, f"{name}LogitsProcessor.__call__", f"logits:{wrapper}", takes(scores, uses=uses))
            for name, wrapper, uses in (
                ("NoRepeatNGram", "no_repeat_ngram", "ngram_size"),
                ("EncoderNoRepeatNGram", "no_repeat_ngram", "ngram_size batch_size"),
                ("MinLength", "min_length", "min_length eos_token_id"),
                ("MinNewTokensLength", "min_length", "min_new_tokens prompt_length_to_skip eos_token_id"),
            )
        ),
        hook(
            processors,
            "TopPLogitsWarper.__call__",
            "logits:top_p",
            takes(scores, uses="top_p filter_value min_tokens_to_keep"),
        ),
        hook(
            prophetnet, "ProphetNetPositionalEmbeddings.forward", f"{step}:embed_positions", has(releases.TAKES_CACHE)
        ),
        hook(prophetnet, "ProphetNetNgramSelfAttention.forward", f"{step}:attend", has(attention)),
        *encoders.patches(),
    ]
