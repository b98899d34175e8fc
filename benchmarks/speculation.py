"""Speculative decoding: seconds of Transformers, of FastGen without a draft and with one, in turn, on real weights.

    python -m benchmarks.speculation FOLDER [--only NAME ...] [--repetitions N] [--new-tokens N] [--transformers]

FOLDER holds SmolLM2-135M-Instruct (`python -m benchmarks.smollm2 FOLDER`); BART is the model in examples/. Steps are
recorded, and their parts measured, before anything is timed. Tokens of greedy search that differ from those of plain
generation are an error: it is printed, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

import fastgen
from fastgen.decoding.speculation.draft_length import DraftLength
from fastgen.optimizer.transformers.captured import graph_cache
from fastgen.optimizer.transformers.speculation import decoding
from fastgen.optimizer.transformers.speculation.drafting import LENGTHS

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
    Case("self-draft, 1 sequence", "smollm2", QUESTIONS[:1], {}, "int8"),
    Case("self-draft, 4 sequences", "smollm2", QUESTIONS, {}, "int8"),
    Case("self-draft, 1 sequence, sampled at 0.7", "smollm2", QUESTIONS[:1], SAMPLED, "int8"),
    Case("self-draft, 1 sequence, bfloat16", "smollm2", QUESTIONS[:1], {}, "int8", dtype=torch.bfloat16),
    Case("prompt lookup, rewriting, 1 sequence", "smollm2", REWRITE[:1], {}, draft=LOOKUP),
    Case("prompt lookup, rewriting, 8 sequences", "smollm2", REWRITE, {}, draft=LOOKUP),
    Case("self-draft, BART, 1 sequence", "bart", (), {"num_beams": 1}, "int8"),
    Case("self-draft, BART, 8 sequences", "bart", (), {"num_beams": 1}, "int8"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    rows = {case.name: partial(measured, case, options) for case in CASES}
    rows |= {f"unsuited, {draft}": partial(unsuited, draft, options) for draft in DRAFTS}
    rows["first calls"] = partial(first_calls, options)
    different: list[str] = []
    # By default, steps with a draft are recorded after more calls than there are before the measurement.
    fastgen.enable(captured_step="always")
    for name, measure in rows.items():
        if not options.only or name in options.only:
            row, differs = measure()
            print(row, flush=True)
            different += differs
    for name in different:
        print(f"error: other tokens than without a draft: {name}", file=sys.stderr)
    return 1 if different else 0


def measured(case: Case, options: argparse.Namespace) -> tuple[str, list[str]]:
    """A row: seconds of each side, medians, and whether the tokens are the same; and its name if they are not.

    In bfloat16, where sums of other orders differ more, tokens may change places, which the row says.
    """
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
            start = options.clock()
            results[name] = side()
            seconds[name].append(options.clock() - start)
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    counts = fastgen.stats().get("transformers.speculation", {})
    checks = max(counts.get("checks", 0), 1)
    same = all(torch.equal(result, results["FastGen"]) for result in results.values())
    is_sampled = case.options.get("do_sample", False)
    row = (
        f"| {case.name} | " + " / ".join(f"{found:.2f}" for found in medians.values())
        + f" | {medians['FastGen'] / medians['with a draft']:.2f} | "
        + (f"{medians['Transformers'] / medians['with a draft']:.2f}" if options.transformers else "-")
        + f" | {counts.get('accepted', 0) / max(counts.get('drafted', 0), 1):.1%} | "
        + f"{counts.get('accepted', 0) / checks:.2f} | {'sampled' if is_sampled else same} |"
    )  # fmt: skip
    return row, [] if same or is_sampled or case.dtype is not torch.float32 else [case.name]


class Unsuited(NamedTuple):
    """A prompt that drafts do not suit: text, or so many random tokens."""

    prompt: str | int
    new_tokens: int = 64
    options: dict[str, Any] = {}


HOT = {"do_sample": True, "temperature": 1.5}
GRID = (
    *(Unsuited(count) for count in (5, 40, 100, 200)),
    *(
        Unsuited(prompt)
        for prompt in (
            "def quicksort(items):", "#include <stdio.h>\nint main(", "SELECT name, count(*) FROM",
            "3.14159265358979", "2 3 5 7 11 13 17 19 23", "Invent ten unusual names for a cat.",
            "Invent a riddle about a lighthouse.", "Invent seven titles of novels.",
            "Invent the menu of a restaurant under water.",
        )
    ),
    *(
        Unsuited(prompt, options=HOT)
        for prompt in ("A short poem about rust.", "A dialogue of two clouds.", "A lullaby for a robot.", "A toast.")
    ),
    *(Unsuited("Is water wet? Answer yes or no.", count) for count in (8, 12, 16)),
)  # fmt: skip
# How often the prompts are gone through at the most, unmeasured and measured: that takes about three minutes.
UNSUITED_PASSES = (1, 4)
RECORDING_TOKENS = 48  # that a case generates in an unmeasured pass, at the least
FIRST_TOKENS, MOST_FIRST_CALLS = 64, 80
# What drafts: a setting, and options of the call. The assistant is made of the first layers of the model.
ASSISTANT_LAYERS = 8
DRAFTS = {"self-draft": "int8", "prompt lookup": "off", "an assistant": "off"}


# The steps of all prompts are kept, or each measured call would record its own.
@mock.patch.object(graph_cache, "MOST", 8 * len(GRID))
def unsuited(draft: str, options: argparse.Namespace) -> tuple[str, list[str]]:
    """How many times as fast as plain ones the calls of each prompt of `GRID` are: the least, the median, and all.

    Every call counts after the steps have been recorded, also those that only try whether drafts gain something. And
    the prompts of greedy search for which the tokens are not those of the plain calls, in any of the repetitions.
    """
    model, _ = _load(Case("", "smollm2", QUESTIONS[:1], {}), options)
    fastgen.reset_stats()
    extra = {"self-draft": {}, "prompt lookup": LOOKUP, "an assistant": {"assistant_model": _first_layers(model)}}[
        draft
    ]
    sides = {"plain": ("off", {}), "drafted": (DRAFTS[draft], extra)}
    found: dict[int, dict[str, float]] = {number: dict.fromkeys(sides, 0.0) for number in range(len(GRID))}
    different: dict[int, str] = {}
    warm_ups, repetitions = map(min, UNSUITED_PASSES, (options.warm_ups, options.repetitions))
    for repetition in range(warm_ups + repetitions):
        is_measured = repetition >= warm_ups
        if repetition == warm_ups:
            decoding._pauses.clear()
        for number, case in enumerate(GRID):
            inputs, new_tokens = _inputs(case, options), case.new_tokens
            arguments = {"do_sample": False, "pad_token_id": 2, "min_new_tokens": new_tokens, **case.options, **inputs}
            tokens = {}
            for name in sides if repetition % 2 else reversed(sides):
                setting, asked = sides[name]
                fastgen.enable(self_speculation=setting)
                start = options.clock()
                with contextlib.nullcontext() if is_measured else _every_length():
                    # A call of a few tokens has too few rounds for all parts of its step.
                    for _ in range(1 if is_measured else -(-RECORDING_TOKENS // new_tokens)):
                        tokens[name] = _generate(model, {**arguments, "max_new_tokens": new_tokens, **asked})
                if is_measured:
                    found[number][name] += options.clock() - start
            if not case.options.get("do_sample") and not torch.equal(tokens["plain"], tokens["drafted"]):
                different[number] = f"unsuited, {draft}, {case.prompt!r}"
    fastgen.enable(self_speculation="off")
    ratios = {number: seconds["plain"] / seconds["drafted"] for number, seconds in found.items()}
    worst = min(ratios, key=ratios.__getitem__)
    plain, drafted = (sum(seconds[name] for seconds in found.values()) for name in sides)
    if options.details:
        for number, ratio in ratios.items():
            print(f"{ratio:.3f} {found[number]['plain']:.3f} {GRID[number]}", flush=True)
        print(fastgen.stats().get("transformers.speculation"))
    greedy = sum(not case.options.get("do_sample") for case in GRID)
    row = (
        f"{len(GRID)} unsuited prompts, {draft}: {ratios[worst]:.3f} at the least ({GRID[worst].prompt!r}), "
        f"{statistics.median(ratios.values()):.2f} median, {plain / drafted:.2f} all together; "
        f"tokens of greedy search the same in {greedy - len(different)} of {greedy}"
    )
    return row, [*different.values()]


@contextlib.contextmanager
def _every_length() -> Iterator[None]:
    """Rounds draft the most tokens for which nothing is recorded, then each number in turn, whatever that gains."""
    decoding._pauses.clear()
    places, choose = itertools.cycle(reversed(range(len(LENGTHS)))), DraftLength.choose

    def next_length(policy: DraftLength, rows: Any, most: int, available: Any = None) -> int:
        choose(policy, rows, most, available)
        costs = policy.costs
        missing = [length for length in reversed(costs.lengths) if length <= most and costs.seconds(length + 1) is None]
        wanted = missing[0] if missing else costs.lengths[next(places)]
        if available is not None and not any(available):
            # Only what was found can be drafted. A check with room for more is recorded nevertheless.
            wanted = missing[0] if missing and not costs.is_ragged else 0
        return wanted if wanted <= most or costs.is_ragged else 0

    DraftLength.choose = next_length  # type: ignore[method-assign]
    try:
        yield
    finally:
        DraftLength.choose = choose  # type: ignore[method-assign]


def first_calls(options: argparse.Namespace) -> tuple[str, list[str]]:
    """How much longer than plain ones calls take that prepare self-drafts, as by default, and which do.

    Plain calls follow each of them, whose step is recorded before any of them prepares something.
    """
    model, inputs = _load(Case("", "smollm2", QUESTIONS, {}), options)
    fastgen.disable()  # which forgets all steps
    fastgen.enable(captured_step="auto")
    arguments = {**inputs, "do_sample": False, "pad_token_id": 2, "max_new_tokens": FIRST_TOKENS}
    arguments["min_new_tokens"] = FIRST_TOKENS
    seconds: dict[str, list[float]] = {"off": [], "int8": []}
    begun: list[int] = []  # calls that prepare, those that make nothing included
    has_drafted = False
    while not has_drafted and len(seconds["off"]) < MOST_FIRST_CALLS:
        for setting, found in seconds.items():
            fastgen.enable(self_speculation=setting)
            fastgen.reset_stats()
            start = options.clock()
            _generate(model, arguments)
            found.append(options.clock() - start)
        counts = fastgen.stats().get("transformers.speculation", {})
        has_drafted = counts.get("accelerated", 0) > 0
        if has_drafted or any("little by little" in reason for reason in counts.get("not used", {})):
            begun.append(len(seconds["int8"]) - 1)
    fastgen.enable(captured_step="always", self_speculation="off")
    plain = statistics.median(seconds["off"][begun[0] :])
    ratios = [seconds["int8"][number] / plain for number in begun]
    row = (
        f"first calls of {FIRST_TOKENS} tokens, 4 sequences: {begun[0]} without drafts, then {len(begun)} that prepare "
        f"them: {max(ratios):.2f} plain ones at the longest, {statistics.mean(ratios):.2f} on the average"
    )
    return row, []


def _first_layers(model: Any) -> Any:
    """A model of the first layers, embedding and output layer of another one."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = ASSISTANT_LAYERS
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:ASSISTANT_LAYERS]
    made = type(model)(config).to(model.dtype).eval()
    names = made.state_dict().keys()
    made.load_state_dict({name: tensor for name, tensor in model.state_dict().items() if name in names})
    return made


def _inputs(case: Unsuited, options: argparse.Namespace) -> dict[str, torch.Tensor]:
    if isinstance(case.prompt, str):
        return _load(Case("", "smollm2", (case.prompt,), {}), options)[1]
    drawn = torch.randint(100, 40_000, (1, case.prompt), generator=torch.Generator().manual_seed(case.prompt))
    return {"input_ids": drawn, "attention_mask": torch.ones_like(drawn)}


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
    parser.add_argument("--only", nargs="+", default=[], help="rows of these names; 'unsuited, self-draft' and so on")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--warm-ups", type=int, default=6)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--transformers", action="store_true", help="time the library, too")
    parser.add_argument("--details", action="store_true", help="each of the unsuited prompts")
    parser.add_argument("--cpu-time", dest="clock", action="store_const", const=time.thread_time,
                        default=time.perf_counter, help="count the processor's time, of one thread")  # fmt: skip
    options = parser.parse_args(arguments)
    if options.clock is time.thread_time:
        torch.set_num_threads(1)
        time.perf_counter = time.thread_time  # what FastGen measures of its steps, too
    return options


if __name__ == "__main__":
    sys.exit(main())
