"""Tiny models that take more than text, and inputs that fit them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassFieldValidationError

from fastgen import releases
from tests.equivalence.models import BOS, EOS, PAD, VOCABULARY, Weights, enliven

# Stands for a part of a picture, or of a sound.
PLACEHOLDER = VOCABULARY - 1
LENGTH = 28
_TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
_LAYERS: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
_TEXT = {**_TOKENS, **_LAYERS, "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 8}
_TEXT["max_position_embeddings"] = 512
_VISION = {**_LAYERS, "num_hidden_layers": 1, "image_size": 16, "patch_size": 8}
_SIGLIP = {**_VISION, "model_type": "siglip_vision_model"}
_PATCHES: dict[str, Any] = {"depth": 1, "hidden_size": 32, "num_heads": 4, "patch_size": 8}
_AXES = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
_QWEN = {
    "image_token_id": PLACEHOLDER, "video_token_id": VOCABULARY - 2,
    "vision_start_token_id": VOCABULARY - 3, "vision_end_token_id": VOCABULARY - 4,
}  # fmt: skip
_BOTH = ["sliding_attention", "full_attention"]
_SLIDING = {"sliding_window": 16, "layer_types": _BOTH}
# The last two layers read what the first two have stored.
_SHARED = {"num_hidden_layers": 4, "layer_types": 2 * _BOTH, "num_kv_shared_layers": 2, "global_head_dim": 8}
# Its first and third layers have states in place of K and V.
_LINEAR = {
    "num_hidden_layers": 4, "layer_types": 2 * ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
_SOUND = {"num_mel_bins": 8, "max_source_positions": 16}


def _granite() -> dict[str, Any]:
    return {
        "text_config": {**_TEXT, "model_type": "granite"}, "audio_token_index": PLACEHOLDER,
        "has_lora_adapter": False, "downsample_rate": 5, "window_size": 15,
        "encoder_config": {
            "input_dim": 16, "num_layers": 1, "hidden_dim": 32, "feedforward_mult": 2, "num_heads": 4, "dim_head": 8,
            "output_dim": 10, "context_size": 20, "max_pos_emb": 32, "conv_kernel_size": 3,
        },
        "projector_config": {
            **_LAYERS, "model_type": "blip_2_qformer", "num_hidden_layers": 1, "encoder_hidden_size": 32,
            "vocab_size": 10,
        },
    }  # fmt: skip


CONFIGS: dict[str, Callable[[], dict[str, Any]]] = {
    "Gemma3": lambda: {
        "text_config": {**_TEXT, **_SLIDING}, "vision_config": _SIGLIP, "image_token_index": PLACEHOLDER,
        "mm_tokens_per_image": 4, "boi_token_index": VOCABULARY - 2, "eoi_token_index": VOCABULARY - 3,
    },
    "Gemma4": lambda: {
        "text_config": {
            **_TEXT, **_SLIDING, **_SHARED, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY
        },
        "vision_config": None, "audio_config": None, "image_token_id": PLACEHOLDER,
    },
    "Qwen2VL": lambda: {
        **_QWEN, "text_config": {**_TEXT, **_AXES}, "vision_config": {**_PATCHES, "embed_dim": 32, "mlp_ratio": 2}
    },
    "Qwen2_5_VL": lambda: {
        **_QWEN, "text_config": {**_TEXT, **_AXES},
        "vision_config": {**_PATCHES, "out_hidden_size": 32, "intermediate_size": 64, "fullatt_block_indexes": [0]},
    },
    "Qwen3VL": lambda: {
        **_QWEN, "text_config": {**_TEXT, **_AXES},
        "vision_config": {
            **_PATCHES, "depth": 2, "out_hidden_size": 32, "intermediate_size": 64, "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
    },
    "Glm4v": lambda: {
        "text_config": {**_TEXT, **_AXES},
        "vision_config": {**_PATCHES, "out_hidden_size": 32, "intermediate_size": 64, "image_size": 16},
        "image_token_id": PLACEHOLDER, "video_token_id": VOCABULARY - 2,
        "image_start_token_id": VOCABULARY - 3, "image_end_token_id": VOCABULARY - 4,
    },
    "Llava": lambda: {
        "text_config": transformers.LlamaConfig(**_TEXT), "image_token_index": PLACEHOLDER, "image_seq_length": 4,
        "vision_config": transformers.CLIPVisionConfig(**_VISION, projection_dim=32),
    },
    "Mistral3": lambda: {
        "text_config": {**_TEXT, "model_type": "mistral", "sliding_window": None}, "image_token_index": PLACEHOLDER,
        "vision_config": {**_VISION, "patch_size": 4, "head_dim": 8, "model_type": "pixtral"}, "spatial_merge_size": 2,
    },
    "InternVL": lambda: {
        "text_config": {**_TEXT, "model_type": "qwen2"}, "image_token_id": PLACEHOLDER, "image_seq_length": 1,
        "vision_config": {**_VISION, "image_size": [16, 16], "patch_size": [8, 8]}, "downsample_ratio": 0.5,
    },
    "AyaVision": lambda: {
        "text_config": {**_TEXT, **_SLIDING, "model_type": "cohere2"}, "vision_config": _SIGLIP,
        "image_token_index": PLACEHOLDER, "downsample_factor": 2, "adapter_layer_norm_eps": 1e-6,
    },
    "Cohere2Vision": lambda: {
        "text_config": {**_TEXT, **_SLIDING, "model_type": "cohere2"}, "vision_config": _SIGLIP,
        "image_token_id": PLACEHOLDER, "downsample_factor": 2, "alignment_intermediate_size": 64,
    },
    # Of its experts, some read text alone, and others pictures alone.
    "Ernie4_5_VLMoe": lambda: {
        "text_config": {
            **_TEXT, **_AXES, "moe_intermediate_size": [16, 8], "moe_k": 2, "moe_num_experts": 4,
            "moe_num_shared_experts": 1,
        },
        "vision_config": {**_PATCHES, "intermediate_size": 64},
        "image_token_id": PLACEHOLDER, "video_token_id": VOCABULARY - 2,
        "image_start_token_id": VOCABULARY - 3, "image_end_token_id": VOCABULARY - 4,
    },
    "SmolVLM": lambda: {
        "text_config": {**_TEXT, "model_type": "llama"}, "vision_config": _VISION, "image_token_id": PLACEHOLDER,
        "scale_factor": 2, "pad_token_id": PAD,
    },
    "Idefics2": lambda: {
        "text_config": {**_TEXT, "model_type": "mistral", "sliding_window": None}, "vision_config": _VISION,
        "perceiver_config": {
            "hidden_size": 32, "resampler_n_latents": 4, "resampler_depth": 1, "resampler_n_heads": 4,
            "resampler_head_dim": 8, "num_key_value_heads": 2,
        },
        "image_token_id": PLACEHOLDER, "pad_token_id": PAD,
    },
    "Idefics3": lambda: {
        "text_config": {**_TEXT, "model_type": "llama"}, "vision_config": _VISION, "image_token_id": PLACEHOLDER,
        "scale_factor": 2, "pad_token_id": PAD,
    },
    "PaliGemma": lambda: {
        "text_config": {**_TEXT, "model_type": "gemma"}, "vision_config": {**_SIGLIP, "projection_dim": 32},
        "image_token_index": PLACEHOLDER, "projection_dim": 32, "hidden_size": 32,
    },
    "Voxtral": lambda: {
        "text_config": {**_TEXT, "model_type": "llama"}, "audio_token_id": PLACEHOLDER,
        "audio_config": {**_LAYERS, **_SOUND, "intermediate_size": 128, "num_hidden_layers": 1},
    },
    "Qwen2Audio": lambda: {
        "text_config": {**_TEXT, "model_type": "qwen2"}, "audio_token_index": PLACEHOLDER,
        "audio_config": {
            **_SOUND, "d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 4, "encoder_ffn_dim": 64
        },
    },
    "AudioFlamingo3": lambda: {
        "text_config": {**_TEXT, "model_type": "qwen2"}, "audio_token_id": PLACEHOLDER,
        "audio_config": {**_LAYERS, **_SOUND, "num_hidden_layers": 1},
    },
    "GlmAsr": lambda: {
        "text_config": {**_TEXT, "model_type": "llama"}, "audio_token_id": PLACEHOLDER,
        "audio_config": {
            **_LAYERS, "intermediate_size": 128, "num_hidden_layers": 1, "num_key_value_heads": 4, "head_dim": 8,
            "num_mel_bins": 8,
        },
    },
    "GraniteSpeech": _granite,
    "GraniteSpeechPlus": _granite,
    "VideoLlama3": lambda: {
        "text_config": {**_TEXT, "model_type": "qwen2"}, "vision_config": {**_VISION, "patch_size": 8},
        "image_token_id": PLACEHOLDER, "video_token_id": VOCABULARY - 2,
    },
    "Aria": lambda: {
        "text_config": {
            **_TEXT, "model_type": "aria_text", "moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1
        },
        "vision_config": {**_VISION, "model_type": "idefics3_vision"}, "image_token_index": PLACEHOLDER,
        "projector_patch_to_query_dict": {4: 4},
    },
    # These two count positions from the cache, whatever they are given.
    "Exaone4_5_": lambda: {
        "text_config": {
            **_TEXT, "model_type": "exaone4", "sliding_window": None, "layer_types": ["full_attention"] * 2
        },
        "vision_config": {
            **_PATCHES, "out_hidden_size": 32, "intermediate_size": 64, "fullatt_block_indexes": [0],
            "num_key_value_heads": 2,
        },
        "image_token_id": PLACEHOLDER, "video_token_id": VOCABULARY - 2,
    },
    "HyperCLOVAXVisionV2": lambda: {
        "text_config": {**_TEXT, "model_type": "hyperclovax"},
        "vision_config": {**_PATCHES, "out_hidden_size": 32, "intermediate_size": 64, "fullatt_block_indexes": [0]},
        "image_token_id": PLACEHOLDER, "video_token_id": VOCABULARY - 2,
    },
    "GlmImage": lambda: {
        "text_config": {**_TEXT, **_AXES, "vision_vocab_size": VOCABULARY},
        "vision_config": {**_PATCHES, "intermediate_size": 64, "image_size": 16},
        "vq_config": {"embed_dim": 8, "num_embeddings": VOCABULARY, "latent_channels": 32},
        "image_token_id": PLACEHOLDER, "image_start_token_id": VOCABULARY - 3, "image_end_token_id": VOCABULARY - 4,
    },
    "Mllama": lambda: {
        "text_config": {
            **_TEXT, "cross_attention_layers": [1], "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}
        },
        "vision_config": {
            **_VISION, "num_global_layers": 1, "attention_heads": 4, "vision_output_dim": 64, "max_num_tiles": 1,
            "intermediate_layers_indices": [0], "supported_aspect_ratios": [[1, 1]],
        },
        "image_token_index": PLACEHOLDER,
    },
}  # fmt: skip
if releases.keeps_states_in_cache():
    CONFIGS["Qwen3_5"] = lambda: {
        **_QWEN,
        "text_config": {**_TEXT, **_AXES, **_LINEAR},
        "vision_config": {
            **_PATCHES, "out_hidden_size": 32, "intermediate_size": 64, "num_position_embeddings": 16
        },
    }  # fmt: skip
    CONFIGS["Lfm2Vl"] = lambda: {
        "text_config": {**_TEXT, "model_type": "lfm2", "layer_types": ["conv", "full_attention"], "conv_L_cache": 3},
        "vision_config": {**_VISION, "model_type": "siglip2_vision_model", "num_patches": 16},
        "image_token_id": PLACEHOLDER,
        "projector_hidden_size": 32,
    }


def llava(text_config: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    """The configuration of a Llava with another model inside, of which a part is given."""
    return lambda: {
        **CONFIGS["Llava"](),
        "tie_word_embeddings": False,
        "text_config": {**_TOKENS, "tie_word_embeddings": False, **text_config},
    }


@functools.cache
def build(name: str) -> Any:
    """A model of this name; the test is skipped where the release has none that is made so."""
    return made(name, CONFIGS[name])


def made(name: str, config: Callable[[], dict[str, Any]]) -> Any:
    kind = getattr(transformers, f"{name}ForConditionalGeneration", None)
    if kind is None:
        pytest.skip("this release has no such model")
    torch.manual_seed(0)
    try:
        # A configuration may write into what it is given.
        given = getattr(transformers, f"{name}Config")(**copy.deepcopy(config()))
    except StrictDataclassFieldValidationError:
        pytest.skip("this release refuses its own configuration")
    model = kind(given).eval()
    enliven(model, Weights(1))
    tokens = {key: value for key, value in _TOKENS.items() if key != "vocab_size"}
    model.generation_config.update(max_new_tokens=20, **tokens)
    return model


def text(rows: int = 2, placeholders: tuple[tuple[int, ...], ...] = ()) -> dict[str, torch.Tensor]:
    """Prompts of text, the second one with padding in front.

    Args:
        placeholders: of each input, how many tokens stand for each of its pictures.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, VOCABULARY - 5, (rows, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    mask[1:2, :5] = 0
    ids = ids.masked_fill(mask == 0, PAD)
    for row, pictures in enumerate(placeholders):
        at = 7
        for length in pictures:
            ids[row, at : at + length] = PLACEHOLDER
            at += length + 2
    return {"input_ids": ids, "attention_mask": mask}


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def _pictures(counts: tuple[int, ...] = (1, 1), tokens: int = 4) -> dict[str, torch.Tensor]:
    """So many pictures in each input, of so many tokens each."""
    found = text(len(counts), tuple((tokens,) * count for count in counts))
    return {**found, "pixel_values": _noise(sum(counts), 3, 16, 16)}


def _of_gemma(counts: tuple[int, ...] = (1, 1)) -> dict[str, torch.Tensor]:
    found = _pictures(counts, 4)
    return {**found, "token_type_ids": (found["input_ids"] == PLACEHOLDER).long()}


def _of_qwen(counts: tuple[int, ...] = (1, 1)) -> dict[str, torch.Tensor]:
    """Pictures of an input are larger one by one, and each of their positions has three axes."""
    found = text(len(counts), tuple(tuple(range(1, count + 1)) for count in counts))
    ids = found["input_ids"]
    begins = (ids[:, 1:] == PLACEHOLDER) & (ids[:, :-1] != PLACEHOLDER)
    ids[:, :-1].masked_fill_(begins, VOCABULARY - 3)
    grids = torch.tensor([[1, 2, 2 * size] for count in counts for size in range(1, count + 1)])
    pixels = _noise(int(grids.prod(dim=1).sum()), 3 * 2 * 8 * 8)
    return {**found, "pixel_values": pixels, "image_grid_thw": grids, "mm_token_type_ids": (ids == PLACEHOLDER).long()}


def _of_ernie(counts: tuple[int, ...] = (1, 1)) -> dict[str, torch.Tensor]:
    """Where a picture begins is for the experts of pictures, too."""
    found = _of_qwen(counts)
    is_seen = (found["input_ids"] == PLACEHOLDER) | (found["input_ids"] == VOCABULARY - 3)
    patches = _noise(found["pixel_values"].shape[0], 3 * 8 * 8)
    return {**found, "pixel_values": patches, "moe_mm_token_type_ids": is_seen.long()}


def _of_idefics(counts: tuple[int, ...] = (1, 1), tokens: int = 1) -> dict[str, torch.Tensor]:
    count = max(counts)
    found = _pictures((count,) * len(counts), tokens)
    return {**found, "pixel_values": found["pixel_values"].unflatten(0, (len(counts), count))}


def _of_mistral(counts: tuple[int, ...] = (1, 1)) -> dict[str, torch.Tensor]:
    return {**_pictures(counts, 4), "image_sizes": torch.tensor([[16, 16]] * sum(counts))}


def _sounds(counts: tuple[int, ...] = (1, 1)) -> dict[str, torch.Tensor]:
    return {**text(len(counts), tuple((4,) * count for count in counts)), "input_features": _noise(sum(counts), 8, 32)}


def _frames(counts: tuple[int, ...] = (1, 1)) -> dict[str, torch.Tensor]:
    """Sounds, with a mask of their frames."""
    found = {**text(len(counts), tuple((8,) * count for count in counts)), "input_features": _noise(sum(counts), 8, 32)}
    return {**found, "feature_attention_mask": torch.ones(sum(counts), 32, dtype=torch.int64)}


def _frames_of_features(counts: tuple[int, ...] = (1, 1), frames: int = 32, tokens: int = 8) -> dict[str, torch.Tensor]:
    """The same where the mask has the name of the features."""
    found = {**text(len(counts), tuple((tokens,) * count for count in counts))}
    sounds = sum(counts)
    return {
        **found, "input_features": _noise(sounds, 8, frames),
        "input_features_mask": torch.ones(sounds, frames, dtype=torch.int64),
    }  # fmt: skip


def _of_granite(counts: tuple[int, ...] = (1, 1)) -> dict[str, torch.Tensor]:
    """Sounds, with a mask of what they become."""
    found, sounds = text(len(counts), tuple((3,) * count for count in counts)), sum(counts)
    mask = torch.ones(sounds, 3, dtype=torch.bool)
    return {**found, "input_features": _noise(sounds, 15, 16), "input_features_mask": mask}


def _of_video_llama(counts: tuple[int, ...] = (1, 1)) -> dict[str, torch.Tensor]:
    """Pictures of one row of patches, of which an input's are longer one by one."""
    found = text(len(counts), tuple(tuple(range(1, count + 1)) for count in counts))
    grids = torch.tensor([[1, 2, 2 * size] for count in counts for size in range(1, count + 1)])
    sizes = torch.full((len(grids),), 2)
    pixels = _noise(int(grids.prod(dim=1).sum()), 3 * 8 * 8)
    return {**found, "pixel_values": pixels, "image_grid_thw": grids, "image_merge_sizes": sizes}


def _of_lfm2(counts: tuple[int, ...] = (1, 1)) -> dict[str, torch.Tensor]:
    """Pictures of patches, which are a row each."""
    found, count = text(len(counts), tuple((4,) * count for count in counts)), sum(counts)
    mask, shapes = torch.ones(count, 16, dtype=torch.int64), torch.tensor([[4, 4]] * count)
    patches = _noise(count, 16, 3 * 8 * 8)
    return {**found, "pixel_values": patches, "pixel_attention_mask": mask, "spatial_shapes": shapes}


PICTURES: dict[str, Callable[..., dict[str, torch.Tensor]]] = {
    "Gemma3": _of_gemma,
    "Qwen2VL": _of_qwen,
    "Qwen2_5_VL": _of_qwen,
    "Qwen3VL": _of_qwen,
    "Qwen3_5": _of_qwen,
    "Glm4v": _of_qwen,
    "Llava": _pictures,
    "Mistral3": _of_mistral,
    "InternVL": functools.partial(_pictures, tokens=1),
    "AyaVision": functools.partial(_pictures, tokens=1),
    "Cohere2Vision": functools.partial(_pictures, tokens=1),
    "Ernie4_5_VLMoe": _of_ernie,
    "SmolVLM": _of_idefics,
    "Idefics2": functools.partial(_of_idefics, tokens=4),
    "Idefics3": _of_idefics,
    "PaliGemma": _of_gemma,
    "Voxtral": _sounds,
    "Qwen2Audio": _frames,
    "AudioFlamingo3": _frames_of_features,
    "GlmAsr": functools.partial(_frames_of_features, frames=64),
    "GraniteSpeech": _of_granite,
    "GraniteSpeechPlus": _of_granite,
    "VideoLlama3": _of_video_llama,
    "Lfm2Vl": _of_lfm2,
}
"""Inputs with so many pictures each, for the models that have such here."""
