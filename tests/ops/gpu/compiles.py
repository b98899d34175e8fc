"""Compiles what the kernels are launched with for a GPU that is not there; run by test_compiles.py.

    python -m tests.ops.gpu.compiles CASE ...

Calls a public function on tensors that exist on the CPU only, with the launch replaced by the compiler. Prints a JSON
object per kernel: name, bytes of shared memory, and what the assembler says of registers and spills.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fastgen.ops import gpu as package
from tests.ops.gpu.test_compiles import CASES, gpu_of

_case = ""
_TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
    torch.uint8: "u8",
}


def compile_launch(kernel: Any, grid: tuple[int, ...], arguments: Any, **options: Any) -> None:
    """In place of `fastgen.ops.gpu.launch`: compiles for the target, specialised as a launch would be."""
    names = [parameter.name for parameter in kernel.params]
    settings = {key: options.pop(key) for key in ("num_warps", "num_stages") if key in options}
    values = dict(zip(names, arguments, strict=False)) | options
    signature, constants, attributes = {}, {}, {}
    for place, parameter in enumerate(kernel.params):
        name, value = parameter.name, values[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = "*" + _TYPES[value.dtype]
            attributes[(place,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif value == 1:
            signature[name], constants[name] = "constexpr", 1
        else:
            signature[name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0:
                attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", gpu_of(_case)[0], 32), options=settings)
    report(kernel=kernel.__name__, shared=compiled.metadata.shared, **resources(compiled))


def report(**what: Any) -> None:
    print(json.dumps({"case": _case, **what}), flush=True)


def resources(compiled: Any) -> dict[str, Any]:
    """Registers, and bytes of local memory (spilled registers among them), from the binary."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        return {}
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder, "kernel.cubin")
        binary.write_bytes(compiled.asm["cubin"])
        said = subprocess.run([tool, "--dump-resource-usage", binary], capture_output=True, text=True).stdout
    found: dict[str, Any] = {}
    for word in said.split():
        key, _, value = word.partition(":")
        if key in ("REG", "STACK", "LOCAL") and value.isdigit():
            found[key.lower()] = int(value)
    # Loads that are under way while the block before is worked on.
    found["async_copies"] = "cp.async.cg" in compiled.asm["ptx"]
    found["tensor_cores"] = any(word in compiled.asm["ptx"] for word in ("mma.sync", "wgmma"))
    return found


def main() -> None:
    os.environ.pop("TRITON_INTERPRET", None)
    package.launch = compile_launch
    package.available = lambda *tensors: True
    package.limits = lambda device: (132, gpu_of(_case)[1])
    global _case
    for _case in sys.argv[1:]:
        try:
            CASES[_case]()
        except Exception as error:
            report(kernel="?", error=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
