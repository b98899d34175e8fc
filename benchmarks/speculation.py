"""Speculative decoding: seconds of FastGen without a draft and with one, interleaved, on real weights.

    python -m benchmarks.speculation FOLDER [--only NAME ...] [--repetitions N] [--new-tokens N] [--transformers]

FOLDER holds SmolLM2-135M-Instruct (`python -m benchmarks.smollm2 FOLDER`); BART is the model in examples/. A row has
the medians of each side, how many times as fast the side with a draft is, and how many tokens a verify accepts. The
rows "unsuited" have 20 prompts that drafts do not suit. Tokens of greedy search in float32 that are not those of plain
generation are an error: it is printed, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

import fastgen
from benchmarks.machine import ROOT
from benchmarks.measure import alternate, timed
from benchmarks.workloads.smollm2_chat import QUESTIONS
from fastgen import settings

TEXT = (
    "The harbour was quiet in the early morning. Three fishing boats lay at the quay, and a thin mist hung over the "
    "water. Old Martin sat on a crate and mended his nets, as he had done for forty years. The gulls waited for him to "
    "finish his breakfast. At seven the bell of the church rang, and the first children ran down the hill to school. "
)
NAMES = ("Peter", "Anna", "John", "Maria", "Paul", "Ruth", "Karl", "Eve")
REWRITE = tuple(f"Repeat this text word by word, and change only the name to {name}. {TEXT}" for name in NAMES)
LOOKUP = {"prompt_lookup_num_tokens": 8, "max_matching_ngram_size": 3}
SAMPLED, HOT = {"do_sample": True, "temperature": 0.7}, {"do_sample": True, "temperature": 1.5}


class Case(NamedTuple):
    """What is generated, and what drafts in the side that has a draft.

    Attributes:
        prompts: of a chat; a number is so many random tokens. None: the first `sequences` sources of the examples, by
            their BART.
    """

    name: str
    prompts: tuple[str | int, ...] | None = None
    options: dict[str, Any] = {}
    setting: str = "off"
    draft: dict[str, Any] = {}
    dtype: torch.dtype = torch.float32
    sequences: int = 1
    new_tokens: int | None = None


CASES = (
    Case("self-draft, 1 sequence", QUESTIONS[:1], setting="int8"),
    Case("self-draft, 4 sequences", QUESTIONS[:4], setting="int8"),
    Case("self-draft, 1 sequence, sampled at 0.7", QUESTIONS[:1], SAMPLED, "int8"),
    Case("self-draft, 1 sequence, bfloat16", QUESTIONS[:1], setting="int8", dtype=torch.bfloat16),
    Case("prompt lookup, rewriting, 1 sequence", REWRITE[:1], draft=LOOKUP),
    Case("prompt lookup, rewriting, 8 sequences", REWRITE, draft=LOOKUP),
    Case("self-draft, BART, 1 sequence", options={"num_beams": 1}, setting="int8"),
    Case("self-draft, BART, 8 sequences", options={"num_beams": 1}, setting="int8", sequences=8),
)
# Prompts that drafts do not suit: random tokens, code, numbers, inventions, hot samples, and answers of few tokens.
UNSUITED = (
    *(Case("", (prompt,), new_tokens=64) for prompt in (
        5, 40, 100, 200, "def quicksort(items):", "#include <stdio.h>\nint main(", "SELECT name, count(*) FROM",
        "3.14159265358979", "2 3 5 7 11 13 17 19 23", "Invent ten unusual names for a cat.",
        "Invent a riddle about a lighthouse.", "Invent seven titles of novels.",
        "Invent the menu of a restaurant under water.",
    )),
    *(Case("", (prompt,), HOT, new_tokens=64) for prompt in (
        "A short poem about rust.", "A dialogue of two clouds.", "A lullaby for a robot.", "A toast.",
    )),
    *(Case("", ("Is water wet? Answer yes or no.",), new_tokens=count) for count in (8, 12, 16)),
)  # fmt: skip
UNSUITED_RUNS = 4
DRAFTS = ("self-draft", "prompt lookup", "an assistant")
ASSISTANT_LAYERS = 8  # the first ones of the model


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    rows: dict[str, Callable[[], tuple[str, bool]]] = {case.name: partial(row, case, options) for case in CASES}
    rows |= {f"unsuited, {draft}": partial(unsuited, draft, options) for draft in DRAFTS}
    different = []
    # By default, steps with a draft are recorded after more calls than there are before the measurement.
    fastgen.enable(captured_step="always")
    for name, measure in rows.items():
        if not options.only or name in options.only:
            line, same = measure()
            print(line, flush=True)
            different += [] if same else [name]
    for name in different:
        print(f"error: other tokens than without a draft: {name}", file=sys.stderr)
    return 1 if different else 0


def measured(case: Case, options: argparse.Namespace, runs: int) -> tuple[dict[str, list[float]], bool]:
    """Seconds of each run of each side, and whether the tokens are those without a draft, where they must be."""
    model, inputs = _load(case, options.folder)
    count = case.new_tokens or options.new_tokens
    arguments = {"do_sample": False, "pad_token_id": 2, "max_new_tokens": count, **case.options, **inputs}
    if case.new_tokens:
        arguments["min_new_tokens"] = count

    def generate(setting: str, **draft: Any) -> tuple[float, Tensor]:
        with settings.changed(self_speculation=setting):
            torch.manual_seed(0)
            return timed(lambda: model.generate(**arguments, **draft))

    def library() -> tuple[float, Tensor]:
        with fastgen.disabled():
            return generate("off")

    sides = {"FastGen": partial(generate, "off"), "with a draft": partial(generate, case.setting, **case.draft)}
    alternate(sides, options.warm_ups)
    fastgen.reset_stats()
    found = alternate(({"Transformers": library} if options.transformers else {}) | sides, runs)
    must_be_same = not case.options.get("do_sample") and case.dtype is torch.float32
    expected = found["FastGen"][0][1]
    same = all(torch.equal(tokens, expected) for each in found.values() for _, tokens in each)
    return {name: [seconds for seconds, _ in each] for name, each in found.items()}, same or not must_be_same


def row(case: Case, options: argparse.Namespace) -> tuple[str, bool]:
    """A line of a table in Markdown."""
    seconds, same = measured(case, options, options.repetitions)
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    counts = fastgen.stats().get("transformers.speculation", {})
    drafted = medians.pop("with a draft")
    gains = ", ".join(f"{median / drafted:.2f} x {name}" for name, median in medians.items())
    accepted = counts.get("accepted", 0) / max(counts.get("verifies", 0), 1)
    times = " / ".join(f"{each:.2f}" for each in (*medians.values(), drafted))
    return f"| {case.name} | {times} | {gains} | {accepted:.2f} accepted |", same


def unsuited(draft: str, options: argparse.Namespace) -> tuple[str, bool]:
    """How many times as fast as plain ones the calls of each prompt of `UNSUITED` are: the least, the median, all.

    Every call counts after the first ones, also those that only try whether drafts gain something.
    """
    model, _ = _load(CASES[0], options.folder)
    changes: dict[str, Any] = {
        "self-draft": {"setting": "int8"},
        "prompt lookup": {"draft": LOOKUP},
        "an assistant": {"draft": {"assistant_model": _first_layers(model)}},
    }[draft]
    found = [measured(case._replace(**changes), options, UNSUITED_RUNS) for case in UNSUITED]
    sums = [(sum(seconds["FastGen"]), sum(seconds["with a draft"])) for seconds, _ in found]
    ratios = [plain / drafted for plain, drafted in sums]
    worst = min(range(len(ratios)), key=ratios.__getitem__)
    plain, drafted = (sum(side) for side in zip(*sums, strict=True))
    line = (
        f"{len(ratios)} unsuited prompts, {draft}: {ratios[worst]:.3f} at the least ({UNSUITED[worst].prompts}), "
        f"{statistics.median(ratios):.2f} median, {plain / drafted:.2f} all together"
    )
    return line, all(same for _, same in found)


def _first_layers(model: Any) -> Any:
    """A model of the first layers, embedding and output layer of another one."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = ASSISTANT_LAYERS
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:ASSISTANT_LAYERS]
    made = type(model)(config).to(model.dtype).eval()
    made.load_state_dict({name: model.state_dict()[name] for name in made.state_dict()})
    return made


@cache
def _model(folder: Path, is_bart: bool, dtype: torch.dtype) -> tuple[Any, Any]:
    kind = AutoModelForSeq2SeqLM if is_bart else AutoModelForCausalLM
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="right" if is_bart else "left")
    return kind.from_pretrained(folder, dtype=dtype).eval(), tokenizer


def _load(case: Case, folder: Path) -> tuple[Any, dict[str, Tensor]]:
    """The model, and what `generate` gets."""
    examples = ROOT / "examples"
    if case.prompts is None:
        model, tokenizer = _model(examples / "models" / "kjv-bart", True, case.dtype)
        texts = (examples / "data" / "heldout.src.txt").read_text().splitlines()[: case.sequences]
    else:
        model, tokenizer = _model(folder, False, case.dtype)
        if isinstance(count := case.prompts[0], int):
            drawn = torch.randint(100, 40_000, (1, count), generator=torch.Generator().manual_seed(count))
            drawn %= model.config.vocab_size
            return model, {"input_ids": drawn, "attention_mask": torch.ones_like(drawn)}
        chats = [[{"role": "user", "content": prompt}] for prompt in case.prompts]
        texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    encoded = tokenizer(texts, return_tensors="pt", padding=True)
    return model, {name: encoded[name] for name in ("input_ids", "attention_mask")}


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speculation", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", default=[], help="rows of these names; 'unsuited, self-draft' and so on")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--warm-ups", type=int, default=6)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--transformers", action="store_true", help="time the library, too")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
