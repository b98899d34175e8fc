"""Hooks that decide which checkpoints `from_pretrained` loads into layers that keep low-bit weights.

The library calls `get_hf_quantizer` for the object that prepares a model for its checkpoint. It gets FastGen's if bits
are to be kept: because the call, a setting or the checkpoint asks for it, or because the library lacks a package for
the format. Otherwise it gets its own. If only the files reveal that FastGen cannot serve them, `from_pretrained` is
repeated with the library's own quantizer.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch

from fastgen import counters, patching, settings
from fastgen.ops import gpu
from fastgen.optimizer.transformers.quantized import configurations, gguf_hooks
from fastgen.optimizer.transformers.quantized.configurations import ENTRY_POINT, NotServed
from fastgen.quantization.layers import QuantizedWeight
from fastgen.settings import IN_CONFIG, KeepBits

_declined: ContextVar[bool] = ContextVar("fastgen_checkpoint_declined", default=False)


def from_pretrained(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps `PreTrainedModel.from_pretrained`: repeats the call if FastGen turns out not to serve the checkpoint."""
    asked = _asked(kwargs.get("quantization_config"))
    is_keeping = asked is not None or settings.current().keep_bits
    is_gguf = kwargs.get("gguf_file") is not None and patching.is_active()
    with gguf_hooks.reading_gguf() if is_gguf else contextlib.nullcontext():
        try:
            with patching.held(gguf_hooks.keeping, is_keeping):
                return wrapped(*args, **kwargs)
        except NotServed as reason:
            _decline(reason, asked)
        with patching.held(_declined, True):
            return wrapped(*args, **kwargs)


def get_hf_quantizer(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps `get_hf_quantizer`: returns FastGen's quantizer if bits are to be kept.

    Removes `KeepBits` from the call, because the library compares the class of this argument with that in the file.
    """
    bound = patching.bound(wrapped, args, kwargs)
    if bound is None:
        return wrapped(*args, **kwargs)
    given = bound.arguments
    asked = _asked(given.get("quantization_config"))
    if asked is not None:
        given["quantization_config"] = None
        if not patching.is_active():
            raise ValueError("quantization_config is KeepBits, which FastGen reads, and FastGen is disabled here")
    if patching.is_active() and not _declined.get():
        try:
            if given.get("gguf_file") is None:
                found = counters.decided(ENTRY_POINT, _for_checkpoint, given, asked, foreseen=(NotServed,))
                if found is not None:
                    return found
            elif asked is not None or settings.current().keep_bits:
                return _for_gguf(lambda: wrapped(*bound.args, **bound.kwargs), given, asked)
        except NotServed as reason:
            _decline(reason, asked)
    return wrapped(*bound.args, **bound.kwargs)


def resize_token_embeddings(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Wraps `PreTrainedModel.resize_token_embeddings`: unpacks low-bit embeddings before their size changes."""
    if patching.is_active():
        given = inspect.signature(wrapped).bind(*args, **kwargs).arguments
        _unpack_embeddings(instance, given.get("new_num_tokens"), given.get("pad_to_multiple_of"))
    return wrapped(*args, **kwargs)


def _unpack_embeddings(model: Any, tokens: int | None, multiple: int | None) -> None:
    embedding = model.get_input_embeddings()
    kept = [each for each in (embedding, model.get_output_embeddings()) if isinstance(each, QuantizedWeight)]
    replaced = getattr(getattr(model, "hf_quantizer", None), "replaced", None)
    if not kept or replaced is None:
        return
    now = embedding.weight.shape[0]
    wanted = now if tokens is None else tokens
    if multiple:
        wanted = -(-wanted // multiple) * multiple
    if wanted != now:
        replaced.unpack(model, kept)


def _asked(quantization_config: Any) -> KeepBits | None:
    return quantization_config if isinstance(quantization_config, KeepBits) else None


def _decline(reason: NotServed, asked: KeepBits | None) -> None:
    """Leaves the checkpoint to the library, and warns if the user has asked to keep its bits."""
    counters.count_fallback(ENTRY_POINT, str(reason))
    if asked is not None or settings.current().keep_bits:
        message = f"FastGen does not keep the bits of this checkpoint, which Transformers loads as it does: {reason}"
        warnings.warn(message, UserWarning, stacklevel=2)


def _for_checkpoint(given: dict[str, Any], asked: KeepBits | None) -> tuple[Any, Any, Any] | None:
    """Returns what `get_hf_quantizer` returns if bits are kept; None to use the library's answer."""
    config, device_map = given["config"], given["device_map"]
    stored = configurations.stored(config)
    method = configurations.method_of(stored)
    if method is None:
        if asked is not None:
            what = stored.get("quant_method", "floating point")
            raise NotServed(f"weights in {getattr(what, 'value', what)} are no format that FastGen keeps")
        return None
    # The `quantization_config` that `fastgen-quantize` writes asks for it.
    is_asked_for = asked is not None or settings.current().keep_bits or stored.get(IN_CONFIG) is True
    if not is_asked_for and method.library_loads():
        return None
    form = method.form(stored)
    _check_call(given["quantization_config"], device_map)
    from fastgen.optimizer.transformers.quantized.stored import StoredQuantizer

    instead_of = None if is_asked_for else method
    quantizer = StoredQuantizer(configurations.Kept(stored), form, asked or KeepBits(), instead_of)
    config.quantization_config = quantizer.quantization_config
    given["user_agent"]["quant"] = stored["quant_method"]
    return quantizer, config, device_map


def _for_gguf(
    library: Callable[[], tuple[Any, Any, Any]], given: dict[str, Any], asked: KeepBits | None
) -> tuple[Any, Any, Any]:
    """Returns the library's answer for a GGUF file, with FastGen's quantizer in place of the library's."""
    _check_call(given["quantization_config"], given["device_map"])
    try:
        from fastgen.optimizer.transformers.quantized.gguf import GgufBlocksQuantizer, replaces
    except ImportError as error:
        raise NotServed(f"this release of Transformers reads GGUF in another way ({error})") from None
    found, config, device_map = library()
    if not replaces(found):
        raise NotServed("this release of Transformers reads GGUF in another way")
    return GgufBlocksQuantizer(found.quantization_config, asked or KeepBits()), config, device_map


def _check_call(quantization_config: Any, device_map: Any) -> None:
    """Raises NotServed for arguments of `from_pretrained` that ask for anything but weights on one device."""
    if quantization_config is not None:
        raise NotServed("the call has a quantization_config of its own")
    places = device_map.values() if isinstance(device_map, dict) else [device_map]
    devices = {torch.get_default_device()} if device_map is None else {_device(place) for place in places}
    if len(devices) != 1:
        raise NotServed("the model is loaded to several devices")
    (device,) = devices
    if device.type != "cpu":
        no_gpu = device.type == "cuda" and not torch.cuda.is_available()
        reason = "there is no GPU" if no_gpu else gpu.unavailable(device)
        if reason is not None:
            raise NotServed(f"the model is loaded to another device than the CPU: {reason}")


def _device(place: Any) -> torch.device:
    """Converts a place to a device. Raises NotServed for places that are none, such as "auto" and "disk"."""
    try:
        return torch.device("cuda", place) if isinstance(place, int) else torch.device(place)
    except (RuntimeError, TypeError):
        raise NotServed(f"device_map is {place}") from None
