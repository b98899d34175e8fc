"""Hugging Face Transformers: the functions that FastGen hooks.

`generate` opens a call, and repeats it with the original code if FastGen's part fails. `_prefill`, which every decoding
loop calls before its first step, runs on one row per input and puts FastGen's KV cache into the library's. Then a
captured step replaces the loop and the processors that it supports (`loop`, `captured`). If it does not serve the call,
the library's loop, processors and criteria run on hooks. The user's own processors and criteria always run.
"""

from __future__ import annotations

from fastgen import releases
from fastgen.optimizer.transformers.encoders.stacks import STACKS
from fastgen.patching import Condition, Patch, has, takes

_SCORES = "self input_ids scores"  # of processors and criteria


def patches() -> list[Patch]:
    """Returns every patch that FastGen applies to Transformers."""
    return [*_checkpoints(), *_generation(), *_processors(), *_special_models(), *_encoders()]


def _hook(module: str, target: str, wrapper: str, condition: Condition, former: str | None = None) -> Patch:
    path = f"transformers.{module}", target, f"{__name__}.{wrapper}"
    return Patch(*path, condition, former, on_refusal=releases.note_patch)


def _checkpoints() -> list[Patch]:
    hooks, of_gguf = "quantized.hooks", "quantized.gguf_hooks"
    quantizer = has("config quantization_config device_map user_agent")
    sizes = has("new_num_tokens pad_to_multiple_of")
    loading = has("pretrained_model_name_or_path")
    return [
        _hook("modeling_utils", "PreTrainedModel.from_pretrained", f"{hooks}:from_pretrained", loading),
        _hook("modeling_utils", "get_hf_quantizer", f"{hooks}:get_hf_quantizer", quantizer),
        _hook("modeling_utils", "PreTrainedModel.resize_token_embeddings", f"{hooks}:resize_token_embeddings", sizes),
        _hook(*releases.GGUF_HEADER, f"{of_gguf}:read_gguf", has("gguf_path")),
        Patch("gguf.gguf_reader", "GGUFReader.__init__", f"{__name__}.{of_gguf}:gguf_reader", has("path")),
        Patch("gguf", "get_tensor_name_map", f"{__name__}.{of_gguf}:name_map", has("arch n_blocks")),
    ]


def _generation() -> list[Patch]:
    def hook(method: str, wrapper: str, condition: Condition, former: str | None = None) -> Patch:
        former = former and f"GenerationMixin.{former}"
        return _hook("generation.utils", f"GenerationMixin.{method}", wrapper, condition, former)

    call = has("inputs generation_config streamer assistant_model custom_generate kwargs")
    prefill = takes("self input_ids generation_config model_kwargs is_first_iteration")
    loop = has("input_ids logits_processor stopping_criteria generation_config")
    encoder, former = releases.RUN_ENCODER
    inputs = has("inputs_tensor model_kwargs model_input_name generation_config")
    early = has("beam_scores is_sent_finished early_stopping")
    criteria = "generation.stopping_criteria", "StoppingCriteriaList.__call__"
    return [
        hook("generate", "generate:generate", call),
        hook("_prefill", "prefill:prefill", prefill),
        hook("_beam_search", "loop:decode", loop),
        hook("_sample", "generate:sample", loop),
        hook(encoder, "buckets:encode", inputs, former),
        hook("prepare_inputs_for_generation", "loop_hooks:prepare_inputs", has("input_ids")),
        hook("_update_model_kwargs_for_generation", "loop_hooks:update_kwargs", has("outputs model_kwargs")),
        hook("_check_early_stop_heuristic", "loop_hooks:early_stop", early),
        _hook(*criteria, "loop_hooks:stopping_criteria", has(_SCORES)),
    ]


def _processors() -> list[Patch]:
    def hook(target: str, wrapper: str, uses: str) -> Patch:
        return _hook(module, f"{target}.__call__", f"logits:{wrapper}", takes(_SCORES, uses=uses))

    module, with_encoder = "generation.logits_process", "EncoderNoRepeatNGramLogitsProcessor"
    least_new = "min_new_tokens prompt_length_to_skip eos_token_id"
    return [
        _hook(module, "LogitsProcessorList.__call__", "logits:process", has(_SCORES)),
        _hook(module, f"{with_encoder}.__init__", "logits:remember_encoder_tokens", has("encoder_input_ids")),
        hook("NoRepeatNGramLogitsProcessor", "no_repeat_ngram", "ngram_size"),
        hook(with_encoder, "no_repeat_ngram", "ngram_size batch_size"),
        hook("MinLengthLogitsProcessor", "min_length", "min_length eos_token_id"),
        hook("MinNewTokensLengthLogitsProcessor", "min_length", least_new),
        hook("TopPLogitsWarper", "top_p", "top_p filter_value min_tokens_to_keep"),
    ]


def _special_models() -> list[Patch]:
    """Returns the patches of single models' code, and of the code that mixtures of experts share."""
    hooks, experts, keys = "special_models", "experts", "captured.key_positions"
    cache = releases.TAKES_CACHE
    prophetnet = "models.prophetnet.modeling_prophetnet"
    buckets = "main_relative_position_buckets predict_relative_position_buckets"
    attention = has(f"hidden_states {cache} position_ids {buckets}")
    attends = "self query key value attention_mask"
    of_mpt = has(f"hidden_states position_bias {cache} attention_mask")
    of_bark, of_neo = takes(attends, uses="is_causal bias head_dim attn_dropout"), takes(attends, uses="bias")
    longcat = "models.longcat_flash.modeling_longcat_flash"
    uses = "gate_up_proj down_proj act_fn num_routed_experts"
    chooses = takes("self hidden_states top_k_index top_k_weights", uses=uses)
    # The code that expands latents into K and V in multi-head latent attention.
    expands = takes("self kv_nope k_rot", uses="kv_b_proj qk_nope_head_dim v_head_dim qk_rope_head_dim")
    with_latents = {
        "axk1": "AXK1Attention", "axk2": "AXK2Attention", "bailing_hybrid": "BailingHybridAttention",
        "deepseek_v2": "DeepseekV2Attention", "deepseek_v3": "DeepseekV3Attention",
        "deepseek_v32": "DeepseekV32Attention", "dots3_note": "Dots3NoteTextAttention",
        "glm4_moe_lite": "Glm4MoeLiteAttention", "glm_moe_dsa": "GlmMoeDsaAttention", "hy_v4": "HYV4Attention",
        "kimi_linear": "KimiLinearAttention", "longcat_flash": "LongcatFlashMLA", "minicpm3": "MiniCPM3Attention",
        "mistral4": "Mistral4Attention", "mistral_large4": "MistralLarge4TextAttention", "youtu": "YoutuAttention",
    }  # fmt: skip
    # The indexers of sparse attention.
    with_indexers = {
        "axk2": "AXK2Indexer", "deepseek_v32": "DeepseekV32Indexer", "dots3_note": "Dots3NoteTextIndexer",
        "glm_moe_dsa": "GlmMoeDsaIndexer", "hy_v4": "HYV4Indexer", "mistral_large4": "MistralLarge4TextIndexer",
    }  # fmt: skip
    indexes = has(f"hidden_states attention_mask {cache}")
    switch = "models.switch_transformers.modeling_switch_transformers"
    of_switch = takes("self hidden_states selected_experts routing_weights")
    jetmoe = "models.jetmoe.modeling_jetmoe"
    sizes = takes("self inputs expert_size", uses="weight")
    return [
        _hook(prophetnet, "ProphetNetPositionalEmbeddings.forward", f"{keys}:embed_prophetnet", has(cache)),
        _hook(prophetnet, "ProphetNetNgramSelfAttention.forward", f"{keys}:attend_prophetnet", attention),
        _hook("models.bark.modeling_bark", "BarkSelfAttention._attn", f"{hooks}:attend", of_bark),
        _hook("models.gpt_neo.modeling_gpt_neo", "GPTNeoSelfAttention._attn", f"{keys}:attend_gpt_neo", of_neo),
        _hook("models.mpt.modeling_mpt", "MptAttention.forward", f"{keys}:attend_mpt", of_mpt),
        *(
            _hook(f"models.{name}.modeling_{name}", f"{kind}.expand_kv", f"{hooks}:expand_kv", expands)
            for name, kind in with_latents.items()
        ),
        *(
            _hook(f"models.{name}.modeling_{name}", f"{kind}.forward", f"{hooks}:choose_positions", indexes)
            for name, kind in with_indexers.items()
        ),
        _hook("integrations.moe", "_grouped_mm", f"{experts}:grouped_mm", has("input weight offs")),
        _hook(longcat, "LongcatFlashExperts.forward", f"{experts}:longcat_flash", chooses),
        _hook(switch, "SwitchTransformersExperts.forward", f"{experts}:switch_transformers", of_switch),
        _hook(jetmoe, "JetMoeTopKGating.forward", f"{experts}:jetmoe_gating", takes("self hidden_states")),
        _hook(jetmoe, "JetMoeParallelExperts.forward", f"{experts}:jetmoe", sizes),
    ]


def _encoders() -> list[Patch]:
    """Returns the patches of encoders: of a model's call, its layers, and their attention function."""
    library, text = "transformers.modeling_utils", "sentence_transformers"
    call, layers, sentences = (f"{__name__}.encoders.{name}" for name in ("call", "unpadded_forward", "sentences"))
    interface = has("attn_implementation default")
    transformer = f"{text}.base.modules.transformer"
    return [
        Patch(library, "PreTrainedModel.__call__", f"{call}:call", is_inherited=True),
        Patch(library, "AttentionInterface.get_interface", f"{layers}:get_interface", interface),
        Patch(
            f"{text}.sentence_transformer.model",
            "SentenceTransformer.encode",
            f"{sentences}:encode",
            has("output_value"),
        ),
        Patch(transformer, "Transformer.forward", f"{sentences}:forward", has("features")),
        *(
            _hook(f"models.{module}", f"{name}.forward", "encoders.unpadded_forward:stack", has(" ".join(given)))
            for (module, name), (_, given) in STACKS.items()
        ),
    ]
