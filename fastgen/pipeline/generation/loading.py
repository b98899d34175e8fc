"""Loads a model that generates, with its task, its languages and its generation config, and checks them."""

from __future__ import annotations

import contextlib
import copy
import time
from dataclasses import dataclass
from typing import Any

import fastgen
from fastgen.pipeline.errors import SetupError, check_installed, explained, one_line
from fastgen.pipeline.generation.options import DRAFTS, RunOptions, check_names, check_values, read_generation_file
from fastgen.pipeline.loading import Loaded, base_of, file_of, read_json_object, read_model


@dataclass
class LoadedModel(Loaded):
    """A model ready to generate, and everything that the other stages need to know about it."""

    generation: Any
    prefix: str
    encoder_decoder: bool
    positions: int | None
    """The most tokens of an input; None if the model does not give a limit."""
    pad_id: int = 0
    chat_template: str | None = None
    """The template of inputs that are conversations."""
    form: dict[str, str] | None = None
    """The form of outputs."""
    grammar: Any = None
    """The form, compiled for the tokenizer."""

    @property
    def asks_for_drafts(self) -> bool:
        return any(getattr(self.generation, name, None) is not None for name in DRAFTS)

    def decisive(self) -> dict[str, Any]:
        fields = self.generation.to_dict().items()
        generation = {key: value for key, value in fields if key != "transformers_version" and key[0] != "_"}
        template = {} if self.chat_template is None else {"chat_template": self.chat_template}
        if "strftime_now" in (self.chat_template or ""):  # prompts change with the date
            template["date"] = time.strftime("%Y-%m-%d")
        return {"generation": generation, **template, **({} if self.form is None else {"form": self.form})}


def load(settings: RunOptions) -> LoadedModel:
    """Loads model and tokenizer, and makes the generation config. Raises `SetupError` if any part is damaged."""
    return prepare(*read(settings), settings)


def read(settings: RunOptions) -> tuple[Any, Any]:
    """Loads model and tokenizer. Raises `SetupError` if any part is damaged."""
    import fastgen.models.unilm  # noqa: F401 - makes its type known to the library

    def kind(config: Any) -> Any:
        # The library ignores a damaged generation config.
        if file := file_of(base_of(settings.model), "generation_config.json"):
            read_json_object(file, "the generation config")
        return class_named(config) or class_of_type(config)

    return read_model(settings, kind, settings.seed)


def class_named(config: Any) -> Any:
    """Returns the library's class that loads the architecture which a configuration names, with the head that its files
    have; None if it names none that generates text from text.
    """
    named = set(config.architectures or ())
    return next((kind for kind, known in _classes_of(config) if named & {each.__name__ for each in known}), None)


def class_of_type(config: Any) -> Any:
    """Returns the library's class for a configuration that names no known architecture."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    if config.is_encoder_decoder:
        return AutoModelForSeq2SeqLM
    # The usual class comes first, if it knows the type.
    return next((kind for kind, _ in _classes_of(config)), AutoModelForCausalLM)


def is_known(config: Any) -> bool:
    """Whether the library knows models of this type which generate text from text."""
    return bool(_classes_of(config))


def _classes_of(config: Any) -> list[tuple[Any, list[type]]]:
    """Returns the library's classes that know models of this type which generate text from text, and these models."""
    import transformers

    mappings = {
        transformers.AutoModelForCausalLM: transformers.MODEL_FOR_CAUSAL_LM_MAPPING,
        transformers.AutoModelForSeq2SeqLM: transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    }
    if not config.is_encoder_decoder:  # encoder-decoder ones read images or audio instead of text
        mappings[transformers.AutoModelForMultimodalLM] = transformers.MODEL_FOR_MULTIMODAL_LM_MAPPING
    found = [(kind, known[type(config)]) for kind, known in mappings.items() if type(config) in known]
    return [(kind, [one for one in (each if isinstance(each, tuple) else (each,)) if one]) for kind, each in found]


def prepare(model: Any, tokenizer: Any, settings: RunOptions) -> LoadedModel:
    """Prepares a model that is in memory already."""
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
        generation = _without_drafts(generation)  # calls that return scores, and beams, have no drafts
    # Also set on the model: options that are None here would otherwise be filled in from the model's own defaults.
    # FastGen leaves a model whose defaults ask for drafts to the library, which then refuses batches.
    model.generation_config = _without_drafts(generation)
    prefix = task_options.get("prefix", "") if settings.prefix is None else settings.prefix
    positions = _input_limit(model.config, generation)
    template = _chat_template(tokenizer, settings) if settings.chat else None
    form, grammar = settings.form, None
    if form is not None:
        check_installed("llguidance", f"--{next(iter(form)).replace('_', '-')}")
        with explained("the form of outputs"):
            grammar = fastgen.Grammar(tokenizer, generation.eos_token_id, **form)
    return LoadedModel(
        model, tokenizer, generation, prefix, encoder_decoder, positions, pad_id, template, form, grammar
    )


def _chat_template(tokenizer: Any, settings: RunOptions) -> str:
    check_installed("jinja2", "--chat")
    try:
        return tokenizer.get_chat_template()
    except ValueError as error:
        raise SetupError(f"{settings.model} has no chat template: leave out --chat ({one_line(error)})") from error


def _without_drafts(generation: Any) -> Any:
    """Returns a copy without options for drafts."""
    plain = copy.deepcopy(generation)
    for name in DRAFTS:
        if hasattr(plain, name):
            setattr(plain, name, None)
    return plain


def _task(config: Any, settings: RunOptions) -> dict[str, Any]:
    """Returns the model's `task_specific_params` for the task."""
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
    """Sets the languages of a multilingual tokenizer; returns options that make the model write the target language."""
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
    """Merges the config of the model, the task, the languages, the file and the options; later ones win."""
    generation = copy.deepcopy(model.generation_config)
    # Older models list task parameters that are not generation options (a prefix, a vocabulary).
    values = {name: value for name, value in task.items() if name != "prefix" and hasattr(generation, name)} | languages
    if settings.generation_config:
        values |= read_generation_file(settings.generation_config)
    values |= check_names(settings.generation, "the generation options")
    for name, value in values.items():
        with explained(f"generation option {name}={value!r}"):
            setattr(generation, name, _as_config(name, value))
    if not settings.to_text:
        # For the scores of sequences; the distributions are released after every step.
        generation.output_scores = True
        generation.return_dict_in_generate = True
    return generation


def _as_config(name: str, value: Any) -> Any:
    """Converts a dictionary to the object that the library expects."""
    from transformers.generation import configuration_utils as classes

    if isinstance(value, dict) and name == "compile_config":
        return classes.CompileConfig(**value)
    if isinstance(value, dict) and name == "watermarking_config":
        synth = "ngram_len" in value
        return (classes.SynthIDTextWatermarkingConfig if synth else classes.WatermarkingConfig)(**value)
    return value


def _pad_id(tokenizer: Any, generation: Any) -> int:
    """Returns a padding token: padding is masked, so any token will do if the model has none."""
    end = generation.eos_token_id
    end = end[0] if isinstance(end, list | tuple) and end else end
    for candidate in (generation.pad_token_id, tokenizer.pad_token_id, end, tokenizer.eos_token_id):
        if isinstance(candidate, int) and candidate >= 0:
            return candidate
    return 0


def _input_limit(config: Any, generation: Any) -> int | None:
    """Returns the most tokens of an input."""
    if config.is_encoder_decoder:
        text = config.get_text_config(encoder=True)
        for name in ("max_encoder_position_embeddings", "max_position_embeddings"):
            value = getattr(text, name, None)
            if isinstance(value, int) and value > 0:
                follows = getattr(config, "target_follows_source", False)
                target = generation.max_new_tokens or (generation.max_length or 21) - 1
                return _positions_left(value, target) if follows else value
        # T5 and related models: positions are relative and have no end.
        return None
    positions = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    limits = []
    if isinstance(positions, int) and positions > 0:
        # Generated tokens take positions as well.
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

    A total length counts the padding of decoder-only prompts. A repetition penalty applies to the padding token, and
    with n-grams of one token that token is forbidden, which may be the one that ends an output. With such options, only
    inputs of equal length share a batch, so that a record's result is its own.
    """
    generation = loaded.generation
    penalties = {generation.encoder_repetition_penalty}
    if generation.encoder_no_repeat_ngram_size == 1:
        return True
    if not loaded.encoder_decoder:
        total = generation.max_new_tokens is None and generation.max_length is not None
        shortest = generation.min_new_tokens is None and bool(generation.min_length)
        if total or shortest or generation.no_repeat_ngram_size == 1:
            return True
        penalties.add(generation.repetition_penalty)
    return not penalties <= {None, 1.0}
