"""Generates with llama.cpp, in an environment without FastGen (`serve_lines.py`).

Calls the functions of its library as its own programs do: one batch for a step of all sequences.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

# The file type to convert to (`llama_ftype`), and the type of K and V (`ggml_type`): values of the file format, one of
# which the library's Python module lacks.
_PRECISIONS = {"F32": (0, 0), "BF16": (32, 30), "Q8_0": (7, 1), "Q4_0": (2, 1), "Q4_1": (None, 1)}


def load(asked: dict[str, Any]) -> tuple[str, Callable[[dict[str, int]], list[list[int]]]]:
    import llama_cpp

    file_type, cache_type = _PRECISIONS[asked["precision"]]
    file = asked["file"]
    if file_type is not None:
        file = _converted(llama_cpp, file, Path(asked["folder"], "model.gguf"), file_type)
    padded = asked["inputs"]["input_ids"]
    # llama.cpp gets no padding.
    prompts = [
        [token for token, is_there in zip(tokens, mask, strict=True) if is_there]
        for tokens, mask in zip(padded, asked["inputs"]["attention_mask"], strict=True)
    ]
    model = _model(llama_cpp, file, asked["precision"])
    parameters = llama_cpp.llama_context_default_params()
    parameters.n_seq_max = len(prompts)
    parameters.n_ctx = len(prompts) * (max(map(len, prompts)) + asked["new_tokens"])
    parameters.n_batch = sum(map(len, prompts))
    parameters.n_threads = parameters.n_threads_batch = asked["threads"]
    parameters.type_k = parameters.type_v = cache_type
    context = llama_cpp.llama_init_from_model(model, parameters)
    batch = llama_cpp.llama_batch_init(parameters.n_batch, 0, 1)
    sampler = _greedy(llama_cpp, model, asked["end"])

    def step(pieces: Iterable[tuple[int, list[int]]]) -> list[int]:
        """Returns the next token of each sequence after these tokens, which start at this position."""
        last = []
        batch.n_tokens = 0
        for row, (start, tokens) in enumerate(pieces):
            for position, token in enumerate(tokens, start):
                place = batch.n_tokens
                batch.token[place], batch.pos[place] = token, position
                batch.n_seq_id[place], batch.seq_id[place][0], batch.logits[place] = 1, row, 0
                batch.n_tokens += 1
            last.append(batch.n_tokens - 1)
            batch.logits[last[-1]] = 1
        if llama_cpp.llama_decode(context, batch) != 0:
            raise RuntimeError("llama.cpp could not decode the batch")
        return [llama_cpp.llama_sampler_sample(sampler, context, place) for place in last]

    def generate(work: dict[str, int]) -> list[list[int]]:
        count = work["new_tokens"]
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), False)
        steps = [step((0, prompt) for prompt in prompts)]
        while len(steps) < count:
            starts = [len(prompt) + len(steps) - 1 for prompt in prompts]
            steps.append(step((start, [token]) for start, token in zip(starts, steps[-1], strict=True)))
        return [[*before, *new] for before, new in zip(padded, zip(*steps, strict=True), strict=True)]

    return llama_cpp.__version__, generate


def _converted(llama_cpp: Any, file: str, target: Path, file_type: int) -> str:
    """Writes the file with another matrix type."""
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = file_type
    parameters.allow_requantize = True
    if llama_cpp.llama_model_quantize(file.encode(), str(target).encode(), ctypes.byref(parameters)) != 0:
        raise RuntimeError(f"llama.cpp could not convert {file}")
    return str(target)


def _model(llama_cpp: Any, file: str, precision: str) -> Any:
    """Loads the model, and checks that its weights have the reported precision."""
    parameters = llama_cpp.llama_model_default_params()
    # Its AMX kernels for 8-bit or 4-bit weights can crash the process (ggml-org/llama.cpp, issue 20824).
    parameters.use_extra_bufts = False
    model = llama_cpp.llama_model_load_from_file(file.encode(), parameters)
    said = ctypes.create_string_buffer(256)
    llama_cpp.llama_model_desc(model, said, len(said))
    if precision not in said.value.decode():
        raise RuntimeError(f"the weights are not {precision}: {said.value.decode()}")
    return model


def _greedy(llama_cpp: Any, model: Any, end: list[int]) -> Any:
    """Makes a sampler of the likeliest token that does not end a sequence."""
    sampler = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
    size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    never = (llama_cpp.llama_logit_bias * len(end))(*[(token, float("-inf")) for token in end])
    llama_cpp.llama_sampler_chain_add(sampler, llama_cpp.llama_sampler_init_logit_bias(size, len(end), never))
    llama_cpp.llama_sampler_chain_add(sampler, llama_cpp.llama_sampler_init_greedy())
    return sampler
