"""Interprets the quantization configuration of a checkpoint, and decides whether FastGen reads it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from transformers.utils import (
    is_accelerate_available,
    is_compressed_tensors_available,
    is_gptqmodel_available,
    is_optimum_available,
)
from transformers.utils.quantization_config import QuantizationConfigMixin

from fastgen.quantization.checkpoint import BITS, Format
from fastgen.quantization.formats import AWQ, GPTQ, PackQuantized

# Name under which `fastgen.stats()` counts checkpoints.
ENTRY_POINT = "transformers.from_pretrained"


class NotServed(Exception):
    """The checkpoint is left to the library, for this reason."""


class Kept(QuantizationConfigMixin):
    """The `quantization_config` of a checkpoint as it is in the file, so that saving writes it unchanged."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = copy.deepcopy(dict(values))
        self.quant_method = self.values["quant_method"]

    def to_dict(self) -> dict[str, Any]:
        return copy.deepcopy(self.values)

    def get_loading_attributes(self) -> dict[str, Any]:
        return {}


def stored(config: Any) -> dict[str, Any]:
    """Returns the `quantization_config` of a model's configuration; {} if there is none."""
    found = getattr(config, "quantization_config", None)
    if found is None:
        found = getattr(config.get_text_config(decoder=True), "quantization_config", None)
    if found is None:
        return {}
    return dict(found) if isinstance(found, Mapping) else found.to_dict()


class Method(NamedTuple):
    """A `quant_method` that FastGen reads.

    Attributes:
        form: returns the format of a checkpoint with this `quantization_config`. Raises NotServed if FastGen does not
            read it.
        library_loads: whether the packages that the library needs for such checkpoints are installed.
        needs: the names of these packages.
    """

    name: str
    form: Callable[[Mapping[str, Any]], Format]
    library_loads: Callable[[], bool]
    needs: str


def method_of(values: Mapping[str, Any]) -> Method | None:
    """Returns the method of a `quantization_config`; None if FastGen does not know it."""
    method = values.get("quant_method")
    return _METHODS.get(str(getattr(method, "value", method)))


def _gptq(values: Mapping[str, Any]) -> Format:
    _check_bits("gptq", values.get("bits"))
    for overriding in _mappings(values.get("dynamic")):
        _check_bits("gptq", overriding.get("bits", 4))
    version = values.get("checkpoint_format") or values.get("format") or "gptq"
    if version not in ("gptq", "gptq_v2"):
        raise NotServed(f"gptq: format {version}")
    if values.get("is_marlin_format"):
        raise NotServed("gptq: format marlin")
    sizes = _group_sizes(values, *_mappings(values.get("dynamic")))
    return GPTQ(lowered=version == "gptq", symmetric=bool(values.get("sym", True)), group_sizes=sizes)


def _awq(values: Mapping[str, Any]) -> Format:
    bits = values.get("bits", values.get("w_bit", 4))
    if bits != 4:
        raise NotServed(f"awq: {bits} bits")
    version = str(values.get("version") or values.get("format") or "gemm").lower()
    if version != "gemm":
        raise NotServed(f"awq: format {version}")
    if not values.get("zero_point", True):
        raise NotServed("awq: without zero points")
    return AWQ(group_sizes=_group_sizes(values))


def _compressed_tensors(values: Mapping[str, Any]) -> Format:
    groups = _mappings(values.get("config_groups"))
    if not groups:
        raise NotServed("compressed-tensors: no config_groups")
    for group in groups:
        form = group.get("format") or values.get("format")
        if form != "pack-quantized":
            raise NotServed(f"compressed-tensors: format {form}")
        weights = group.get("weights")
        if not isinstance(weights, Mapping):
            raise NotServed("compressed-tensors: a group without weights")
        if weights.get("type", "int") != "int":
            raise NotServed(f"compressed-tensors: weights of type {weights.get('type')}")
        _check_bits("compressed-tensors", weights.get("num_bits", 8))
        if weights.get("strategy") not in ("group", "channel"):
            raise NotServed(f"compressed-tensors: strategy {weights.get('strategy')}")
        if group.get("input_activations") or group.get("output_activations"):
            raise NotServed("compressed-tensors: low-bit activations")
    if values.get("kv_cache_scheme"):
        raise NotServed("compressed-tensors: a low-bit KV cache")
    if values.get("transform_config"):
        raise NotServed("compressed-tensors: transformed weights")
    sparsity = values.get("sparsity_config")
    if sparsity and (not isinstance(sparsity, Mapping) or sparsity.get("format", "dense") != "dense"):
        raise NotServed("compressed-tensors: sparse weights")
    return PackQuantized(group_sizes=_group_sizes(*(dict(group["weights"]) for group in groups)))


def _group_sizes(*values: Mapping[str, Any]) -> frozenset[int]:
    """Returns the group sizes (inputs per group) that the configuration gives; -1 for one group per row."""
    found = [each.get("group_size", each.get("q_group_size")) for each in values]
    if any(each.get("strategy") == "channel" for each in values):
        found.append(-1)
    return frozenset(int(size) for size in found if isinstance(size, int))


def _check_bits(method: str, bits: Any) -> None:
    if bits not in BITS:
        raise NotServed(f"{method}: {bits} bits")


def _mappings(values: Any) -> list[Mapping[str, Any]]:
    return [value for value in values.values() if isinstance(value, Mapping)] if isinstance(values, Mapping) else []


_METHODS = {
    method.name: method
    for method in (
        Method("gptq", _gptq, lambda: is_gptqmodel_available() and is_optimum_available(), "gptqmodel and optimum"),
        Method("awq", _awq, lambda: is_gptqmodel_available() and is_accelerate_available(), "gptqmodel and accelerate"),
        Method("compressed-tensors", _compressed_tensors, is_compressed_tensors_available, "compressed-tensors"),
    )
}
