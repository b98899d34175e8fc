"""The options of `fastgen-generate`: those of a run, and the fields of `GenerationConfig`.

The types of the fields are listed here, because importing transformers takes seconds, which is too long for `--help` or
a misspelt option, and because the class itself has no types. A field that only a later release has may be given, too:
the class is asked for it, and its value is JSON or text.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

from fastgen import settings as process_settings
from fastgen.pipeline.errors import SetupError, explained, one_line
from fastgen.pipeline.loading import read_json_object
from fastgen.pipeline.settings import DataOptions, among, check_types, option

METRICS = ("bleu", "rouge", "chrf", "exact")
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
# Smaller values make no sense to the library, which does not check all of them itself.
_LEAST = dict.fromkeys(["num_beams", "num_return_sequences", "num_beam_groups", "max_new_tokens", "max_length"], 1)
_LEAST |= dict.fromkeys(["min_length", "min_new_tokens", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"], 0)
# Options for drafts, which the model verifies several at a time.
DRAFTS = ("prompt_lookup_num_tokens", "assistant_early_exit")
# Fields that describe the file a configuration came from rather than the generation.
_METADATA = {"transformers_version"}


@dataclass(frozen=True)
class RunOptions(DataOptions):
    """Every option of a run. Only `model`, `input` and `output` are needed; the rest has the defaults shown."""

    OUTPUTS: ClassVar[tuple[str, ...]] = ("txt", "jsonl", "csv", "tsv", "parquet")
    OTHERWISE: ClassVar[str] = "txt"

    generation: Mapping[str, Any] = field(default_factory=dict)
    """`GenerationConfig` fields that override the model's own."""
    generation_config: str | None = None
    """A JSON file of such fields (or a directory with generation_config.json) that is applied before `generation`."""

    output_format: str = option("auto", "txt, jsonl, csv, tsv or parquet (default: by the name)", rare=True)
    keep: tuple[str, ...] = option(
        (),
        "columns of INPUT that the output has, too, in place of id, input and reference: names with commas between, or "
        "all",
        group="data",
    )
    output_column: str = option("text", "column with the outputs (default: text)")
    token_ids: bool = option(False, "also write the generated token ids (not in .txt)", rare=True)

    task: str = option(
        "auto",
        "auto, text2text, text-generation, translation, summarization, or a name in the model's task_specific_params, "
        "whose prefix and options are then used (default: auto)",
        group="task",
    )
    chat: bool = option(
        False, "apply the model's chat template to every input, which is a prompt, or a list of messages"
    )
    system_prompt: str | None = option(None, "with --chat: the message that begins each conversation")
    prefix: str | None = option(None, "text put before every input", "--source-prefix")
    src_lang: str | None = option(None, "source language, for multilingual models", "--source-lang")
    tgt_lang: str | None = option(None, "target language, for multilingual models", "--target-lang")
    max_source_length: int | None = option(
        None, "truncate inputs to N tokens (prompts of decoder-only models keep their end)", least=1
    )
    truncation: bool = option(False, "truncate inputs that are too long for the model instead of skipping them")
    json_schema: str | None = option(None, "file with a JSON schema: outputs are JSON of it", free=True)
    regex: str | None = option(None, "regular expression that outputs match, all of each", free=True)
    grammar: str | None = option(None, "file with a grammar of outputs, in Lark or GBNF", free=True, rare=True)
    include_prompt: bool = option(False, "decoder-only models: put the prompt before the new text", rare=True)
    detokenizer: str | None = option(None, "moses: detokenise the outputs with sacremoses", rare=True)
    lang: str | None = option(None, "language of the detokenizer (default: --tgt-lang, or en)", rare=True)

    workers: int | None = option(
        None,
        "processes for detokenising and metrics; 0: a thread (default: a quarter of the cores, 1 to 4); with --ray, "
        "processes that hold the model",
        group="running",
        free=True,
        rare=True,
        least=0,
        most=1024,
    )
    ray: str | None = option(
        None,
        "address of a Ray cluster whose workers run the model, or local for one on this machine; needs --workers",
        free=True,
        rare=True,
    )
    batching: str = option(
        "auto",
        "static; continuous: a record that is done makes room for the next one; or auto: continuous where static "
        "batches would be far from full (default: auto)",
        free=True,
    )
    seed: int = option(42, "seed for sampling (default: 42)", rare=True)
    self_speculation: str = option(
        lambda: process_settings.current().self_speculation,
        "int8 or int4: the model's own weights in 8 or 4 bits draft tokens, which the model verifies (default: off); "
        "kernels are chosen by measurements then",
        rare=True,
    )

    reference: str | None = option(
        None, "file of references, a line each", "--reference-path", group="scores", free=True
    )
    reference_column: str | None = option(None, "column of INPUT with the references", "--summary-column", free=True)
    metrics: tuple[str, ...] = option(
        (), "any of bleu,rouge,chrf,exact, over the records that were not skipped (default: by the task)"
    )
    score_path: str | None = option(None, "write the metrics to this JSON file", free=True, rare=True)

    def __post_init__(self) -> None:
        check_types(self)
        among("detokenizer", self.detokenizer or "none", ("moses", "none"))
        among("batching", self.batching, ("auto", "static", "continuous"))
        if self.batching == "continuous" and self.max_tokens is not None:
            raise SetupError("max-tokens cuts static batches: leave it out, or choose --batching static")
        for metric in self.metrics:
            among("metrics", metric, METRICS)
        if self.ray and not self.workers:
            raise SetupError("ray needs workers that hold the model: give --workers and their number")
        if self.reference and self.reference_column:
            raise SetupError("give either a reference file or a reference column, not both")
        if (self.metrics or self.score_path) and not (self.reference or self.reference_column):
            what = "metrics need" if self.metrics else "a score path needs"
            raise SetupError(f"{what} references: give a reference file or a reference column")
        if self.chat and self.prefix:
            raise SetupError("prefix and chat do not go together: a chat template says what comes before an input")
        if sum(each is not None for each in (self.json_schema, self.regex, self.grammar)) > 1:
            raise SetupError("outputs have one form: give a JSON schema, a regular expression or a grammar")
        if self.system_prompt is not None and not self.chat:
            raise SetupError("a system prompt is part of a conversation: it needs --chat")
        super().__post_init__()
        if self.keep and self.to_text:
            raise SetupError("lines of text have no columns: to keep some, name OUTPUT .jsonl, .csv, .tsv or .parquet")

    def read(self) -> dict[str, str | None]:
        own = {"the reference": self.reference, "the generation config": self.generation_config}
        return super().read() | own | {"the JSON schema": self.json_schema, "the grammar": self.grammar}

    def written_beside(self) -> dict[str, str | None]:
        return {"the score path": self.score_path} | super().written_beside()

    @property
    def form(self) -> dict[str, str] | None:
        """The form of outputs, as for `fastgen.Grammar`; None for any. Raises SetupError if its file cannot be read."""
        for kind, path in ("json_schema", self.json_schema), ("grammar", self.grammar):
            if path is not None:
                with explained(f"the file {path} cannot be read"):
                    return {kind: Path(path).read_text(encoding="utf-8")}
        return None if self.regex is None else {"regex": self.regex}

    @property
    def weights(self) -> dict[str, Any]:
        drafts = {"self_speculation": self.self_speculation}
        return super().weights | drafts | (captured_drafts() if self.to_text and self.self_speculation != "off" else {})

    @property
    def to_text(self) -> bool:
        """Whether the output is lines of text, which cannot hold scores."""
        return self.resolved_output_format == "txt"


def captured_drafts() -> dict[str, Any]:
    """Returns the settings with which a batch of one text samples its drafts like other batches."""
    return process_settings.unless_explicit(assisted_sampling="fastgen")


@lru_cache(maxsize=1)
def known_names() -> frozenset[str]:
    """Returns the fields of the installed `GenerationConfig`. Imports transformers."""
    from transformers import GenerationConfig

    return frozenset(name for name in vars(GenerationConfig()) if not name.startswith("_")) - _METADATA


def is_field(name: str) -> bool:
    """Whether `GenerationConfig` has this field. Imports transformers for a name that is not listed here."""
    return name in TYPES or name in known_names()


def is_flag(name: str) -> bool:
    """Whether the field can be given without a value."""
    return "bool" in TYPES.get(name, ())


def parse(name: str, text: str) -> Any:
    """Returns the value of a command-line word. Raises ValueError if it is not of the field's types."""
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
    """Raises `SetupError` if a field of a generation config has a value of a wrong type, or too small a value."""
    for name, types in TYPES.items():
        value = getattr(generation, name, None)
        if value is None:
            continue
        # In Python, a truth value is an integer, and an integer serves as any number.
        found = next((kinds for kind, kinds in _KINDS.items() if isinstance(value, kind)), {"json"})
        if not types & found:
            raise SetupError(f"generation option {name} is {value!r}: it must be of type {_named(types)}")
        if name in _LEAST and value < _LEAST[name]:
            raise SetupError(f"generation option {name} is {value}: it must be at least {_LEAST[name]}")


def read_generation_file(path: str) -> dict[str, Any]:
    """Returns the fields in a generation configuration file, or in the generation_config.json of a directory."""
    file = Path(path, "generation_config.json") if Path(path).is_dir() else Path(path)
    return check_names(read_json_object(file, "the generation config"), f"the generation config {file}")


def check_names(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns the values without metadata. Raises `SetupError` for a field that `GenerationConfig` does not have."""
    kept = {name: value for name, value in values.items() if not name.startswith("_") and name not in _METADATA}
    unknown = sorted(set(kept) - known_names())
    if unknown:
        raise SetupError(f"{where} has the unknown field {unknown[0]!r}")
    return kept
