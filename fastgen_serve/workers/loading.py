"""Loads models in their own process, and tokenizers in the server's.

Code in a checkpoint never runs: `trust_remote_code` is never set.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from fastgen.pipeline.errors import check_installed, explained, one_line
from fastgen.pipeline.generation import RunOptions
from fastgen.pipeline.generation.loading import class_named, is_known, read
from fastgen.pipeline.loading import (
    base_of,
    both_of,
    check_path,
    file_of,
    processor_of,
    read_model,
    sentence_files_of,
    tokenizer_of,
    why_not_loaded,
)
from fastgen.pipeline.settings import STANDARD_STREAM

_log = logging.getLogger("fastgen_serve")
# Models that transcribe, by type: those that need no input but the recording.
_SPEECH = {
    "whisper": "WhisperForConditionalGeneration",
    "moonshine": "MoonshineForConditionalGeneration",
    "speech_to_text": "Speech2TextForConditionalGeneration",
}


def read_config(path: str) -> Any:
    """Reads the configuration of a model. Works in any process.

    Raises:
        SetupError: it cannot be read.
    """
    from transformers import AutoConfig

    import fastgen.models.unilm  # noqa: F401 - makes its type known to the library

    return _read(AutoConfig, path, "cannot be loaded", base_of)


def generates(path: str) -> bool:
    """Returns whether a model generates, by the architecture in its configuration, or else by its type.

    Raises:
        SetupError: its configuration cannot be read.
    """
    from transformers import MODEL_FOR_MASKED_LM_MAPPING

    config = read_config(path)
    if file_of(sentence_files_of(path), "modules.json"):  # a sentence-transformers model
        return False
    if config.architectures:
        return class_named(config) is not None
    return is_known(config) and (config.is_encoder_decoder or type(config) not in MODEL_FOR_MASKED_LM_MAPPING)


def transcribes(path: str) -> bool:
    """Returns whether a model transcribes recordings, and is one of the supported types.

    Raises:
        SetupError: its configuration cannot be read.
    """
    config = read_config(path)
    name = _SPEECH.get(config.model_type)
    return name is not None and name in (config.architectures or (name,))


def read_speech(path: str, dtype: str) -> Any:
    """Loads a model that transcribes.

    Raises:
        SetupError: a part of it is damaged.
    """
    from transformers import AutoModelForSpeechSeq2Seq

    none = STANDARD_STREAM
    options = RunOptions(path, none, none, dtype=dtype, device="cpu", keep_bits=False, quiet=True)
    return read_model(options, lambda config: AutoModelForSpeechSeq2Seq)[0]


def read_feature_extractor(path: str) -> Any:
    """Loads the feature extractor, for the server's process; returns None for a model that does not transcribe.

    Raises:
        SetupError: it cannot be loaded, or a package that decodes recordings is missing.
    """
    from transformers import AutoFeatureExtractor

    if not transcribes(path):
        return None
    for package in ("soundfile", "soxr"):
        check_installed(package, "what reads recordings", "pip install 'fastgen-transformers[serve]'")
    return _read(AutoFeatureExtractor, path, "has no feature extractor that can be loaded", lambda name: name)


def read_generating(path: str, dtype: str) -> tuple[Any, Any]:
    """Loads a model that generates, and its tokenizer.

    Raises:
        SetupError: a part of it is damaged.
    """
    # The command's options also name an input and an output, which do not exist here.
    none = STANDARD_STREAM
    return read(RunOptions(path, none, none, dtype=dtype, device="cpu", keep_bits=False, quiet=True))


def read_tokenizer(path: str) -> Any:
    """Loads the tokenizer of a model, for the server's process.

    Raises:
        SetupError: it cannot be loaded.
    """
    from transformers import AutoTokenizer

    return _read(AutoTokenizer, path, "has no tokenizer that can be loaded", tokenizer_of)


def read_processor(path: str) -> tuple[Any, str]:
    """Loads the processor that makes a model's inputs of texts and images. Returns it and "", or None and the reason;
    the model then still generates from text.
    """
    from transformers import AutoProcessor

    place, found = processor_of(path), None
    if place is None:
        return None, "takes text only"
    try:
        check_installed("PIL", "what reads images", "pip install pillow")
        found = AutoProcessor.from_pretrained(place, trust_remote_code=False)
    except Exception as error:  # of the library, or of a package that the processor needs
        _log.warning("model %s takes text only, as its processor cannot be loaded: %s", path, one_line(error))
        return None, "takes text only here: its processor is not loaded, and the server's log says why"
    return (None, "takes text only") if getattr(found, "image_processor", None) is None else (found, "")


def _read(kind: Any, path: str, failure: str, source: Callable[[str], str]) -> Any:
    """Loads a library object of a model, without running the checkpoint's code. For a model that has only adapters,
    loads it from `source`.
    """
    check_path(path)
    place = source(path)
    with explained(f"model {both_of(path, place)} {failure}", why_not_loaded(place)):
        return kind.from_pretrained(place, trust_remote_code=False)
