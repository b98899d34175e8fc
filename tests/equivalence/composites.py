"""Tiny models made of two, images, sounds or text in, text out; and inputs that fit them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import transformers

from tests.equivalence.models import BOS, EOS, LONG, PAD, VOCABULARY, Weights, enliven

_TEXT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_IMAGE = {**_TEXT, "image_size": 32, "patch_size": 4}
_TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}


_SEQ2SEQ = {"d_model": 32, "max_position_embeddings": 128}
_OF_SIDES: dict[str, Any] = {"layers": 2, "attention_heads": 4, "ffn_dim": 64}
_ENCODER, _DECODER = ({f"{side}_{name}": value for name, value in _OF_SIDES.items()} for side in ("encoder", "decoder"))
_INSIDE: dict[str, Any] = {"is_decoder": True, "add_cross_attention": True}
# The first layers of what hears sounds.
_CONVOLUTIONS = {
    "conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3),
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2,
}  # fmt: skip
_SEAMLESS = {
    **{name: value for name, value in _TEXT.items() if name == "hidden_size"}, **_ENCODER, **_DECODER,
    "speech_encoder_layers": 1, "speech_encoder_attention_heads": 4, "speech_encoder_intermediate_size": 64,
    "feature_projection_input_dim": 16, "t2u_encoder_layers": 1, "t2u_decoder_layers": 1,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2,
}  # fmt: skip


def _of_two(kind: str, encoder: Any, decoder: Any) -> Any:
    config = getattr(transformers, f"{kind}Config").from_encoder_decoder_configs(encoder, decoder)
    return getattr(transformers, f"{kind}Model")(config)


def _vit_and(decoder: Any) -> Any:
    return _of_two("VisionEncoderDecoder", transformers.ViTConfig(**_IMAGE), decoder)


def _vit_and_trocr(**options: Any) -> Any:
    sizes = {"d_model": 32, **_DECODER, "cross_attention_hidden_size": 32, "max_position_embeddings": 128}
    return _vit_and(transformers.TrOCRConfig(**_TOKENS, **sizes, **options))


def _vit_and_gpt2() -> Any:
    return _vit_and(transformers.GPT2Config(**_TOKENS, n_embd=32, n_layer=2, n_head=4, add_cross_attention=True))


def bert_and_rembert() -> Any:
    """Steps of the second one are not captured: nobody has looked at them."""
    decoder = transformers.RemBertConfig(**_TOKENS, **_TEXT, **_INSIDE, input_embedding_size=32)
    return _of_two("EncoderDecoder", transformers.BertConfig(**_TOKENS, **_TEXT), decoder)


def _donut() -> Any:
    sizes: dict[str, Any] = {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4}
    swin = transformers.DonutSwinConfig(image_size=32, patch_size=2, **sizes)
    return _of_two("VisionEncoderDecoder", swin, transformers.MBartConfig(**_TOKENS, **_SEQ2SEQ, **_DECODER, **_INSIDE))


def _twins(name: str) -> Any:
    """An encoder, and the same as a decoder."""
    kind = getattr(transformers, f"{name}Config")
    return _of_two("EncoderDecoder", kind(**_TOKENS, **_TEXT), kind(**_TOKENS, **_TEXT, **_INSIDE))


def _wav2vec2_and_mbart() -> Any:
    encoder = transformers.Wav2Vec2Config(**_TEXT, **_CONVOLUTIONS, num_feat_extract_layers=2)
    decoder = transformers.MBartConfig(**_TOKENS, **_SEQ2SEQ, **_DECODER, **_INSIDE)
    return _of_two("SpeechEncoderDecoder", encoder, decoder)


def _speech_to_text() -> Any:
    sizes = {"input_feat_per_channel": 8, "conv_channels": 16, "max_source_positions": 64, "max_target_positions": 64}
    config = transformers.Speech2TextConfig(**_TOKENS, **_SEQ2SEQ, **_ENCODER, **_DECODER, **sizes)
    return transformers.Speech2TextForConditionalGeneration(config)


def _speecht5() -> Any:
    sizes = {"hidden_size": 32, **_ENCODER, **_DECODER, **_CONVOLUTIONS}
    return transformers.SpeechT5ForSpeechToText(transformers.SpeechT5Config(**_TOKENS, **sizes))


def _moonshine() -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 128}
    sides = {
        f"{side}_num_{name}": 2 for side in ("encoder", "decoder") for name in ("hidden_layers", "attention_heads")
    }
    return transformers.MoonshineForConditionalGeneration(transformers.MoonshineConfig(**_TOKENS, **sizes, **sides))


def _seamless(version: str, reads: str) -> Any:
    kind = getattr(transformers, f"SeamlessM4T{version}For{reads}ToText")
    model = kind(kind.config_class(**_TOKENS, **_SEAMLESS))
    model.generation_config.text_decoder_lang_to_code_id = {"eng": 5}
    return model


def _florence2() -> Any:
    """It embeds tokens itself, and images among them: its encoder gets none."""
    vision: dict[str, Any] = {"depths": [1] * 4, "embed_dim": [16] * 4, "num_heads": [4] * 4, "num_groups": [4] * 4}
    text = {**_TOKENS, "model_type": "bart", "d_model": 32, "decoder_start_token_id": BOS}
    for side in ("encoder", "decoder"):
        text |= {f"{side}_layers": 2, f"{side}_attention_heads": 4, f"{side}_ffn_dim": 64}
    vision["projection_dim"] = 32
    config = transformers.Florence2Config(vision_config=vision, text_config=text, image_token_id=VOCABULARY - 1)
    return transformers.Florence2ForConditionalGeneration(config)


def _blip(kind: str) -> Any:
    """What generates is a model without encoder to `generate`, which gets the states of one."""
    text = {**_TOKENS, **_TEXT, "projection_dim": 32, "encoder_hidden_size": 32, "max_position_embeddings": 128}
    config = transformers.BlipConfig(text_config={**text, "sep_token_id": EOS}, vision_config=_IMAGE, projection_dim=32)
    model = getattr(transformers, f"BlipFor{kind}")(config)
    model.text_decoder.generation_config.update(max_new_tokens=8)
    return model


def _pix2struct() -> Any:
    sizes = {"hidden_size": 32, "d_kv": 8, "d_ff": 64}
    text = {**_TOKENS, **sizes, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": BOS, "use_cache": True}
    vision = {**sizes, "patch_embed_hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 4, "seq_len": 16}
    config = transformers.Pix2StructConfig(text_config=text, vision_config=vision)
    model = transformers.Pix2StructForConditionalGeneration(config)
    model.generation_config.update(use_cache=True)
    return model


def _git() -> Any:
    """Images are in front of the tokens in the cache, five positions that no input has."""
    vision = {**_IMAGE, "image_size": 16, "patch_size": 8}
    return transformers.GitForCausalLM(transformers.GitConfig(**_TOKENS, **_TEXT, vision_config=vision))


def _udop() -> Any:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
    image = {"image_size": 32, "patch_size": 8, "max_2d_position_embeddings": 64}
    return transformers.UdopForConditionalGeneration(transformers.UdopConfig(**_TOKENS, **sizes, **image))


def _blip2(kind: str, text: Any) -> Any:
    """What generates is inside, with images among its tokens."""
    former = {**_TEXT, "vocab_size": VOCABULARY, "encoder_hidden_size": 32, "cross_attention_frequency": 1}
    config = getattr(transformers, f"{kind}Config")(
        vision_config=_IMAGE, qformer_config=former, text_config=text, num_query_tokens=4,
        image_token_index=VOCABULARY - 1,
    )  # fmt: skip
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    special = {key: value for key, value in _TOKENS.items() if key != "vocab_size"}
    model.language_model.generation_config.update(decoder_start_token_id=BOS, **special)
    return model


def _opt() -> Any:
    sizes = {"hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return transformers.OPTConfig(**_TOKENS, **sizes, word_embed_proj_dim=32, max_position_embeddings=128)


def _t5() -> Any:
    return transformers.T5Config(**_TOKENS, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)


def idefics() -> Any:
    """It encodes images in its prefill, and hands what comes of it on from step to step."""
    config = transformers.IdeficsConfig(
        **_TOKENS, **_TEXT, cross_layer_interval=1, use_resampler=False, alpha_initializer="ones",
        vision_config={"embed_dim": 32, "image_size": 16, "patch_size": 8, **_TEXT},
    )  # fmt: skip
    return transformers.IdeficsForVisionText2Text(config)


def _kosmos2() -> Any:
    text = {"embed_dim": 32, "ffn_dim": 64, "layers": 2, "attention_heads": 4, "max_position_embeddings": 128}
    config = transformers.Kosmos2Config(
        text_config={**_TOKENS, **text}, latent_query_num=4,
        vision_config={**_TEXT, "num_hidden_layers": 1, "image_size": 16, "patch_size": 8},
    )  # fmt: skip
    model = transformers.Kosmos2ForConditionalGeneration(config)
    special = {key: value for key, value in _TOKENS.items() if key != "vocab_size"}
    model.text_model.generation_config.update(max_new_tokens=8, **special)
    return model


def _kosmos2_5() -> Any:
    text = {"embed_dim": 32, "ffn_dim": 64, "layers": 2, "attention_heads": 4, "max_position_embeddings": 128}
    vision = {
        "hidden_size": 32, "patch_embed_hidden_size": 12, "intermediate_size": 64, "head_dim": 8,
        "num_hidden_layers": 1, "num_attention_heads": 4, "max_num_patches": 16,
    }  # fmt: skip
    config = transformers.Kosmos2_5Config(text_config={**_TOKENS, **text}, vision_config=vision, latent_query_num=4)
    return transformers.Kosmos2_5ForConditionalGeneration(config)


@functools.cache
def build(make: Any) -> Any:
    torch.manual_seed(0)
    model = make().eval()
    enliven(model.text_decoder if model.get_output_embeddings() is None else model, Weights(1))  # BLIP has it inside
    special = {key: value for key, value in _TOKENS.items() if key != "vocab_size"}
    model.generation_config.update(max_new_tokens=8, decoder_start_token_id=BOS, **special)
    return model


def _images(rows: int, size: int = 32) -> torch.Tensor:
    return torch.randn(rows, 3, size, size, generator=torch.Generator().manual_seed(0))


def tokens(rows: int, length: int, shortest: int | None = None) -> dict[str, torch.Tensor]:
    """Prompts, of which the second one may be shorter."""
    ids = torch.randint(4, VOCABULARY - 1, (rows, length), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, shortest or length :] = 0
    return {"input_ids": ids.masked_fill(mask == 0, PAD), "attention_mask": mask}


def _with_an_image() -> dict[str, torch.Tensor]:
    """Of 32 x 32, which are two tokens."""
    inputs = tokens(3, LONG, 7)
    inputs["input_ids"][:, :2] = VOCABULARY - 1
    return {**inputs, "pixel_values": _images(3)}


def _with_images(rows: int, length: int, shortest: int | None = None) -> dict[str, torch.Tensor]:
    return {**tokens(rows, length, shortest), "pixel_values": _images(rows)}


def _with_a_page() -> dict[str, torch.Tensor]:
    """Words of a page, where they are, and the page."""
    corner = torch.rand(2, 9, 2, generator=torch.Generator().manual_seed(0)) / 2
    return {**_with_images(2, 9), "bbox": torch.cat([corner, corner + 0.3], dim=2)}


def _with_patches() -> dict[str, torch.Tensor]:
    """An image in parts, with the row and the column of each; the second one has fewer."""
    patches = torch.randn(2, 10, 2 + 12, generator=torch.Generator().manual_seed(0))
    patches[:, :, 0], patches[:, :, 1] = torch.arange(10) // 5 + 1, torch.arange(10) % 5 + 1
    mask = torch.ones(2, 10)
    mask[1, 7:] = patches[1, 7:] = 0
    return {"flattened_patches": patches, "attention_mask": mask}


def _with_places() -> dict[str, torch.Tensor]:
    """Prompts with padding in front of the second one, and an image that replaces four of their tokens."""
    inputs = tokens(2, 12)
    inputs["input_ids"][1, :3] = PAD
    inputs["attention_mask"][1, :3] = 0
    places = torch.zeros_like(inputs["input_ids"])
    places[:, 4:8] = 1
    return {**inputs, "pixel_values": _images(2, 16), "image_embeds_position_mask": places}


def _patches_with_places() -> dict[str, torch.Tensor]:
    """The same as of Kosmos-2, with an image in parts."""
    inputs, patches = _with_places(), _with_patches()["flattened_patches"]
    del inputs["pixel_values"]
    return {**inputs, "flattened_patches": patches}


def _with_queries(instruct: bool = False) -> dict[str, torch.Tensor]:
    """Prompts behind an image, which is four tokens."""
    inputs = _with_images(2, 12)
    inputs["input_ids"][:, :4] = VOCABULARY - 1
    more = {f"qformer_{name}": value for name, value in tokens(2, 6).items()} if instruct else {}
    return inputs | more


def _sounds(name: str, *shape: int) -> dict[str, torch.Tensor]:
    """Of which the second one is shorter."""
    sounds = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, shape[0], dtype=torch.int64)
    mask[1, shape[0] // 2 :] = 0
    return {name: sounds, "attention_mask": mask}


def of_idefics() -> dict[str, torch.Tensor]:
    return {**tokens(2, 7), "pixel_values": _images(2, 16).unsqueeze(1), "image_attention_mask": torch.ones(2, 7, 1)}


MODELS: dict[str, tuple[Callable[[], Any], Callable[[], dict[str, torch.Tensor]]]] = {
    "vit and trocr": (_vit_and_trocr, lambda: {"pixel_values": _images(2)}),
    "vit and trocr, waves": (
        functools.partial(_vit_and_trocr, use_learned_position_embeddings=False),
        lambda: {"pixel_values": _images(2)},
    ),
    "vit and gpt2": (_vit_and_gpt2, lambda: {"pixel_values": _images(2)}),
    "donut": (_donut, lambda: {"pixel_values": _images(2)}),
    "bert and bert": (functools.partial(_twins, "Bert"), lambda: tokens(2, LONG, 20)),
    "roberta and roberta": (functools.partial(_twins, "Roberta"), lambda: tokens(2, LONG, 20)),
    "wav2vec2 and mbart": (_wav2vec2_and_mbart, lambda: _sounds("input_values", 600)),
    "speech to text": (_speech_to_text, lambda: _sounds("input_features", LONG, 8)),
    "speecht5": (_speecht5, lambda: _sounds("input_values", 600)),
    "moonshine": (_moonshine, lambda: _sounds("input_values", 6000)),
    "seamless, text": (functools.partial(_seamless, "", "Text"), lambda: tokens(2, LONG, 20)),
    "seamless, sounds": (functools.partial(_seamless, "", "Speech"), lambda: _sounds("input_features", LONG, 16)),
    "seamless 2, text": (functools.partial(_seamless, "v2", "Text"), lambda: tokens(2, LONG, 20)),
    "seamless 2, sounds": (functools.partial(_seamless, "v2", "Speech"), lambda: _sounds("input_features", LONG, 16)),
    "blip, captions": (functools.partial(_blip, "ConditionalGeneration"), lambda: _with_images(2, 5)),
    "blip, questions": (functools.partial(_blip, "QuestionAnswering"), lambda: _with_images(2, 9, 6)),
    "git": (_git, lambda: {**tokens(2, 5), "pixel_values": _images(2, 16)}),
    "git captions": (_git, lambda: {"pixel_values": _images(2, 16)}),
    "udop": (_udop, _with_a_page),
    "pix2struct": (_pix2struct, _with_patches),
    "blip 2 with opt": (lambda: _blip2("Blip2", _opt()), _with_queries),
    "blip 2 with t5": (lambda: _blip2("Blip2", _t5()), _with_queries),
    "instructblip with opt": (lambda: _blip2("InstructBlip", _opt()), lambda: _with_queries(instruct=True)),
    "instructblip with t5": (lambda: _blip2("InstructBlip", _t5()), lambda: _with_queries(instruct=True)),
    "kosmos 2": (_kosmos2, lambda: tokens(2, 12)),
    "kosmos 2, an image": (_kosmos2, _with_places),
    "kosmos 2.5": (_kosmos2_5, lambda: tokens(2, 12)),
    "kosmos 2.5, an image": (_kosmos2_5, _patches_with_places),
    "florence2": (_florence2, lambda: tokens(3, LONG, 7)),
    "florence2, an image": (_florence2, _with_an_image),
}


def options(name: str, decoding: dict[str, Any]) -> dict[str, Any]:
    """Those of a way of decoding, and what a model needs besides."""
    return {**decoding, **({"tgt_lang": "eng"} if name.startswith("seamless") else {})}
