"""Recordings and models for the tests of what is said in them, and what the library makes of one alone."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import soundfile
import torch
import transformers
from transformers import AutoFeatureExtractor, AutoModelForSpeechSeq2Seq, AutoTokenizer

import fastgen
from tests.pipeline import tiny

RATE = 16_000


def sound(seconds: float, seed: int = 0, rate: int = RATE) -> Any:
    """The samples of a tone that swells, with some noise."""
    times = numpy.arange(int(rate * seconds)) / rate
    tone = 0.3 * numpy.sin(2 * numpy.pi * (200 + 300 * seed) * times) * (1 + numpy.sin(6 * numpy.pi * times)) / 2
    return (tone + 0.05 * numpy.random.default_rng(seed).standard_normal(len(times))).astype("float32")


def file(samples: Any, rate: int = RATE, kind: str = "WAV", subtype: str | None = None) -> bytes:
    """A file of these samples."""
    written = io.BytesIO()
    soundfile.write(written, samples, rate, format=kind, subtype=subtype)
    return written.getvalue()


def lossless(samples: Any, rate: int = RATE) -> bytes:
    return file(samples, rate, subtype="FLOAT")


def claiming(data: bytes, size: int) -> bytes:
    """A WAV file whose header says that so many bytes of samples follow."""
    place = data.index(b"data") + 4
    return data[:place] + struct.pack("<I", size) + data[place + 4 :]


def flac_claiming(data: bytes, frames: int) -> bytes:
    """A FLAC file whose header says that it has so many samples."""
    return data[:21] + bytes([data[21] & 0xF0 | frames >> 32]) + struct.pack(">I", frames & 0xFFFFFFFF) + data[26:]


def moonshine(folder: Path) -> Path:
    """A Moonshine with its processor."""
    tokens = tiny.tokenizer(encoder_decoder=True)
    torch.manual_seed(1)
    model = transformers.MoonshineForConditionalGeneration(
        transformers.MoonshineConfig(
            vocab_size=len(tokens), hidden_size=32, intermediate_size=64, encoder_num_hidden_layers=1,
            decoder_num_hidden_layers=1, encoder_num_attention_heads=2, decoder_num_attention_heads=2,
            max_position_embeddings=64, bos_token_id=0, eos_token_id=2, pad_token_id=1, decoder_start_token_id=0,
            initializer_range=0.3,
        )
    )  # fmt: skip
    model.generation_config.max_length = 20
    extractor = transformers.Wav2Vec2FeatureExtractor(do_normalize=False, return_attention_mask=True)
    tiny.saved(model, tokens, folder)
    transformers.Wav2Vec2Processor(extractor, tokens).save_pretrained(folder)
    return folder


def speech2text(folder: Path) -> Path:
    """A Speech2Text with its feature extractor."""
    tokens = tiny.tokenizer(encoder_decoder=True)
    torch.manual_seed(1)
    model = transformers.Speech2TextForConditionalGeneration(
        transformers.Speech2TextConfig(
            vocab_size=len(tokens), d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, conv_channels=16, init_std=0.3,
            input_feat_per_channel=8, max_source_positions=600, max_target_positions=64, bos_token_id=0,
            eos_token_id=2, pad_token_id=1, decoder_start_token_id=2,
        )
    )  # fmt: skip
    model.generation_config.max_length = 20
    transformers.Speech2TextFeatureExtractor(feature_size=8, num_mel_bins=8).save_pretrained(folder)
    return tiny.saved(model, tokens, folder)


KINDS = (moonshine, speech2text)


@cache
def loaded(folder: str) -> tuple[Any, Any, Any]:
    """A model, its feature extractor, and its tokenizer."""
    model = AutoModelForSpeechSeq2Seq.from_pretrained(folder).eval()
    return model, AutoFeatureExtractor.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def generated(folder: str, samples: Any, seed: int | None = None, **options: Any) -> Any:
    """What `generate` returns for a recording alone, without FastGen."""
    model, extractor, _ = loaded(folder)
    window = getattr(extractor, "n_samples", len(samples))
    is_long = len(samples) > window
    cutting: dict[str, Any] = {"truncation": False, "padding": "longest"} if is_long else {}
    made = extractor(samples, sampling_rate=RATE, return_tensors="pt", return_attention_mask=True, **cutting)
    if seed is not None:
        torch.manual_seed(seed)
    with fastgen.disabled():
        return model.generate(**made, **{**({"return_timestamps": True} if is_long else {}), **options})


def text(folder: str, samples: Any, **options: Any) -> str:
    """The text of a recording alone."""
    (found,) = loaded(folder)[2].batch_decode(generated(folder, samples, **options), skip_special_tokens=True)
    return str(found).strip()


HOSTILE: dict[str, Callable[[], bytes]] = {
    "nothing": lambda: b"",
    "no sound": lambda: b"<html>not a recording</html>" * 100,
    "zeros": lambda: bytes(10_000),
    "a header alone": lambda: file(sound(1))[:20],
    "wav cut": lambda: file(sound(1))[:9_000],
    "flac cut": lambda: file(sound(1), kind="FLAC")[:5_000],
    "ogg cut": lambda: file(sound(1), kind="OGG")[:3_500],
    "flac damaged": lambda: file(sound(1), kind="FLAC")[:5_000] + bytes(5_000),
    "wav of 10 hours": lambda: claiming(file(sound(1)), 10 * 3600 * RATE * 2),
    "flac of 10 hours": lambda: flac_claiming(file(sound(1), kind="FLAC"), 10 * 3600 * RATE),
    "flac of any length": lambda: flac_claiming(file(sound(1), kind="FLAC"), 0),
    "long": lambda: file(numpy.zeros(RATE * 21, "int16")),
    "no samples": lambda: file(numpy.zeros(0, "float32")),
    "a few samples": lambda: file(sound(0.01)),
    "192 kHz": lambda: file(sound(1, rate=192_000), 192_000),
    "1 Hz": lambda: file(sound(1)[:10], 1),
    "32 channels": lambda: file(numpy.zeros((RATE, 32), "float32")),
    "no numbers": lambda: lossless(numpy.where(numpy.arange(RATE) == 9_000, numpy.nan, sound(1))),
    "infinite": lambda: lossless(numpy.where(numpy.arange(RATE) == 9_000, -numpy.inf, sound(1))),
    "deafening": lambda: lossless(sound(1) * 1e30),
    "another format": lambda: file(sound(1), kind="AIFF"),
    "video": lambda: b"\x00\x00\x00\x20ftypisom" + bytes(5_000),
    "id3 in front of another format": lambda: b"ID3\x03\x00\x00\x00\x00\x00\x00" + file(sound(1), kind="AIFF"),
}
