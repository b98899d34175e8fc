"""Results of a given form: all that a model generates has it, in every search, with the library's tokens."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

import fastgen
from fastgen import Grammar, grammar, settings
from fastgen.engine import continuous
from fastgen.engine.continuous import ContinuousBatches
from fastgen.engine.engine import Engine
from fastgen.engine.options import make
from fastgen.optimizer.transformers.captured.slots import Slots
from tests.conftest import ROOT
from tests.engine.conftest import run

MODELS = ROOT / "examples" / "models"
SCHEMA = {
    "type": "object",
    "properties": {"who": {"enum": ["Moses", "Aaron"]}, "years": {"type": "integer", "minimum": 0, "maximum": 999}},
    "required": ["who", "years"],
    "additionalProperties": False,
}
TEXT = "and he said unto him what is"
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3, "num_return_sequences": 3},
    "drawn": {"do_sample": True, "num_return_sequences": 3},
    "drawn beams": {"do_sample": True, "num_beams": 3},
    "lookup": {"prompt_lookup_num_tokens": 4},
    "padding": {"min_new_tokens": 12},
}


@pytest.fixture(scope="module")
def gpt2() -> tuple[Any, Any]:
    return AutoModelForCausalLM.from_pretrained(MODELS / "kjv-gpt2").eval(), AutoTokenizer.from_pretrained(
        MODELS / "kjv-gpt2"
    )


def alone(model: Any, tokenizer: Any, text: str, form: Grammar | None, **options: Any) -> torch.Tensor:
    """What a call of `generate` for this text alone gives."""
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    found: torch.Tensor = model.generate(ids, attention_mask=torch.ones_like(ids), **options, **_with(form))
    return found


def generated(model: Any, tokenizer: Any, grammar: Grammar, texts: list[str], **options: Any) -> list[str]:
    """What follows the prompts, with FastGen; the library's tokens are the same."""
    tokenizer.padding_side = "left"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    options = {"max_new_tokens": 60, "do_sample": False, "pad_token_id": tokenizer.pad_token_id, **options}

    def call() -> torch.Tensor:
        torch.manual_seed(3)
        made: torch.Tensor = model.generate(**inputs, **_with(grammar), **options)
        return made

    found = call()
    with fastgen.disabled():
        expected = call()
    assert torch.equal(found, expected)
    begin = 1 if model.config.is_encoder_decoder else inputs["input_ids"].shape[1]
    return list(tokenizer.batch_decode(found[:, begin:], skip_special_tokens=True))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("count", [1, 3])
def test_json(gpt2: tuple[Any, Any], options: dict[str, Any], count: int) -> None:
    if count > 1 and "prompt_lookup_num_tokens" in options:
        pytest.skip("the library looks up for one input only")
    grammar = Grammar(gpt2[1], json_schema=SCHEMA)
    for text in generated(*gpt2, grammar, [TEXT, "the king", "thou"][:count], **options):
        value = json.loads(text)
        assert value.keys() == {"who", "years"} and value["who"] in ("Moses", "Aaron") and 0 <= value["years"] < 1000


@pytest.mark.parametrize("form", ["regex", "choice", "lark", "gbnf"])
def test_other_forms(gpt2: tuple[Any, Any], form: str) -> None:
    pattern = "(Moses|Aaron)[0-9]{2}"
    given: dict[str, Any] = {
        "regex": {"regex": pattern},
        "choice": {"choice": ["Moses07", "Aaron11", "Aaron12"]},
        "lark": {"grammar": 'start: ("Moses" | "Aaron") /[0-9]{2}/'},
        "gbnf": {"grammar": 'root ::= ("Moses" | "Aaron") [0-9] [0-9]'},
    }[form]
    for options in OPTIONS["greedy"], OPTIONS["beams"], OPTIONS["drawn"]:
        for text in generated(*gpt2, Grammar(gpt2[1], **given), [TEXT, "thou"], **options):
            assert re.fullmatch(pattern, text), text


def test_encoder_decoder() -> None:
    """Tokens that the model's config forces are no part of the result."""
    model, tokenizer = (kind.from_pretrained(MODELS / "kjv-bart") for kind in (AutoModelForSeq2SeqLM, AutoTokenizer))
    grammar = Grammar(tokenizer, model.generation_config.eos_token_id, json_schema=SCHEMA)
    for options in {}, {"num_beams": 4}, {"forced_bos_token_id": tokenizer.bos_token_id}:
        for text in generated(model.eval(), tokenizer, grammar, [TEXT, "the king"], **options):
            assert json.loads(text)["who"] in ("Moses", "Aaron")


def test_a_class_of_pydantics() -> None:
    pydantic = pytest.importorskip("pydantic")
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "kjv-gpt2")
    kind = pydantic.create_model("Person", who=(str, ...))
    found, expected = (Grammar(tokenizer, json_schema=form) for form in (kind, json.dumps(kind.model_json_schema())))
    assert _allowed(found, 2500) == _allowed(expected, 2500) != []


def _allowed(grammar: Grammar, size: int, *tokens: int) -> list[int]:
    """Tokens that may follow these, of scores of so many."""
    prompt, processor = [7, 8, 9], grammar.processor()
    for count in range(len(tokens) + 1):
        scores = processor(torch.tensor([[*prompt, *tokens[:count]]]), torch.zeros(1, size))
    return (scores[0] == 0).nonzero().flatten().tolist()


def test_the_end(gpt2: tuple[Any, Any]) -> None:
    """Behind a whole result, each token that ends one may follow, and no other; and so behind that."""
    tokenizer, size = gpt2[1], len(gpt2[1])
    digit, eos = tokenizer.convert_tokens_to_ids("7"), [tokenizer.eos_token_id, 4]
    grammar = Grammar(tokenizer, eos, regex="7")
    assert _allowed(grammar, size) == [digit]
    for tokens in [digit], [digit, eos[0]], [digit, eos[1], 11], [digit, *eos, *eos]:
        assert _allowed(grammar, size, *tokens) == eos
    assert {digit, *eos} <= set(_allowed(Grammar(tokenizer, eos, regex="7+"), size, digit))


def test_scores_of_no_token(gpt2: tuple[Any, Any]) -> None:
    """A model may have scores of more than the tokens of its tokenizer, or of fewer."""
    grammar, size = Grammar(gpt2[1], regex="[a-z]+"), len(gpt2[1])
    every = _allowed(grammar, size)
    assert _allowed(grammar, size + 7) == every
    assert _allowed(grammar, size - 7) == [token for token in every if token < size - 7]


def test_what_others_force(gpt2: tuple[Any, Any]) -> None:
    """A token that they force comes, and is no part of the form. What they block comes where the form wants it."""
    tokenizer, size = gpt2[1], len(gpt2[1])
    digit, forced, processor = tokenizer.convert_tokens_to_ids("7"), 20, Grammar(gpt2[1], regex="7").processor()
    scores = torch.full((1, size), -torch.inf)
    scores[0, forced] = 1.5
    assert torch.equal(processor(torch.tensor([[7]]), scores), scores)
    found = processor(torch.tensor([[7, forced]]), torch.zeros(1, size))
    assert (found[0] == 0).nonzero().flatten().tolist() == [digit]
    scores = torch.zeros(1, size)
    scores[0, digit], scores[0, forced] = -torch.inf, 1.5
    found = processor(torch.tensor([[7, forced]]), scores)
    assert found[0, digit] == 1.5 and (found > -torch.inf).sum() == 1


def test_json_is_on_one_line(gpt2: tuple[Any, Any]) -> None:
    (text,) = generated(*gpt2, Grammar(gpt2[1], json_schema=SCHEMA), [TEXT])
    assert text == json.dumps(json.loads(text))
    free = SCHEMA | {"x-guidance": {"whitespace_flexible": True}}
    space = gpt2[1].convert_tokens_to_ids("Ġ")
    begin = gpt2[1].convert_tokens_to_ids("{")
    assert space in _allowed(Grammar(gpt2[1], json_schema=json.dumps(free)), 2500, begin)
    assert space not in _allowed(Grammar(gpt2[1], json_schema=json.dumps(SCHEMA)), 2500, begin)


def test_other_results_by_their_beginning(gpt2: tuple[Any, Any]) -> None:
    """A result is JSON, or begins so: with a text, or a special token, and then any."""
    tokenizer, size = AutoTokenizer.from_pretrained(MODELS / "kjv-gpt2"), 2600
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|call|>"]})
    special = tokenizer.convert_tokens_to_ids("<|call|>")
    brace, less, eos = *tokenizer.convert_tokens_to_ids(["{", "<"]), tokenizer.eos_token_id
    for unless, first, then in ("<<", less, less), ("<|call|><", special, less), ("<|call|>", special, None):
        form = Grammar(tokenizer, json_schema=SCHEMA, unless=unless)
        begin = _allowed(form, size)
        assert first in begin and set(begin) <= {first, brace, *range(4, size)} and eos not in begin
        if then is not None:
            assert _allowed(form, size, first) == [then]
        behind = _allowed(form, size, *([first] if then is None else [first, then]))
        assert {eos, special, 17, 900} <= set(behind)
        assert special not in _allowed(form, size, brace)
    for given in {"unless": "a", "regex": "a"}, {"unless": "", "json_schema": {}}:
        with pytest.raises(ValueError, match="unless is a text beside a json_schema"):
            Grammar(tokenizer, **given)


def test_blocked_repetition(gpt2: tuple[Any, Any]) -> None:
    grammar = Grammar(gpt2[1], regex="(ab){9}")
    for options in OPTIONS["greedy"], OPTIONS["beams"] | {"num_return_sequences": 1}, OPTIONS["drawn"]:
        for text in generated(*gpt2, grammar, [TEXT], no_repeat_ngram_size=2, **options):
            assert text == "ab" * 9


def test_tokens_that_are_added_later() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "kjv-gpt2")
    size = len(tokenizer)
    assert max(_allowed(Grammar(tokenizer, regex="verily.*"), 3000)) < size
    tokenizer.add_tokens(["verilyverily"])
    assert size in _allowed(Grammar(tokenizer, regex="verily.*"), 3000)


@pytest.mark.parametrize("form", [{"json_schema": SCHEMA}, {"regex": "[a-z ]{60}"}], ids=["json", "regex"])
def test_a_processor_that_is_used_again(gpt2: tuple[Any, Any], form: dict[str, Any]) -> None:
    """A call begins anew, be it repeated or another one; sequences are known by their tokens, in whatever row."""
    model, tokenizer = gpt2
    grammar = Grammar(tokenizer, **form)
    processor = grammar.processor()
    for texts in ["thou"], ["thou"], ["and he said unto him", "the king"], ["thou"], ["thou"], [TEXT * 9]:
        inputs = tokenizer(texts, return_tensors="pt", padding=True)
        options = {"max_new_tokens": 60, "do_sample": False, "pad_token_id": tokenizer.eos_token_id}
        found = model.generate(**inputs, logits_processor=[processor], **options)
        assert torch.equal(found, model.generate(**inputs, logits_processor=[grammar.processor()], **options))
    rows, size = torch.tensor([[7, 8], [7, 9]]), len(tokenizer)
    first, other = tokenizer.convert_tokens_to_ids(["7", "8"])
    processor = Grammar(tokenizer, choice=["7!", "8?"]).processor()
    processor(rows, torch.zeros(2, size))
    longer = torch.tensor([[7, 9, other], [7, 8, first], [7, 9, first]])
    found = processor(longer, torch.zeros(3, size))
    assert [[tokenizer.decode(token) for token in (row == 0).nonzero()] for row in found] == [["?"], ["!"], ["!"]]
    again = processor(torch.tensor([[7, 9, other]]), torch.zeros(1, size))  # of a state that others have gone on from
    assert torch.equal(again[0], found[0])


SHARED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"do_sample": True, "num_return_sequences": 2},
    "beams": {"num_beams": 3},
    "blocked": {"no_repeat_ngram_size": 2},
    "penalty": {"repetition_penalty": 1.3},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("kind", "at_once", "name"),
    [*(("gpt2", 1, name) for name in SHARED), *(("bart", 6, name) for name in SHARED), ("gpt2", 6, "greedy")],
)
def test_in_slots(kind: str, at_once: int, name: str, gpt2: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests with forms of their own share a step with others, and are as calls of their own: whatever lengths they
    have, so that they change their places, and in whatever order they come.
    """
    model, tokenizer = gpt2
    if kind == "bart":
        model, tokenizer = (
            each.from_pretrained(MODELS / "kjv-bart") for each in (AutoModelForSeq2SeqLM, AutoTokenizer)
        )
    steps = list[Slots]()

    def begin(*given: Any) -> Slots:
        assert not any(step.taken for step in steps), "they share one"
        steps.append(Slots(*given))
        return steps[-1]

    monkeypatch.setattr(continuous, "Slots", begin)
    schema, digits = Grammar(tokenizer, json_schema=SCHEMA), Grammar(tokenizer, regex="[0-9]{3}|[a-z ]{9}")
    forms = [None, schema, digits, None, digits, schema]
    texts = [TEXT, "the king", "thou", "and they went forth to go into the land of canaan", "so", "behold"]
    options = {"max_new_tokens": 30, "do_sample": False, "num_beams": 1, "no_repeat_ngram_size": 0, **SHARED[name]}
    drawn = options["do_sample"]
    expected = list[torch.Tensor]()
    for number, (text, form) in enumerate(zip(texts, forms, strict=True)):
        torch.manual_seed(number)
        expected.append(alone(model, tokenizer, text, form, **options))
    for _ in range(2):  # then in a step that others have left
        requests = [
            make(model, tokenizer(text)["input_ids"], None, {**options, **_with(form)}, number if drawn else None, 6)
            for number, (text, form) in enumerate(zip(texts, forms, strict=True))
        ]
        executor = ContinuousBatches(model.eval(), 6 if options["num_beams"] == 1 else 9)
        run(executor, requests, at_once)
        assert all(torch.equal(each.future.result(60), own) for each, own in zip(requests, expected, strict=True))
        assert not executor.alone and executor.counts["repeated"] == 0
    if at_once > 1 and name == "greedy":
        assert executor.counts["batches"] < len(requests)


@pytest.mark.parametrize("first", [0, 1])
def test_what_others_force_in_slots(gpt2: tuple[Any, Any], first: int) -> None:
    """A step has a mask of its own for forms behind what bans and forces: each request is in that of its call."""
    model, tokenizer = gpt2
    form = Grammar(tokenizer, regex="[0-9]{9}")
    given: list[dict[str, Any]] = [{}, {"min_new_tokens": 20}, {"forced_bos_token_id": 20}, {"repetition_penalty": 1.3}]
    given, ids = given[first:] + given[:first], tokenizer(TEXT)["input_ids"]
    options = {"max_new_tokens": 30, "num_beams": 1, "no_repeat_ngram_size": 0, "repetition_penalty": 1.0}
    executor = ContinuousBatches(model, 4)
    requests = [make(model, ids, None, options | own | _with(form), None, 4) for own in given]
    run(executor, requests, 4)
    assert executor.counts["steps"] < 2 * 13, "they share them"
    for own, request in zip(given, requests, strict=True):
        assert torch.equal(request.future.result(60), alone(model, tokenizer, TEXT, form, **options | own)), own


@pytest.mark.parametrize("captured", ["auto", "never"])
def test_one_processor_for_all(gpt2: tuple[Any, Any], captured: str) -> None:
    """Each input begins the form, also where a batch has one processor, and whatever runs meanwhile."""
    model, tokenizer = gpt2
    form = Grammar(tokenizer, regex="[0-9]{3}|[a-z ]{9}")
    texts, options = [TEXT, "the king", "thou", "and they went forth to go"], {"max_new_tokens": 20, "do_sample": False}
    inputs = [tokenizer(text)["input_ids"] for text in texts]
    with settings.changed(captured_step=captured):
        found = model.generate_batch(inputs, **options, **_with(form))
    for text, ids, output in zip(texts, inputs, found.values(), strict=True):
        expected = alone(model, tokenizer, text, form, **options)
        assert output.generated_tokens == expected[0, len(ids) :].tolist()


def test_static_batches(gpt2: tuple[Any, Any]) -> None:
    """Requests with forms of their own do not share one."""
    model, tokenizer = gpt2
    forms = [Grammar(tokenizer, regex=f"{digit}{{3}}") for digit in range(4)]
    ids, options = tokenizer(TEXT)["input_ids"], {"max_new_tokens": 10, "num_beams": 1, "no_repeat_ngram_size": 0}
    executor = ContinuousBatches(model, 4)
    requests = [make(model, ids, None, options | _with(form), None, 4) for form in forms]
    with settings.changed(captured_step="never"):
        run(executor, requests, 4)
    results = [tokenizer.decode(request.future.result(60)[0, len(ids) : -1]) for request in requests]
    assert results == ["000", "111", "222", "333"] and executor.counts["steps"] == 0


def test_slots_that_begin_again(gpt2: tuple[Any, Any]) -> None:
    """A form may be followed once more, as where there is no room for K and V."""
    model, tokenizer = gpt2
    grammar, options = Grammar(tokenizer, json_schema=SCHEMA), {"max_new_tokens": 40, "num_beams": 1}
    texts, budget = [TEXT, "the king", "thou", "behold"], None
    for _ in range(2):
        executor = ContinuousBatches(model, 4, cache_bytes=budget)
        requests = [
            make(model, tokenizer(text)["input_ids"], None, options | _with(grammar), None, 4) for text in texts
        ]
        run(executor, requests, 4)
        budget = executor.stats()["kv_bytes"] // 2
    assert executor.counts["preempted"] > 0
    for text, request in zip(texts, requests, strict=True):
        assert torch.equal(request.future.result(60), alone(model, tokenizer, text, grammar, **options))


def test_other_processors_beside_a_form(gpt2: tuple[Any, Any]) -> None:
    """With code of the user's the host runs both, in a step of their own."""
    model, tokenizer = gpt2
    seen = list[int]()

    def note(tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(tokens.shape[1])
        return scores

    grammar, options = Grammar(tokenizer, json_schema=SCHEMA), {"max_new_tokens": 40, "num_beams": 1}
    ids, expected = tokenizer(TEXT)["input_ids"], alone(model, tokenizer, TEXT, grammar, **options)
    with Engine(model, slots=4) as engine:
        future = engine.submit(ids, **options, logits_processor=[note, grammar.processor()])
        beside = engine.submit(ids, **options, **_with(grammar))
        assert torch.equal(future.result(60), expected) and torch.equal(beside.result(60), expected)
    assert seen == list(range(len(ids), expected.shape[1]))


class _Emptied(dict[Any, Any]):
    """Another thread makes room for its own trie just then."""

    def __setitem__(self, key: Any, value: Any) -> None:
        self.clear()


def test_threads_with_other_ends(gpt2: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = gpt2[1]
    monkeypatch.setitem(grammar._tries, tokenizer, _Emptied())
    assert Grammar(tokenizer, [0, 1], regex="a")


DEEP: dict[str, Any] = {}
for _ in range(10_000):
    DEEP = {"a": DEEP}


def _with(form: Grammar | None) -> dict[str, Any]:
    return {} if form is None else {"logits_processor": [form.processor()]}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "give one of json_schema, regex, choice, grammar: 0 are given"),
        ({"regex": "a", "choice": ["a"]}, "give one of .*: 2 are given"),
        ({"regex": "(a"}, "cannot be followed"),
        ({"json_schema": {"type": "nothing"}}, "cannot be followed"),
        ({"json_schema": "{"}, "json_schema is no JSON"),
        ({"json_schema": '{"a":' * 100_000}, "json_schema is no JSON"),
        ({"json_schema": DEEP}, "json_schema is no JSON"),
        ({"json_schema": {"enum": {1}}}, "json_schema is no JSON"),
        ({"grammar": "start: other"}, "cannot be followed"),
        (
            {"json_schema": {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 2}}, "$ref": "#/$defs/a"}},
            "cannot be followed",
        ),
        ({"choice": []}, "choice is no list of texts"),
        ({"choice": "abc"}, "choice is no list of texts"),
        ({"regex": 7}, "regex is no text"),
    ],
)
def test_errors(gpt2: tuple[Any, Any], given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Grammar(gpt2[1], **given)


def test_tokenizers_that_are_not_served(gpt2: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="object is no fast tokenizer"):
        Grammar(object(), 0, regex="a")
    with pytest.raises(ValueError, match="no token ends a result"):
        Grammar(gpt2[1], [], regex="a")
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ImportError, match="pip install llguidance"):
        Grammar(gpt2[1], regex="a")
