"""Models made of two: images or text in, text out. And models that take more than text, which are left alone."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import transformers

from tests.equivalence.cases import DECODING
from tests.equivalence.check import accelerated, check, fallbacks
from tests.equivalence.models import BOS, EOS, LLAMA, LONG, PAD, VOCABULARY, Weights, enliven

_TEXT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_IMAGE = {**_TEXT, "image_size": 32, "patch_size": 4}
_TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
SCORES = {"return_dict_in_generate": True, "output_scores": True}


def _vit_and_trocr() -> Any:
    decoder = transformers.TrOCRConfig(
        **_TOKENS,
        d_model=32,
        decoder_layers=2,
        decoder_attention_heads=4,
        decoder_ffn_dim=64,
        cross_attention_hidden_size=32,
    )
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        transformers.ViTConfig(**_IMAGE), decoder
    )
    return transformers.VisionEncoderDecoderModel(config)


def _vit_and_gpt2() -> Any:
    decoder = transformers.GPT2Config(**_TOKENS, n_embd=32, n_layer=2, n_head=4, add_cross_attention=True)
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        transformers.ViTConfig(**_IMAGE), decoder
    )
    return transformers.VisionEncoderDecoderModel(config)


def _bert_and_bert() -> Any:
    encoder = transformers.BertConfig(**_TOKENS, **_TEXT)
    decoder = transformers.BertConfig(**_TOKENS, **_TEXT, is_decoder=True, add_cross_attention=True)
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    return transformers.EncoderDecoderModel(config)


def _florence2() -> Any:
    vision = {
        "depths": [1, 1, 1, 1],
        "embed_dim": [16, 16, 16, 16],
        "num_heads": [4, 4, 4, 4],
        "num_groups": [4, 4, 4, 4],
        "projection_dim": 32,
    }
    text = {**_TOKENS, "model_type": "bart", "d_model": 32, "decoder_start_token_id": BOS}
    for side in ("encoder", "decoder"):
        text |= {f"{side}_layers": 2, f"{side}_attention_heads": 4, f"{side}_ffn_dim": 64}
    config = transformers.Florence2Config(vision_config=vision, text_config=text, image_token_id=VOCABULARY - 1)
    return transformers.Florence2ForConditionalGeneration(config)


@pytest.mark.parametrize("decoding", DECODING, ids=lambda name: name.replace(" ", "-"))
@pytest.mark.parametrize("image", [False, True])
def test_an_encoder_that_gets_no_tokens(image: bool, decoding: str) -> None:
    """Florence-2 embeds them itself, and images among them; the prompts of a batch differ in length."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, VOCABULARY - 1, (3, LONG), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    inputs = {"input_ids": ids.masked_fill(mask == 0, PAD), "attention_mask": mask}
    if image:  # of 32 x 32, two tokens
        inputs["input_ids"][:, :2] = VOCABULARY - 1
        inputs["pixel_values"] = torch.randn(3, 3, 32, 32, generator=generator)
    check(build(_florence2), inputs, {**DECODING[decoding], **SCORES})
    assert accelerated() == 1


def _idefics(resampler: bool) -> Any:
    config = transformers.IdeficsConfig(
        **_TOKENS,
        **_TEXT,
        cross_layer_interval=1,
        use_resampler=resampler,
        alpha_initializer="ones",
        vision_config={"embed_dim": 32, "image_size": 16, "patch_size": 8, **_TEXT},
        perceiver_config={
            "use_resampler": resampler,
            "resampler_n_latents": 4,
            "resampler_depth": 1,
            "resampler_n_heads": 2,
            "resampler_head_dim": 16,
        },
    )
    return transformers.IdeficsForVisionText2Text(config)


_IDEFICS = {resampler: functools.partial(_idefics, resampler) for resampler in (False, True)}


@pytest.mark.parametrize("decoding", DECODING, ids=lambda name: name.replace(" ", "-"))
@pytest.mark.parametrize("images", [1, 2])
@pytest.mark.parametrize("resampler", _IDEFICS)
def test_images_that_are_handed_on_from_step_to_step(resampler: bool, images: int, decoding: str) -> None:
    """Idefics encodes images in its prefill, and gives the next steps what comes of it."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, VOCABULARY, (2, 7), generator=generator)
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.randn(2, images, 3, 16, 16, generator=generator),
        "image_attention_mask": torch.ones(2, 7, images),
    }
    check(build(_IDEFICS[resampler]), inputs, {**DECODING[decoding], **SCORES})
    assert accelerated() == 1


def _handing_on() -> Any:
    class HandingOn(transformers.LlamaForCausalLM):
        """As Moshi and others do: what it hands on has the rows of the prefill."""

        def forward(self, input_ids: Any = None, former: Any = None, **kwargs: Any) -> Any:
            outputs = super().forward(input_ids, **kwargs)
            if former is not None:
                outputs.logits = outputs.logits + former
            return outputs

        def prepare_inputs_for_generation(self, input_ids: Any, former: Any = None, **kwargs: Any) -> Any:
            return {**super().prepare_inputs_for_generation(input_ids, **kwargs), "former": former}

        def _update_model_kwargs_for_generation(
            self, outputs: Any, model_kwargs: Any, *args: Any, **kwargs: Any
        ) -> Any:
            found = super()._update_model_kwargs_for_generation(outputs, model_kwargs, *args, **kwargs)
            return {**found, "former": outputs.logits[:1, -1:].tanh()}

    for method in (HandingOn.forward, HandingOn.prepare_inputs_for_generation):
        method.__module__ = "transformers.models.handing_on"
    HandingOn._update_model_kwargs_for_generation.__module__ = "transformers.models.handing_on"
    return HandingOn(transformers.LlamaConfig(**_TOKENS, **LLAMA))


@pytest.mark.usefixtures("tests_are_the_librarys")
def test_models_of_which_it_is_not_known_what_they_hand_on() -> None:
    """With several sequences for an input they are left to the original code."""
    ids = torch.randint(4, VOCABULARY, (2, LONG), generator=torch.Generator().manual_seed(0))
    model = build(_handing_on)
    check(model, {"input_ids": ids}, {"num_beams": 3})
    assert list(fallbacks()) == ["HandingOn hands on more than K/V from step to step"]


def _llava() -> Any:
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**{**_IMAGE, "patch_size": 8}, projection_dim=32),
        text_config=transformers.LlamaConfig(**_TOKENS, **LLAMA),
        image_token_index=VOCABULARY - 1,
        image_seq_length=16,
    )
    return transformers.LlavaForConditionalGeneration(config)


@functools.cache
def build(make: Any) -> Any:
    torch.manual_seed(0)
    model = make().eval()
    enliven(model, Weights(1))
    tokens = {key: value for key, value in _TOKENS.items() if key != "vocab_size"}
    model.generation_config.update(max_new_tokens=8, decoder_start_token_id=BOS, **tokens)
    return model


@pytest.mark.parametrize("decoding", DECODING, ids=lambda name: name.replace(" ", "-"))
@pytest.mark.parametrize("make", [_vit_and_trocr, _vit_and_gpt2], ids=["vit-trocr", "vit-gpt2"])
def test_images_to_text(make: Any, decoding: str) -> None:
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    check(build(make), {"pixel_values": images}, {**DECODING[decoding], **SCORES})
    assert accelerated() == 1


@pytest.mark.parametrize("decoding", DECODING, ids=lambda name: name.replace(" ", "-"))
def test_text_to_text(decoding: str) -> None:
    ids = torch.randint(4, VOCABULARY, (2, LONG), generator=torch.Generator().manual_seed(0))
    check(
        build(_bert_and_bert),
        {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
        {**DECODING[decoding], **SCORES},
    )
    assert accelerated() == 1


@pytest.mark.parametrize("decoding", DECODING, ids=lambda name: name.replace(" ", "-"))
def test_images_in_the_prompt(decoding: str) -> None:
    """Left to the original, with or without an image."""
    ids = torch.randint(4, VOCABULARY - 1, (2, LONG), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    check(build(_llava), inputs, {**DECODING[decoding], **SCORES})
    ids = ids.clone()
    ids[:, 3:19] = VOCABULARY - 1
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    check(build(_llava), {**inputs, "input_ids": ids, "pixel_values": images}, {**DECODING[decoding], **SCORES})
    assert fallbacks() == {"LlavaForConditionalGeneration takes more than text": 2}
