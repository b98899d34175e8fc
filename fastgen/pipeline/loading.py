"""Loading: a model, its tokenizer and its generation config, checked before anything is generated."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastgen import settings as process_settings
from fastgen.pipeline.errors import SetupError, check_installed, explained, one_line
from fastgen.pipeline.generation_fields import DRAFTS, check_names, check_values, read_generation_file, read_json_object
from fastgen.pipeline.readers import quiet_hub
from fastgen.pipeline.settings import DataOptions, RunOptions

_ALL_KINDS = {"missing": "missing", "unexpected": "left over", "mismatched": "misshapen"}


@dataclass
class Loaded(ABC):
    """A model in memory, with its tokenizer."""

    model: Any
    tokenizer: Any

    @property
    def device(self) -> Any:
        """Where the model is."""
        return self.model.device

    @abstractmethod
    def decisive(self) -> dict[str, Any]:
        """What else decides the output, beside the model, the tokenizer and the options."""


@dataclass
class LoadedModel(Loaded):
    """A model ready to generate, with all that the other stages need to know about it."""

    generation: Any
    prefix: str
    encoder_decoder: bool
    positions: int | None
    """The most tokens that an input may have; None where the model does not say."""
    pad_id: int = 0
    chat_template: str | None = None
    """What inputs are put into, where they are conversations."""

    @property
    def asks_for_drafts(self) -> bool:
        return any(getattr(self.generation, name, None) is not None for name in DRAFTS)

    def decisive(self) -> dict[str, Any]:
        fields = self.generation.to_dict().items()
        generation = {key: value for key, value in fields if key != "transformers_version" and key[0] != "_"}
        template = {} if self.chat_template is None else {"chat_template": self.chat_template}
        if "strftime_now" in (self.chat_template or ""):  # the prompts of another day are others
            template["date"] = time.strftime("%Y-%m-%d")
        return {"generation": generation, **template}


def load(settings: RunOptions) -> LoadedModel:
    """Load model and tokenizer and make the generation config. Raises `SetupError` where any of it is damaged."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    import fastgen.models.unilm  # noqa: F401 - makes its type known to the classes above

    def kind(config: Any) -> Any:
        # The library goes on without a generation config that is damaged.
        if file := file_of(settings.model, "generation_config.json"):
            read_json_object(file, "the generation config")
        return AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM

    model, tokenizer = read_model(settings, kind, settings.seed)
    return prepare(model, tokenizer, settings)


def read_model(
    settings: DataOptions,
    kind: Callable[[Any], Any],
    seed: int = 0,
    needed: Mapping[str, str] = _ALL_KINDS,
    unused: str = "",
    folder: str = "",
) -> tuple[Any, Any]:
    """The model that the settings name and its tokenizer. Raises `SetupError` where any of it is damaged.

    Args:
        kind: the class that loads a model with a configuration.
        seed: for weights that are missing, which are drawn.
        needed: the kinds of weights that must not be there, by what they are called in messages.
        unused: a part of the model that is not used, whose weights may be missing.
        folder: where the files are, in the model's directory.
    """
    import torch
    from transformers import AutoConfig, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    quiet_transformers(settings.quiet)
    check_path(settings.model, gguf=True)
    device = choose_device(settings.device)
    local, gguf = Path(settings.model).is_dir(), is_gguf(settings.model)
    name, file = address(settings.model)
    options: dict[str, Any] = {"trust_remote_code": settings.trust_remote_code, **file}
    if local and folder:
        name = str(Path(settings.model, folder))
    elif not (local or gguf):
        options["subfolder"] = folder
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[settings.dtype]
    with (
        explained(f"model {settings.model} cannot be loaded", why_not_loaded(settings.model)),
        process_settings.changed(keep_bits=settings.keep_bits),
    ):
        config = AutoConfig.from_pretrained(name, **options)
        stored = getattr(config, "quantization_config", None)
        chosen = kind(config)
        tokenizer = AutoTokenizer.from_pretrained(name, **options)
        _check_tokenizer(tokenizer, settings.model if gguf else name)
        torch.manual_seed(seed)  # a run with weights that are drawn can be repeated
        before = transformers_logging.get_verbosity()
        if not settings.allow_missing_weights:  # otherwise the library shows a table of those that are missing
            transformers_logging.set_verbosity_error()
        try:
            loaded: Any = chosen.from_pretrained(name, config=config, dtype=dtype, output_loading_info=True, **options)
        finally:
            transformers_logging.set_verbosity(before)
        model, found = loaded
        _check_weights(found, settings, needed, unused)
        model = model.eval().to(device)
    if not settings.quiet:
        print(_how_loaded(model, "gguf" if gguf else stored), file=sys.stderr)
    return model, tokenizer


def is_gguf(model: str) -> bool:
    """Whether a model is named by its GGUF file."""
    return model.lower().endswith(".gguf") and Path(model).is_file()


def address(model: str) -> tuple[str, dict[str, str]]:
    """What the library's `from_pretrained` takes for a model: a name, and options; a GGUF file is one of the latter."""
    if is_gguf(model):
        return str(Path(model).parent), {"gguf_file": Path(model).name}
    return model, {}


def why_not_loaded(model: str) -> Callable[[Exception], str]:
    """What says why loading has failed. Of a name that is no folder here, the library says where it looked instead."""

    def reason(error: Exception) -> str:
        if isinstance(error, OSError) and not Path(model).exists() and "connect" in str(error):
            return "there is no such folder, and the hub cannot be reached to look for it there"
        return one_line(error)

    return reason


def _how_loaded(model: Any, stored: Any) -> str:
    """A line about the weights of a model.

    Args:
        stored: "gguf", or the `quantization_config` of a checkpoint, or None.
    """
    from fastgen.quantization import loaded

    kept = loaded.described(model)
    if kept is not None:
        return f"model: {kept}"
    line = f"model: {type(model).__name__} in {str(model.dtype).removeprefix('torch.')}"
    if not stored:
        return line
    method = stored if isinstance(stored, str) else dict(stored).get("quant_method")
    return f"{line}, as Transformers loads {method} (--keep-bits keeps weights in their bits)"


def _check_tokenizer(tokenizer: Any, name: str) -> None:
    """Raises `SetupError` where the library made a tokenizer without the files that belong to it."""
    # Of special tokens alone, or of these and "▁". A tokenizer of bytes has no files.
    named = {*getattr(tokenizer, "vocab_files_names", {}).values()} - {"tokenizer_config.json"}
    known = {*named, "tokenizer.json", "tokenizer.model", "tekken.json"}
    ordinary = set(tokenizer.get_vocab()) - {*tokenizer.get_added_vocab(), *tokenizer.all_special_tokens}
    has_file = is_gguf(name) or any(file_of(name, file) for file in known)
    if not ordinary or (named and not has_file):
        raise SetupError(f"model {name} has no tokenizer: its files, such as tokenizer.json, are missing")


def file_of(model: str, name: str) -> Path | None:
    """A file of a model, in its directory or where the library keeps what it has downloaded."""
    from huggingface_hub import try_to_load_from_cache

    if is_gguf(model):  # which holds all that there is
        return None
    path = Path(model, name) if Path(model).is_dir() else try_to_load_from_cache(model, name)
    return Path(path) if isinstance(path, str | Path) and Path(path).exists() else None


def _check_weights(found: Mapping[str, Any], settings: DataOptions, needed: Mapping[str, str], unused: str) -> None:
    """Raises `SetupError` where the files have too few weights, or weights that the model has no place for."""
    if settings.allow_missing_weights:
        return
    for kind, what in needed.items():
        names = sorted(str(name) for name in found.get(f"{kind}_keys") or ())
        names = [name for name in names if not (unused and name.startswith(unused))]
        if names:
            raise SetupError(
                f"model {settings.model}: {len(names)} of its weights are {what}, {names[0]} the first of them "
                "(--allow-missing-weights runs the model all the same)"
            )


def check_path(name: str, gguf: bool = False) -> None:
    """A SetupError where a path is given that no model can be at. Done before anything slow is imported.

    Args:
        gguf: whether it may be a GGUF file.
    """
    path = Path(name)
    if gguf and name.lower().endswith(".gguf") and not path.exists():
        raise SetupError(f"model {name}: no such file")
    if not path.exists() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise SetupError(f"model {name}: no such directory")
    if path.is_file() and not (gguf and is_gguf(name)):
        raise SetupError(f"model {name} is a file: give the directory written by save_pretrained, or a hub name")


def prepare(model: Any, tokenizer: Any, settings: RunOptions) -> LoadedModel:
    """Decide everything about a model that is in memory already."""
    encoder_decoder = bool(model.config.is_encoder_decoder)
    if encoder_decoder and settings.task == "text-generation":
        raise SetupError(f"model {settings.model} is an encoder-decoder: task text-generation needs a decoder-only one")
    task_options = _task(model.config, settings)
    generation = _generation_config(model, settings, task_options, _languages(tokenizer, settings))
    pad_id = _pad_id(tokenizer, generation)
    if generation.pad_token_id is None:
        generation.pad_token_id = pad_id
    check_values(generation)
    with explained("the generation options do not fit together"):
        generation.validate()
    if not settings.to_text or (generation.num_beams or 1) > 1:
        generation = _without_drafts(generation)  # there are none for calls that return scores, and for beams
    # On the model as well: what is None here would otherwise be filled in from the model's own defaults. FastGen leaves
    # a model whose defaults ask for drafts to the library, which refuses batches then.
    model.generation_config = _without_drafts(generation)
    prefix = task_options.get("prefix", "") if settings.prefix is None else settings.prefix
    positions = _input_limit(model.config, generation)
    template = _chat_template(tokenizer, settings) if settings.chat else None
    return LoadedModel(model, tokenizer, generation, prefix, encoder_decoder, positions, pad_id, template)


def _chat_template(tokenizer: Any, settings: RunOptions) -> str:
    check_installed("jinja2", "--chat")
    try:
        return tokenizer.get_chat_template()
    except ValueError as error:
        raise SetupError(f"{settings.model} has no chat template: leave out --chat ({one_line(error)})") from error


def _without_drafts(generation: Any) -> Any:
    """A copy that asks for none."""
    plain = copy.deepcopy(generation)
    for name in DRAFTS:
        if hasattr(plain, name):
            setattr(plain, name, None)
    return plain


def choose_device(name: str | None) -> Any:
    """The device asked for, or the best there is."""
    import torch

    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    with explained(f"device {name} cannot be used"):
        device = torch.device(name)
        torch.empty(1, device=device)
    return device


def _once(told: set[str], record: logging.LogRecord) -> bool:
    """Lets a message through once: generate warns about the same options at every call."""
    message = record.getMessage()
    new = message not in told
    told.add(message)
    return new


def quiet_transformers(quiet: bool) -> None:
    """No progress bars of the library's own beside ours, and every warning once (with `quiet`, none)."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    quiet_hub()
    if quiet:
        transformers_logging.set_verbosity_error()
    for handler in logging.getLogger("transformers").handlers:
        if not any(getattr(known, "func", None) is _once for known in handler.filters):
            handler.addFilter(functools.partial(_once, set()))


def _task(config: Any, settings: RunOptions) -> dict[str, Any]:
    """What the model's `task_specific_params` lists for the task."""
    listed = getattr(config, "task_specific_params", None) or {}
    name = settings.task
    if name == "translation" and settings.src_lang and settings.tgt_lang:
        pair = f"translation_{settings.src_lang}_to_{settings.tgt_lang}"
        name = pair if pair in listed else name
    if name == "auto":
        return {}
    known = ("text2text", "text-generation", "translation", "summarization")
    if name not in known and name not in listed and not name.startswith("translation_"):
        raise SetupError(f"unknown task {name!r}: choose from {', '.join(['auto', *known, *listed])}")
    return dict(listed.get(name, {}))


def _languages(tokenizer: Any, settings: RunOptions) -> dict[str, Any]:
    """Set the languages of a multilingual tokenizer; the options that make the model write the target language."""
    if not (settings.src_lang or settings.tgt_lang) or not hasattr(tokenizer, "src_lang"):
        # Models for one pair of languages, or told by a prefix, have nothing to set.
        return {}
    codes = getattr(tokenizer, "lang_code_to_id", None) or {}

    def token_of(lang: str) -> int:
        with contextlib.suppress(AttributeError, KeyError):
            return int(tokenizer.get_lang_id(lang))
        if lang in codes:
            return int(codes[lang])
        token = tokenizer.convert_tokens_to_ids(lang)
        if token is None or token == tokenizer.unk_token_id:
            known = list(codes) or [t for t in getattr(tokenizer, "additional_special_tokens", []) if "_" in t]
            some = f" (it knows {', '.join(map(str, known[:6]))}, ...)" if known else ""
            raise SetupError(f"the tokenizer does not know the language {lang!r}{some}")
        return int(token)

    if settings.src_lang:
        token_of(settings.src_lang)
        tokenizer.src_lang = settings.src_lang
    if not settings.tgt_lang:
        return {}
    target = token_of(settings.tgt_lang)
    # The first mBART starts the decoder with the language; all later models force it as the first token.
    starts_with_language = type(tokenizer).__name__ in ("MBartTokenizer", "MBartTokenizerFast")
    return {"decoder_start_token_id" if starts_with_language else "forced_bos_token_id": target}


def _generation_config(model: Any, settings: RunOptions, task: dict[str, Any], languages: dict[str, Any]) -> Any:
    """The model's own, then the task's, the languages', the file's and the options', the last word last."""
    generation = copy.deepcopy(model.generation_config)
    # Older models list things for a task that are no generation options (its prefix, a vocabulary).
    values = {name: value for name, value in task.items() if name != "prefix" and hasattr(generation, name)} | languages
    if settings.generation_config:
        values |= read_generation_file(settings.generation_config)
    values |= check_names(settings.generation, "the generation options")
    for name, value in values.items():
        with explained(f"generation option {name}={value!r}"):
            setattr(generation, name, _as_config(name, value))
    if not settings.to_text:
        # Scores of the sequences; the distributions they come from are let go at every step.
        generation.output_scores = True
        generation.return_dict_in_generate = True
    return generation


def _as_config(name: str, value: Any) -> Any:
    """A dictionary as the object that the library wants in its place."""
    from transformers.generation import configuration_utils as classes

    if isinstance(value, dict) and name == "compile_config":
        return classes.CompileConfig(**value)
    if isinstance(value, dict) and name == "watermarking_config":
        synth = "ngram_len" in value
        return (classes.SynthIDTextWatermarkingConfig if synth else classes.WatermarkingConfig)(**value)
    return value


def _pad_id(tokenizer: Any, generation: Any) -> int:
    """A token to pad with: what is padded is masked, so any will do where the model has none."""
    end = generation.eos_token_id
    end = end[0] if isinstance(end, list | tuple) and end else end
    for candidate in (generation.pad_token_id, tokenizer.pad_token_id, end, tokenizer.eos_token_id):
        if isinstance(candidate, int) and candidate >= 0:
            return candidate
    return 0


def _input_limit(config: Any, generation: Any) -> int | None:
    """How many tokens an input may have."""
    if config.is_encoder_decoder:
        text = config.get_text_config(encoder=True)
        for name in ("max_encoder_position_embeddings", "max_position_embeddings"):
            value = getattr(text, name, None)
            if isinstance(value, int) and value > 0:
                follows = getattr(config, "target_follows_source", False)
                target = generation.max_new_tokens or (generation.max_length or 21) - 1
                return _positions_left(value, target) if follows else value
        # T5 and its kin: positions are relative and have no end.
        return None
    positions = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    limits = []
    if isinstance(positions, int) and positions > 0:
        # What is generated takes positions as well.
        limits.append(_positions_left(positions, generation.max_new_tokens or 1))
    if generation.max_new_tokens is None and generation.max_length is not None:
        limits.append(_positions_left(generation.max_length, 1))
    return min(limits) if limits else None


def _positions_left(positions: int, target: int) -> int:
    if positions <= target:
        raise SetupError(f"the model has {positions} positions: {target} new tokens leave none for an input")
    return positions - target


def depends_on_padding(loaded: LoadedModel) -> bool:
    """Whether options are set whose effect in the library changes with the padding of a batch.

    A total length counts the padding of decoder-only prompts, and a repetition penalty applies to the padding token.
    With such options only inputs of one length share a batch, so that a record's result is its own.
    """
    generation = loaded.generation
    penalties = {generation.encoder_repetition_penalty}
    if not loaded.encoder_decoder:
        total = generation.max_new_tokens is None and generation.max_length is not None
        shortest = generation.min_new_tokens is None and bool(generation.min_length)
        if total or shortest:
            return True
        penalties.add(generation.repetition_penalty)
    return not penalties <= {None, 1.0}
