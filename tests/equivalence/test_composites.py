"""Models made of two: images or text in, text out."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from tests.equivalence.cases import DECODING
from tests.equivalence.check import accelerated, check, fallbacks
from tests.equivalence.models import BOS, EOS, LONG, PAD, VOCABULARY, Weights, enliven

_TEXT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_IMAGE = {**_TEXT, "image_size": 32, "patch_size": 4}
_TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
SCORES = {"return_dict_in_generate": True, "output_scores": True}


def _vit_and(decoder: Any) -> Any:
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        transformers.ViTConfig(**_IMAGE), decoder
    )
    return transformers.VisionEncoderDecoderModel(config)


def _vit_and_trocr() -> Any:
    sizes = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 64}
    return _vit_and(transformers.TrOCRConfig(**_TOKENS, **sizes, cross_attention_hidden_size=32))


def _vit_and_gpt2() -> Any:
    return _vit_and(transformers.GPT2Config(**_TOKENS, n_embd=32, n_layer=2, n_head=4, add_cross_attention=True))


def _bert_and_bert() -> Any:
    encoder = transformers.BertConfig(**_TOKENS, **_TEXT)
    decoder = transformers.BertConfig(**_TOKENS, **_TEXT, is_decoder=True, add_cross_attention=True)
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    return transformers.EncoderDecoderModel(config)


def _florence2() -> Any:
    """It embeds tokens itself, and images among them: its encoder gets none."""
    vision: dict[str, Any] = {"depths": [1] * 4, "embed_dim": [16] * 4, "num_heads": [4] * 4, "num_groups": [4] * 4}
    text = {**_TOKENS, "model_type": "bart", "d_model": 32, "decoder_start_token_id": BOS}
    for side in ("encoder", "decoder"):
        text |= {f"{side}_layers": 2, f"{side}_attention_heads": 4, f"{side}_ffn_dim": 64}
    vision["projection_dim"] = 32
    config = transformers.Florence2Config(vision_config=vision, text_config=text, image_token_id=VOCABULARY - 1)
    return transformers.Florence2ForConditionalGeneration(config)


def _idefics() -> Any:
    """It encodes images in its prefill, and hands what comes of it on from step to step."""
    config = transformers.IdeficsConfig(
        **_TOKENS, **_TEXT, cross_layer_interval=1, use_resampler=False, alpha_initializer="ones",
        vision_config={"embed_dim": 32, "image_size": 16, "patch_size": 8, **_TEXT},
    )  # fmt: skip
    return transformers.IdeficsForVisionText2Text(config)


@functools.cache
def build(make: Any) -> Any:
    torch.manual_seed(0)
    model = make().eval()
    enliven(model, Weights(1))
    tokens = {key: value for key, value in _TOKENS.items() if key != "vocab_size"}
    model.generation_config.update(max_new_tokens=8, decoder_start_token_id=BOS, **tokens)
    return model


def _images(rows: int, size: int = 32) -> torch.Tensor:
    return torch.randn(rows, 3, size, size, generator=torch.Generator().manual_seed(0))


def _tokens(rows: int, length: int, shortest: int | None = None) -> dict[str, torch.Tensor]:
    """Prompts, of which the second one may be shorter."""
    ids = torch.randint(4, VOCABULARY - 1, (rows, length), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, shortest or length :] = 0
    return {"input_ids": ids.masked_fill(mask == 0, PAD), "attention_mask": mask}


def _with_an_image() -> dict[str, torch.Tensor]:
    """Of 32 x 32, which are two tokens."""
    inputs = _tokens(3, LONG, 7)
    inputs["input_ids"][:, :2] = VOCABULARY - 1
    return {**inputs, "pixel_values": _images(3)}


def _of_idefics() -> dict[str, torch.Tensor]:
    return {**_tokens(2, 7), "pixel_values": _images(2, 16).unsqueeze(1), "image_attention_mask": torch.ones(2, 7, 1)}


MODELS: dict[str, tuple[Callable[[], Any], Callable[[], dict[str, torch.Tensor]]]] = {
    "vit and trocr": (_vit_and_trocr, lambda: {"pixel_values": _images(2)}),
    "vit and gpt2": (_vit_and_gpt2, lambda: {"pixel_values": _images(2)}),
    "bert and bert": (_bert_and_bert, lambda: _tokens(2, LONG)),
    "florence2": (_florence2, lambda: _tokens(3, LONG, 7)),
    "florence2, an image": (_florence2, _with_an_image),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("decoding", DECODING, ids=lambda name: name.replace(" ", "-"))
@pytest.mark.parametrize("name", MODELS)
def test_models_made_of_two(name: str, decoding: str) -> None:
    make, inputs = MODELS[name]
    check(build(make), inputs(), {**DECODING[decoding], **SCORES})
    assert accelerated() == 1


def test_a_model_that_hands_on_more_than_its_cache() -> None:
    """With several sequences for an input it is left to the original code."""
    model = build(_idefics)
    check(model, _of_idefics(), {"num_beams": 1, **SCORES})
    assert accelerated() == 1 and not fallbacks()
    check(model, _of_idefics(), {"num_beams": 3})
    assert list(fallbacks()) == ["IdeficsForVisionText2Text hands on more than K/V from step to step"]
