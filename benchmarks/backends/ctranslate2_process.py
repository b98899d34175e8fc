"""Generates with CTranslate2, in a process of its own (`serve_lines.py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def load(asked: dict[str, Any]) -> tuple[str, Callable[[dict[str, Any]], list[list[int]]]]:
    import ctranslate2

    kind = ctranslate2.Translator if asked["encoder_decoder"] else ctranslate2.Generator
    engine = kind(
        asked["folder"],
        device="cpu",
        compute_type=asked["compute_type"],
        inter_threads=1,
        intra_threads=asked["threads"],
    )
    if engine.compute_type not in (asked["compute_type"], f"{asked['compute_type']}_float32"):
        raise RuntimeError(f"CTranslate2 computes {asked['compute_type']} as {engine.compute_type} here")

    def generate(work: dict[str, Any]) -> list[list[int]]:
        count, inputs = work["new_tokens"], work.get("inputs") or asked["inputs"]
        padded = inputs["input_ids"]
        # CTranslate2 gets no padding; it packs the batch itself.
        prompts = [
            [str(token) for token, is_there in zip(tokens, mask, strict=True) if is_there]
            for tokens, mask in zip(padded, inputs["attention_mask"], strict=True)
        ]
        options = {**asked["options"], "max_batch_size": len(prompts)}
        if asked["encoder_decoder"]:
            lengths = {"min_decoding_length": count, "max_decoding_length": count, "max_input_length": 0}
            results = engine.translate_batch(prompts, **lengths, **options)
            found = [tokens for result in results for tokens in result.hypotheses]
            before = [[asked["start"]]] * len(found)
        else:
            lengths = {"min_length": count, "max_length": count, "include_prompt_in_result": False}
            results = engine.generate_batch(prompts, **lengths, **options)
            found = [tokens for result in results for tokens in result.sequences]
            before = [tokens for tokens in padded for _ in range(options["num_hypotheses"])]
        widths = {len(tokens) for tokens in found}
        if len(widths) != 1:
            raise RuntimeError(f"CTranslate2 generated between {min(widths)} and {max(widths)} tokens")
        return [[*first, *map(int, tokens)] for first, tokens in zip(before, found, strict=True)]

    return ctranslate2.__version__, generate
