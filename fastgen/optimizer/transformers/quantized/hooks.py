"""The hooks: which checkpoints `from_pretrained` reads into FastGen's layers.

The library asks `get_hf_quantizer` for what prepares a model for its checkpoint. For a checkpoint that FastGen serves
it gets FastGen's. What only the files tell comes out later: then `from_pretrained` is repeated with the library's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch

from fastgen import counters, patching
from fastgen.ops import triton
from fastgen.optimizer.transformers.quantized import configurations
from fastgen.optimizer.transformers.quantized.configurations import ENTRY_POINT, NotServed

_declined: ContextVar[bool] = ContextVar("fastgen_checkpoint_declined", default=False)


def from_pretrained(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Around `PreTrainedModel.from_pretrained`: repeats the call for a checkpoint that turns out not to be served."""
    try:
        return wrapped(*args, **kwargs)
    except NotServed as reason:
        counters.count_fallback(ENTRY_POINT, str(reason))
    with patching.held(_declined, True):
        return wrapped(*args, **kwargs)


def get_hf_quantizer(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Around `get_hf_quantizer`: FastGen's quantizer for checkpoints that it serves."""
    if not patching.is_active() or _declined.get():
        return wrapped(*args, **kwargs)
    try:
        given = inspect.signature(wrapped).bind(*args, **kwargs).arguments
    except TypeError:
        return wrapped(*args, **kwargs)  # which raises it
    if given.get("gguf_file") is not None:
        found = wrapped(*args, **kwargs)
        return counters.decided(ENTRY_POINT, _for_gguf, found, given) or found
    found = counters.decided(ENTRY_POINT, _for_checkpoint, given)
    return wrapped(*args, **kwargs) if found is None else found


def _for_checkpoint(given: dict[str, Any]) -> tuple[Any, Any, Any] | None:
    """What `get_hf_quantizer` returns for a checkpoint that is served; None, and why is counted, for another one."""
    config, device_map = given["config"], given["device_map"]
    try:
        stored = configurations.stored(config)
        form = configurations.form_of(stored)
        if form is None:
            return None
        _check_call(given["quantization_config"], device_map)
    except NotServed as reason:
        counters.count_fallback(ENTRY_POINT, str(reason))
        return None
    from fastgen.optimizer.transformers.quantized.stored import StoredQuantizer

    quantizer = StoredQuantizer(configurations.Kept(stored), form)
    given["user_agent"]["quant"] = stored["quant_method"]
    config.quantization_config = quantizer.quantization_config
    return quantizer, config, device_map


def _for_gguf(found: tuple[Any, Any, Any], given: dict[str, Any]) -> tuple[Any, Any, Any]:
    """The library's answer for a GGUF file, with FastGen's quantizer in place of the library's."""
    try:
        _check_call(given["quantization_config"], given["device_map"])
        try:
            from fastgen.optimizer.transformers.quantized.gguf import GgufBlocksQuantizer, replaces
        except ImportError as error:
            raise NotServed(f"this release of Transformers reads GGUF in another way ({error})") from None
        library, config, device_map = found
        if not replaces(library):
            raise NotServed("this release of Transformers reads GGUF in another way")
    except NotServed as reason:
        counters.count_fallback(ENTRY_POINT, str(reason))
        return found
    return GgufBlocksQuantizer(library.quantization_config), config, device_map


def _values(device_map: Any) -> Any:
    return device_map.values() if isinstance(device_map, dict) else [device_map]


def _check_call(quantization_config: Any, device_map: Any) -> None:
    """Raises NotServed for arguments of `from_pretrained` that ask for something else than weights on one device."""
    if quantization_config is not None:
        raise NotServed("the call has a quantization_config of its own")
    places = {_device(place) for place in ([torch.get_default_device()] if device_map is None else _values(device_map))}
    if len(places) != 1:
        raise NotServed("the model is loaded to several devices")
    (device,) = places
    if device.type != "cpu":
        no_gpu = device.type == "cuda" and not torch.cuda.is_available()
        reason = "there is no GPU" if no_gpu else triton.unavailable(device)
        if reason is not None:
            raise NotServed(f"the model is loaded to another device than the CPU: {reason}")


def _device(place: Any) -> torch.device:
    """Raises NotServed for what is none, such as "auto" and "disk"."""
    try:
        return torch.device("cuda", place) if isinstance(place, int) else torch.device(place)
    except (RuntimeError, TypeError):
        raise NotServed(f"device_map is {place}") from None
