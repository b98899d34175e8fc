"""A user's process: loads a saved model and generates, without FastGen or with it (`serve_lines.py`).

An answer has the tokens, and the counts of `fastgen.stats()` in this call: {} if FastGen was never imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def load(asked: dict[str, Any]) -> tuple[str, Callable[[dict[str, Any]], dict[str, Any]]]:
    """`asked` has "settings" for `fastgen.enable`, or None to not import FastGen, and "root", its folder."""
    import torch
    import transformers

    if asked["settings"] is not None:
        sys.path.insert(0, asked["root"])
        import fastgen

        fastgen.enable(**asked["settings"])
    if asked["threads"] is not None:
        torch.set_num_threads(asked["threads"])
    kind = transformers.AutoModelForSeq2SeqLM if asked["is_encoder_decoder"] else transformers.AutoModelForCausalLM
    model = kind.from_pretrained(asked["folder"], dtype=getattr(torch, asked["dtype"])).eval()

    def generate(work: dict[str, Any]) -> dict[str, Any]:
        count, inputs = work["new_tokens"], {name: torch.tensor(value) for name, value in work["inputs"].items()}
        tokens = model.generate(**inputs, min_new_tokens=count, max_new_tokens=count, **asked["options"])
        return {"tokens": tokens.tolist(), "stats": counted()}

    return transformers.__version__, generate


def counted() -> dict[str, Any]:
    """Returns FastGen's counts since the last time."""
    fastgen: Any = sys.modules.get("fastgen")
    if fastgen is None:
        return {}
    stats = fastgen.stats()
    fastgen.reset_stats()
    return stats
