"""Loads the model to quantise, and saves the quantised model."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastgen.pipeline.errors import SetupError, explained
from fastgen.pipeline.generation.loading import LoadedModel, load
from fastgen.pipeline.generation.options import RunOptions
from fastgen.pipeline.loading import (
    address,
    file_of,
    is_gguf,
    processor_files_of,
    quiet_transformers,
    why_not_loaded,
)
from fastgen.pipeline.quantizing.options import QuantizeOptions
from fastgen.pipeline.quantizing.work import Work, saving
from fastgen.pipeline.settings import DTYPES, STANDARD_STREAM, dtype_named

if TYPE_CHECKING:
    from fastgen.quantization.calibration import Block

_GENERATION = "generation_config.json"
_MARK = "stands_for_conv1d"


def load_model(options: QuantizeOptions, name: str | Path | None = None) -> LoadedModel:
    """Loads the model that the options name, or another one, in the dtype that they ask for.

    The model that the options name has linear layers in place of Conv1D.

    Raises `SetupError` if it cannot be loaded, or if the model to quantise is quantised already.
    """
    quiet_transformers(options.quiet)
    settings = options.reading(options.calibration or STANDARD_STREAM, None)
    if name is None:
        settings = dataclasses.replace(settings, keep_bits=False)  # unpacks a GGUF file
    else:
        settings = dataclasses.replace(settings, model=str(name))
    loaded = load(dataclasses.replace(settings, dtype=_dtype(settings, options.dtype, of_floats=name is None)))
    if name is None:
        _forget_the_file(loaded.model)
        conv1d_as_linear(loaded.model)
    return loaded


def _forget_the_file(model: Any) -> None:
    """Marks a model from a GGUF file as not quantised: it holds floats, but the library would refuse to save it."""
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None:
        quantizer.remove_quantization_config(model)


def _dtype(settings: RunOptions, wanted: str, of_floats: bool) -> str:
    from transformers import AutoConfig

    name, options = address(settings.model)
    with explained(f"model {settings.model} cannot be loaded", why_not_loaded(settings.model)):
        config = AutoConfig.from_pretrained(name, trust_remote_code=settings.trust_remote_code, **options)
    if of_floats and getattr(config, "quantization_config", None) is not None:
        raise SetupError(f"model {settings.model} is quantised already")
    if wanted != "auto":
        return wanted
    own = dtype_named(str(getattr(config, "dtype", None)).removeprefix("torch."))
    return own if own in DTYPES else "fp32"


def save(loaded: LoadedModel, blocks: Sequence[Block], work: Work, options: QuantizeOptions) -> list[str]:
    """Saves model, tokenizer and generation config in the directory that becomes OUT. The model is unusable afterwards.

    Layer by layer, the quantised weights in the work directory replace the others.

    Returns:
        The names of the linear layers that stay as they are.
    """
    import torch
    from transformers import AutoTokenizer

    from fastgen.quantization.calibration import sharing
    from fastgen.quantization.rounding import Kind
    from fastgen.quantization.writing import PackedLinear, config, gptq_config, load_block

    model: Any = loaded.model
    as_gptq = any(stands_for_conv1d(layer) for block in blocks for layer in block.linears.values())
    kinds = {}
    tied: dict[str, str] = {}  # layers that share the weight of a quantised one
    for number, block in enumerate(blocks):
        for name, (weight, _) in load_block(work.block(number)).items():
            parent, _, own = name.rpartition(".")
            layer = block.linears.pop(name)
            tied |= {other: name for other in sharing(model, layer) if other != name}
            setattr(model.get_submodule(parent), own, PackedLinear(weight, layer.bias, as_gptq))
            kinds[name] = Kind(weight.bits, weight.group_size, not options.asymmetric)
    linear = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    stored = gptq_config(kinds, linear) if as_gptq else config(kinds, linear, set(tied.values()))
    model.config.quantization_config = stored
    linear_as_conv1d(model)
    shutil.rmtree(work.model, ignore_errors=True)
    with saving(work.model):
        state = {key: tensor for key, tensor in model.state_dict().items() if key.rpartition(".")[0] not in tied}
        model.save_pretrained(work.model, state_dict=_as_stored(state))
        # A new one: that of the run remembers its truncation.
        name, file = address(options.model)
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=options.trust_remote_code, **file)
        tokenizer.save_pretrained(work.model)
        own_generation = file_of(options.model, _GENERATION)
        if own_generation:
            shutil.copyfile(own_generation, work.model / _GENERATION)
        for file_of_processor in processor_files_of(options.model):  # loading it may need missing packages
            shutil.copyfile(file_of_processor, work.model / file_of_processor.name)
    return [name for name in linear if name not in tied]


def _as_stored(state: dict[str, Any]) -> dict[str, Any]:
    """Converts tensors in float32 that fit into float16 to the last bit, as if stored in it, to float16.

    Scales stay as they are, because compressed-tensors multiplies in their type.
    """
    import torch

    known: dict[int, Any] = {}

    def stored(tensor: Any) -> Any:
        if tensor.dtype != torch.float32:
            return tensor
        if tensor.data_ptr() not in known:
            half = tensor.half()
            known[tensor.data_ptr()] = half if torch.equal(half.float(), tensor) else tensor
        return known[tensor.data_ptr()]  # one object for tied weights

    return {name: tensor if name.endswith(".weight_scale") else stored(tensor) for name, tensor in state.items()}


def weight_bytes(name: str | Path, model: Any = None) -> int:
    """Returns the bytes of a GGUF file, or of the weight files in a directory; for a hub model, of its parameters in
    memory.
    """
    folder = Path(name)
    if is_gguf(str(name)):
        return folder.stat().st_size
    for pattern in ("*.safetensors", "*.bin"):
        if folder.is_dir() and (files := list(folder.glob(pattern))):
            return sum(file.stat().st_size for file in files)
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


# While a model is quantised, linear layers replace those of class Conv1D, whose weight is [inputs, outputs].


def conv1d_as_linear(model: Any) -> None:
    """Replaces each Conv1D by a linear layer with the same weight."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    for name, module in list(model.named_modules()):
        if type(module) is Conv1D:
            layer = _put(model, name, module, lambda old: nn.Linear(old.nx, old.nf))
            vars(layer)[_MARK] = True


def linear_as_conv1d(model: Any) -> None:
    """Inverts `conv1d_as_linear` for the layers that still exist."""
    from transformers.pytorch_utils import Conv1D

    for name, module in list(model.named_modules()):
        if stands_for_conv1d(module):
            _put(model, name, module, lambda old: Conv1D(old.out_features, old.in_features))


def _put(model: Any, name: str, old: Any, make: Callable[[Any], Any]) -> Any:
    """Replaces a layer by one of another class, with its weight transposed."""
    import torch

    with torch.device("meta"):
        layer = make(old)
    layer.weight = torch.nn.Parameter(old.weight.detach().t().contiguous(), requires_grad=False)
    layer.bias = old.bias
    model.set_submodule(name, layer.train(old.training))
    return layer


def stands_for_conv1d(layer: Any) -> bool:
    """Whether this layer replaces a Conv1D."""
    return _MARK in vars(layer)
