"""SmolLM2-135M-Instruct, a trained language model, on chat prompts: the performance that one user or a few get.

The model comes from `python -m benchmarks.smollm2 FOLDER`. Its weights are unpacked from 4 bits. Workloads in float32
have weights that need 32 bits. "from-bfloat16" in a name means bfloat16 values in float32, as a user has who loads the
published checkpoint with `dtype=torch.float32`. "smollm2-file" compares backends that read the 4-bit file unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import smollm2
from benchmarks.workload import Generation

QUESTIONS = (
    "Explain in simple words why the sky is blue.",
    "Write a short story about a fox who learns to swim.",
    "What are three good ways to save water at home?",
    "Give me a recipe for a simple vegetable soup.",
    "How does a bicycle stay upright when it moves?",
    "Describe the city of Lisbon to a child.",
    "What is the difference between a virus and a bacterium?",
    "Write a polite letter that asks a neighbour to be quiet.",
    "Name some books for someone who likes the sea.",
    "How do I plant tomatoes on a balcony?",
    "Why do leaves change their colour in autumn?",
    "Tell me what to pack for a week in the mountains.",
    "What did people eat in the Middle Ages?",
    "Explain to me what a prime number is.",
    "How can I learn to play the guitar alone?",
    "Write four lines about the first snow of the year.",
)

_NOISE = 2e-3
# llama.cpp has no beams. The other backends' weights were unpacked from Q4_1.
_LLAMA_CPP = {"float32": ("llama.cpp-f32", "llama.cpp-q4_1"), "bfloat16": ("llama.cpp-bf16",)}


def smollm2_instruct() -> Any:
    """Loads the model in float32, from the folder in the environment variable."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(smollm2.folder(), dtype=torch.get_default_dtype())


def smollm2_instruct_from_bfloat16() -> Any:
    """Returns the model with bfloat16 values in float32 weights, as in its published checkpoint."""
    model = smollm2_instruct()
    for weight in model.parameters():
        weight.data = weight.data.to(torch.bfloat16).to(torch.float32)
    return model


def smollm2_of_32_bits() -> Any:
    """Returns the model with weights that need all bits of float32: unpacked weights are 4 bits times a scale."""
    model = smollm2_instruct().float()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1 + _NOISE * torch.randn_like(weight))
    return model.to(torch.get_default_dtype())


def tokenizer_of(folder: Path | str, padding_side: str = "left") -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side=padding_side)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer


def chat_prompts(folder: Path, count: int, questions: Sequence[str] = QUESTIONS) -> dict[str, Tensor]:
    """Returns the first questions in the chat template, left-padded: [count, length] of tokens and their mask."""
    tokenizer = tokenizer_of(folder)
    chats = [[{"role": "user", "content": question}] for question in questions[:count]]
    prompts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    encoded = tokenizer(prompts, return_tensors="pt", padding=True)
    return {name: encoded[name] for name in ("input_ids", "attention_mask")}


@dataclass(frozen=True, kw_only=True)
class Chat(Generation):
    """Uses the first of some `questions` in the chat template, left-padded."""

    questions: tuple[str, ...] = QUESTIONS
    length: int = 40
    needs_smollm2: bool = True

    def make_inputs(self, model: Any) -> dict[str, Tensor]:
        folder = smollm2.folder()
        assert folder is not None
        model.generation_config.pad_token_id = tokenizer_of(folder).pad_token_id
        prompts = chat_prompts(folder, self.batch, self.questions)
        return {name: each.to(model.device) for name, each in prompts.items()}


def _chat(batch: int, beams: int, dtype: str = "float32", further: tuple[str, ...] = ()) -> Chat:
    how = "greedy" if beams == 1 else f"{beams} beams"
    kind = "32-bit weights" if dtype == "float32" else dtype
    return Chat(
        name=f"smollm2-b{batch}{'' if beams == 1 else f'-beam{beams}'}{'' if dtype == 'float32' else f'-{dtype}'}",
        title=f"SmolLM2-135M, {kind}, batch {batch}, {how}, chat",
        shape=smollm2_of_32_bits if dtype == "float32" else smollm2_instruct,
        batch=batch,
        new_tokens=96,
        options={"do_sample": False, **({"num_beams": beams} if beams > 1 else {})},
        dtype=dtype,
        further_backends=("fastgen-hooks", "openvino", *(_LLAMA_CPP[dtype] if beams == 1 else ()), *further),
    )


def _from_bfloat16(work: Chat) -> Chat:
    return replace(
        work,
        name=f"{work.name}-from-bfloat16",
        title=work.title.replace("32-bit weights", "bfloat16 weights in float32"),
        shape=smollm2_instruct_from_bfloat16,
        further_backends=("openvino", "fastgen-gguf"),
    )


_INT8 = ("openvino-int8", "fastgen-int8")
_ONE = _chat(1, 1, further=(*_INT8, "llama.cpp-q8_0", "openvino-int4", "fastgen-int4"))
_FLOAT = [_ONE, _chat(4, 1, further=_INT8), _chat(16, 1, further=_INT8), _chat(4, 4)]
WORKLOADS = [
    *_FLOAT,
    *map(_from_bfloat16, _FLOAT),
    Chat(
        name="smollm2-file",
        title="SmolLM2-135M, the file of 4 bits, batch 1, greedy, chat",
        shape=smollm2_instruct,
        batch=1,
        new_tokens=64,
        options={"do_sample": False},
        repetitions=7,
        further_backends=("fastgen-gguf", "fastgen-gguf-int8", "llama.cpp-q4_1", "openvino-genai"),
    ),
    _chat(1, 1, "bfloat16"),
    _chat(16, 1, "bfloat16"),
    _chat(4, 4, "bfloat16"),
]
