"""Speculative decoding: seconds of Transformers, of FastGen without a draft and with one, in turn, on real weights.

    python -m benchmarks.speculation FOLDER [--only NAME ...] [--repetitions N] [--new-tokens N] [--transformers]

FOLDER holds SmolLM2-135M-Instruct (`python -m benchmarks.smollm2 FOLDER`); BART is the model in examples/. Steps are
recorded, and their parts measured, before anything is timed. Float32 tokens must be those of Transformers.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

import fastgen

ROOT = Path(__file__).parent.parent
QUESTIONS = (
    "Explain why the sky is blue in simple terms.",
    "How do I boil an egg? Give every step.",
    "Describe how a bicycle works.",
    "What should I pack for a week in the mountains?",
)
TEXT = (
    "The harbour was quiet in the early morning. Three fishing boats lay at the quay, and a thin mist hung over the "
    "water. Old Martin sat on a crate and mended his nets, as he had done for forty years. The gulls waited for him to "
    "finish his breakfast. At seven the bell of the church rang, and the first children ran down the hill to school. "
)
# Answers that repeat nothing of the prompt.
UNSUITED = tuple(
    f"Invent {what}." for what in (
        "ten unusual names for a cat", "a short poem about rust", "five odd inventions", "a riddle about a lighthouse",
        "a list of imaginary spices", "a dialogue of two clouds", "seven titles of novels", "a recipe with moonlight",
        "a new sport and its rules", "an insult of a polite pirate", "three proverbs of a desert people",
        "a lullaby for a robot", "names of eight fantastic rivers", "a weather report from Mars",
        "the first lines of a thriller", "a toast for a mathematician", "six slogans for a slow train",
        "a letter from a forgotten umbrella", "four superstitions of sailors", "the menu of a restaurant under water",
    )
)  # fmt: skip


class Case(NamedTuple):
    """A row of the table: what is generated, and what drafts in the side that has a draft."""

    name: str
    model: str
    prompts: tuple[str, ...]
    options: dict[str, Any]
    setting: str = "off"
    draft: dict[str, Any] = {}
    dtype: torch.dtype = torch.float32


LOOKUP = {"prompt_lookup_num_tokens": 8, "max_matching_ngram_size": 3}
REWRITE = tuple(f"Repeat this text word by word, and change only the name to {name}. {TEXT}" for name in
                ("Peter", "Anna", "John", "Maria", "Paul", "Ruth", "Karl", "Eve"))  # fmt: skip
SAMPLED = {"do_sample": True, "temperature": 0.7}
CASES = (
    Case("own weights, 1 sequence", "smollm2", QUESTIONS[:1], {}, "int8"),
    Case("own weights, 4 sequences", "smollm2", QUESTIONS, {}, "int8"),
    Case("own weights, 1 sequence, sampled at 0.7", "smollm2", QUESTIONS[:1], SAMPLED, "int8"),
    Case("own weights, 1 sequence, bfloat16", "smollm2", QUESTIONS[:1], {}, "int8", dtype=torch.bfloat16),
    Case("prompt lookup, rewriting, 1 sequence", "smollm2", REWRITE[:1], {}, draft=LOOKUP),
    Case("prompt lookup, rewriting, 8 sequences", "smollm2", REWRITE, {}, draft=LOOKUP),
    Case("own weights, BART, 1 sequence", "bart", (), {"num_beams": 1}, "int8"),
    Case("own weights, BART, 8 sequences", "bart", (), {"num_beams": 1}, "int8"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    rows = []
    for case in CASES:
        if not options.only or case.name in options.only:
            rows.append(measured(case, options))
            print(rows[-1], flush=True)
    if not options.only or "unsuited" in options.only:
        print(unsuited(options), flush=True)
    return 0


def measured(case: Case, options: argparse.Namespace) -> str:
    """A row: seconds of each side, medians, and whether the tokens are the same."""
    model, inputs = _load(case, options)
    length = {"max_new_tokens": options.new_tokens, "pad_token_id": model.generation_config.pad_token_id or 2}
    arguments = {**inputs, "do_sample": False, **length, **case.options}

    def plain() -> torch.Tensor:
        fastgen.enable(self_speculation="off")
        return _generate(model, arguments)

    def drafted() -> torch.Tensor:
        fastgen.enable(self_speculation=case.setting)
        return _generate(model, {**arguments, **case.draft})

    def library() -> torch.Tensor:
        with fastgen.disabled():
            return _generate(model, arguments)

    sides: dict[str, Callable[[], torch.Tensor]] = {"FastGen": plain, "with a draft": drafted}
    if options.transformers:
        sides = {"Transformers": library, **sides}
    for _ in range(options.warm_ups):
        plain(), drafted()
    fastgen.reset_stats()
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    results: dict[str, torch.Tensor] = {}
    for _ in range(options.repetitions):
        for name, side in sides.items():
            start = time.perf_counter()
            results[name] = side()
            seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    counts = fastgen.stats().get("transformers.speculation", {})
    checks = max(counts.get("checks", 0), 1)
    same = all(torch.equal(result, results["FastGen"]) for result in results.values())
    return (
        f"| {case.name} | " + " / ".join(f"{found:.2f}" for found in medians.values())
        + f" | {medians['FastGen'] / medians['with a draft']:.2f} | "
        + (f"{medians['Transformers'] / medians['with a draft']:.2f}" if options.transformers else "-")
        + f" | {counts.get('accepted', 0) / max(counts.get('drafted', 0), 1):.1%} | "
        + f"{counts.get('accepted', 0) / checks:.2f} | {'sampled' if case.options.get('do_sample') else same} |"
    )  # fmt: skip


def unsuited(options: argparse.Namespace) -> str:
    """The worst of prompts that prompt lookup does not suit, as the ratio of plain seconds to those with a draft."""
    ratios = []
    for prompt in UNSUITED:
        case = Case("", "smollm2", (prompt,), {})
        model, inputs = _load(case, options)
        arguments = {**inputs, "do_sample": False, "max_new_tokens": 64, "pad_token_id": 2}
        found: dict[str, list[float]] = {"plain": [], "drafted": []}
        for repetition in range(2 + options.repetitions):
            for name, extra in (("plain", {}), ("drafted", LOOKUP)):
                start = time.perf_counter()
                _generate(model, {**arguments, **extra})
                if repetition >= 2:
                    found[name].append(time.perf_counter() - start)
        ratios.append(statistics.median(found["plain"]) / statistics.median(found["drafted"]))
    ratios.sort()
    worst, median = ratios[0], statistics.median(ratios)
    return f"prompt lookup, {len(ratios)} unsuited prompts: {worst:.2f} at the worst, {median:.2f} median"


_models: dict[tuple[str, torch.dtype], tuple[Any, Any]] = {}


def _load(case: Case, options: argparse.Namespace) -> tuple[Any, dict[str, torch.Tensor]]:
    folder = options.folder if case.model == "smollm2" else ROOT / "examples" / "models" / "kjv-bart"
    if (case.model, case.dtype) not in _models:
        _models.clear()
        kind = AutoModelForCausalLM if case.model == "smollm2" else AutoModelForSeq2SeqLM
        tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left" if case.model == "smollm2" else "right")
        _models[case.model, case.dtype] = kind.from_pretrained(folder, dtype=case.dtype).eval(), tokenizer
    model, tokenizer = _models[case.model, case.dtype]
    if case.model == "smollm2":
        texts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
            )
            for prompt in case.prompts
        ]
    else:
        lines = (ROOT / "examples" / "data" / "heldout.src.txt").read_text().splitlines()
        texts = lines[: 1 if "1 sequence" in case.name else 8]
    return model, dict(tokenizer(texts, return_tensors="pt", padding=True))


def _generate(model: Any, arguments: dict[str, Any]) -> torch.Tensor:
    torch.manual_seed(0)
    return model.generate(**{name: value for name, value in arguments.items() if name != "token_type_ids"})


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speculation", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", default=[], help="rows of these names; unsuited")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--warm-ups", type=int, default=6)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--transformers", action="store_true", help="time the library, too")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
