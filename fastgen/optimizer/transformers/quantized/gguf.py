"""Reads GGUF files: blocks of the types in `fastgen.quantization.formats` stay packed; the library handles everything
else.

For each architecture, the library has a processor that converts tensors of the file into tensors of the model, and may
reorder their rows (llama.cpp stores the rows of queries and keys in another order). Blocks lie within rows. FastGen
therefore passes row numbers through the processor; its output tells where each row of blocks belongs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import modeling_gguf_pytorch_utils as library
from transformers.pytorch_utils import Conv1D

from fastgen import counters, releases
from fastgen.optimizer.transformers.quantized import replacing
from fastgen.optimizer.transformers.quantized.configurations import ENTRY_POINT, NotServed
from fastgen.quantization.formats import BLOCK_TYPES, Blocks, BlockType
from fastgen.quantization.layers import note_format
from fastgen.settings import KeepBits

_LIBRARYS: Any = releases.gguf_quantizer()
_MAX_ROWS = 2**23  # float32 represents twice this number exactly


class _Kept(NamedTuple):
    """A tensor that stays in blocks."""

    layer: str  # in the model
    type: BlockType
    data: NDArray[np.uint8]  # in the file, [rows, bytes]
    order: NDArray[np.int64]  # row i of the layer is row order[i] of the file


def replaces(quantizer: Any) -> bool:
    """Whether this is the library's quantizer that `GgufBlocksQuantizer` replaces."""
    return type(quantizer) is _LIBRARYS


class GgufBlocksQuantizer(_LIBRARYS):
    """The hooks that the library calls while it loads a GGUF file."""

    def __init__(self, config: Any, keep: KeepBits, **named: Any) -> None:
        super().__init__(config, **named)
        self._keep = keep
        self._kept: dict[str, _Kept] = {}  # by name in the file

    def _process_model_before_weight_loading(self, model: Any, checkpoint_files: Any = None, **_: Any) -> None:
        if self.supported:
            raise NotServed(f"gguf: the library has its own blocks for {self.header.architecture}")
        (file,) = checkpoint_files
        self._file = _File(file, model)
        for name, kept in self._file.blocks(model).items():
            with_it = replacing.tied_to(model, kept.layer)
            if all(replacing.sizes(model.get_submodule(layer)) is not None for layer in with_it):
                self._kept[name] = kept
        if not self._kept:
            raise NotServed("gguf: no weight of a type that is kept in blocks")
        self.replaced = replacing.Replaced(model, {kept.layer: _stored(kept) for kept in self._kept.values()})

    def get_state_dict(self, checkpoint_file: str, model: Any) -> dict[str, Tensor]:
        tensors = self._file.unpacked(self._kept, self.dtype)
        for kept in self._kept.values():
            tensors[f"{kept.layer}.blocks"] = torch.from_numpy(kept.data[kept.order])
        return tensors

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        self.replaced.pack(model, self._keep.activations)
        for kind in sorted(self._file.other_types):
            counters.count_not_used(ENTRY_POINT, f"gguf: weights of type {kind}, which are unpacked")
        del self._file
        self._kept = {}  # they refer to the file's memory
        note_format(model, "gguf")
        counters.count_accelerated(ENTRY_POINT)
        return model

    def _dequantize(self, model: Any, dtype: Any = None) -> Any:
        self.replaced.dequantize(model, dtype)
        return model

    def is_serializable(self, safe_serialization: Any = None) -> bool:
        raise ValueError(
            "a model in GGUF blocks cannot be saved: keep its file, or call model.dequantize() to save it in floating "
            "point"
        )


def _stored(kept: _Kept) -> tuple[Blocks, dict[str, Tensor]]:
    return Blocks(kept.type), {"blocks": torch.empty(kept.data.shape, dtype=torch.uint8, device="meta")}


class _File:
    """A GGUF file, read into a model by the library's processor for its architecture."""

    def __init__(self, path: str, model: Any) -> None:
        self._reader = gguf.GGUFReader(path)
        architecture = library.read_field(self._reader, "general.architecture")[0]
        config = library.load_gguf_checkpoint(path, return_tensors=False)["config"]
        kind = library.TENSOR_PROCESSORS.get(architecture, library.TensorProcessor)
        self._processor = kind(config=config)
        self._names = library.get_gguf_hf_weights_map(model, self._processor)
        self.other_types: set[str] = set()  # low-bit types whose weights are unpacked

    def blocks(self, model: Any) -> dict[str, _Kept]:
        """Returns what can stay in blocks: tensors of known types whose rows become rows of a layer's weight."""
        found = {}
        for tensor in self._reader.tensors:
            kept = self._block(model, tensor)
            if kept is not None:
                found[tensor.name] = kept
            elif tensor.tensor_type.value not in BLOCK_TYPES and tensor.data.dtype == np.uint8:
                self.other_types.add(tensor.tensor_type.name)
        return found

    def _block(self, model: Any, tensor: Any) -> _Kept | None:
        kind = BLOCK_TYPES.get(tensor.tensor_type.value)
        if kind is None or len(tensor.shape) != 2 or not 0 < tensor.shape[1] <= _MAX_ROWS:
            return None
        inputs, rows = (int(size) for size in tensor.shape)
        numbered = np.arange(2 * rows, dtype=np.float32).reshape(rows, 2)
        processed: dict[str, Tensor] = {}
        try:
            self._process(tensor.name, numbered, processed, torch.float32)
        except (ValueError, KeyError, IndexError):
            return None  # it needs whole rows: the library unpacks the tensor
        if len(processed) != 1:
            return None
        ((name, result),) = processed.items()
        layer, _, leaf = name.rpartition(".")
        module = model.get_submodule(layer) if leaf == "weight" else None
        if module is None or replacing.sizes(module) != (rows, inputs):
            return None
        order = _row_order((result.T if isinstance(module, Conv1D) else result).numpy())
        return None if order is None else _Kept(layer, kind, tensor.data, order)

    def _process(self, name: str, values: NDArray[Any], tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
        """Processes a tensor and stores the results in `tensors`, under the model's names."""
        result = self._processor.process(
            weights=values, name=name, tensor_key_mapping=self._names, parsed_parameters={"tensors": tensors}
        )
        if result.name in self._names:
            tensors[self._names[result.name]] = torch.from_numpy(np.copy(result.weights)).to(dtype)

    def unpacked(self, kept: dict[str, _Kept], dtype: torch.dtype) -> dict[str, Tensor]:
        """Returns all other tensors in floating point, under the model's names."""
        tensors: dict[str, Tensor] = {}
        for tensor in self._reader.tensors:
            if tensor.name not in kept:
                self._process(tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type), tensors, dtype)
        return {name: tensor.to(dtype) for name, tensor in tensors.items()}


def _row_order(processed: NDArray[np.float32]) -> NDArray[np.int64] | None:
    """Returns where numbered pairs, one per row, have moved to; None if they have changed otherwise."""
    if processed.ndim != 2 or processed.shape[1] != 2:
        return None
    first = processed[:, 0].astype(np.int64)
    expected = 2 * np.arange(len(first))
    if not np.array_equal(processed[:, 1], first + 1) or not np.array_equal(np.sort(first), expected):
        return None
    return first // 2
