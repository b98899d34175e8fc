"""The modules after the model in sentence-transformers files (pooling, layers, normalisation), and its prompts.

`modules.json` lists the modules in order, each with its type and the folder of its files. Files are data: a type is
looked up here and never imported, and weights are tensors. They may hold anything: an error names the file, the field
and its value.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastgen.pipeline.errors import SetupError, explained
from fastgen.pipeline.loading import file_of, read_json_object
from fastgen.pipeline.settings import POOLINGS, EmbedOptions, must_be

# Older files have a flag for each kind of pooling; vectors are joined in this order.
_POOLING_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid", "LeakyReLU", "ELU", "Softplus")
_SETTINGS = ("sentence_bert_config.json", "sentence_roberta_config.json", "sentence_distilbert_config.json",
             "sentence_camembert_config.json", "sentence_albert_config.json", "sentence_xlm-roberta_config.json",
             "sentence_xlnet_config.json")  # fmt: skip
_PROMPTS = "config_sentence_transformers.json"
_VECTOR = "sentence_embedding"


@dataclass
class Step:
    """A module after the pooling."""

    run: Callable[[Any], Any]
    """Maps vectors [rows, size] in float32 to others."""
    about: dict[str, Any]
    """What the journal keeps: the type, the file's contents, and sums of the weights."""
    sizes: tuple[str, int | None, int | None] = ("", None, None)
    """The file, and the sizes of input and output vectors, as far as the file gives them."""


@dataclass
class SentenceModules:
    """The processing before and after the model."""

    pooling: tuple[str, ...] = ("mean",)
    include_prompt: bool = True
    steps: list[Step] = field(default_factory=list)
    folder: str = ""
    """The folder of the model itself."""
    max_length: int | None = None
    lower_case: bool = False
    prompt: str = ""
    said: bool = False
    """Whether the model's files contain all this."""
    pooled: tuple[str, int | None] = ("", None)
    """The file of the pooling, and the size of a state that it gives."""

    def check(self, hidden: int | None) -> None:
        """Raises `SetupError` if a module takes vectors of another size than it gets.

        Args:
            hidden: size of the model's states; None if its configuration does not give it.
        """
        file, states = self.pooled
        _check_size(file, states, hidden)
        one = states or hidden
        size = None if one is None else one * len(self.pooling)
        for file, into, out in (step.sizes for step in self.steps):
            _check_size(file, into, size)
            size = out or into or size

    def __call__(self, states: Any, mask: Any, prompt_length: Any = 0) -> Any:
        """Returns the vectors [rows, size] of texts, in float32.

        Args:
            states: the last hidden states [rows, length, hidden].
            mask: 1 for tokens and 0 for padding, [rows, length]. States of padding do not matter; they may even be NaN.
            prompt_length: tokens of the prompt, and those that the tokenizer puts before it: a number, or [rows, 1].
        """
        import torch

        skipped = 0 if self.include_prompt else prompt_length
        pooled = torch.cat([_pool(kind, states, mask, skipped) for kind in self.pooling], dim=-1)
        for step in self.steps:
            pooled = step.run(pooled)
        return pooled


def _check_size(file: str, wanted: int | None, given: int | None) -> None:
    if wanted is not None and given is not None and wanted != given:
        raise SetupError(f"{file} is for vectors of {wanted} numbers, but gets some of {given}")


def _pool(kind: str, states: Any, mask: Any, skipped: Any) -> Any:
    """Returns one vector for each text. Ignores the first `skipped` tokens of each."""
    import torch

    rows = torch.arange(len(states), device=states.device)
    place = mask.long().cumsum(dim=1)  # position of each token in its text, from 1
    # If a text was cut within the prompt, its last token is kept: otherwise nothing would be left.
    kept = mask.bool() & (place > torch.minimum(place[:, -1:] - 1, torch.as_tensor(skipped, device=place.device)))
    if kind in ("cls", "lasttoken"):
        found = kept.int() if kind == "cls" else kept.int() * place
        return states[rows, found.argmax(dim=1)].float()
    if kind == "max":
        return states.masked_fill(~kept.unsqueeze(-1), float("-inf")).amax(dim=1).float()
    weights = kept.float() * place if kind == "weightedmean" else kept.float()
    total = weights.sum(dim=1, keepdim=True)
    if kind == "mean_sqrt_len_tokens":
        total = total.sqrt()
    states = states.float().masked_fill(~kept.unsqueeze(-1), 0.0)
    return torch.bmm(weights.unsqueeze(1), states).squeeze(1) / total


def read_modules(name: str, settings: EmbedOptions) -> SentenceModules:
    """Reads the files of a model, and applies the options over them.

    Args:
        name: a directory or hub name; empty for a model in memory that came from neither.

    Raises `SetupError` if the files ask for an unknown module, are damaged, or lack the prompt.
    """
    found = SentenceModules()
    if listed := file_of(name, "modules.json"):
        found.said = True
        _read_list(name, listed, found, settings.pooling)
    found.prompt = _prompt(settings, _fields(name, _PROMPTS))
    if settings.pooling is not None:
        found.pooling, found.said = (settings.pooling,), True
    if settings.normalize and [step.about["type"] for step in found.steps[-1:]] != ["Normalize"]:
        found.steps.append(Step(_normalize, {"type": "Normalize"}))
    return found


def _read_list(name: str, listed: Path, found: SentenceModules, asked: str | None) -> None:
    entries = _entries(listed)
    if [kind for kind, _ in entries[:1]] != ["Transformer"] or [kind for kind, _ in entries].count("Transformer") != 1:
        raise SetupError(f"{listed}: the first of its modules, and no other one, must be a Transformer")
    found.folder = entries[0][1]
    for file in _SETTINGS:
        if fields := _fields(name, file, found.folder):
            found.max_length, found.lower_case = fields.size("max_seq_length"), fields.get("do_lower_case", bool, False)
            break
    pooled = False
    for kind, folder in entries[1:]:
        fields = _fields(name, "config.json", folder)
        if kind == "Pooling" and not pooled:
            _read_pooling(found, fields, listed, folder, asked)
            pooled = True
        elif kind in _STEPS and pooled:
            if fields.get("module_input_name", str, _VECTOR) != _VECTOR or (
                fields.get("module_output_name", str, _VECTOR) != _VECTOR
            ):
                raise SetupError(f"{listed}: module {folder} is not one of the text's vector, which is not supported")
            found.steps.append(_STEPS[kind](name, folder, fields))
            found.steps[-1].about |= {"type": kind, "config": fields.values}
        elif kind != "Dropout":  # it does nothing outside training
            raise SetupError(f"{listed}: a module of type {short(kind)[1:-1]} in place {folder!r} is not supported")
    if not pooled:
        raise SetupError(f"{listed} has no module of type Pooling: models without one are not supported")


def _entries(listed: Path) -> list[tuple[str, str]]:
    """Returns the modules that the file lists: the last part of their types, and their folders."""
    with explained(f"{listed} is damaged"):
        read = json.loads(listed.read_text(encoding="utf-8"))
    if not isinstance(read, list):
        raise SetupError(f"{listed} is damaged: it must be a list of modules")
    found = []
    for number, entry in enumerate(read):
        where = f"{listed} is damaged: module {number}"
        if not isinstance(entry, dict):
            raise SetupError(f"{where} is {short(entry)}: it must be an object")
        kind, path = entry.get("type"), entry.get("path")
        if not isinstance(kind, str):
            raise SetupError(f"{where}: type is {short(kind)}: it must be a string")
        if not isinstance(path, str) or not is_folder(path):
            raise SetupError(f"{where}: path is {short(path)}: it must be a folder of the model")
        found.append((kind.rpartition(".")[2], path.strip("/")))
    return found


def _read_pooling(found: SentenceModules, fields: Fields, listed: Path, folder: str, asked: str | None) -> None:
    """Reads the configuration of the Pooling module, unless a pooling is asked for."""
    found.include_prompt = fields.get("include_prompt", bool, True)
    if asked is not None:
        return
    if not fields:
        raise SetupError(
            f"{listed}: module {folder!r} of type Pooling has no config.json, which says how to pool: --pooling chooses"
        )
    found.pooling = _poolings(fields)
    size = fields.size("word_embedding_dimension") or fields.size("embedding_dimension")
    found.pooled = str(fields.path), size


def _poolings(fields: Fields) -> tuple[str, ...]:
    asked = fields.values.get("pooling_mode")
    if asked is None:
        flags = {kind: fields.get(flag, bool, False) for flag, kind in _POOLING_FLAGS.items()}
        # The library's own default, if the file has none of them.
        is_said = any(fields.values.get(flag) is not None for flag in _POOLING_FLAGS)
        asked = [kind for kind, is_set in flags.items() if is_set] if is_said else ["mean"]
        if not asked:
            raise SetupError(f"{fields.path}: every pooling_mode_... is false: --pooling chooses a pooling")
    kinds = [asked] if isinstance(asked, str) else asked
    if not isinstance(kinds, list) or not kinds or not all(isinstance(kind, str) for kind in kinds):
        raise fields.wrong("pooling_mode", "a pooling, or a list of some")
    for kind in kinds:
        if kind not in POOLINGS:
            raise SetupError(
                f"{fields.path}: pooling_mode: pooling {short(kind)} is not supported: --pooling chooses another one"
            )
    return tuple(kinds)


def read_prompts(name: str) -> dict[str, str]:
    """Returns the prompts that come with a model, by name. Raises `SetupError` if their file is damaged."""
    return _fields(name, _PROMPTS).texts("prompts")


def _prompt(settings: EmbedOptions, fields: Fields) -> str:
    if settings.prompt is not None:
        return settings.prompt
    name = settings.prompt_name or fields.get("default_prompt_name", str)
    if name is None:
        return ""
    known = fields.texts("prompts")
    if name not in known:
        there = f"there are {', '.join(known)}" if known else "it has none"
        named = "" if settings.prompt_name else f" (default_prompt_name of {fields.path})"
        raise SetupError(f"model {settings.model} has no prompt {short(name)}{named}: {there}")
    return known[name]


def _normalize(vectors: Any) -> Any:
    import torch

    return torch.nn.functional.normalize(vectors, dim=-1)


def _dense_step(name: str, folder: str, fields: Fields) -> Step:
    """A linear layer with an activation, and optionally a residual connection."""
    import torch

    path = fields.get("activation_function", str, "torch.nn.modules.activation.Tanh")
    activation = path.rpartition(".")[2]
    if not path.startswith("torch.nn.") or activation not in _ACTIVATIONS:
        raise SetupError(f"{fields.path}: activation_function {short(path)} is not supported")
    act = getattr(torch.nn, activation)()
    out, into = fields.needed("out_features"), fields.needed("in_features")
    has_bias, adds = fields.get("bias", bool, True), fields.get("use_residual", bool, False)
    kinds: dict[str, Callable[[], Any]] = {"linear": lambda: torch.nn.Linear(into, out, has_bias)}
    if adds and out != into:
        kinds["residual"] = lambda: torch.nn.Linear(into, out, False)
    layers, about = _loaded(name, folder, fields, kinds)

    def step(vectors: Any) -> Any:
        own = layers.to(vectors.device)
        made = act(own["linear"](vectors))
        if not adds:
            return made
        return made + (own["residual"](vectors) if "residual" in own else vectors)

    return Step(step, about, (str(fields.path), into, out))


def _norm_step(name: str, folder: str, fields: Fields) -> Step:
    import torch

    size = fields.needed("dimension")
    layers, about = _loaded(name, folder, fields, {"norm": lambda: torch.nn.LayerNorm(size)})
    return Step(lambda vectors: layers.to(vectors.device)["norm"](vectors), about, (str(fields.path), size, size))


_STEPS: dict[str, Callable[[str, str, Fields], Step]] = {
    "Normalize": lambda *_: Step(_normalize, {}),
    "Dense": _dense_step,
    "LayerNorm": _norm_step,
}


def _loaded(
    name: str, folder: str, fields: Fields, kinds: Mapping[str, Callable[[], Any]]
) -> tuple[Any, dict[str, Any]]:
    """Returns layers with the tensors of a module's file, by their names in it, and what the journal keeps of these."""
    import torch

    file, weights = _weights(name, folder)
    with torch.device("meta"):
        layers = torch.nn.ModuleDict({part: make() for part, make in kinds.items()})
    with explained(f"{file} does not fit {fields.path}"):
        layers.load_state_dict(weights, assign=True)
    return layers.requires_grad_(False), {"weights": _sums(weights)}


def _weights(name: str, folder: str) -> tuple[Path, dict[str, Any]]:
    """Returns the file of a module's tensors, and these in float32. Runs no code from the file."""
    import torch

    if path := file_of(name, "model.safetensors", folder):
        from safetensors.torch import load_file

        with explained(f"cannot read {path}"):
            return path, {key: value.float() for key, value in load_file(path).items()}
    if path := file_of(name, "pytorch_model.bin", folder):
        with explained(f"cannot read {path}"):
            found = torch.load(path, map_location="cpu", weights_only=True)
            if not isinstance(found, dict) or not all(isinstance(value, torch.Tensor) for value in found.values()):
                raise ValueError("it must be a dictionary of tensors")
            return path, {str(key): value.to_dense().float() for key, value in found.items()}
    raise SetupError(f"model {name}: module {folder} has no weights (model.safetensors)")


def _sums(weights: Mapping[str, Any]) -> dict[str, list[float]]:
    """Returns the sum of all elements of each tensor, and a sample of them."""
    return {key: [float(value.double().sum()), *value.flatten()[:: max(1, value.numel() // 64)].tolist()]
            for key, value in sorted(weights.items())}  # fmt: skip


def _fields(name: str, file: str, folder: str = "") -> Fields:
    path = file_of(name, file, folder)
    return Fields(path, read_json_object(path, "the model's file")) if path else Fields(Path(name, folder, file), None)


_LONGEST = 80  # characters of a value in a message
_LARGEST = 2**31 - 1  # limit of a size: no vector has more elements


class Fields:
    """The fields of one file; empty if the model has no such file.

    Every method raises `SetupError` if the value has the wrong type. A field that is null counts as missing.
    """

    def __init__(self, path: Path, values: Mapping[str, Any] | None) -> None:
        self.path, self._is_there = path, values is not None
        self.values = dict(values or {})
        """All fields, as they are in the file."""

    def __bool__(self) -> bool:
        """Whether there is such a file."""
        return self._is_there

    def get(self, name: str, kind: Any, default: Any = None) -> Any:
        """Returns a value of this type."""
        found = self.values.get(name)
        if found is None:
            return default
        if (must := must_be(found, kind)) is not None:
            raise self.wrong(name, must)
        return found

    def size(self, name: str) -> int | None:
        """Returns a positive number."""
        found: int | None = self.get(name, int)
        if found is not None and found < 1:
            raise self.wrong(name, "a positive number")
        return found

    def texts(self, name: str) -> dict[str, str]:
        """Returns an object of strings."""
        found: dict[str, str] = self.get(name, dict[str, str], {})
        for key, value in found.items():
            if type(value) is not str:
                raise SetupError(f"{self.path}: {name}[{short(key)}] is {short(value)}: it must be a string")
        return found

    def needed(self, name: str) -> int:
        """Returns a positive number of elements of a tensor, which must be given."""
        found = self.size(name)
        if found is None:
            raise SetupError(f"{self.path} has no {name}: it must be a positive number")
        if found > _LARGEST:
            raise self.wrong(name, f"at most {_LARGEST}")
        return found

    def wrong(self, name: str, must: str) -> SetupError:
        return SetupError(f"{self.path}: {name} is {short(self.values.get(name))}: it must be {must}")


def short(value: Any) -> str:
    """Formats a value for a message."""
    text = repr(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def is_folder(path: str) -> bool:
    """Whether this names a folder inside the model's folder, or that folder itself."""
    return not (path.startswith("/") or "\\" in path or "\0" in path or ".." in path.split("/"))
