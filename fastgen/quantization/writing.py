"""Writes quantised layers in the format `pack-quantized` of the library compressed-tensors, and as a run's saved work.

Models with layers of the class Conv1D, such as GPT-2, which compressed-tensors does not support, are written in the
format of GPTQ instead, version 1. `formats.py` lists the tensors of a layer.
"""

from __future__ import annotations

import collections
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from fastgen.quantization.calibration import Quantised
from fastgen.quantization.checkpoint import QuantizedTensor, check
from fastgen.quantization.formats import GPTQ, PackQuantized
from fastgen.quantization.rounding import Kind
from fastgen.settings import IN_CONFIG

_BEGINNING = "fastgen"  # the metadata key of block files


def tensors(weight: QuantizedTensor) -> dict[str, Tensor]:
    """Returns the tensors of a quantised weight. Raises ValueError if it has mins, or another order of in_features."""
    check(weight)
    if weight.mins is not None or weight.order is not None:
        raise ValueError("compressed-tensors has no mins, and no order of in_features")
    found = PackQuantized().write(weight)
    del found["weight_g_idx"]  # in_features are in order
    if weight.zeros is None:
        del found["weight_zero_point"]
    return found


class PackedLinear(nn.Module):
    """Holds the tensors of a quantised linear layer under the names for saving. It cannot be called."""

    def __init__(self, weight: QuantizedTensor, bias: Tensor | None, as_gptq: bool = False) -> None:
        super().__init__()
        for name, tensor in (GPTQ().write(weight) if as_gptq else tensors(weight)).items():
            self.register_buffer(name, tensor)
        self.register_buffer("bias", bias)


def config(layers: Mapping[str, Kind], left_out: Iterable[str], embeddings: Iterable[str] = ()) -> dict[str, Any]:
    """Returns the `quantization_config` of a model with these quantised layers.

    Args:
        layers: the kind of grid of each layer.
        left_out: the names of the linear layers that stay as they are.
        embeddings: the names of the quantised embeddings. Only possible if all layers are of one kind.
    """
    kinds: dict[tuple[int, int, bool], list[str]] = collections.defaultdict(list)
    for name, kind in layers.items():
        kinds[kind.bits, kind.group_size, kind.symmetric].append(name)
    groups = {}
    usual = max(kinds, key=lambda of: len(kinds[of]))
    # The names of layers come before the class, which matches all layers that are not named.
    for number, (of, names) in enumerate(sorted(kinds.items(), key=lambda item: item[0] == usual)):
        bits, group_size, symmetric = of
        weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group"}
        groups[f"group_{number}"] = {
            "targets": ["Linear", *embeddings] if of == usual else names,
            "weights": weights | {"group_size": group_size, "dynamic": False},
            "input_activations": None,
            "output_activations": None,
            "format": "pack-quantized",
        }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": list(left_out),
        "kv_cache_scheme": None,
        # Makes Transformers unpack the weights while it loads them: otherwise it does so in the first forward pass,
        # which fails for zero points and for T5. But this requires all layers to be of one kind.
        "dequantize": len(groups) == 1,
        IN_CONFIG: True,
    }


def gptq_config(layers: Mapping[str, Kind], left_out: Iterable[str]) -> dict[str, Any]:
    """As `config`, for the format of GPTQ. Layers of an unusual kind are under `dynamic`, as in GPTQModel."""
    usual, _ = collections.Counter(layers.values()).most_common(1)[0]
    others: dict[str, dict[str, Any]] = {f"-:^{re.escape(name)}$": {} for name in left_out}
    for name, kind in layers.items():
        if kind != usual:
            others[f"+:^{re.escape(name)}$"] = {"bits": kind.bits, "group_size": kind.group_size, "sym": kind.symmetric}
    return {
        "quant_method": "gptq",
        "bits": usual.bits,
        "group_size": usual.group_size,
        "sym": usual.symmetric,
        "desc_act": False,
        "lm_head": False,
        "checkpoint_format": "gptq",
        "pack_dtype": "int32",
        "dynamic": others,
        IN_CONFIG: True,
    }


def save_block(path: Path, layers: Mapping[str, Quantised]) -> None:
    """Saves the layers of a finished block in a file."""
    parts: dict[str, Tensor] = {}
    about = {}
    for name, (weight, error) in layers.items():
        kept = {"qweight": weight.qweight, "scales": weight.scales, "zeros": weight.zeros}
        parts |= {f"{name}.{part}": tensor.contiguous() for part, tensor in kept.items() if tensor is not None}
        about[name] = {"bits": weight.bits, "group_size": weight.group_size, "error": error}
    save_file(parts, path, metadata={_BEGINNING: json.dumps(about)})


def load_block(path: Path) -> dict[str, Quantised]:
    """Loads what `save_block` saved. Raises ValueError for a damaged file, or one of another program."""
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads(file.metadata()[_BEGINNING])
            names = set(file.keys())
            found = {}
            for name, values in about.items():
                qweight, scales = (file.get_tensor(f"{name}.{part}") for part in ("qweight", "scales"))
                zeros = file.get_tensor(f"{name}.zeros") if f"{name}.zeros" in names else None
                weight = QuantizedTensor(qweight, scales, zeros, None, values["bits"], values["group_size"], None)
                check(weight)
                found[name] = Quantised(weight, float(values["error"]))
            return found
    except Exception as error:  # a damaged file may cause any error
        raise ValueError(f"{path} is damaged") from error
