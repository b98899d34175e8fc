"""Memory of a low-bit model beside the size of its weights:

    python -m benchmarks.low_bit_memory MODEL [--gguf FILE] [--new-tokens N] [--activations float|int8] [--json FILE]
                                         [--python-allocator]

MODEL is a folder as `fastgen-quantize` writes it, or one with a GGUF file. A process that does nothing else has loaded
the libraries and generated with a tiny low-bit model. Then it loads MODEL, generates twice, and asks the system
what it holds. What has been added is set beside the bytes of the weights as the file has them.

What it holds is private memory of the process (RssAnon of Linux), after the C library has given back what is free, and
tensors of the model that are a file in memory, as floating-point weights of safetensors are. K/V, captured steps and
buffers are in it. Python's own allocator does not give all back that is free, so the process runs with the C library's,
unless `--python-allocator` is given.

Beside that it tells the bytes of the model's tensors, and the largest floating-point tensor that is no parameter or
buffer of the model: with a weight left behind in float, it would be as large as that.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fastgen
from fastgen import settings
from fastgen.quantization.layers import QuantizedWeight

_PROMPT = 32


def private_bytes() -> int:
    """Memory of this process that no file backs, in bytes.

    Raises:
        RuntimeError: the system does not tell.
    """
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))
    try:
        found = re.search(r"^RssAnon:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        found = None
    if found is None:
        raise RuntimeError("this system does not tell the private memory of a process: Linux does")
    return int(found[1]) * 1024


def file_bytes(folder: Path, gguf_file: str | None) -> int:
    """Bytes of the weights in the files of a checkpoint."""
    if gguf_file is not None:
        import gguf

        return sum(int(tensor.n_bytes) for tensor in gguf.GGUFReader(folder / gguf_file).tensors)
    from safetensors import safe_open

    total = 0
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            total += sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118 - it is no mapping
    return total


def tensor_bytes(tensors: Iterator[Tensor]) -> int:
    """Bytes of tensors, those that share memory counted once."""
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors if tensor.device.type == "cpu"}.values())


def mapped_bytes(tensors: Iterator[Tensor]) -> int:
    """Bytes of tensors that lie in a file, those that share memory counted once."""
    files = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, _, _, _, inode = line.split()[:5]
        if inode != "0":
            files.append([int(address, 16) for address in addresses.split("-")])
    inside = (tensor for tensor in tensors if any(start <= tensor.data_ptr() < end for start, end in files))
    return tensor_bytes(inside)


def own_tensors(model: torch.nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def strangers(model: torch.nn.Module) -> list[Tensor]:
    """Floating-point tensors of this process that are not the model's, the largest first."""
    own = {tensor.untyped_storage().data_ptr() for tensor in own_tensors(model)}
    found = [each for each in gc.get_objects() if type(each) in (Tensor, torch.nn.Parameter)]
    others = [
        each
        for each in found
        if each.is_floating_point() and each.device.type == "cpu" and each.untyped_storage().data_ptr() not in own
    ]
    return sorted(others, key=lambda tensor: -tensor.untyped_storage().nbytes())


def largest_weight(model: torch.nn.Module) -> int:
    """Bytes that the largest low-bit weight would have in float32."""
    return max(4 * layer.n * layer.k for layer in model.modules() if isinstance(layer, QuantizedWeight))


def generate(model: Any, new_tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, model.config.vocab_size, (1, _PROMPT), generator=generator)
    options = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False, "num_beams": 1}
    model.generate(tokens, attention_mask=torch.ones_like(tokens), pad_token_id=0, **options)


def warm_up() -> None:
    """Loads what the first call of anything loads."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=512, num_key_value_heads=4, **sizes)
    with settings.changed(weight_dtype="int4"):
        generate(AutoModelForCausalLM.from_config(config).eval(), 4)


def measure(folder: Path, gguf_file: str | None, new_tokens: int) -> dict[str, Any]:
    """What loading this checkpoint and generating with it adds to the memory of this process."""
    from transformers import AutoModelForCausalLM

    in_files = file_bytes(folder, gguf_file)
    named = {} if gguf_file is None else {"gguf_file": gguf_file}
    warm_up()
    before = private_bytes()
    keep = fastgen.KeepBits()
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=keep, **named).eval()
    loaded = private_bytes() + mapped_bytes(own_tensors(model))
    for _ in range(2):
        generate(model, new_tokens)
    after = private_bytes() + mapped_bytes(own_tensors(model))
    layers = [layer for layer in model.modules() if isinstance(layer, QuantizedWeight)]
    if not layers:
        raise RuntimeError(f"{folder} has no low-bit weights that FastGen keeps")
    others = strangers(model)
    return {
        "layers": len(layers),
        "file_bytes": in_files,
        "tensor_bytes": tensor_bytes(own_tensors(model)),
        "added_when_loaded": loaded - before,
        "added_after_generating": after - before,
        "largest_other_float_bytes": others[0].untyped_storage().nbytes() if others else 0,
        "largest_weight_in_float_bytes": largest_weight(model),
    }


def lines(found: dict[str, Any]) -> Iterator[str]:
    size = found["file_bytes"]
    yield f"{found['layers']} low-bit layers; weights in the files: {size / 2**20:.1f} MiB"
    for name, text in (
        ("tensor_bytes", "the model's tensors"),
        ("added_when_loaded", "memory, loaded"),
        ("added_after_generating", "memory, after two calls"),
    ):
        yield f"{text}: {found[name] / 2**20:.1f} MiB, {found[name] / size:.3f} of the weights"
    other, weight = found["largest_other_float_bytes"], found["largest_weight_in_float_bytes"]
    yield (
        f"the largest floating-point tensor besides: {other / 2**20:.2f} MiB; the largest weight would have "
        f"{weight / 2**20:.2f} MiB in float32"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.low_bit_memory", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--gguf", metavar="FILE", help="a GGUF file in the folder")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--activations", choices=("float", "int8"), default="float", help="of the kept weights")
    parser.add_argument("--captured-step", choices=("auto", "always", "never"), default="auto", help="the setting")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--python-allocator", action="store_true", help="count what Python keeps free, too")
    given = parser.parse_args()
    if not given.python_allocator and os.environ.get("PYTHONMALLOC") != "malloc":
        command = [sys.executable, "-m", __spec__.name, *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | {"PYTHONMALLOC": "malloc"})
    fastgen.enable(activations=given.activations, captured_step=given.captured_step)
    found = measure(given.model, given.gguf, given.new_tokens)
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=2) + "\n")
    print(*lines(found), sep="\n")


if __name__ == "__main__":
    sys.exit(main())
