"""Models that only encode: the same results at real tokens, and the library's own or zeros in the place of padding."""

from __future__ import annotations

import copy
import gc
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import fastgen
from fastgen import settings
from fastgen.decoding import derived_weights, layers
from fastgen.ops.linear import choose, copies
from fastgen.optimizer.transformers.encoders import call, unpadded_forward
from fastgen.optimizer.transformers.encoders.stacks import BUCKETED, RIGHT_PADDED, VARLEN
from tests.equivalence.encoder_models import (
    HEADS,
    LONGEST,
    OF_SEQ2SEQ,
    OTHERS,
    TOLERANCE,
    WITHOUT_PADDING,
    assert_close,
    build,
    class_of,
    inputs,
    tensors,
)
from tests.equivalence.models import BY_NAME
from tests.noting import noted

pytestmark = [pytest.mark.usefixtures("strict"), pytest.mark.sampled(6)]

LENGTHS = [7, LONGEST, 20, 6, 21, 7, 2]
# The architectures whose heads read padded positions: a last position, or an average that multiplies them with zero.
READS_PADDING = {("EuroBert", "SequenceClassification"), ("RoFormer", "MultipleChoice")}
# The heads whose results have nothing in the place of padding.
WITHOUT_STATES = ("SequenceClassification", "MultipleChoice")


def _plain(model: Any, given: dict[str, Any]) -> Any:
    with torch.inference_mode(), fastgen.disabled():
        return model(**given)


def _fast(model: Any, given: dict[str, Any], padding: str = "exact") -> Any:
    fastgen.enable(padding=padding)
    fastgen.reset_stats()
    with torch.inference_mode():
        return model(**given)


def _accelerated() -> int:
    return sum(
        entry["accelerated"] for name, entry in fastgen.stats().items() if name.startswith("transformers.encoder")
    )


def _reasons() -> list[str]:
    return list(fastgen.stats().get("transformers.encoder", {}).get("not used", {}))


def _assert_same(found: Any, expected: Any, mask: Tensor, padding: str, tolerance: float = TOLERANCE) -> None:
    """At tokens, and with padding="exact" everywhere; there are zeros in the place of padding otherwise."""
    assert type(found) is type(expected) and (not isinstance(expected, dict) or list(found) == list(expected))
    for one, other in zip(tensors(found), tensors(expected), strict=True):
        if mask.dim() > 2 and other.dim() == mask.dim():  # states of choices, a row each
            mask = mask.flatten(0, -2)
        has_positions = padding == "zero" and other.shape[: mask.dim()] == mask.shape
        assert_close(one, other, tolerance, at=mask if has_positions else None)
        assert not (has_positions and _accelerated() and one[~mask.bool()].any())


def _check(model: Any, given: dict[str, Any], padding: str = "exact", tolerance: float = TOLERANCE) -> None:
    expected = _plain(model, given)
    _assert_same(_fast(model, given, padding), expected, given["attention_mask"], padding, tolerance)


def _grid() -> list[tuple[str, str, str]]:
    """Architectures with their heads, and padding.

    "exact" is tried where it makes a difference: on heads that show no states; the other ones decline for one reason,
    whatever the architecture. So do architectures whose stack is not known, of which two heads are enough.
    """
    known = [(name, head) for name in WITHOUT_PADDING for head in ("", *HEADS)] + [(name, "") for name in OF_SEQ2SEQ]
    others = [(name, head) for name in OTHERS for head in ("", "SequenceClassification")]
    found = [(name, head, "zero") for name, head in [*known, *others]]
    found += [(*both, "exact") for both in known if both[1] in WITHOUT_STATES]
    return [each for each in found if class_of(*each[:2]) is not None]


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(("architecture", "head", "padding"), _grid())
def test_every_architecture(architecture: str, head: str, side: str, padding: str) -> None:
    kind = class_of(architecture, head)
    given: dict[str, Any] = inputs(LENGTHS, side)
    if head == "MultipleChoice":
        given = {name: value[:6].view(3, 2, -1) for name, value in given.items()}
    # Which implementation it is says in which form the layers get the mask, whatever the head.
    both = kind._supports_sdpa and not head
    for attention in ("sdpa", "eager") if both else ("sdpa" if kind._supports_sdpa else "eager",):
        model = build(architecture, head, attention)
        if head == "MultipleChoice" and getattr(model.base_model, "pooler", True) is None:
            pytest.skip("this release makes it without the pooler that it reads")
        _check(model, given, padding)
        if architecture in OTHERS:
            assert not _accelerated()
        elif side == "right" and (architecture, head) not in READS_PADDING:
            assert _accelerated() == 1, _reasons()


def test_the_page_names_every_architecture_with_its_way() -> None:
    """docs/encoders.md: what the models that the tests run are served by."""
    ways = {VARLEN: "one row", BUCKETED: "groups", RIGHT_PADDED: "groups, with padding behind the texts only"}
    known = (*WITHOUT_PADDING, *OF_SEQ2SEQ)
    if missing := [name for name in known if class_of(name) is None]:
        pytest.skip(f"this release has no {missing[0]}")
    expected = {name: ways[call.known_of(build(name)).way] for name in known}
    page = (Path(__file__).parents[2] / "docs/encoders.md").read_text()
    rows = re.findall(r"^\| ((?:one row|groups|original)[^|]*) \| (.*) \|$", page, re.MULTILINE)
    found = {name: way.partition(":")[0] for way, names in rows for name in re.findall("`(.*?)`", names)}
    assert found == expected | dict.fromkeys(OTHERS, "original")
    assert f"all {len(found)} with" in page


@pytest.fixture
def classifier() -> Any:
    return build("Bert", "SequenceClassification")


def _with(name: str, side: str = "right", width: int = 32) -> dict[str, Any]:
    """Inputs with one more argument, or in another form; embeddings have this width."""
    given: dict[str, Any] = inputs(LENGTHS, side)
    ids = given["input_ids"]
    if name == "token types":
        given["token_type_ids"] = (torch.arange(LONGEST) > 3).long().expand_as(ids)
    elif name == "positions":
        given["position_ids"] = torch.arange(LONGEST).flip(0).expand_as(ids) + 2
    elif name == "positions of one row":
        given["position_ids"] = torch.arange(LONGEST).flip(0)[None] + 2
    elif name == "embeddings":
        generator = torch.Generator().manual_seed(0)
        given["inputs_embeds"] = torch.randn(*ids.shape, width, generator=generator)
        del given["input_ids"]
    elif name == "labels":
        given["labels"] = torch.arange(len(ids)) % 3
    elif name == "a tuple":
        given["return_dict"] = False
    elif name == "a mask of bool":
        given["attention_mask"] = given["attention_mask"].bool()
    elif name == "a mask of float":
        given["attention_mask"] = given["attention_mask"].float()
    elif name == "holes":
        given["attention_mask"][1, 5:9] = 0
    return given


OPTIONS = ["token types", "positions", "positions of one row", "embeddings", "labels", "a tuple"]
OPTIONS += ["a mask of bool", "a mask of float", "holes"]


@pytest.mark.parametrize("padding", ["exact", "zero"])
@pytest.mark.parametrize("option", OPTIONS)
def test_options(classifier: Any, option: str, padding: str) -> None:
    _check(classifier, _with(option), padding)
    assert _accelerated() == 1, _reasons()


def test_positional_arguments(classifier: Any) -> None:
    given = inputs(LENGTHS)
    with torch.inference_mode():
        assert_close(classifier(*given.values()), _plain(classifier, given))
    assert _accelerated() == 1


def test_as_many_labels_as_positions(classifier: Any) -> None:
    """A result with a row for each text and a column for each label is none of positions."""
    given = inputs([3, 1, 2], longest=3)
    expected = _plain(classifier, given)
    assert expected.logits.shape == given["input_ids"].shape
    found = _fast(classifier, given, "zero")
    torch.testing.assert_close(found.logits, expected.logits, rtol=0.0, atol=TOLERANCE)
    assert _accelerated() == 1


@pytest.mark.parametrize("architecture", ["Bert", "DebertaV2", "T5"])
def test_bfloat16(architecture: str) -> None:
    model = build(architecture, "" if architecture == "T5" else "SequenceClassification")
    half = type(model)(model.config).eval()
    half.load_state_dict(model.state_dict())
    _check(half.to(torch.bfloat16), inputs(LENGTHS), "zero", tolerance=3e-2)
    assert _accelerated() == 1


def test_many_rows_have_kernels_of_fastgens(classifier: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that have changed since are seen."""
    used = noted(monkeypatch, choose, "kernel_for")
    monkeypatch.setattr(layers, "MIN_WEIGHT", 0)
    model = copy.deepcopy(classifier)
    for lengths in (LENGTHS * 3, [LONGEST] * 9):  # with and without padding
        used.clear()
        _check(model, inputs(lengths))
        assert used
        with torch.no_grad():
            model.classifier.weight.data.mul_(-2.0)


def test_weights_in_fewer_bits(classifier: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are kept from one forward pass to the next, and only if the user asks for that; changed ones are noticed."""
    monkeypatch.setattr(layers, "MIN_WEIGHT", 0)
    monkeypatch.setattr(layers, "MIN_NARROW", 0)
    monkeypatch.setattr(choose, "unavailable", lambda *arguments: None)
    packed = noted(monkeypatch, copies, "pack")
    model = copy.deepcopy(classifier)
    given = inputs(LENGTHS)
    exact = _plain(model, given).logits
    with settings.changed(weight_dtype="int8", packed_weights="keep"):
        for _ in range(2):
            with torch.inference_mode():
                found = model(**given).logits
            assert not torch.equal(found, exact)
            torch.testing.assert_close(found, exact, rtol=0.1, atol=0.3)
        count = len(packed)
        assert count and "forward" not in vars(model.classifier)
        with torch.no_grad():
            model.classifier.weight.mul_(-1.0)
            model.classifier.bias.mul_(-1.0)
            torch.testing.assert_close(model(**given).logits, -found)
        assert len(packed) == count + 1
    fastgen.reset_stats()
    with settings.changed(weight_dtype="int8"), torch.inference_mode():
        torch.testing.assert_close(model(**given).logits, -exact, rtol=0.0, atol=TOLERANCE)
    assert "packed_weights" in str(fastgen.stats()["int8 weights"]["not used"])
    derived_weights.drop_all()


def test_the_original_code_with_gradients(classifier: Any) -> None:
    with torch.inference_mode(False), torch.enable_grad():
        classifier(**_with("labels")).loss.backward()
    assert classifier.classifier.weight.grad is not None and not _accelerated()
    assert any("gradients" in reason for reason in _reasons())
    classifier.zero_grad()


def _decoder() -> Any:
    """It looks at the states of an encoder."""
    config = transformers.BertConfig(**WITHOUT_PADDING["Bert"], is_decoder=True, add_cross_attention=True)
    return transformers.BertLMHeadModel(config).eval()


def _eager() -> Any:
    return build("Bert", "SequenceClassification", "eager")


# Why a call is left to the original code: the model, and what is changed of its inputs.
LEFT_ALONE: dict[str, tuple[Callable[[], Any], Callable[[dict[str, Any]], Any]]] = {
    "a sequence that is all padding": (_eager, lambda given: given["attention_mask"][2].zero_()),
    "a mask of other values": (_eager, lambda given: given["attention_mask"][2].mul_(2)),
    "arguments that ask for more (output_attentions)": (_eager, lambda given: given.update(output_attentions=True)),
    "encoder_hidden_states": (_decoder, lambda given: given.update(encoder_hidden_states=torch.randn(7, 5, 32))),
    "hardly any padding that could be left out": (_eager, lambda given: given.update(inputs([39, 40, 38]))),
    "a mask with holes": (  # and positions that are relative
        lambda: build("DebertaV2", "SequenceClassification"),
        lambda given: given.update(_with("holes")),
    ),
}


@pytest.mark.parametrize("reason", LEFT_ALONE)
def test_calls_left_to_the_original_code(reason: str) -> None:
    (make, change), given = LEFT_ALONE[reason], inputs(LENGTHS)
    model = make()
    change(given)
    expected = _plain(model, given)
    for padding in ("exact", "zero"):
        found = _fast(model, given, padding)
        for one, other in zip(tensors(found), tensors(expected), strict=True):
            assert torch.equal(one, other)
        assert not _accelerated() and reason in _reasons()[0]


def test_calls_without_a_mask_of_tokens() -> None:
    """There is none, or it says more than which tokens count: nothing is left out, and nothing fails."""
    model, given = build("Bert", "SequenceClassification"), inputs(LENGTHS)
    for mask in (None, given["attention_mask"][:, None, None, :].bool()):
        given["attention_mask"] = mask
        torch.testing.assert_close(_fast(model, given, "zero").logits, _plain(model, given).logits)
        assert not _reasons() and not fastgen.stats().get("transformers.encoder", {}).get("fallback")


def test_a_call_that_asks_for_less_than_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = build("Bert", "SequenceClassification"), inputs(LENGTHS)
    monkeypatch.setattr(model.config, "output_hidden_states", True)
    _fast(model, given)
    assert not _accelerated() and "output_hidden_states" in _reasons()[0]
    given["output_hidden_states"] = False
    torch.testing.assert_close(_fast(model, given).logits, _plain(model, given).logits)
    assert _accelerated()


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("architecture", [*WITHOUT_PADDING, *OF_SEQ2SEQ])
def test_states_of_all_layers(architecture: str, side: str) -> None:
    """They are those of the library at real tokens: of one row of tokens, and of groups of texts."""
    for head in ("", "TokenClassification", "MultipleChoice"):
        if class_of(architecture, head) is None or (head and architecture in OF_SEQ2SEQ):
            continue
        model, given = build(architecture, head), {**inputs(LENGTHS, side), "output_hidden_states": True}
        if head == "MultipleChoice":
            if (architecture, head) in READS_PADDING:
                continue
            given |= {name: given[name][:6].view(3, 2, -1) for name in ("input_ids", "attention_mask")}
        for padding, as_dict in (("exact", True), ("zero", True), ("zero", False)):
            expected = _plain(model, {**given, "return_dict": as_dict})
            assert len(tensors(expected)) > 2  # the last states and those before
            _check(model, {**given, "return_dict": as_dict}, padding)
            # With padding in front, poolers read it, and some models count positions from it.
            assert side == "left" or _accelerated() == (padding == "zero"), _reasons()


def test_states_that_are_asked_for_in_another_way(classifier: Any) -> None:
    model, given = copy.deepcopy(classifier), inputs(LENGTHS)
    for some in (model, build("ModernBert")):
        _check(some, {**given, "output_hidden_states": [0, -2]}, "zero")
        assert not _accelerated() and _reasons() == ["an argument of the layers (output_hidden_states)"]
    _check(build("ModernBert"), {**given, "output_hidden_states": 2}, "zero")
    model.config.output_hidden_states = True
    _check(model, given, "zero")
    assert _accelerated() == 1, _reasons()


def test_training_and_hooks(classifier: Any) -> None:
    given = inputs(LENGTHS)
    with classifier.bert.encoder.layer[0].register_forward_hook(lambda *arguments: None):
        _check(classifier, given)
        assert _reasons() == ["forward hooks are registered on the model"]
    classifier.bert.encoder.layer[0].train()
    try:
        _fast(classifier, given)
        assert not _accelerated()
    finally:
        classifier.eval()


def test_padded_positions_are_those_of_the_library() -> None:
    """With padding="exact", whoever looks at them sees what the library gives."""
    given = inputs(LENGTHS)
    for head in ("", "TokenClassification"):
        model = build("Roberta", head)
        expected = _plain(model, given)
        for _ in range(2):  # the second time it is known that it does not serve
            assert torch.equal(_fast(model, given)[0], expected[0])
            assert not _accelerated() and "padded positions" in _reasons()[0]


def test_a_failure_is_repeated_with_the_original_code(classifier: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*arguments: Any) -> Any:
        raise ValueError("planted")

    fastgen.enable(strict=False)
    monkeypatch.setattr(unpadded_forward.Packing, "attend", failing)
    given = inputs(LENGTHS)
    expected = _plain(classifier, given)
    with pytest.warns(RuntimeWarning, match="planted"):
        found = _fast(classifier, given)
    assert torch.equal(found.logits, expected.logits)


def test_threads(classifier: Any) -> None:
    batches = [inputs([length, LONGEST, 3]) for length in range(2, 14)]
    expected = [_plain(classifier, given).logits for given in batches]

    def run(given: dict[str, Any]) -> Tensor:
        with torch.inference_mode():
            return classifier(**given).logits

    with ThreadPoolExecutor(4) as pool:
        assert_close([*pool.map(run, batches)], expected)
    assert _accelerated() == len(batches)


def test_the_encoder_inside_an_encoder_decoder_model() -> None:
    model, given = BY_NAME["bart"].build(), inputs([5, LONGEST, 9, 5, 7])
    given["decoder_input_ids"] = given["input_ids"][:, :4]
    expected = _plain(model, given)
    for padding in ("exact", "zero"):
        found = _fast(model, given, padding)
        torch.testing.assert_close(found.logits, expected.logits, rtol=0.0, atol=TOLERANCE)
        assert _accelerated() == (padding == "zero")


def test_nothing_is_known_of_a_model_that_is_gone() -> None:
    gc.collect()
    before = len(call._known)
    _fast(type(build("Bert"))(build("Bert").config).eval(), inputs(LENGTHS), "zero")
    gc.collect()
    assert len(call._known) <= before


def test_generation_is_not_concerned() -> None:
    model, given = BY_NAME["bart"].build(), inputs([5, 30, 9])
    fastgen.enable(strict=False, padding="zero")
    with torch.inference_mode():
        model.generate(**given, max_new_tokens=3)
    assert "transformers.encoder" not in str(fastgen.stats())
