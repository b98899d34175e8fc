"""The fields of `GenerationConfig` as options: the type of each one, and values checked against it.

The types are listed here, because importing transformers takes seconds, which is too long for `--help` or a misspelt
option, and because the class itself has no types. A field that only a later release has may be given too: the class is
asked for it, and its value is JSON or text.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from fastgen.pipeline.errors import SetupError, one_line

_NAMES = {
    "bool": "do_sample use_cache use_mtp renormalize_logits remove_invalid_values token_healing output_attentions "
    "output_hidden_states output_scores output_logits return_dict_in_generate is_assistant disable_compile low_memory",
    "bool str": "early_stopping",
    "int": "max_length max_new_tokens min_length min_new_tokens num_beams max_cache_len top_k no_repeat_ngram_size "
    "num_return_sequences pad_token_id bos_token_id encoder_no_repeat_ngram_size "
    "num_assistant_tokens prompt_lookup_num_tokens max_matching_ngram_size assistant_early_exit assistant_lookbehind "
    "target_lookbehind num_beam_groups prefill_chunk_size",
    "int json": "eos_token_id forced_bos_token_id forced_eos_token_id decoder_start_token_id",
    "float": "max_time temperature top_p min_p top_h typical_p epsilon_cutoff eta_cutoff repetition_penalty "
    "encoder_repetition_penalty length_penalty guidance_scale assistant_confidence_threshold assistant_ensemble_weight "
    "penalty_alpha diversity_penalty",
    "str": "cache_implementation num_assistant_tokens_schedule speculation_type",
    "str json": "stop_strings dola_layers",
    "json": "cache_config bad_words_ids exponential_decay_length_penalty suppress_tokens begin_suppress_tokens "
    "sequence_bias watermarking_config compile_config continuous_batching_config constraints force_words_ids",
}
TYPES = {name: frozenset(types.split()) for types, names in _NAMES.items() for name in names.split()}
_KINDS: dict[type, set[str]] = {bool: {"bool"}, str: {"str"}, int: {"int", "float", "json"}, float: {"float", "json"}}
# Smaller values make no sense to the library, which does not look at all of them itself.
_LEAST = dict.fromkeys(["num_beams", "num_return_sequences", "num_beam_groups", "max_new_tokens", "max_length"], 1)
_LEAST |= dict.fromkeys(["min_length", "min_new_tokens", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"], 0)
# Those that ask for drafts, which the model then checks several at a time.
DRAFTS = ("prompt_lookup_num_tokens", "assistant_early_exit")
# Fields that describe the file a configuration came from rather than the generation.
_METADATA = {"transformers_version"}


@lru_cache(maxsize=1)
def known_names() -> frozenset[str]:
    """The fields of the installed `GenerationConfig`. Imports transformers."""
    from transformers import GenerationConfig

    return frozenset(name for name in vars(GenerationConfig()) if not name.startswith("_")) - _METADATA


def is_field(name: str) -> bool:
    """Whether `GenerationConfig` has this field. Imports transformers for a name that is not listed here."""
    return name in TYPES or name in known_names()


def is_flag(name: str) -> bool:
    """Whether the field can be given without a value."""
    return "bool" in TYPES.get(name, ())


def parse(name: str, text: str) -> Any:
    """The value that a word on a command line stands for. Raises ValueError where it is not of the field's types."""
    types = TYPES.get(name, frozenset())
    word = text.strip().lower()
    if word in ("none", "null"):
        return None
    if "bool" in types and word in ("true", "false"):
        return word == "true"
    for kind in (int, float):
        if kind.__name__ in types:
            with contextlib.suppress(ValueError):
                return kind(text)
    bracketed = word.startswith(("[", "{"))
    if bracketed if "str" in types else "json" in types or not types:
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            if types or bracketed:
                raise ValueError(f"{text!r} is not valid JSON: {one_line(error)}") from error
    if "str" in types or not types:
        return text
    raise ValueError(f"{text!r} is not a value of type {_named(types)}")


def _named(types: frozenset[str]) -> str:
    return " or ".join(sorted("JSON" if name == "json" else name for name in types))


def check_values(generation: Any) -> None:
    """Raises `SetupError` where a field of a generation config has a value of a wrong type, or too small a value."""
    for name, types in TYPES.items():
        value = getattr(generation, name, None)
        if value is None:
            continue
        # A truth value is an integer to Python, and an integer serves as any number.
        found = next((kinds for kind, kinds in _KINDS.items() if isinstance(value, kind)), {"json"})
        if not types & found:
            raise SetupError(f"generation option {name} is {value!r}: it must be of type {_named(types)}")
        if name in _LEAST and value < _LEAST[name]:
            raise SetupError(f"generation option {name} is {value}: it must be at least {_LEAST[name]}")


def read_json_object(path: Path, what: str) -> dict[str, Any]:
    """The JSON object in a file. Raises `SetupError` where it cannot be read or is none."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SetupError(f"cannot read {what} {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise SetupError(f"{what} {path} is not valid JSON: {one_line(error)}") from error
    if not isinstance(values, dict):
        raise SetupError(f"{what} {path} is not a JSON object")
    return values


def read_generation_file(path: str) -> dict[str, Any]:
    """The fields in a generation configuration file, or in the generation_config.json of a directory."""
    file = Path(path, "generation_config.json") if Path(path).is_dir() else Path(path)
    return check_names(read_json_object(file, "the generation config"), f"the generation config {file}")


def check_names(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The values without metadata. Raises `SetupError` for a field that `GenerationConfig` does not have."""
    kept = {name: value for name, value in values.items() if not name.startswith("_") and name not in _METADATA}
    unknown = sorted(set(kept) - known_names())
    if unknown:
        raise SetupError(f"{where} has the unknown field {unknown[0]!r}")
    return kept
