"""Tables in and out: each format, with columns of the input kept, and conversations."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pandas
import pyarrow
import pytest
from pyarrow import parquet

from fastgen.pipeline import SetupError, generate_dataset
from tests.pipeline import tiny
from tests.pipeline.children import interrupted_after

OPTIONS: dict[str, Any] = {"quiet": True, "device": "cpu", "batch_size": 4}
SHORT = {"max_new_tokens": 4, "num_beams": 2}
# What a table may hold that a line of text cannot.
STRANGE = [
    'a "quoted" word', "two\nlines", "a,comma", "a\ttab", "", "both\r\nends", "a return\rwithin", " spaces ",
    "日本語 🙂",
]  # fmt: skip
TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] }} {{ message['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)


def run(model: Any, source: Path, target: Path, **options: Any) -> Any:
    """Of the column `article` of a table, unless another one is given."""
    column = None if source.suffix == ".txt" else "article"
    return generate_dataset(
        model, source, target, **{"input_column": column, "generation": SHORT, **OPTIONS, **options}
    )


def table() -> pandas.DataFrame:
    texts = tiny.sentences(len(STRANGE))
    return pandas.DataFrame({"key": STRANGE, "article": texts, "id": range(100, 100 + len(texts))})


def write(frame: pandas.DataFrame, path: Path) -> Path:
    if path.suffix == ".parquet":
        frame.to_parquet(path)
    elif path.suffix == ".jsonl":
        frame.to_json(path, orient="records", lines=True)
    else:
        frame.to_csv(path, index=False, sep="\t" if path.suffix == ".tsv" else ",", lineterminator="\n", quoting=1)
    return path


def read(path: Path) -> pandas.DataFrame:
    if path.suffix == ".parquet":
        return pandas.read_parquet(path)
    if path.suffix == ".jsonl":
        return pandas.read_json(path, lines=True, dtype=False)
    return pandas.read_csv(path, sep="\t" if path.suffix == ".tsv" else ",", keep_default_na=False)


@pytest.mark.parametrize(
    ("given", "written"),
    [(".csv", ".parquet"), (".tsv", ".csv"), (".jsonl", ".tsv"), (".parquet", ".jsonl"), (".parquet", ".parquet")],
)
def test_columns_are_kept_as_they_were(bart: Path, tmp_path: Path, given: str, written: str) -> None:
    frame = table()
    source, target = write(frame, tmp_path / f"in{given}"), tmp_path / f"out{written}"
    report = run(bart, source, target, keep=("all",))
    assert (report.samples, report.skipped) == (len(frame), 0)
    found = read(target)
    assert list(found.columns)[:4] == ["key", "article", "id", "text"]
    assert found["key"].tolist() == STRANGE
    assert found["article"].tolist() == frame["article"].tolist()
    assert [int(number) for number in found["id"]] == frame["id"].tolist()
    lines = tmp_path / "out.txt"
    run(bart, source, lines)
    assert found["text"].tolist() == lines.read_text().splitlines()


@pytest.mark.parametrize("form", ["csv", "tsv"])
def test_a_table_without_kept_columns(bart: Path, inputs: Path, tmp_path: Path, form: str) -> None:
    references = tmp_path / "references.txt"
    references.write_text(inputs.read_text())
    options = {"reference": str(references), "metrics": ("exact",), "token_ids": True}
    run(bart, inputs, tmp_path / f"out.{form}", **options)
    run(bart, inputs, tmp_path / "out.jsonl", **options)
    with open(tmp_path / f"out.{form}", newline="") as handle:
        rows = list(csv.DictReader(handle, delimiter="\t" if form == "tsv" else ","))
    wanted = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert list(rows[0]) == ["id", "input", "text", "score", "input_tokens", "output_tokens", "reference", "token_ids"]
    for row, record in zip(rows, wanted, strict=True):
        assert (row["id"], row["input"], row["text"]) == (str(record["id"]), record["input"], record["text"])
        assert float(row["score"]) == record["scores"][0] and int(row["output_tokens"]) == record["output_tokens"][0]
        assert row["reference"] == record["reference"] and json.loads(row["token_ids"]) == record["token_ids"]
        assert int(row["input_tokens"]) == record["input_tokens"]


def test_types_of_kept_columns_in_parquet(bart: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of numbers, and of what is nested; all else is text. They do not depend on where the parts end."""
    from fastgen.pipeline import layouts

    monkeypatch.setattr(layouts, "_PARQUET_ROWS", 2)
    typed: dict[str, list[Any]] = {
        "whole": [1, 2, None, 4, 5], "wide": [2**60 + 1, 1, 3, None, 5], "broken": [1, 2.5, None, 0.25, 3],
        "flag": [True, None, False, True, True], "nested": [{"a": [1]}, {"a": []}, None, {"a": [2, 3]}, {"a": [4]}],
    }  # fmt: skip
    textual: dict[str, list[Any]] = {
        "large": [2**70, 1, None, 2, 3], "nothing": [None] * 5, "empty": [{}, {}, {}, {}, {}],
        "within": [{"k": {}}, None, {"k": {}}, None, None], "list": [[{}], [], None, [{}], []],
        "before": [2**60 + 1, 1, 0.5, None, 1], "after": [0.5, 1, 2**60 + 1, None, 1],
    }  # fmt: skip
    columns = typed | textual | {"mixed": ["x", 1, None, [2], {"b": 3}], "unknown": [1, 2.5, None, float("nan"), 3]}
    source, target = tmp_path / "in.jsonl", tmp_path / "out.parquet"
    rows = [{"article": text, **{k: v[n] for k, v in columns.items()}} for n, text in enumerate(tiny.sentences(5))]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run(bart, source, target, keep=tuple(columns))
    found = parquet.read_table(target)
    kinds = {name: found.schema.field(name).type for name in columns}
    assert {kinds[name] for name in ("whole", "wide")} == {pyarrow.int64()} and kinds["flag"] == pyarrow.bool_()
    assert kinds["broken"] == kinds["unknown"] == pyarrow.float64() and pyarrow.types.is_struct(kinds["nested"])
    assert {kinds[name] for name in (*textual, "mixed")} == {pyarrow.string()}
    as_text = {name: [v if v is None else json.dumps(v) for v in values] for name, values in textual.items()}
    wanted = {**typed, **as_text, "mixed": ["x", "1", None, "[2]", '{"b": 3}'], "unknown": [1.0, 2.5, None, None, 3.0]}
    values = found.to_pydict()
    assert {name: values[name] for name in columns} == wanted


@pytest.mark.parametrize("written", [".csv", ".jsonl", ".parquet"])
def test_skipped_records_stay_skipped(bart: Path, tmp_path: Path, written: str) -> None:
    source = tmp_path / "in.jsonl"
    texts = tiny.sentences(6)
    rows: list[dict[str, Any]] = [{"article": text, "key": number} for number, text in enumerate(texts)]
    rows[2]["article"], rows[4]["article"] = "", None
    del rows[3]["key"]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    target = tmp_path / f"out{written}"
    report = run(bart, source, target, keep=("key",))
    assert (report.samples, report.skipped) == (4, 2)
    found = [None if key != key or key == "" else int(key) for key in read(target)["key"]]
    assert found == [0, 1, None, 5]
    errors = [json.loads(line) for line in Path(f"{target}.errors.jsonl").read_text().splitlines()]
    assert [error["line"] for error in errors] == [3, 5]


@pytest.mark.parametrize(
    "options, said",
    [
        ({"keep": ("absent",)}, "has no column to keep 'absent', the columns are: key, article, id"),
        ({"keep": ("all",), "output_column": "key"}, "column 'key' would be twice in the output: name it otherwise"),
        ({"keep": ("key",), "output_format": "txt"}, "lines of text have no columns"),
        ({"keep": ("key",), "output_column": "scores"}, "column 'scores' would be twice"),
        ({"system_prompt": "be kind"}, "it needs --chat"),
        ({"chat": True, "prefix": "x"}, "do not go together"),
        ({"chat": True}, "has no chat template: leave out --chat"),
    ],
)
def test_what_does_not_fit_is_one_line(bart: Path, tmp_path: Path, options: dict[str, Any], said: str) -> None:
    source, target = write(table(), tmp_path / "in.csv"), tmp_path / "out.csv"
    with pytest.raises(SetupError) as refused:
        run(bart, source, target, **options)
    assert said in str(refused.value) and "\n" not in str(refused.value)
    assert not target.exists()


def test_a_kept_column_named_as_one_of_the_output(bart: Path, tmp_path: Path) -> None:
    frame = table().rename(columns={"article": "text"})
    source, target = write(frame, tmp_path / "in.csv"), tmp_path / "out.csv"
    run(bart, source, target, input_column="text", keep=("all",), output_column="summary")
    assert read(target)["text"].tolist() == frame["text"].tolist() and len(set(read(target)["summary"])) > 0


def test_a_run_is_not_resumed_with_other_columns(bart: Path, tmp_path: Path) -> None:
    source, target = write(table(), tmp_path / "in.csv"), tmp_path / "out.csv"
    options: dict[str, Any] = {"keep": ("key",)}
    with pytest.raises(KeyboardInterrupt), interrupted_after(1):
        run(bart, source, target, **options)
    for changed in ({"keep": ("key", "id")}, {"output_column": "other"}, {"keep": ()}):
        with pytest.raises(SetupError, match="resume"):
            run(bart, source, target, resume=True, **{**options, **changed})
    run(bart, source, target, resume=True, **options)
    assert read(target)["key"].tolist() == STRANGE


@pytest.fixture
def chatting(gpt2: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gpt2)
    tokenizer.chat_template = TEMPLATE
    return AutoModelForCausalLM.from_pretrained(gpt2), tokenizer


def chat(chatting: tuple[Any, Any], source: Path, target: Path, **options: Any) -> Any:
    """A few tokens in answer to each row."""
    model, tokenizer = chatting
    given = {"input_column": "messages", "generation": {"max_new_tokens": 3}, **options}
    return run(model, source, target, tokenizer=tokenizer, chat=True, **given)


@pytest.mark.parametrize("form", ["prompt", "messages"])
@pytest.mark.parametrize("system", [None, tiny.WORDS[7]])
def test_a_chat_template(chatting: tuple[Any, Any], tmp_path: Path, form: str, system: str | None) -> None:
    """The prompts are those of the library's template, whether a row has a prompt or a conversation."""
    import torch

    model, tokenizer = chatting
    first, second, third = (" ".join(tiny.WORDS[at : at + 2]) for at in (0, 4, 9))
    messages = [
        {"role": "user", "content": first},
        {"role": "assistant", "content": second},
        {"role": "user", "content": third},
    ]
    value = {"prompt": first, "messages": messages}[form]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps({"messages": value}) + "\n")
    chat(chatting, source, target, system_prompt=system, generation={"max_new_tokens": 5, "do_sample": False})
    found = json.loads(target.read_text())
    conversation = [{"role": "system", "content": system}] * bool(system)
    conversation += [{"role": "user", "content": first}] if form == "prompt" else messages
    ids = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=True)["input_ids"]
    options = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": False}
    expected = model.generate(torch.tensor([ids]), **options)[0, len(ids) :]
    assert found["text"] == tokenizer.decode(expected, skip_special_tokens=True)
    assert found["input_tokens"] == len(ids) and found["input"] == (first if form == "prompt" else third)


def test_what_is_no_conversation_is_skipped(chatting: tuple[Any, Any], tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    values = [[], [{"role": "user"}], [{"role": "user", "content": 3}], [1], {"role": "user"}, 7]
    values.append([{"role": "user", "content": "x y"}])
    source.write_text("".join(json.dumps({"messages": each}) + "\n" for each in values))
    report = chat(chatting, source, target)
    assert (report.samples, report.skipped) == (1, 6)


def test_a_run_is_not_resumed_with_another_template(chatting: tuple[Any, Any], tmp_path: Path) -> None:
    source, target = tmp_path / "in.txt", tmp_path / "out.jsonl"
    source.write_text("\n".join(tiny.sentences(9)))
    with pytest.raises(KeyboardInterrupt), interrupted_after(2):
        chat(chatting, source, target, input_column=None)
    chatting[1].chat_template = TEMPLATE + "b"
    with pytest.raises(SetupError, match="resume"):
        chat(chatting, source, target, input_column=None, resume=True)
    chatting[1].chat_template = TEMPLATE
    chat(chatting, source, target, input_column=None, resume=True)
    assert len(target.read_text().splitlines()) == 9


def test_a_kept_value_that_is_no_text_skips_its_record(bart: Path, tmp_path: Path) -> None:
    source = tmp_path / "in.csv"
    texts = tiny.sentences(3)
    source.write_bytes(
        b"article,key\n"
        + b"".join(t.encode() + b"," + k + b"\n" for t, k in zip(texts, (b"a", b"caf\xe9", b"c"), strict=True))
    )
    deep: Any = 1
    for _ in range(900):
        deep = [deep]
    lines = tmp_path / "in.jsonl"
    keys: list[Any] = ["a", {"x": ["\ud800"]}, deep]
    lines.write_text("".join(json.dumps({"article": t, "key": k}) + "\n" for t, k in zip(texts, keys, strict=True)))
    for path, skipped in ((source, 1), (lines, 2)):
        for form in ("csv", "parquet", "jsonl"):
            target = tmp_path / f"{path.suffix[1:]}.{form}"
            report = run(bart, path, target, keep=("key",))
            assert (report.samples, report.skipped) == (3 - skipped, skipped)


def test_a_kept_column_of_ids_beside_other_ids(bart: Path, tmp_path: Path) -> None:
    source, target = write(table(), tmp_path / "in.jsonl"), tmp_path / "out.parquet"
    options = {"input_column": "article", "id_column": "key"}
    run(bart, source, target, keep=("id",), **options)
    assert parquet.read_table(target)["id"].to_pylist() == table()["id"].tolist()


def test_columns_of_late_rows_are_kept(bart: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows: list[dict[str, Any]] = [{"article": text} for text in tiny.sentences(103)]
    rows[101]["extra"] = 5
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run(bart, source, target, keep=["all"])
    found = [json.loads(line) for line in target.read_text().splitlines()]
    assert found[101]["extra"] == 5 and found[0]["extra"] is None


def test_a_prompt_that_looks_like_messages_is_a_prompt(chatting: tuple[Any, Any], tmp_path: Path) -> None:
    """Text of others must not become a message of the system. In a table of text, that is what messages look like."""
    value = json.dumps([{"role": "user", "content": "x"}])
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": value}) + "\n")
    write(pandas.DataFrame({"prompt": [value]}), tmp_path / "in.csv")
    for name, shown in (("in.jsonl", value), ("in.csv", "x")):
        target = tmp_path / f"{name}.jsonl"
        chat(chatting, tmp_path / name, target, input_column="prompt", truncation=True)
        assert json.loads(target.read_text())["input"] == shown
