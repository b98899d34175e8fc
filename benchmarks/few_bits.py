"""Weights of 4 and 8 bits beside llama.cpp and float32: one sequence, a long prompt, and perplexity.

    python -m benchmarks.few_bits FOLDER [--only ROW ...] [--repetitions N] [--threads N] [--text FILE] [--help]

FOLDER is what `python -m benchmarks.smollm2 FOLDER` has made. Sides run in turn. A row has the medians of their times,
and their quotients with their ranges. llama.cpp needs the environment of `make bench-llama`, OpenVINO GenAI that of
`make bench-openvino`.

| row | what |
| --- | --- |
| file | the 4 bits of the GGUF file, activations in float and int8, llama.cpp, OpenVINO GenAI: a prompt of 40, 64 new |
| int8 | `weight_dtype="int8"` and llama.cpp in Q8_0: the same |
| llama-1b | the shape of Llama-1B: `weight_dtype="int4"` and llama.cpp in Q4_0: a prompt of 32, and 64 new tokens |
| prompt | a prompt of 512 tokens and one new token, with `weight_dtype="int4"` and in float32 |
| perplexity | of the text, in float32 and in 8 bits, and with the weights of the file and activations in 8 bits |

The row of Llama-1B also tells the bytes of weights that a step reads in a second, as a part of a large copy. It takes
10 GB of memory, and 4 GB in the folder for temporary files.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fastgen
from benchmarks import smollm2
from benchmarks.backends import elsewhere, llama_cpp
from benchmarks.machine import ROOT
from benchmarks.measure import alternate, copy_bandwidth, format_seconds, timed
from benchmarks.workloads.shapes import llama_1b
from fastgen import settings
from fastgen.optimizer.transformers.call import fast_layers

_CPU = torch.device("cpu")
_COPY_BYTES = 2**28
_TEXT = ROOT / "examples" / "data" / "heldout.ref.txt"
_LINES = 250  # the other half is what weights are calibrated on (docs/quantize.md)
_WINDOW = 1024  # tokens that are predicted from each other
_OPENVINO_GENAI = Path(llama_cpp.__file__).with_name("openvino_genai_process.py")
_GREEDY = {"do_sample": False, "num_beams": 1}
# Names of tensors in a GGUF file, by those in a Llama of Transformers.
_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def prompt(model: Any, length: int) -> Tensor:
    """[1, length] of random tokens."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(10, model.config.vocab_size - 10, (1, length), generator=generator)


def generate(model: Any, tokens: Tensor, count: int, **settings_of_side: Any) -> Tensor:
    """So many new tokens, with these settings of FastGen."""
    with settings.changed(**settings_of_side):
        mask = torch.ones_like(tokens)
        lengths = {"max_new_tokens": count, "min_new_tokens": count}
        return model.generate(tokens, attention_mask=mask, pad_token_id=0, **lengths, **_GREEDY)


class OtherLibrary:
    """A library in a process of its own, which reads a GGUF file and makes greedy tokens of a prompt."""

    def __init__(self, name: str, environment: str, script: Path, **question: Any) -> None:
        self._process = elsewhere.Process(name, elsewhere.python_of(environment, name), script)
        self._process.ask({**question, "folder": str(self._process.folder), "threads": torch.get_num_threads()})

    def __enter__(self) -> OtherLibrary:
        return self

    def __exit__(self, *exception: Any) -> None:
        self._process.close()

    def generate(self, count: int) -> Any:
        return self._process.ask({"new_tokens": count})


def compared(sides: dict[str, Callable[[], Any]], repetitions: int) -> str:
    """Medians of all sides, and how many times as fast as each other one the first one is."""
    for run in sides.values():
        for _ in range(3):  # weights are packed, and steps recorded
            run()
    found = alternate({name: partial(timed, run) for name, run in sides.items()}, repetitions)
    times = {name: [seconds for seconds, _ in runs] for name, runs in found.items()}
    medians = {name: statistics.median(each) for name, each in times.items()}
    first, *others = times
    parts = []
    for name in others:
        pairs = [other / one for one, other in zip(times[first], times[name], strict=True)]
        ratio = medians[name] / medians[first]
        parts.append(f"{ratio:.2f} times as fast as {name} ({min(pairs):.2f} to {max(pairs):.2f})")
    return f"{', '.join(f'{name} {format_seconds(each)}' for name, each in medians.items())}: {', '.join(parts)}"


def against_others(
    model: Any,
    file: Path,
    precision: str,
    length: int,
    count: int,
    repetitions: int,
    *,
    openvino: bool = False,
    **settings_of_side: Any,
) -> str:
    """FastGen beside llama.cpp, and `openvino`, which reads a file as it is."""
    tokens, end = prompt(model, length), model.generation_config.eos_token_id
    inputs = {"input_ids": tokens.tolist(), "attention_mask": torch.ones_like(tokens).tolist()}
    question = {"file": str(file), "precision": precision, "inputs": inputs, "new_tokens": count}
    question["end"] = end if isinstance(end, list) else [end]
    others = {f"llama.cpp {precision}": ("llama.cpp", "llama", llama_cpp.LlamaCpp.script)}
    if openvino:
        others["OpenVINO GenAI"] = ("OpenVINO GenAI", "openvino", _OPENVINO_GENAI)
    sides = {"FastGen": partial(generate, model, tokens, count, packed_weights="keep", **settings_of_side)}
    with ExitStack() as stack:
        missing = []
        for name, started in others.items():
            try:
                other = stack.enter_context(OtherLibrary(*started, **question))
            except elsewhere.Unsupported as reason:
                missing.append(f"; {name} not measured, {reason}")
                continue
            sides[name] = partial(other.generate, count)
        if len(sides) == 1:
            raise elsewhere.Unsupported("".join(missing).removeprefix("; "))
        return compared(sides, repetitions) + "".join(missing)


def write_gguf(model: Any, path: Path) -> None:
    """A Llama of Transformers as a GGUF file without a tokenizer: matrices in float16, the rest in float32."""
    import gguf

    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(groups)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.hidden_size // heads)
    writer.add_rope_freq_base(float(config.rope_parameters["rope_theta"]))
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(1)
    for name, weight in model.named_parameters():
        rotary = {"q_proj": heads, "k_proj": groups}.get(name.split(".")[-2])
        weight = weight.detach() if rotary is None else _interleaved(weight.detach(), rotary)
        writer.add_tensor(gguf_name(name), weight.numpy() if weight.dim() == 1 else weight.half().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str) -> str:
    *path, kind = name.split(".")
    if path[:2] != ["model", "layers"]:
        return f"{_GGUF_NAMES['.'.join(path)]}.{kind}"
    return f"blk.{path[2]}.{_GGUF_NAMES['.'.join(path[3:])]}.{kind}"


def _interleaved(weight: Tensor, heads: int) -> Tensor:
    """Rows of rotary positions as llama.cpp has them: the two that turn together lie next to each other."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()


def file_row(given: argparse.Namespace) -> Iterator[str]:
    from transformers import AutoModelForCausalLM

    for activations in ("float", "int8"):
        keep = fastgen.KeepBits(activations=activations)
        model = AutoModelForCausalLM.from_pretrained(
            given.folder, gguf_file=smollm2.GGUF, quantization_config=keep
        ).eval()
        file = given.folder / smollm2.GGUF
        line = against_others(model, file, "Q4_1", 40, 64, given.repetitions, openvino=True)
        yield f"activations in {activations}: {line}"


def int8_row(given: argparse.Namespace) -> Iterator[str]:
    file = given.folder / smollm2.GGUF
    yield against_others(_loaded(given), file, "Q8_0", 40, 64, given.repetitions, weight_dtype="int8")


def llama_1b_row(given: argparse.Namespace) -> Iterator[str]:
    model = llama_1b().eval()
    few = {"weight_dtype": "int4", "weight_group_size": 64}
    with ExitStack() as stack:
        file = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fastgen-benchmark-")), "model.gguf")
        write_gguf(model, file)
        yield against_others(model, file, "Q4_0", 32, 64, given.repetitions, **few)
    tokens = prompt(model, 32)
    run = partial(generate, model, tokens, packed_weights="keep", **few)
    longer, shorter = (statistics.median(timed(partial(run, n))[0] for _ in range(3)) for n in (48, 16))
    step = (longer - shorter) / 32
    read = bytes_in_few_bits(model, 4, 64)
    speed = read / step / 1e9
    copy = copy_bandwidth(_CPU, _COPY_BYTES) / 1e9
    yield f"a step takes {format_seconds(step)}: {speed:.1f} GB/s of {copy:.1f} GB/s of a copy, {speed / copy:.2f}"


def bytes_in_few_bits(model: Any, bits: int, group_size: int) -> int:
    """Of the matrices of a step, with a scale in float16 for each group. The output layer may be the embedding."""
    matrices = [module.weight for module in model.modules() if isinstance(module, torch.nn.Linear)]
    return int(sum(weight.numel() for weight in matrices) * (bits + 16 / group_size) / 8)


def prompt_row(given: argparse.Namespace) -> Iterator[str]:
    model = _loaded(given)
    run = partial(generate, model, prompt(model, 512), 1, packed_weights="keep")
    # Kept weights have one form at a time, so there are two models.
    other = _loaded(given)
    plain = partial(generate, other, prompt(other, 512), 1)
    yield compared({"int4": partial(run, weight_dtype="int4"), "float32": plain}, given.repetitions)


def perplexity(model: Any, tokens: Tensor, **settings_of_side: Any) -> float:
    """Of [1, n] tokens, in pieces. Inputs are rounded as in generation."""
    total = 0.0
    with settings.changed(packed_weights="keep", **settings_of_side), torch.inference_mode(), fast_layers(model):
        for piece in tokens.split(_WINDOW, dim=1):
            logits = model(input_ids=piece, use_cache=False).logits[0, :-1].float()
            total += float(torch.nn.functional.cross_entropy(logits, piece[0, 1:], reduction="sum"))
    return math.exp(total / (tokens.shape[1] - len(tokens.split(_WINDOW, dim=1))))


def perplexity_row(given: argparse.Namespace) -> Iterator[str]:
    from transformers import AutoTokenizer

    text = "\n".join(given.text.read_text(encoding="utf-8").splitlines()[-_LINES:])
    tokens = AutoTokenizer.from_pretrained(given.folder)(text, return_tensors="pt").input_ids
    model = _loaded(given)
    exact = perplexity(model, tokens)
    yield f"float32: {exact:.3f} ({tokens.shape[1]} tokens)"
    for size in (64, 32):
        found = perplexity(model, tokens, weight_dtype="int8", weight_group_size=size)
        yield f"int8, groups of {size}: {found:.3f}, {found / exact - 1:+.2%}"
    if not (given.folder / smollm2.GGUF).exists():
        return
    kept = _loaded(given, gguf_file=smollm2.GGUF, quantization_config=fastgen.KeepBits())
    for activations in ("float", "int8"):
        found = perplexity(kept, tokens, activations=activations)
        yield f"the file's weights, activations in {activations}: {found:.3f}, {found / exact - 1:+.2%}"


def _loaded(given: argparse.Namespace, **named: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(given.folder, dtype=torch.float32, **named).eval()


ROWS: dict[str, Callable[[argparse.Namespace], Iterator[str]]] = {
    "file": file_row,
    "int8": int8_row,
    "llama-1b": llama_1b_row,
    "prompt": prompt_row,
    "perplexity": perplexity_row,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.few_bits", description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help=f"as `{smollm2.__name__}` makes it")
    names = list(ROWS)
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="ROW", help=", ".join(names))
    parser.add_argument("--repetitions", type=int, default=5, metavar="N", help="of each side (default: %(default)s)")
    parser.add_argument("--threads", type=int, metavar="N", help="of torch and the other libraries (default: torch's)")
    parser.add_argument("--text", type=Path, default=_TEXT, help="its last 250 lines are predicted")
    given = parser.parse_args(arguments)
    fastgen.enable()
    if given.threads:
        torch.set_num_threads(given.threads)
    for name in given.only:
        try:
            for line in ROWS[name](given):
                print(f"{name}: {line}", flush=True)
        except elsewhere.Unsupported as reason:
            print(f"{name}: not measured, {reason}", flush=True)
        gc.collect()
    return 0


if __name__ == "__main__":
    sys.exit(main())
