"""Loads an encoder-only model: with the settings in its sentence-transformers files, or with a classification head."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any

from fastgen import settings as process_settings
from fastgen.pipeline.encoding.modules import SentenceModules, read_modules
from fastgen.pipeline.errors import SetupError
from fastgen.pipeline.loading import (
    Loaded,
    check_path,
    is_gguf,
    labels_of_adapters,
    read_model,
    sentence_files_of,
)
from fastgen.pipeline.settings import ClassifyOptions, EmbedOptions

# A checkpoint may have heads that are not used.
_NEEDED = {"missing": "missing", "mismatched": "misshapen"}
# Tokenizers without a limit report a huge number.
_NO_LIMIT = 10**9


# Names of the hidden size in configurations.
_HIDDEN = ("hidden_size", "d_model", "dim")


@dataclass
class LoadedEncoder(Loaded):
    """An encoder-only model, and what the stages need to know about its inputs."""

    longest: int | None
    """The tokens to which inputs are cut; None if neither the model nor the options have a limit."""
    prompt: str = ""
    prompt_length: int = 0
    """Tokens of the prompt, and those that the tokenizer puts before it."""
    lower_case: bool = False

    @property
    def pad_id(self) -> int:
        """A padding token: padding is masked, so any token will do if the model has none."""
        found = self.tokenizer.pad_token_id
        return 0 if found is None else int(found)

    def decisive(self) -> dict[str, Any]:
        return {"longest": self.longest, "prompt": self.prompt, "lower_case": self.lower_case}

    @abstractmethod
    def numbers(self, inputs: dict[str, Any]) -> Any:
        """Returns the model's output for a padded batch: [rows, size] in float32."""


@dataclass
class LoadedEmbedder(LoadedEncoder):
    """A model whose last hidden states become a vector for each text."""

    modules: SentenceModules = field(default_factory=SentenceModules)

    def decisive(self) -> dict[str, Any]:
        modules = self.modules
        pooling = {"pooling": list(modules.pooling), "include_prompt": modules.include_prompt}
        return super().decisive() | pooling | {"modules": [step.about for step in modules.steps]}

    def numbers(self, inputs: dict[str, Any], prompt_lengths: Any = None) -> Any:
        """Returns the vectors of texts, each of which may begin with a prompt of its own."""
        # States of padding do not matter: the modules mask them.
        with process_settings.changed(**process_settings.unless_explicit(padding="zero")):
            states = self.model(**inputs)[0]
        skipped = self.prompt_length if prompt_lengths is None else prompt_lengths
        return self.modules(states, inputs["attention_mask"], skipped)


@dataclass
class LoadedClassifier(LoadedEncoder):
    labels: list[str] = field(default_factory=list)
    scores: str = "softmax"
    """The function that turns the model's logits into scores: softmax, sigmoid, or raw."""

    def decisive(self) -> dict[str, Any]:
        return super().decisive() | {"labels": self.labels, "scores": self.scores}

    def numbers(self, inputs: dict[str, Any]) -> Any:
        found = self.model(**inputs).logits.float()
        if self.scores == "raw":
            return found
        return found.softmax(dim=-1) if self.scores == "softmax" else found.sigmoid()


def load_embedder(settings: EmbedOptions) -> LoadedEmbedder:
    """Loads the model that the settings name, with its modules. Raises `SetupError` if any part is damaged."""
    from transformers import MODEL_FOR_TEXT_ENCODING_MAPPING, AutoModel, AutoModelForTextEncoding

    check_path(settings.model, gguf=True)
    modules = read_modules("" if is_gguf(settings.model) else sentence_files_of(settings.model), settings)

    def kind(config: Any) -> Any:
        # For models with a decoder, such as T5, many checkpoints contain only the encoder.
        return AutoModelForTextEncoding if type(config) in MODEL_FOR_TEXT_ENCODING_MAPPING else AutoModel

    # The pooler is not used: vectors are computed from the hidden states.
    model, tokenizer = read_model(settings, kind, needed=_NEEDED, unused="pooler.", folder=modules.folder)
    return prepare_embedder(model, tokenizer, settings, modules)


def prepare_embedder(model: Any, tokenizer: Any, settings: EmbedOptions, modules: SentenceModules) -> LoadedEmbedder:
    """Prepares a model that is in memory already."""
    if model.config.is_encoder_decoder and hasattr(model, "decoder"):
        model = model.get_encoder()
    config = model.config.get_text_config()
    modules.check(
        next((getattr(config, name, None) for name in _HIDDEN if isinstance(getattr(config, name, None), int)), None)
    )
    longest = _longest(model, tokenizer, settings.max_length, modules.max_length)
    prompt = lowered(modules.prompt) if modules.lower_case else modules.prompt
    loaded = LoadedEmbedder(model, tokenizer, longest, prompt, 0, modules.lower_case, modules)
    if prompt and not modules.include_prompt:
        loaded.prompt_length = len(prompt_ids(tokenizer, prompt))
    return loaded


def prompt_ids(tokenizer: Any, prompt: str) -> list[int]:
    """Returns the tokens that texts with this prompt begin with, including those that the tokenizer puts before it."""
    ids = list(tokenizer(prompt)["input_ids"])
    # The last token may be one that ends a text.
    return ids[:-1] if ids and ids[-1] in tokenizer.all_special_ids else ids


def lowered(text: str) -> str:
    """Returns the text in lower case, as a tokenizer would lower it."""
    from tokenizers.normalizers import Lowercase

    return str(Lowercase().normalize_str(text))


def load_classifier(settings: ClassifyOptions) -> LoadedClassifier:
    """Loads the model that the settings name. Raises `SetupError` if any part is damaged, or there is no head."""
    from transformers import AutoModelForSequenceClassification

    def kind(config: Any) -> Any:
        count = labels_of_adapters(settings.model)
        if count not in (None, config.num_labels):  # nothing else gives their number
            config.num_labels = count
        return AutoModelForSequenceClassification

    model, tokenizer = read_model(settings, kind, needed=_NEEDED)
    return prepare_classifier(model, tokenizer, settings)


def prepare_classifier(model: Any, tokenizer: Any, settings: ClassifyOptions) -> LoadedClassifier:
    """Prepares a model that is in memory already."""
    config = model.config
    if config.get_text_config().pad_token_id is None and tokenizer.pad_token_id is not None:
        # Models that read the last token of a text need it to find where the text ends.
        config.get_text_config().pad_token_id = tokenizer.pad_token_id
    count = config.num_labels
    if settings.top_k > count:
        raise SetupError(f"top-k is {settings.top_k}, but model {settings.model} has {count} labels")
    names = config.id2label or {}
    labels = [str(names.get(number, f"LABEL_{number}")) for number in range(count)]
    scores = settings.scores
    if scores == "auto":
        several = config.problem_type == "multi_label_classification"
        one = count == 1 or config.problem_type == "regression"
        scores = "sigmoid" if several else "raw" if one else "softmax"
    longest = _longest(model, tokenizer, settings.max_length, None)
    return LoadedClassifier(model, tokenizer, longest, labels=labels, scores=scores)


def _longest(model: Any, tokenizer: Any, asked: int | None, named: int | None) -> int | None:
    """Returns the most tokens of an input: as asked for, or named by the model's files, or as the model was made for.

    Raises `SetupError` if more are asked for than the model takes, or too few for the tokens that the tokenizer adds.
    """
    made_for = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    usual = [
        limit for limit in (tokenizer.model_max_length, made_for) if isinstance(limit, int) and 0 < limit < _NO_LIMIT
    ]
    places = _places(model, made_for)
    if asked is not None and places is not None and asked > places:
        raise SetupError(f"max-length is {asked}, but the model takes at most {places} tokens")
    limits = [asked or named or min(usual, default=None), places]
    # Libraries count in 64 bits, and a file may hold any number.
    found = min((limit for limit in limits if limit is not None and limit < _NO_LIMIT), default=None)
    if found is not None and found <= tokenizer.num_special_tokens_to_add():
        raise SetupError(f"max-length is {found}: the tokenizer adds {tokenizer.num_special_tokens_to_add()} tokens")
    return found


def _places(model: Any, made_for: Any) -> int | None:
    """Returns for how many positions the model has an embedding; None if it has none, as with relative positions."""
    import torch

    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if isinstance(module, torch.nn.Embedding) and ("position" in last or last == "wpe"):
            # RoBERTa and related models count from the number after that of the padding.
            there = module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1)
            # BART and related models have a few more embeddings than positions.
            return min(there, made_for) if isinstance(made_for, int) and made_for > 0 else there
    return None
