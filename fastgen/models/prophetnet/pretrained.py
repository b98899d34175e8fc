"""The authors' checkpoints: their parameter names, and loading them for fine-tuning."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

_PARTS = ("encoder", "decoder")


def load(model: nn.Module, path: str, load_sep: bool) -> None:
    """Loads a published checkpoint, or a file of weights alone, into `model`.

    Additional tokens of the vocabulary get random embeddings. Additional positions repeat the checkpoint's, each time
    with the dimensions rotated by one; surplus positions are dropped.

    Args:
        load_sep: gives [X_SEP] the embedding of [SEP], for a model that was pre-trained with the one and is fine-tuned
            with the other.

    Raises:
        ValueError: the file does not contain a ProphetNet, or the dictionary lacks the tokens of `load_sep`.
    """
    found = read(path)
    state = found["model"] if isinstance(found, dict) and "model" in found and "args" in found else found
    names = [f"{part}.{table}.weight" for part in _PARTS for table in ("embed_tokens", "embed_positions")]
    if not isinstance(state, dict) or not all(name in state for name in names):
        raise ValueError(f"{path} holds no ProphetNet weights: {names[0]} is missing")
    state = dict(state)
    sides = {part: getattr(model, part) for part in _PARTS}
    for part, side in sides.items():
        tokens, positions = f"{part}.embed_tokens.weight", f"{part}.embed_positions.weight"
        state[tokens] = _fit_tokens(state[tokens], side.dictionary, load_sep)
        state[positions] = _fit_positions(state[positions], side.embed_positions.num_embeddings)
    if sides["decoder"].embed_tokens is sides["encoder"].embed_tokens:
        state["decoder.embed_tokens.weight"] = state["encoder.embed_tokens.weight"]
    model.load_state_dict(state)


def read(path: str) -> Any:
    """Reads the file. With FastGen enabled it may contain all types of FairSeq's checkpoints, besides tensors."""
    return torch.load(path, map_location="cpu", weights_only=True)


def _fit_tokens(weight: Tensor, dictionary: Any, load_sep: bool) -> Tensor:
    missing = len(dictionary) - weight.shape[0]
    if missing > 0:
        new = torch.randn(missing, weight.shape[1]) * weight.shape[1] ** -0.5
        weight = torch.cat([weight, new.to(weight.dtype)])
    if load_sep:
        if "[SEP]" not in dictionary or "[X_SEP]" not in dictionary:
            raise ValueError("--load-sep needs a dictionary with [SEP] and [X_SEP]")
        weight = weight.clone()
        weight[dictionary.index("[X_SEP]")] = weight[dictionary.index("[SEP]")]
    return weight


def _fit_positions(weight: Tensor, count: int) -> Tensor:
    times = math.ceil(count / weight.shape[0])
    return torch.cat([weight.roll(-time, dims=1) for time in range(times)])[:count]


def store_as(module: nn.Module, names: dict[str, str]) -> None:
    """Makes the state dict of `module` name its parameters as in `names`, {its own name: name in checkpoints}.

    A name in checkpoints that is also a parameter of `module` stands for both, which then share one parameter.
    """
    # Not closures, which could not be pickled with the module.
    module.register_state_dict_post_hook(partial(_save, names))
    module.register_load_state_dict_pre_hook(partial(_load, names))


def _save(names: dict[str, str], module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for own, stored in names.items():
        state[prefix + stored] = state.pop(prefix + own)


def _load(names: dict[str, str], module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for own, stored in names.items():
        if prefix + stored in state:
            state[prefix + own] = state[prefix + stored]
            if stored not in parameters:
                del state[prefix + stored]
