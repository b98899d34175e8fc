"""The models of the equivalence grid: tiny random configurations, and inputs that fit them.

A random model of the usual initialisation says one token for ever, which would show nothing: beams that never swap
and never finish compare equal whatever is done to them. Weights are therefore drawn anew with a spread that makes the
output depend on the whole history, and the end-of-sequence token is made likely enough that beams finish at different
steps.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

VOCABULARY = 160
PAD, BOS, EOS = 0, 1, 2
# Tokens of the inputs are drawn from here on.
FIRST_WORD = 4
# Sources and prompts of the grid: longer than what the shared prefix is worth from (`MIN_SHARED_PREFIX`), and shorter.
LONG, SHORT = 44, 9

_SPECIAL_TOKENS = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}


@dataclass(frozen=True)
class Weights:
    """How random weights are drawn.

    Attributes:
        seed: chosen so that sequences differ, end at different steps, and no two candidates of a search are nearly
            equal (which of them comes first would be a matter of rounding).
        eos: how much more the score of the end-of-sequence token varies than those of other tokens.
        gain: spread of what layers add to their input. T5 does not scale its attention: with a large gain, rounding
            grows to what separates two candidates.
        embedding: spread of the embeddings.
    """

    seed: int
    eos: float = 2.0
    gain: float = 1.5
    embedding: float = 0.05


@dataclass(frozen=True)
class Family:
    """One row of the grid.

    Attributes:
        model_class: name of the class in Transformers.
        weights: how they are drawn.
        config: what its configuration takes besides the tokens.
        encoder_decoder: the input goes to an encoder, with padding on the right.
        inputs: what the model reads: "text", or "audio" (features of one length, no padding).
    """

    name: str
    model_class: str
    weights: Weights
    config: dict[str, Any] = field(hash=False)
    encoder_decoder: bool = False
    inputs: str = "text"

    def __str__(self) -> str:
        return self.name

    def exceeds_window(self, decoding: dict[str, Any]) -> bool:
        """Whether a long prompt and its continuation, decoded one sequence per input, are longer than a sliding window.

        Such a call has captured steps, or is left to the original code: both read no more than the window.
        """
        per_input = max(decoding.get("num_beams", 1), decoding.get("num_return_sequences", 1))
        return per_input == 1 and self.config.get("sliding_window", 4096) < LONG

    def attentions(self) -> list[str]:
        """The attention implementations to run it with."""
        kind = getattr(transformers, self.model_class)
        return ["eager", "sdpa"] if kind._supports_sdpa else ["eager"]

    def build(self, attention: str = "sdpa") -> Any:
        """The model, in evaluation mode. Every caller gets the same object: put back what you change."""
        return _build(self, attention if attention in self.attentions() else "eager")

    def make_inputs(self, batch: int = 3, length: int = LONG, padding: str | None = "natural") -> dict[str, Any]:
        """Inputs of different lengths, of at most `length` positions.

        Args:
            padding: "left", "right", "natural" (right for an encoder, left for a prompt) or None.
        """
        generator = torch.Generator().manual_seed(1000 * length + batch)
        if self.inputs == "audio":
            return {"input_features": torch.randn(batch, 8, 2 * LONG, generator=generator)}
        ids = torch.randint(FIRST_WORD, VOCABULARY, (batch, length), generator=generator)
        mask = torch.ones_like(ids)
        if padding == "natural":
            padding = "right" if self.encoder_decoder else "left"
        for row in range(batch if padding else 0):
            missing = (row * length) // (4 * batch)
            where = slice(0, missing) if padding == "left" else slice(length - missing, length)
            ids[row, where], mask[row, where] = PAD, 0
        return {"input_ids": ids, "attention_mask": mask}


def padded(
    lengths: list[int],
    side: str = "right",
    longest: int | None = None,
    words: tuple[int, int] = (FIRST_WORD, VOCABULARY),
    pad: int = PAD,
) -> dict[str, torch.Tensor]:
    """Random texts of these lengths, with padding on that side up to the longest of them, or to `longest`."""
    longest = longest or max(lengths)
    generator = torch.Generator().manual_seed(sum(lengths))
    ids = torch.randint(*words, (len(lengths), longest), generator=generator)
    place, size = torch.arange(longest), torch.tensor(lengths).unsqueeze(1)
    mask = (place < size) if side == "right" else (place >= longest - size)
    return {"input_ids": ids.masked_fill(~mask, pad), "attention_mask": mask.long()}


@functools.cache
def _build(family: Family, attention: str) -> Any:
    kind = getattr(transformers, family.model_class)
    config = kind.config_class(**{"vocab_size": VOCABULARY, **_SPECIAL_TOKENS, **family.config})
    config._attn_implementation = attention
    torch.manual_seed(family.weights.seed)
    model = kind(config).eval()
    enliven(model, family.weights)
    model.generation_config.update(max_new_tokens=12, **_SPECIAL_TOKENS)
    return model


@torch.no_grad()
def enliven(model: Any, weights: Weights) -> None:
    """Draws the weights anew, so that what the model says varies."""
    generator = torch.Generator().manual_seed(weights.seed)
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() < 2:
            parameter.add_(noise, alpha=0.1)
        else:
            # Layers speak louder than the embedding of the last token, which would otherwise be repeated for ever.
            spread = weights.embedding if id(parameter) in embeddings else weights.gain * parameter.shape[-1] ** -0.5
            parameter.copy_(noise * spread)
    head = model.get_output_embeddings()
    head.weight[EOS] *= weights.eos


BART = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 512, "decoder_start_token_id": EOS,
    "forced_eos_token_id": None,
}  # fmt: skip
_T5 = {
    "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20, "decoder_start_token_id": PAD,
}  # fmt: skip
_GATED_T5 = {**_T5, "feed_forward_proj": "gated-gelu"}
_PROPHETNET = {
    "hidden_size": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_encoder_layers": 2, "num_decoder_layers": 2,
    "num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4, "max_position_embeddings": 512, "ngram": 2,
    "num_buckets": 8, "relative_max_distance": 20, "decoder_start_token_id": BOS,
}  # fmt: skip
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}
HIDDEN = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 512,
}  # fmt: skip
LLAMA = {**HIDDEN, "num_key_value_heads": 2, "head_dim": 8}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


def _seq2seq(name: str, model_class: str, weights: Weights, config: dict[str, Any], **traits: Any) -> Family:
    return Family(name, model_class, weights, config, encoder_decoder=True, **traits)


def _generation(name: str, prefix: str, weights: Weights, config: dict[str, Any], **traits: Any) -> Family:
    return _seq2seq(name, f"{prefix}ForConditionalGeneration", weights, config, **traits)


FAMILIES = [
    _generation("prophetnet", "ProphetNet", Weights(4), _PROPHETNET),
    _generation("bart", "Bart", Weights(17, gain=2, embedding=0.2), BART),
    _generation("distilbart", "Bart", Weights(1, gain=2), {**BART, "encoder_layers": 3, "decoder_layers": 1}),
    _generation("mbart", "MBart", Weights(0, gain=2.5), BART),
    _generation("pegasus", "Pegasus", Weights(1, embedding=0.2), {**BART, "decoder_start_token_id": PAD}),
    _generation("t5", "T5", Weights(1, eos=3, embedding=0.5), _T5),
    _generation("mt5", "MT5", Weights(1, embedding=0.2), _GATED_T5),
    _generation("umt5", "UMT5", Weights(1, eos=3, embedding=0.5), _GATED_T5),
    _generation("flan-t5", "T5", Weights(2, embedding=0.5), {**_GATED_T5, "tie_word_embeddings": False}),
    _seq2seq("marian", "MarianMTModel", Weights(12, eos=3, gain=3, embedding=0.5),
             {**BART, "decoder_start_token_id": PAD}),
    _generation("m2m100", "M2M100", Weights(3, eos=3, gain=3, embedding=0.2), BART),
    _generation("nllb", "M2M100", Weights(17, eos=3, gain=3),
                {**BART, "encoder_layers": 3, "activation_function": "relu"}),
    _generation("blenderbot", "Blenderbot", Weights(4, gain=2.5), {**BART, "decoder_start_token_id": BOS}),
    _generation("blenderbot-small", "BlenderbotSmall", Weights(1, eos=3.0, gain=2.5),
                {**BART, "decoder_start_token_id": BOS}),
    _generation("led", "LED", Weights(1, embedding=0.5),
                {**BART, "attention_window": 8, "max_encoder_position_embeddings": 512,
                 "max_decoder_position_embeddings": 512}),
    _generation("whisper", "Whisper", Weights(2, eos=3, gain=2.5, embedding=0.2),
                {**BART, "num_mel_bins": 8, "max_source_positions": LONG, "max_target_positions": 64}, inputs="audio"),
    Family("gpt2", "GPT2LMHeadModel", Weights(4, eos=3, gain=2), GPT2),
    Family("opt", "OPTForCausalLM", Weights(5, gain=2), {**HIDDEN, "ffn_dim": 64, "word_embed_proj_dim": 32}),
    Family("gpt-neox", "GPTNeoXForCausalLM", Weights(2), HIDDEN),
    Family("bloom", "BloomForCausalLM", Weights(3, gain=3, embedding=0.2),
           {"hidden_size": 32, "n_layer": 2, "n_head": 4}),
    Family("llama", "LlamaForCausalLM", Weights(0), LLAMA),
    Family("mistral-short-window", "MistralForCausalLM", Weights(5), {**LLAMA, "sliding_window": 40}),
    Family("mistral-long-window", "MistralForCausalLM", Weights(12, gain=2), {**LLAMA, "sliding_window": 400}),
    Family("qwen2", "Qwen2ForCausalLM", Weights(2), LLAMA),
    Family("qwen3", "Qwen3ForCausalLM", Weights(2, gain=2, embedding=0.5), LLAMA),
    Family("gemma", "GemmaForCausalLM", Weights(1), {**LLAMA, "num_key_value_heads": 1}),
    Family("gemma2", "Gemma2ForCausalLM", Weights(2), {**LLAMA, "sliding_window": 40, "query_pre_attn_scalar": 8}),
    Family("phi", "PhiForCausalLM", Weights(6, eos=3, embedding=0.2), {**HIDDEN, "num_key_value_heads": 2}),
    Family("mixtral", "MixtralForCausalLM", Weights(2), {**LLAMA, **_EXPERTS}),
    Family("gpt-oss", "GptOssForCausalLM", Weights(1), {**LLAMA, **_EXPERTS, "sliding_window": 40}),
]  # fmt: skip
BY_NAME = {family.name: family for family in FAMILIES}
