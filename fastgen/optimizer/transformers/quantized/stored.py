"""Reads GPTQ, AWQ and pack-quantized checkpoints: the files tell which layers are low-bit."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers.quantizers.base import HfQuantizer

from fastgen import counters
from fastgen.optimizer.transformers.quantized import replacing
from fastgen.optimizer.transformers.quantized.configurations import ENTRY_POINT, Kept, Method, NotServed
from fastgen.quantization.checkpoint import ADVICE, Format
from fastgen.quantization.formats import PackQuantized
from fastgen.quantization.layers import note_format
from fastgen.settings import KeepBits

_DTYPES = {
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
}


class StoredQuantizer(HfQuantizer):
    """The hooks that the library calls while it loads a checkpoint.

    `instead_of` is the method for which the library lacks packages, if nobody has asked FastGen to load the checkpoint.
    """

    requires_calibration = True  # the library cannot create such checkpoints

    def __init__(self, config: Kept, form: Format, keep: KeepBits, instead_of: Method | None = None) -> None:
        super().__init__(config)
        self.form, self._keep, self._instead_of = form, keep, instead_of

    def _process_model_before_weight_loading(self, model: Any, checkpoint_files: Any = None, **_: Any) -> None:
        layers, others = _layers(checkpoint_files, self.form)
        found = {_path(model, name): tensors for name, tensors in layers.items()}
        for path, tensors in found.items():
            self._check(model, path, tensors, others)
        self.replaced = replacing.Replaced(model, {path: (self.form, tensors) for path, tensors in found.items()})

    def _check(self, model: Any, path: str, tensors: Mapping[str, Tensor], others: set[str]) -> None:
        """Raises NotServed for a layer that cannot be replaced; `others` have a plain weight in the files."""
        module = model.get_submodule(path)
        sizes = replacing.sizes(module)
        is_embedding = isinstance(module, nn.Embedding)
        if sizes is None or (is_embedding and not isinstance(self.form, PackQuantized)):
            raise NotServed(f"{self.form.name}: a low-bit {type(module).__name__}")
        if _has_short_group(tensors, sizes[1], self.form.group_sizes):
            raise NotServed(f"{self.form.name}: a last group that is shorter than the others")
        for other in replacing.tied_to(model, path):
            if others.intersection(_names(model, other)) or replacing.sizes(model.get_submodule(other)) is None:
                raise NotServed(f"{self.form.name}: low-bit weights that are tied to others")

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        self.replaced.pack(model, self._keep.activations)
        note_format(model, self.form.name)
        if self._instead_of is not None:
            _tell(self._instead_of)
        counters.count_accelerated(ENTRY_POINT)
        return model

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Tensor] | None, dict[str, str]]:
        """Returns the tensors to save: the weight of tied layers once, as it was read."""
        if not self.replaced.shared:
            return None, {}
        state = model.state_dict()
        return {key: state[key] for key in state if key.rpartition(".")[0] not in self.replaced.shared}, {}

    def _dequantize(self, model: Any, dtype: Any = None) -> Any:
        self.replaced.dequantize(model, dtype)
        return model

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False


_told: set[str] = set()


def _tell(method: Method) -> None:
    """Warns once that FastGen loads such checkpoints without being asked."""
    if method.name not in _told:
        _told.add(method.name)
        message = (
            f"FastGen loads this {method.name} checkpoint, with its weights kept in their bits: Transformers itself "
            f"needs {method.needs}"
        )
        warnings.warn(message, UserWarning, stacklevel=2)


def _names(model: Any, name: str) -> tuple[str, str, str]:
    """Returns the names that the layer may have in the files, or in the model."""
    prefix = f"{model.base_model_prefix}."
    return name, name.removeprefix(prefix), prefix + name


def _path(model: Any, name: str) -> str:
    """Returns the model's module for a layer of the files."""
    for path in _names(model, name):
        try:
            model.get_submodule(path)
        except AttributeError:
            continue
        return path
    raise NotServed(f"{name} is no layer of {type(model).__name__}")


def _has_short_group(tensors: Mapping[str, Tensor], inputs: int, group_sizes: Collection[int]) -> bool:
    scales = tensors.get("scales")  # [groups, outputs]; compressed-tensors has whole groups
    groups = scales.shape[0] if scales is not None and scales.dim() else 0
    return any(0 < size < inputs and inputs % size and -(-inputs // size) == groups for size in group_sizes)


def _layers(files: Iterable[str] | None, form: Format) -> tuple[dict[str, dict[str, Tensor]], set[str]]:
    """Returns {layer: {tensor: its shape and dtype, on "meta"}} of low-bit layers, and the layers with a plain weight.

    Raises:
        NotServed: a layer has unknown tensors, or the format is unknown.
        ValueError: a file cannot be read.
    """
    mark, known = form.tensors[0], {*form.tensors, "bias"}
    layers: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for file in files or ():
        if not str(file).endswith(".safetensors"):
            raise NotServed(f"{form.name}: the checkpoint is not in safetensors")
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    layer, _, tensor = name.rpartition(".")
                    piece = tensors.get_slice(name)
                    dtype = _DTYPES.get(piece.get_dtype())
                    layers[layer][tensor] = torch.empty(piece.get_shape(), dtype=dtype or torch.uint8, device="meta")
        except SafetensorError as error:
            raise ValueError(f"{file} cannot be read ({error}): {ADVICE}") from None
    # Some files contain scales of activations as separate layers.
    others = [name for name, found in layers.items() if mark not in found and known - {"bias"} & found.keys()]
    plain = {name for name, found in layers.items() if "weight" in found}
    layers = {name: found for name, found in layers.items() if mark in found}
    if not layers:
        raise NotServed(f"{form.name}: the files hold no {mark}")
    if others:
        raise NotServed(f"{form.name}: {others[0]} has scales and no weight")
    for name, found in layers.items():
        if found.keys() - known:
            raise NotServed(f"{form.name}: {name} has {', '.join(sorted(found.keys() - known))}")
        found.pop("bias", None)
    return layers, plain
