"""Reads the checkpoints that UniLM's authors publish, and those that their s2s-ft writes.

There are two layouts with the same parameter names. UniLM v1 publishes a single file of weights without a
configuration; s2s-ft writes a directory with `config.json` and `pytorch_model.bin`. Both hold a BERT with its masked
language-model head, some with parts that generation does not use. Pre-trained files may hold query, key and value as
one matrix. Weights are read as tensors only: no code in a file runs.
"""

from __future__ import annotations

import json
import os
import pickle
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_WORDS = "bert.embeddings.word_embeddings.weight"
_POSITIONS = "bert.embeddings.position_embeddings.weight"
_TYPES = "bert.embeddings.token_type_embeddings.weight"
_BIAS = "cls.predictions.bias"

# Used only in training and classification.
_UNUSED = re.compile(
    r"bert\.pooler\..*|cls\.seq_relationship\..*|crit_mask_lm_smoothed\..*|bert\.embeddings\.position_ids"
)
# Names of tied parameters, and of their originals.
_COPIES = {
    "cls.predictions.decoder.weight": _WORDS,
    "cls.predictions.decoder_weight": _WORDS,
    "cls.predictions.decoder.bias": _BIAS,
}
# One matrix for query, key and value. It has no key bias, which would not change attention weights.
_FUSED = ".attention.self.qkv_linear.weight"
_PARTS = ("query", "key", "value")
# Settings that the weights' shapes do not determine, and that a configuration of s2s-ft may have.
_FROM_CONFIG = ("num_attention_heads", "hidden_act", "source_type_id", "target_type_id")
# Head width of UniLM, base and large.
_HEAD_WIDTH = 64
_SHOWN = 4  # names in a message


def read(path: str | os.PathLike[str], **changes: Any) -> tuple[dict[str, Any], dict[str, Tensor], Path]:
    """Reads a published checkpoint: settings of a configuration, weights by their names here, and their file.

    The weights determine the shape. For arguments and exceptions see `UniLMForSeq2SeqLM.from_published`.
    """
    file, settings = _find(Path(path))
    weights = _canonical(_read(file), file)
    settings = {**_shape(weights, file), **settings, **changes}
    positions = weights[_POSITIONS]
    weights[_POSITIONS] = positions[torch.arange(settings["max_position_embeddings"]) % len(positions)]
    return settings, weights, file


def fill(model: nn.Module, weights: dict[str, Tensor], file: Path) -> None:
    """Loads the weights of a checkpoint into a model of its configuration. Raises ValueError if they do not match."""
    wanted = {name: value.shape for name, value in model.state_dict().items() if name not in _COPIES}
    wrong = {
        "missing": [name for name in wanted if name not in weights],
        "unknown": [name for name in weights if name not in wanted],
        "of another shape": [
            f"{name} {list(weights[name].shape)} instead of {list(shape)}"
            for name, shape in wanted.items()
            if name in weights and weights[name].shape != shape
        ],
    }
    said = "; ".join(f"{what}: {_some(names)}" for what, names in wrong.items() if names)
    if said:
        raise ValueError(f"{file} is not the checkpoint of a UniLM like this one: {said}")
    model.load_state_dict(weights, strict=False)  # all but the tied copies


def _find(path: Path) -> tuple[Path, dict[str, Any]]:
    """Returns the file of weights at a path, and the settings of the configuration beside it."""
    if not path.is_dir():
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file or directory")
        return path, {}
    file = next((path / name for name in _WEIGHTS if (path / name).is_file()), None)
    if file is None:
        raise FileNotFoundError(f"{path} has no weights: expected {' or '.join(_WEIGHTS)}")
    if not (path / "config.json").is_file():
        return file, {}
    try:
        found = json.loads((path / "config.json").read_text(encoding="utf-8"))
        found = {name: found[name] for name in _FROM_CONFIG if name in found}
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path / 'config.json'} is not a configuration: {error}") from error
    return file, {"source_type_id": 0, "target_type_id": 1, **found}


def _read(file: Path) -> dict[str, Tensor]:
    """Reads the tensors in a file, by name."""
    try:
        found = load_file(file) if file.suffix == ".safetensors" else torch.load(file, "cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, SafetensorError) as error:
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"{file} is not a file of tensors: {said}") from error
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise ValueError(f"{file} is not a file of tensors by name (a state dict)")
    return found


def _canonical(weights: dict[str, Tensor], file: Path) -> dict[str, Tensor]:
    """Returns the parameters that generation uses, under their names here."""
    found: dict[str, Tensor] = {}
    for name, value in weights.items():
        name = re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", name))  # BERT's oldest names
        if not _UNUSED.fullmatch(name):
            found[name] = value
    for name in [name for name in found if name.endswith(_FUSED)]:
        _split(found, name.removesuffix("qkv_linear.weight"))
    for copy, original in _COPIES.items():
        if copy in found and original in found and not torch.equal(found[copy], found[original]):
            raise ValueError(f"{file}: {copy} differs from {original}; in a UniLM they are the same")
        found.pop(copy, None)
    return found


def _split(weights: dict[str, Tensor], attention: str) -> None:
    """Splits the combined matrix of the layer whose names begin with `attention` into query, key and value."""
    for part, weight in zip(_PARTS, weights.pop(f"{attention}qkv_linear.weight").chunk(3), strict=True):
        bias = weights.pop(f"{attention}{part[0]}_bias", None)
        weights[f"{attention}{part}.weight"] = weight
        weights[f"{attention}{part}.bias"] = weight.new_zeros(len(weight)) if bias is None else bias.flatten()


def _shape(weights: dict[str, Tensor], file: Path) -> dict[str, Any]:
    """Returns the settings that the weights' shapes determine."""
    layers = [int(found[1]) for name in weights if (found := re.match(r"bert\.encoder\.layer\.(\d+)\.", name))]
    try:
        words, positions, types = weights[_WORDS], weights[_POSITIONS], weights[_TYPES]
        inner = weights["bert.encoder.layer.0.intermediate.dense.weight"]
    except KeyError as error:
        raise ValueError(f"{file} is not a UniLM: it has no {error.args[0]}") from error
    shape = {
        "vocab_size": words.shape[0],
        "hidden_size": words.shape[1],
        "num_hidden_layers": max(layers) + 1,
        "num_attention_heads": max(words.shape[1] // _HEAD_WIDTH, 1),
        "intermediate_size": inner.shape[0],
        "max_position_embeddings": positions.shape[0],
        "type_vocab_size": types.shape[0],
    }
    return shape if types.shape[0] > 5 else {**shape, "source_type_id": 0, "target_type_id": 1}


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
