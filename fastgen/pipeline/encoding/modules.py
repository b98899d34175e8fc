"""What follows the model, as its sentence-transformers files say: pooling, layers, normalisation; and its prompts.

`modules.json` lists the modules in order, each with its type and the folder of its files. Files are data: a type is
looked up here and never imported, and weights are tensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from fastgen.pipeline.encoding.options import POOLINGS, EmbedOptions
from fastgen.pipeline.errors import SetupError, explained
from fastgen.pipeline.generation_fields import read_json_object

# Older files have a truth value for each kind of pooling, in whose order vectors are joined.
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
Step = Callable[[Any], Any]
"""From vectors [rows, size] in float32 to others."""


@dataclass
class SentenceModules:
    """What is done before and after the model."""

    pooling: tuple[str, ...] = ("mean",)
    include_prompt: bool = True
    steps: list[Step] = field(default_factory=list)
    described: list[dict[str, Any]] = field(default_factory=list)
    """The steps as the journal keeps them: their files' contents, and sums of their weights."""
    folder: str = ""
    """Where the model itself is."""
    max_length: int | None = None
    lower_case: bool = False
    prompt: str = ""
    said: bool = False
    """Whether the model's files say all this."""

    def __call__(self, states: Any, mask: Any, prompt_length: int = 0) -> Any:
        """The vectors [rows, size] of texts, in float32.

        Args:
            states: the last hidden states [rows, length, hidden].
            mask: 1 for tokens and 0 for padding, [rows, length]. What is at padding does not matter, not even a NaN.
            prompt_length: tokens of the prompt, with those that the tokenizer puts before it.
        """
        import torch

        pooled = torch.cat([_pool(kind, states, mask, self._skipped(prompt_length)) for kind in self.pooling], dim=-1)
        for step in self.steps:
            pooled = step(pooled)
        return pooled

    def _skipped(self, prompt_length: int) -> int:
        return 0 if self.include_prompt else prompt_length


def _pool(kind: str, states: Any, mask: Any, skipped: int) -> Any:
    """One vector for each text. The first `skipped` tokens of each take part in none."""
    import torch

    rows = torch.arange(len(states), device=states.device)
    place = mask.long().cumsum(dim=1)  # of each token in its text, from 1
    # Where a text was cut within the prompt, nothing would be left.
    kept = mask.bool() & (place > torch.minimum(place[:, -1:] - 1, place.new_tensor(skipped)))
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
    """What the files of a model say, with the options in place of what they say.

    Args:
        name: a directory or hub name; empty for a model in memory that came from neither.

    Raises `SetupError` where they ask for a module that is not known here, are damaged, or lack the prompt.
    """
    found = SentenceModules()
    if listed := _file(name, "modules.json"):
        found.said = True
        _read_list(name, listed, found)
    prompts = _object(name, "config_sentence_transformers.json")
    found.prompt = _prompt(settings, prompts)
    if settings.pooling:
        found.pooling, found.said = (settings.pooling,), True
    if settings.normalize and not (found.described and found.described[-1]["type"] == "Normalize"):
        found.steps.append(_normalize)
        found.described.append({"type": "Normalize"})
    return found


def _read_list(name: str, listed: Path, found: SentenceModules) -> None:
    with explained(f"{listed} is damaged"):
        read = json.loads(listed.read_text(encoding="utf-8"))
        entries = [(entry["type"].rpartition(".")[2], _folder(entry["path"])) for entry in read]
    if [kind for kind, _ in entries[:1]] != ["Transformer"] or [kind for kind, _ in entries].count("Transformer") != 1:
        raise SetupError(f"{listed}: the first of its modules, and no other one, must be a Transformer")
    found.folder = entries[0][1]
    for file in _SETTINGS:
        if values := _object(name, file, found.folder):
            found.max_length = _positive(values.get("max_seq_length"), f"max_seq_length of {file}")
            found.lower_case = bool(values.get("do_lower_case"))
            break
    pooled = False
    for kind, folder in entries[1:]:
        config = _object(name, "config.json", folder)
        if kind == "Pooling" and not pooled:
            found.pooling, found.include_prompt = _poolings(config, listed), bool(config.get("include_prompt", True))
            pooled = True
        elif kind in _STEPS and pooled:
            if config.get("module_input_name", "sentence_embedding") != "sentence_embedding" or (
                config.get("module_output_name") not in (None, "sentence_embedding")
            ):
                raise SetupError(f"{listed}: module {folder} is not one of the text's vector, which is not supported")
            step, about = _STEPS[kind](name, folder, config)
            found.steps.append(step)
            found.described.append({"type": kind, "config": config, **about})
        elif kind != "Dropout":  # which does nothing outside training
            raise SetupError(f"{listed}: a module of type {kind} in place {folder!r} is not supported")
    if not pooled:
        raise SetupError(f"{listed} has no module of type Pooling: models without one are not supported")


def _poolings(config: Mapping[str, Any], listed: Path) -> tuple[str, ...]:
    asked = config.get("pooling_mode")
    if asked is None:
        asked = [kind for flag, kind in _POOLING_FLAGS.items() if config.get(flag)] or ["mean"]
    kinds = tuple([asked] if isinstance(asked, str) else asked)
    for kind in kinds:
        if kind not in POOLINGS:
            raise SetupError(f"{listed}: pooling {kind!r} is not supported: --pooling chooses another one")
    return kinds


def _prompt(settings: EmbedOptions, config: Mapping[str, Any]) -> str:
    if settings.prompt is not None:
        return settings.prompt
    known = config.get("prompts") or {}
    name = settings.prompt_name or config.get("default_prompt_name")
    if name is None:
        return ""
    if not isinstance(known, dict) or not isinstance(known.get(name), str):
        there = f"there are {', '.join(map(str, known))}" if known else "it has none"
        raise SetupError(f"model {settings.model} has no prompt {name!r}: {there}")
    return str(known[name])


def _normalize(vectors: Any) -> Any:
    import torch

    return torch.nn.functional.normalize(vectors, dim=-1)


def _normalize_step(name: str, folder: str, config: Mapping[str, Any]) -> tuple[Step, dict[str, Any]]:
    return _normalize, {}


def _dense_step(name: str, folder: str, config: Mapping[str, Any]) -> tuple[Step, dict[str, Any]]:
    """A linear layer with an activation, and perhaps what went in added to what comes out."""
    import torch

    weights = _weights(name, folder)
    path = str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
    activation = path.rpartition(".")[2]
    if not path.startswith("torch.nn.") or activation not in _ACTIVATIONS:
        raise SetupError(f"model {name}: activation function {path!r} of module {folder} is not supported")
    act = getattr(torch.nn, activation)()
    with explained(f"the weights of module {folder} of model {name} do not fit"):
        shape = (config["out_features"], config["in_features"])
        layer = {part: weights.get(f"linear.{part}") for part in ("weight", "bias")}
        if layer["weight"] is None or tuple(layer["weight"].shape) != shape or (layer["bias"] is None) == bool(
            config.get("bias", True)
        ):  # fmt: skip
            raise ValueError(f"there must be a weight of {shape}, and a bias if the configuration says so")
    residual = weights.get("residual.weight") if config.get("use_residual") else None
    adds = bool(config.get("use_residual"))

    def step(vectors: Any) -> Any:
        linear = torch.nn.functional.linear
        made = act(linear(vectors, _on(layer["weight"], vectors), _on(layer["bias"], vectors)))
        if not adds:
            return made
        return made + (vectors if residual is None else linear(vectors, _on(residual, vectors)))

    return step, {"weights": _sums(weights)}


def _norm_step(name: str, folder: str, config: Mapping[str, Any]) -> tuple[Step, dict[str, Any]]:
    import torch

    weights = _weights(name, folder)
    with explained(f"the weights of module {folder} of model {name} do not fit"):
        weight, bias = weights["norm.weight"], weights["norm.bias"]

    def step(vectors: Any) -> Any:
        return torch.nn.functional.layer_norm(vectors, vectors.shape[-1:], _on(weight, vectors), _on(bias, vectors))

    return step, {"weights": _sums(weights)}


_STEPS = {"Normalize": _normalize_step, "Dense": _dense_step, "LayerNorm": _norm_step}


def _on(tensor: Any, other: Any) -> Any:
    return None if tensor is None else tensor.to(other.device)


def _weights(name: str, folder: str) -> dict[str, Any]:
    """The tensors of a module, in float32. Nothing in the file is run."""
    import torch

    if path := _file(name, "model.safetensors", folder):
        from safetensors.torch import load_file

        with explained(f"cannot read {path}"):
            return {key: value.float() for key, value in load_file(path).items()}
    if path := _file(name, "pytorch_model.bin", folder):
        with explained(f"cannot read {path}"):
            found = torch.load(path, map_location="cpu", weights_only=True)
            return {key: value.float() for key, value in found.items()}
    raise SetupError(f"model {name}: module {folder} has no weights (model.safetensors)")


def _sums(weights: Mapping[str, Any]) -> dict[str, list[float]]:
    """A number of all elements of each tensor, and some of them."""
    return {key: [float(value.double().sum()), *value.flatten()[:: max(1, value.numel() // 64)].tolist()]
            for key, value in sorted(weights.items())}  # fmt: skip


def _folder(path: Any) -> str:
    """A folder of a model. Raises ValueError where it would lead out of it."""
    parts = PurePosixPath(path).parts
    if not isinstance(path, str) or path.startswith("/") or ".." in parts or "\\" in path:
        raise ValueError(f"{path!r} is not a folder of the model")
    return path.strip("/")


def _file(name: str, file: str, folder: str = "") -> Path | None:
    """A file of a model, in its directory or from the hub; None where it has none."""
    if not name:
        return None
    if Path(name).is_dir():
        path = Path(name, folder, file)
        return path if path.is_file() else None
    from transformers.utils import cached_file

    options = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    with explained(f"model {name} cannot be loaded"):
        found = cached_file(name, file, subfolder=folder, **options)
    return Path(found) if found else None


def _object(name: str, file: str, folder: str = "") -> dict[str, Any]:
    path = _file(name, file, folder)
    return read_json_object(path, "the model's file") if path else {}


def _positive(value: Any, what: str) -> int | None:
    if value is not None and (type(value) is not int or value < 1):
        raise SetupError(f"{what} is {value!r}: it must be a positive number")
    return value
