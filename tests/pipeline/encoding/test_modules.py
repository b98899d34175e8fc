"""Pooling and what follows it, against definitions in plain Python; damaged and unknown files of a model."""

from __future__ import annotations

import json
import math

import pytest
import torch

from fastgen.pipeline.encoding.modules import SentenceModules, read_modules
from fastgen.pipeline.errors import SetupError
from fastgen.pipeline.settings import POOLINGS, EmbedOptions
from tests.pipeline import tiny

TOLERANCE = dict(rtol=1e-5, atol=1e-6)


def asked(**options) -> EmbedOptions:
    return EmbedOptions(model="m", input="-", output="-", **options)


def by_hand(kind: str, vectors: list[list[float]], skipped: int) -> list[float]:
    """The vector of a text, by the vectors of its tokens."""
    places = list(range(1, len(vectors) + 1))[skipped:]
    kept = vectors[skipped:]
    if kind in ("cls", "lasttoken"):
        return kept[0 if kind == "cls" else -1]
    columns = list(zip(*kept, strict=True))
    if kind == "max":
        return [max(column) for column in columns]
    weights = [float(place) for place in places] if kind == "weightedmean" else [1.0] * len(kept)
    total = math.sqrt(sum(weights)) if kind == "mean_sqrt_len_tokens" else sum(weights)
    return [sum(w * value for w, value in zip(weights, column, strict=True)) / total for column in columns]


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("skipped", [0, 2])
@pytest.mark.parametrize("kind", POOLINGS)
def test_pooling_is_its_definition_whatever_is_at_padding(kind: str, skipped: int, side: str) -> None:
    torch.manual_seed(0)
    lengths = [7, 3, 5, 7]
    states, mask = torch.full((4, 7, 6), math.nan), torch.zeros(4, 7, dtype=torch.long)
    texts = [torch.randn(length, 6) for length in lengths]
    for row, text in enumerate(texts):
        place = slice(len(text)) if side == "right" else slice(7 - len(text), None)
        states[row, place], mask[row, place] = text, 1
    found = SentenceModules((kind,), include_prompt=False)(states, mask, skipped)
    expected = torch.tensor([by_hand(kind, text.tolist(), skipped) for text in texts])
    torch.testing.assert_close(found, expected, **TOLERANCE)
    with_prompt = SentenceModules((kind,))(states, mask, skipped)
    expected = torch.tensor([by_hand(kind, text.tolist(), 0) for text in texts])
    torch.testing.assert_close(with_prompt, expected, **TOLERANCE)


def test_a_text_that_was_cut_within_the_prompt_keeps_a_token() -> None:
    states = torch.arange(8.0).view(2, 4, 1)
    found = SentenceModules(("mean",), include_prompt=False)(states, torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]), 4)
    assert found.tolist() == [[3.0], [5.0]]


def test_half_precision_is_summed_in_float32() -> None:
    states = torch.full((1, 4096, 1), 8.0, dtype=torch.float16)
    assert SentenceModules(("mean",))(states, torch.ones(1, 4096)).tolist() == [[8.0]]
    assert SentenceModules(("max",))(states, torch.ones(1, 4096)).dtype == torch.float32


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        ({"pooling_mode": "lasttoken"}, ("lasttoken",)),
        ({"pooling_mode": ["cls", "mean"]}, ("cls", "mean")),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, ("cls",)),
        # In the order in which sentence-transformers joins them.
        ({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, ("max", "mean")),
        ({"word_embedding_dimension": 32}, ("mean",)),
    ],
)
def test_both_ways_of_naming_a_pooling(fresh, config, kinds) -> None:
    tiny.sentence_files(fresh, ("Pooling", config))
    assert read_modules(str(fresh), asked()).pooling == kinds
    assert read_modules(str(fresh), asked(pooling="max")).pooling == ("max",)


def dense(folder, activation="torch.nn.modules.activation.Tanh", residual=False, size=5):
    from safetensors.torch import save_file

    torch.manual_seed(3)
    weights = {"linear.weight": torch.randn(size, 32), "linear.bias": torch.randn(size)}
    if residual:
        weights["residual.weight"] = torch.randn(size, 32)
    config = dict(in_features=32, out_features=size, bias=True, activation_function=activation)
    tiny.sentence_files(
        folder, ("Pooling", {"pooling_mode": "mean"}), ("Dense", config | ({"use_residual": True} if residual else {}))
    )
    save_file(weights, folder / "2_Dense" / "model.safetensors")
    return weights


@pytest.mark.parametrize(("activation", "act"), [("Tanh", torch.tanh), ("GELU", torch.nn.functional.gelu)])
@pytest.mark.parametrize("residual", [False, True])
def test_a_dense_module(fresh, activation, act, residual) -> None:
    weights = dense(fresh, f"torch.nn.modules.activation.{activation}", residual)
    pooled = torch.randn(3, 1, 32)
    found = read_modules(str(fresh), asked())(pooled, torch.ones(3, 1))
    expected = act(pooled[:, 0] @ weights["linear.weight"].T + weights["linear.bias"])
    if residual:
        expected += pooled[:, 0] @ weights["residual.weight"].T
    torch.testing.assert_close(found, expected, **TOLERANCE)


def test_weights_of_torch_are_read_without_running_them(fresh) -> None:
    weights = dense(fresh)
    (fresh / "2_Dense" / "model.safetensors").unlink()
    torch.save(weights, fresh / "2_Dense" / "pytorch_model.bin")
    assert read_modules(str(fresh), asked())(torch.randn(3, 1, 32), torch.ones(3, 1)).shape == (3, 5)

    class Runs:
        def __reduce__(self):
            return (print, ("ran",))

    torch.save({"linear.weight": Runs()}, fresh / "2_Dense" / "pytorch_model.bin")
    with pytest.raises(SetupError, match="cannot read"):
        read_modules(str(fresh), asked())


def test_normalisation_is_not_done_twice(fresh) -> None:
    tiny.sentence_files(fresh, ("Pooling", {}), ("Normalize", {}))
    assert len(read_modules(str(fresh), asked(normalize=True)).steps) == 1
    tiny.sentence_files(fresh, ("Pooling", {}))
    (step,) = read_modules(str(fresh), asked(normalize=True)).steps
    assert step.run(torch.tensor([[3.0, 4.0]])).tolist() == [[pytest.approx(0.6), pytest.approx(0.8)]]


def test_prompts(fresh) -> None:
    known = {"prompts": {"query": "q: ", "passage": "p: "}, "default_prompt_name": "passage"}
    tiny.sentence_files(fresh, ("Pooling", {}), prompts=known)
    for options, prompt in (
        ({}, "p: "), ({"prompt_name": "query"}, "q: "), ({"prompt": ""}, ""), ({"prompt": "x"}, "x"),
    ):  # fmt: skip
        assert read_modules(str(fresh), asked(**options)).prompt == prompt
    with pytest.raises(SetupError, match="no prompt 'other': there are query, passage"):
        read_modules(str(fresh), asked(prompt_name="other"))


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ([("Pooling", {}), ("CNN", {})], "type CNN"),
        ([("Normalize", {}), ("Pooling", {})], "type Normalize"),
        ([("Pooling", {}), ("Pooling", {})], "type Pooling"),
        ([("Dropout", {})], "no module of type Pooling"),
        ([("Pooling", {"pooling_mode": "median"})], "pooling 'median' is not supported"),
        ([("Pooling", {}), ("Dense", {"in_features": 32, "out_features": 5})], "no weights"),
        ([("Pooling", {}), ("Normalize", {"module_input_name": "token_embeddings"})], "not one of the text's vector"),
    ],
)
def test_modules_that_are_not_supported_are_refused(fresh, modules, message) -> None:
    tiny.sentence_files(fresh, *modules)
    with pytest.raises(SetupError, match=message):
        read_modules(str(fresh), asked())


def test_code_that_a_configuration_names_is_not_run(fresh) -> None:
    dense(fresh, "os.system")
    with pytest.raises(SetupError, match=r"2_Dense/config.json: activation_function 'os.system' is not supported"):
        read_modules(str(fresh), asked())
    dense(fresh, "torch.nn.Module")
    with pytest.raises(SetupError, match=r"is not supported"):
        read_modules(str(fresh), asked())


@pytest.mark.parametrize(
    "text", ["{", "[]", "[1]", '{"a": 1}', '[{"path": ""}]', '[{"path": "", "type": "x.Pooling"}]']
)
def test_a_damaged_list_is_one_line(fresh, text) -> None:
    (fresh / "modules.json").write_text(text)
    with pytest.raises(SetupError, match=r"modules\.json") as caught:
        read_modules(str(fresh), asked())
    assert "\n" not in str(caught.value)


def change(folder, file, change) -> None:
    """A JSON file of the model, with fields changed; None takes it away."""
    if change is None:
        (folder / file).unlink()
    else:
        (folder / file).write_text(json.dumps({**json.loads((folder / file).read_text()), **change}))


PROMPTS = "config_sentence_transformers.json"


@pytest.mark.parametrize(
    ("file", "changed", "message"),
    [
        ("1_Pooling/config.json", None, "1_Pooling"),
        ("1_Pooling/config.json", {"pooling_mode": []}, r"pooling_mode is \[\]"),
        ("1_Pooling/config.json", {"pooling_mode": [["cls"]]}, "pooling_mode is "),
        ("1_Pooling/config.json", {"pooling_mode": "x" * 5000}, "pooling_mode: pooling 'x"),
        (
            "1_Pooling/config.json",
            {"pooling_mode": None, "pooling_mode_mean_tokens": "no"},
            "pooling_mode_mean_tokens is 'no'",
        ),
        ("1_Pooling/config.json", {"pooling_mode": None, "pooling_mode_mean_tokens": False}, "every pooling_mode_"),
        ("1_Pooling/config.json", {"include_prompt": "yes"}, "include_prompt is 'yes'"),
        ("2_Dense/config.json", None, "2_Dense/config.json has no out_features"),
        ("2_Dense/config.json", {"in_features": True}, "in_features is True"),
        ("2_Dense/config.json", {"out_features": 10**30}, "out_features is 10"),
        ("2_Dense/config.json", {"bias": 1}, "bias is 1"),
        ("2_Dense/config.json", {"activation_function": ["torch.nn.Tanh"]}, "activation_function is "),
        ("2_Dense/config.json", {"module_input_name": 3}, "module_input_name is 3"),
        (PROMPTS, {"prompts": {"query": 5}}, r"prompts\['query'\] is 5"),
        (PROMPTS, {"prompts": {}}, f"default_prompt_name of .*{PROMPTS}"),
        (PROMPTS, {"default_prompt_name": ["query"]}, "default_prompt_name is "),
        (PROMPTS, {"default_prompt_name": "q" * 5000}, "no prompt 'qqq"),
        ("sentence_bert_config.json", {"max_seq_length": "many"}, "max_seq_length is 'many'"),
        ("sentence_bert_config.json", {"do_lower_case": "no"}, "do_lower_case is 'no'"),
    ],
)
def test_an_error_names_the_file_and_the_field(fresh, file, changed, message) -> None:
    dense(fresh)
    (fresh / PROMPTS).write_text(json.dumps({"prompts": {"query": "q: "}, "default_prompt_name": "query"}))
    (fresh / "sentence_bert_config.json").write_text("{}")
    read_modules(str(fresh), asked())
    change(fresh, file, changed)
    with pytest.raises(SetupError, match=message) as caught:
        read_modules(str(fresh), asked())
    found = str(caught.value)
    assert file in found or changed is None
    assert "\n" not in found and len(found) < len(str(fresh)) * 2 + 250


@pytest.mark.parametrize("path", ["../other", "/etc", "a/../../b", "a\\b", 5, "a\0b", ["1_Pooling"], None])
def test_paths_that_cannot_be_of_a_folder_of_the_model(fresh, path) -> None:
    tiny.sentence_files(fresh, ("Pooling", {}))
    listed = json.loads((fresh / "modules.json").read_text())
    listed[1]["path"] = path
    (fresh / "modules.json").write_text(json.dumps(listed))
    with pytest.raises(SetupError, match=r"modules\.json is damaged: module 1: path is "):
        read_modules(str(fresh), asked())


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("linear.bias", (1,)), ("linear.bias", ()), ("linear.bias", (5, 1)), ("linear.weight", (5, 1)),
        ("linear.weight", (32, 5)), ("residual.weight", (1, 32)), ("residual.weight", None), ("linear.bias", None),
        ("linear.scale", (5,)),
    ],
)  # fmt: skip
def test_tensors_of_other_shapes_are_refused(fresh, name, shape) -> None:
    """torch broadcasts many of them."""
    from safetensors.torch import save_file

    weights = dense(fresh, residual=True)
    weights |= {name: torch.zeros(shape)} if shape is not None else {}
    save_file(
        {key: value for key, value in weights.items() if key != name or shape is not None},
        fresh / "2_Dense" / "model.safetensors",
    )
    with pytest.raises(SetupError, match=rf"2_Dense/model\.safetensors does not fit .*{name}"):
        read_modules(str(fresh), asked())


@pytest.mark.parametrize(("weight", "bias"), [((1,), (32,)), ((32,), ()), ((32, 1), (32,))])
def test_norms_of_other_shapes_are_refused(fresh, weight, bias) -> None:
    from safetensors.torch import save_file

    tiny.sentence_files(fresh, ("Pooling", {}), ("LayerNorm", {"dimension": 32}))
    tensors = {"norm.weight": torch.ones(weight), "norm.bias": torch.ones(bias)}
    save_file(tensors, fresh / "2_LayerNorm" / "model.safetensors")
    with pytest.raises(SetupError, match=r"size mismatch for norm\.\w+"):
        read_modules(str(fresh), asked())


def test_vectors_of_another_size_than_a_module_takes(fresh) -> None:
    dense(fresh)
    found = read_modules(str(fresh), asked())
    found.check(32)
    with pytest.raises(SetupError, match=r"2_Dense/config\.json is for vectors of 32 numbers, but gets some of 48"):
        found.check(48)
    change(fresh, "1_Pooling/config.json", {"pooling_mode": ["cls", "mean"], "word_embedding_dimension": 16})
    read_modules(str(fresh), asked()).check(16)
    read_modules(str(fresh), asked(normalize=True)).check(16)
    with pytest.raises(SetupError, match=r"1_Pooling/config\.json is for vectors of 16 numbers, but gets some of 32"):
        read_modules(str(fresh), asked()).check(32)
    with pytest.raises(SetupError, match=r"2_Dense"):
        read_modules(str(fresh), asked(pooling="mean")).check(16)
