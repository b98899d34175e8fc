"""Models of peft with adapters that change the tokens. Tests that import this are skipped where peft is not there."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fastgen
from tests.equivalence.models import BY_NAME

peft = pytest.importorskip("peft", reason="peft is not there")

# Of each family: the task, layers of attention, one that ends a feed-forward block, the embedding.
FAMILIES = {
    "llama": ("CAUSAL_LM", ["q_proj", "v_proj"], "down_proj", "embed_tokens"),
    "bart": ("SEQ_2_SEQ_LM", ["q_proj", "v_proj"], "fc2", "shared"),
    "t5": ("SEQ_2_SEQ_LM", ["q", "v"], "wo", "shared"),
}
KINDS: dict[str, Callable[[list[str], str, str], Any]] = {
    "lora": lambda layers, last, embedding: peft.LoraConfig(r=4, target_modules=[*layers, last]),
    "lora-embedding": lambda layers, last, embedding: peft.LoraConfig(r=4, target_modules=[*layers, embedding]),
    "dora": lambda layers, last, embedding: peft.LoraConfig(r=4, use_dora=True, target_modules=layers),
    "ia3": lambda layers, last, embedding: peft.IA3Config(target_modules=[*layers, last], feedforward_modules=[last]),
    "saved": lambda layers, last, embedding: peft.LoraConfig(r=4, target_modules=layers, modules_to_save=["lm_head"]),
}
OPTIONS: list[dict[str, Any]] = [{}, {"num_beams": 3}, {"do_sample": True, "top_k": 30}]
LONG: dict[str, Any] = {"max_new_tokens": 24, "eos_token_id": None}


def draw(model: Any, seed: int, part: str = "") -> None:
    """Adapters begin as what changes nothing: here, each changes the tokens in its own way."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if part in name and any(each in name for each in ("lora_", "ia3_", "modules_to_save", "prompt")):
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))


def config_of(name: str, kind: str = "lora", **options: Any) -> Any:
    task, *layers = FAMILIES[name]
    config = KINDS[kind](*layers)
    for option, value in {"task_type": task, **options}.items():
        setattr(config, option, value)
    return config


def adapted(name: str, kind: str = "lora", **options: Any) -> Any:
    model = peft.get_peft_model(copy.deepcopy(BY_NAME[name].build()), config_of(name, kind, **options))
    draw(model, 1)
    return model.eval()


def alone(model: Any, prompt: list[int], seed: int | None = None, **options: Any) -> Any:
    """What peft's `generate` gives on the library's code."""
    if seed is not None:
        torch.manual_seed(seed)
    with fastgen.disabled():
        return model.generate(input_ids=torch.tensor([prompt]), **options)
