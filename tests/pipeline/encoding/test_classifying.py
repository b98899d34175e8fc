"""Labels of a file, from end to end, against the library's model on one text after the other."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch

from fastgen.pipeline import SetupError
from fastgen.pipeline.encoding import classify_dataset
from tests.pipeline import tiny
from tests.pipeline.reading import rows_of


def run(model, source, output, **options):
    return classify_dataset(model, source, output, **({"device": "cpu", "quiet": True, "batch_size": 4} | options))


def logits_of(model: Path, texts, pairs=None):
    """The numbers of the labels of one text, or pair, after the other, without any of the pipeline."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(model)
    own = AutoModelForSequenceClassification.from_pretrained(model).eval()
    found = []
    for number, text in enumerate(texts):
        with torch.no_grad():
            given = tokens(text, pairs[number] if pairs else None, truncation=True, max_length=64, return_tensors="pt")
            found.append(own(**given).logits[0])
    return torch.stack(found)


def test_labels_and_scores_are_those_of_each_text_alone(classifier, inputs, tmp_path):
    report = run(classifier, inputs, tmp_path / "out.jsonl", top_k=3)
    texts = inputs.read_text().splitlines()
    rows = rows_of(tmp_path / "out.jsonl")
    assert [row["input"] for row in rows] == texts and report.samples == 40
    expected = logits_of(classifier, texts).softmax(dim=-1)
    for row, scores in zip(rows, expected, strict=True):
        order = scores.argsort(descending=True).tolist()
        assert row["labels"] == [f"kind {label}" for label in order]
        assert row["scores"] == pytest.approx(scores[order].tolist(), abs=1e-5)
        assert (row["label"], row["score"]) == (row["labels"][0], row["scores"][0])
    assert len({row["label"] for row in rows}) > 1


@pytest.mark.parametrize(
    ("changes", "options", "act"),
    [
        ({"labels": 3, "problem_type": "multi_label_classification"}, {}, torch.sigmoid),
        ({"labels": 1}, {}, lambda numbers: numbers),
        ({"labels": 2, "problem_type": "regression"}, {"top_k": 2}, lambda numbers: numbers),
        ({"labels": 1}, {"scores": "sigmoid"}, torch.sigmoid),
        ({"labels": 3}, {"scores": "raw"}, lambda numbers: numbers),
        ({"labels": 3, "problem_type": "multi_label_classification"}, {"scores": "softmax"}, lambda n: n.softmax(-1)),
    ],
)
def test_what_makes_scores(inputs, tmp_path, changes, options, act):
    folder = tiny.bert(tmp_path / "model", **changes)
    run(folder, inputs, tmp_path / "out.jsonl", **options)
    expected = act(logits_of(folder, inputs.read_text().splitlines()))
    scores = [row["score"] for row in rows_of(tmp_path / "out.jsonl")]
    assert scores == pytest.approx(expected.amax(dim=-1).tolist(), abs=1e-5)


def test_equal_scores_come_in_the_order_of_the_model(inputs, tmp_path):
    folder = tiny.bert(tmp_path / "model", labels=3)
    names = ("classifier.weight", "classifier.bias")
    tiny.change_weights(folder, lambda weights: weights.update({name: weights[name] * 0 for name in names}))
    run(folder, inputs, tmp_path / "out.jsonl", top_k=3)
    assert {tuple(row["labels"]) for row in rows_of(tmp_path / "out.jsonl")} == {("kind 0", "kind 1", "kind 2")}


@pytest.mark.parametrize("form", ["csv", "tsv", "jsonl"])
def test_pairs_of_texts(classifier, tmp_path, form):
    texts, others = tiny.sentences(9), tiny.sentences(9, seed=1, longest=80)
    source = tmp_path / f"in.{form}"
    if form == "jsonl":
        lines = [json.dumps({"a": text, "b": other}) for text, other in zip(texts, others, strict=True)]
        source.write_text("\n".join([*lines, json.dumps({"a": "x"}), json.dumps({"a": "x", "b": 3})]) + "\n")
    else:
        mark = "," if form == "csv" else "\t"
        rows = [*zip(texts, others, strict=True), ("x", ""), ("x", "  ")]
        source.write_text(f"a{mark}b\n" + "".join(f"{text}{mark}{other}\n" for text, other in rows))
    report = run(classifier, source, tmp_path / "out.jsonl", input_column="a", pair_column="b")
    assert (report.samples, report.skipped) == (9, 2) and report.truncated > 0
    rows = rows_of(tmp_path / "out.jsonl")
    assert [row["pair"] for row in rows] == others
    expected = logits_of(classifier, texts, others).softmax(dim=-1).amax(dim=-1)
    assert [row["score"] for row in rows] == pytest.approx(expected.tolist(), abs=1e-5)
    assert [row["score"] for row in rows] != pytest.approx(
        logits_of(classifier, texts).softmax(dim=-1).amax(dim=-1).tolist(), abs=1e-3
    )


def test_token_types_reach_the_model(tmp_path):
    """A tokenizer that tells the two texts apart: with padding, in one batch."""
    from tokenizers import processors

    folder = tiny.bert(tmp_path / "model", labels=3)
    from transformers import AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(folder)
    tokens.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    tokens.save_pretrained(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    texts, others = tiny.sentences(6), tiny.sentences(6, seed=1)
    assert AutoTokenizer.from_pretrained(folder)(texts[0], others[0])["token_type_ids"][-1] == 1
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"a": a, "b": b}) + "\n" for a, b in zip(texts, others, strict=True)))
    run(folder, source, tmp_path / "out.jsonl", input_column="a", pair_column="b", batch_size=64, max_tokens=9999)
    expected = logits_of(folder, texts, others).softmax(dim=-1).amax(dim=-1)
    assert [row["score"] for row in rows_of(tmp_path / "out.jsonl")] == pytest.approx(expected.tolist(), abs=1e-5)


def test_every_format_has_the_same_records(classifier, tmp_path):
    source = tmp_path / "in.csv"
    source.write_text('n,text\na,"let there be, ""light"""\nb,\nc,"the\nearth"\n')
    from pyarrow import parquet

    for form in ("jsonl", "csv", "parquet"):
        report = run(classifier, source, tmp_path / f"out.{form}", input_column="text", id_column="n", top_k=2)
        assert (report.samples, report.skipped) == (2, 1)
    rows = rows_of(tmp_path / "out.jsonl")
    assert rows == parquet.read_table(tmp_path / "out.parquet").to_pylist()
    with open(tmp_path / "out.csv", newline="") as handle:
        cells = list(csv.reader(handle))
    assert cells[0] == ["id", "input", "label", "score", "label_2", "score_2"]
    for row, (identity, text, label, score, second, other) in zip(rows, cells[1:], strict=True):
        assert (row["id"], row["input"], row["labels"]) == (identity, text, [label, second])
        assert row["scores"] == [float(score), float(other)]


def test_csv_on_standard_output_has_its_header(classifier, inputs, tmp_path, capsysbinary):
    run(classifier, inputs, "-", output_format="csv")
    lines = capsysbinary.readouterr().out.decode().splitlines()
    assert lines[0] == "id,input,label,score" and len(lines) == 41
    (tmp_path / "none.txt").write_text("")
    run(classifier, tmp_path / "none.txt", "-", output_format="csv")
    assert capsysbinary.readouterr().out == b"id,input,label,score\n"


def test_a_decoder_only_model_with_a_head(inputs, tmp_path):
    from transformers import AutoConfig, GPT2ForSequenceClassification

    folder = tiny.gpt2(tmp_path / "model")
    config = AutoConfig.from_pretrained(folder, num_labels=2)
    torch.manual_seed(0)
    tiny.saved(GPT2ForSequenceClassification(config), tiny.tokenizer(encoder_decoder=False), folder)
    run(folder, inputs, tmp_path / "out.jsonl")
    expected = logits_of(folder, inputs.read_text().splitlines()).softmax(dim=-1).amax(dim=-1)
    assert [row["score"] for row in rows_of(tmp_path / "out.jsonl")] == pytest.approx(expected.tolist(), abs=1e-5)


def test_a_model_without_a_head_is_refused(inputs, tmp_path):
    folder = tiny.bert(tmp_path / "model")
    with pytest.raises(SetupError, match=r"2 of its weights are missing, classifier\.bias"):
        run(folder, inputs, tmp_path / "out.jsonl")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 4}, "top-k is 4, but .* has 3 labels"),
        ({"top_k": 0}, "top-k is 0"),
        ({"scores": "max"}, "scores is 'max'"),
        ({"output": "out.npy"}, "no format: choose one of .jsonl, .csv, .parquet"),
        ({"pair_column": "b"}, "no pair column 'b'"),
        ({"input": "-", "pair_column": "b"}, "standard input needs --input-format jsonl"),
    ],
)
def test_options_that_cannot_be(classifier, inputs, tmp_path, options, message):
    with pytest.raises(SetupError, match=message):
        run(classifier, options.pop("input", inputs), tmp_path / options.pop("output", "out.jsonl"), **options)
