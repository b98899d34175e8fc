"""Tiny models with low-bit linear layers, written as checkpoints of each format."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from fastgen.quantization.checkpoint import QuantizedTensor, dequantized
from tests.quantization import definitions, tiny
from tests.quantization.definitions import random_weight

VOCABULARY = 96


def llama(intermediate_size: int = 96, tied: bool = False) -> PreTrainedModel:
    return tiny.llama(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=intermediate_size, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied, pad_token_id=None,
    )  # fmt: skip


def gpt2() -> PreTrainedModel:
    return tiny.gpt2(vocab_size=VOCABULARY, n_embd=64, n_head=4, initializer_range=0.02)


def bart() -> PreTrainedModel:
    return tiny.bart(
        vocab_size=VOCABULARY, d_model=64, encoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=96, decoder_ffn_dim=96, init_std=0.02,
    )  # fmt: skip


MODELS: dict[str, Callable[[], PreTrainedModel]] = {"llama": llama, "gpt2": gpt2, "bart": bart}


def gptq_config(bits: int = 4, **others: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": 16, "desc_act": False, "sym": True, **others}


def awq_config(**others: Any) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm", **others}


def pack_config(bits: int = 4, weights: dict[str, Any] | None = None, **others: Any) -> dict[str, Any]:
    scheme: dict[str, Any] = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": 16}
    scheme |= {"dynamic": False, **(weights or {})}
    group = {"targets": ["Linear"], "weights": scheme, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head"], **others,
    }  # fmt: skip


class Case:
    """A format, with how the weights are drawn and what the configuration says."""

    def __init__(
        self, write: Callable[[QuantizedTensor], dict[str, Tensor]], config: dict[str, Any], **drawn: Any
    ) -> None:
        self.write, self.config, self.drawn = write, config, drawn


def _asymmetric() -> dict[str, Any]:
    return pack_config(weights={"symmetric": False})


CASES = {
    "gptq": Case(definitions.gptq, gptq_config()),
    "gptq-8-bits": Case(definitions.gptq, gptq_config(8), bits=8),
    "gptq-asymmetric": Case(definitions.gptq, gptq_config(sym=False), symmetric=False),
    "gptq-act-order": Case(definitions.gptq, gptq_config(desc_act=True), act_order=True),
    "gptq-version-2": Case(
        lambda weight: definitions.gptq(weight, version=2),
        gptq_config(sym=False, checkpoint_format="gptq_v2"),
        symmetric=False,
    ),
    "gptq-says-1-holds-2": Case(lambda weight: definitions.gptq(weight, version=2), gptq_config()),
    "awq": Case(definitions.awq, awq_config(), symmetric=False),
    "pack": Case(definitions.pack_quantized, pack_config()),
    "pack-8-bits": Case(definitions.pack_quantized, pack_config(8), bits=8),
    "pack-asymmetric": Case(definitions.pack_quantized, _asymmetric(), symmetric=False),
    "pack-act-order": Case(definitions.pack_quantized, pack_config(weights={"actorder": "group"}), act_order=True),
    "pack-channels": Case(
        definitions.pack_quantized, pack_config(weights={"strategy": "channel", "group_size": None}), group_size=None
    ),
}


def quantize(model: PreTrainedModel, case: Case) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """The model with weights that were quantised and unpacked, and the tensors of its checkpoint."""
    model = copy.deepcopy(model).eval()
    kept = {id(parameter) for parameter in _untied(model).values()}
    stored = {name: value for name, value in model.state_dict(keep_vars=True).items() if id(value) in kept}
    tensors = {name: value.detach() for name, value in stored.items()}
    for name, layer in model.named_modules():
        if not isinstance(layer, (nn.Linear, Conv1D)) or name == "lm_head":
            continue
        weight = layer.weight if isinstance(layer, nn.Linear) else layer.weight.t()
        group_size = case.drawn.get("group_size", 16) or weight.shape[1]
        few = random_weight(*weight.shape, **{**case.drawn, "group_size": group_size})
        values = dequantized(few, torch.float32)
        layer.weight.data = values if isinstance(layer, nn.Linear) else values.t().contiguous()
        del tensors[f"{name}.weight"]
        tensors |= {f"{name}.{key}": value for key, value in case.write(few).items()}
    return model, tensors


def _untied(model: PreTrainedModel) -> dict[str, Tensor]:
    """The parameters without those that are another one's."""
    tied = set(model.all_tied_weights_keys)
    return {name: value for name, value in model.named_parameters(remove_duplicate=False) if name not in tied}


def save(folder: Path, model: PreTrainedModel, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """A checkpoint of these tensors."""
    folder.mkdir(exist_ok=True)
    values = {**model.config.to_dict(), "architectures": [type(model).__name__], "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps({**values, "quantization_config": config}))
    tied = set(model.all_tied_weights_keys)
    saved = {name: tensor.contiguous() for name, tensor in tensors.items() if name not in tied}
    save_file(saved, folder / "model.safetensors", metadata={"format": "pt"})


def inputs_of(model: PreTrainedModel) -> dict[str, Tensor]:
    tokens = torch.randint(3, VOCABULARY, (2, 7))
    found = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    found["attention_mask"][0, : 2 if not model.config.is_encoder_decoder else 0] = 0
    return found | ({"decoder_input_ids": tokens[:, :4]} if model.config.is_encoder_decoder else {})
