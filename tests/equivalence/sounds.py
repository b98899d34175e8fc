"""Tiny models that make sounds, from text: rows of tokens are codebooks of an input, and guidance doubles inputs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import transformers

from tests.equivalence.composites import tokens
from tests.equivalence.models import EOS, PAD, VOCABULARY

# A codebook has so many tokens, and a model so many codebooks.
CODES, CODEBOOKS = 64, 4
_T5 = {
    "vocab_size": VOCABULARY, "pad_token_id": PAD, "eos_token_id": EOS,
    "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
}  # fmt: skip
_LAYERS = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_SPECIAL = {"pad_token_id": CODES, "bos_token_id": CODES}


def _musicgen(kind: str, width: int = 32, codebooks: int = CODEBOOKS, **options: Any) -> Any:
    audio = transformers.EncodecConfig(
        num_filters=4, hidden_size=16, codebook_dim=16, codebook_size=CODES, num_lstm_layers=1,
        upsampling_ratios=[4, 2], sampling_rate=8000, target_bandwidths=(24.0,),
    )  # fmt: skip
    config = getattr(transformers, f"{kind}DecoderConfig")
    decoder = config(
        vocab_size=CODES, hidden_size=width, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4,
        num_codebooks=codebooks, max_position_embeddings=256, eos_token_id=None, **_SPECIAL, **options,
    )  # fmt: skip
    whole = getattr(transformers, f"{kind}Config")
    chroma = {"chroma_length": 12} if kind == "MusicgenMelody" else {}  # states in front of those of a text
    given = whole(text_encoder=transformers.T5Config(**_T5), audio_encoder=audio, decoder=decoder, **chroma)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(given)
    model.generation_config.update(decoder_start_token_id=CODES, max_new_tokens=24, **_SPECIAL)
    return model


def _dia() -> Any:
    heads = {**_LAYERS, "num_key_value_heads": 4, "head_dim": 8}
    special = {"eos_token_id": 64, "pad_token_id": 65, "bos_token_id": 66}
    decoder = {
        **heads, **special, "num_key_value_heads": 2, "vocab_size": 70, "num_channels": 3, "cross_head_dim": 8,
        "cross_hidden_size": 32, "cross_num_attention_heads": 4, "cross_num_key_value_heads": 4,
    }  # fmt: skip
    encoder = {**heads, "vocab_size": VOCABULARY}
    config = transformers.DiaConfig(encoder_config=encoder, decoder_config=decoder, delay_pattern=[0, 2, 3], **special)
    model = transformers.DiaForConditionalGeneration(config)
    model.generation_config.update(max_new_tokens=24, decoder_start_token_id=66, **special)
    return model


def _bark() -> Any:
    """Whose tables of positions are shorter than the buffers of a step."""
    part = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "block_size": 64}
    codec = transformers.EncodecConfig(
        num_filters=4, hidden_size=16, codebook_dim=16, codebook_size=16, num_lstm_layers=1,
        upsampling_ratios=[4, 2], sampling_rate=8000, target_bandwidths=(32.0,),
    )  # fmt: skip
    config = transformers.BarkConfig(
        semantic_config={**part, "input_vocab_size": 180, "output_vocab_size": 110},
        coarse_acoustics_config={**part, "input_vocab_size": 140, "output_vocab_size": 132},
        fine_acoustics_config={**part, "input_vocab_size": 17, "output_vocab_size": 17},
        codec_config=codec,
    )
    model = transformers.BarkModel(config)
    semantic = {
        "eos_token_id": 100, "max_new_tokens": 20, "text_encoding_offset": 10, "text_pad_token": 175,
        "semantic_pad_token": 100, "semantic_infer_token": 176, "semantic_vocab_size": 100,
        "max_input_semantic_length": 12,
    }  # fmt: skip
    coarse = {
        "max_coarse_input_length": 12, "max_coarse_history": 24, "sliding_window_len": 20,
        "coarse_semantic_pad_token": 132, "coarse_infer_token": 133,
    }  # fmt: skip
    fine = {"max_fine_history_length": 16, "max_fine_input_length": 32}
    model.generation_config = transformers.GenerationConfig(
        semantic_config=semantic, coarse_acoustics_config=coarse, fine_acoustics_config=fine, codebook_size=16
    )
    return model


@functools.cache
def build(make: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    model = make().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and not name.startswith(("audio_encoder.", "codec_model.")):
                parameter.normal_(0, 0.25)
    return model


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "guided": {"do_sample": False, "guidance_scale": 3.0},
    "sampling": {"do_sample": True},
    "sampling, guided": {"do_sample": True, "guidance_scale": 3.0, "temperature": 1.2, "top_k": 20},
}


MUSICGEN = {
    "musicgen": functools.partial(_musicgen, "Musicgen"),
    # The states of its text encoder are projected, and with two channels, there are two rows for each codebook.
    "musicgen, stereo": functools.partial(_musicgen, "Musicgen", width=40, audio_channels=2),
}
ONE_CODEBOOK = functools.partial(_musicgen, "Musicgen", codebooks=1)
MODELS: dict[str, Callable[[], Any]] = {
    **MUSICGEN,
    "musicgen melody": functools.partial(_musicgen, "MusicgenMelody"),
    "dia": _dia,
    "bark": _bark,
}


def ways(name: str) -> list[dict[str, Any]]:
    """Of decoding. Bark has another kind of guidance."""
    unguided = {"greedy": {"do_sample": False}, "sampling": {"do_sample": True, "min_eos_p": 0.2}}
    return list((unguided if name == "bark" else WAYS).values())


def inputs(name: str) -> dict[str, torch.Tensor]:
    """For a model: texts, of which the second one is shorter."""
    return tokens(2, 12, 6) if name == "bark" else tokens(2, 9, 6)


def calls(name: str) -> int:
    """How many times a call of a model runs the library's decoding loop."""
    return 4 if name == "bark" else 1
