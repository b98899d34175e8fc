"""Jobs of models that only encode: their numbers are those of the library for each text alone, whatever runs beside."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, BertModel

import fastgen
from fastgen.pipeline.batches import MOST_FAILURES
from fastgen_serve.errors import BadRequest, Failed, Unavailable
from fastgen_serve.jobs import Encode
from fastgen_serve.settings import ServeSettings
from fastgen_serve.workers.encoders import VectorEncoder, classifies, load_encoder
from fastgen_serve.workers.encoding import EncodingWorker
from tests.pipeline import tiny
from tests.serve.checkpoints import encoded, encoder, states

TEXTS = tiny.sentences(24, longest=8)
Asked = Callable[..., Any]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny.bert(tmp_path_factory.mktemp("bert"))
    return tiny.sentence_files(folder, ("Pooling", {"pooling_mode": "mean"}), ("Normalize", {}))


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.bert(tmp_path_factory.mktemp("classifier"), labels=3)


def started(folder: Path, **options: Any) -> EncodingWorker:
    return EncodingWorker(str(folder), ServeSettings(**{"warm_up": False, **options}))


@pytest.fixture(scope="module")
def vectors(bert: Path) -> Iterator[EncodingWorker]:
    worker = started(bert)
    yield worker
    worker.close()


@pytest.fixture(scope="module")
def labels(classifier: Path) -> Iterator[EncodingWorker]:
    worker = started(classifier)
    yield worker
    worker.close()


def ask(worker: EncodingWorker, job: Encode) -> Future[list[float]]:
    future: Future[list[float]] = Future()
    worker.submit(job, lambda made: future.set_result(made.values), future.set_exception)
    return future


def job_of(folder: Path, text: str) -> Encode:
    return Encode(tuple(encoded(str(folder), text)["input_ids"][0].tolist()))


def same(found: list[float], expected: Any) -> None:
    assert found == pytest.approx(expected.tolist(), abs=1e-5)


def test_what_a_model_for_vectors_is(bert: Path, vectors: EncodingWorker) -> None:
    info = vectors.info
    assert (info.kind, info.tasks, info.positions, info.vector_size) == ("encoder", ("vector",), 48, 32)
    assert not classifies(str(bert))


def test_whether_padding_is_left_out(bert: Path) -> None:
    encoder = load_encoder(str(bert), ServeSettings())
    assert encoder.leaves_padding_out()
    with fastgen.disabled():
        assert not encoder.leaves_padding_out()


def test_labels_are_those_of_each_text_alone(classifier: Path, labels: EncodingWorker) -> None:
    model, _ = encoder(str(classifier), AutoModelForSequenceClassification)
    assert labels.info.labels == ("kind 0", "kind 1", "kind 2") and labels.info.tasks == ("labels",)
    assert classifies(str(classifier))
    given = [encoded(str(classifier), text, TEXTS[0] if number % 3 else None) for number, text in enumerate(TEXTS)]
    futures = []
    for number, each in enumerate(given):
        ids = tuple(each["input_ids"][0].tolist())
        # The second half of a pair is of the second type, here: tokenizers differ in that.
        types = tuple(int(place > len(ids) // 2) for place in range(len(ids))) if number % 3 else None
        futures.append(ask(labels, Encode(ids, "labels", types)))
        if types is not None:
            each["token_type_ids"] = torch.tensor([types])
    for each, future in zip(given, futures, strict=True):
        with torch.no_grad():
            same(future.result(60), model(**each).logits[0].softmax(-1))


REFUSED = [
    (Encode((), "vector"), "no tokens"), (Encode((3,) * 49, "vector"), "takes 48"),
    (Encode((3, 100_000), "vector"), "not one of the model's"), (Encode((3, -1), "vector"), "not one of the model's"),
    (Encode((3,), "labels"), "makes vector"), (Encode((3, 4), "vector", (0,)), "token types"),
    (Encode((3, 4), "vector", (0, 2)), "token types"),
]  # fmt: skip


@pytest.mark.parametrize(("job", "message"), REFUSED)
def test_what_the_model_cannot_do_is_refused(vectors: EncodingWorker, job: Encode, message: str) -> None:
    with pytest.raises(BadRequest, match=message) as error:
        ask(vectors, job)
    assert error.value.param in ("input", "model", "token_type_ids")


@pytest.fixture
def held(bert: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[EncodingWorker, Future[Any], threading.Event]]:
    """A worker whose first job runs until the event is set."""
    go, runs = threading.Event(), threading.Event()
    original = VectorEncoder.run

    def run(self: VectorEncoder, jobs: list[Encode]) -> Any:
        runs.set()
        assert go.wait(60)
        return original(self, jobs)

    worker = started(bert)
    monkeypatch.setattr(VectorEncoder, "run", run)
    first = ask(worker, Encode((3, 4)))
    assert runs.wait(60)
    yield worker, first, go
    go.set()
    worker.close()


def test_what_waits_is_run_together(held: tuple[EncodingWorker, Future[Any], threading.Event]) -> None:
    worker, first, go = held
    futures = [ask(worker, Encode((3, 4, 5))) for _ in range(5)]
    assert worker.stats()["waiting"] == 5 and worker.stats()["running"] == 1
    go.set()
    for future in (first, *futures):
        future.result(60)
    assert worker.stats()["batch_sizes"] == {1: 1, 5: 1}


def test_cancelled_jobs_have_no_result(held: tuple[EncodingWorker, Future[Any], threading.Event]) -> None:
    worker, _, go = held
    told: list[Any] = []
    waiting = worker.submit(Encode((3,)), told.append, told.append)
    last = ask(worker, Encode((5,)))
    for _ in range(2):
        waiting.cancel()
    go.set()
    last.result(60)
    waiting.cancel()
    stats = worker.stats()
    assert told == [] and (stats["cancelled"], stats["finished"], stats["rows"]) == (1, 2, 2)


def test_closing_cancels_what_has_no_result(held: tuple[EncodingWorker, Future[Any], threading.Event]) -> None:
    worker, first, go = held
    waiting = ask(worker, Encode((3,)))
    closing = threading.Thread(target=worker.close)
    closing.start()
    while worker.stats()["waiting"]:
        closing.join(0.01)
    go.set()
    closing.join(60)
    assert not closing.is_alive() and not first.done() and not waiting.done()
    assert worker.stats()["cancelled"] == 2
    with pytest.raises(Unavailable, match="stops"):
        ask(worker, Encode((3,)))
    worker.close()


@pytest.fixture
def faulty(bert: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EncodingWorker]:
    """A worker whose model has faults, planted by the tokens of a text."""
    original = BertModel.forward

    def forward(self: Any, input_ids: Any = None, **given: Any) -> Any:
        rows = {int(row[0]) for row in input_ids}
        if 300 in rows:
            raise RuntimeError("a fault")
        if 301 in rows or (302 in rows and len(input_ids) > 1):
            raise torch.OutOfMemoryError("out of memory")
        found = original(self, input_ids=input_ids, **given)
        found.last_hidden_state[input_ids[:, 0] == 303] = torch.inf
        return found

    monkeypatch.setattr(BertModel, "forward", forward)
    worker = started(bert)
    yield worker
    worker.close()


def test_a_job_that_fails_fails_alone(faulty: EncodingWorker) -> None:
    faults = {300: "failed on this text: .*a fault", 301: "not enough memory", 303: "not finite"}
    held, go = threading.Event(), threading.Event()

    def wait(result: Any) -> None:
        held.set()
        go.wait(60)

    faulty.submit(Encode((3,)), wait, wait)
    assert held.wait(60)
    futures = {first: ask(faulty, Encode((first, 4, 5))) for first in (10, 300, 11, 301, 302, 12, 303)}
    go.set()
    for first, future in futures.items():
        if first in faults:
            with pytest.raises(Failed, match=faults[first]):
                future.result(60)
        else:
            assert len(future.result(60)) == 32
    assert faulty.stats()["failed"] == 3 and faulty.stats()["batch_sizes"] == {1: 1, 7: 1}


def test_many_that_fail_first_say_nothing_of_the_others(faulty: EncodingWorker, bert: Path) -> None:
    """A run over a file ends there, as its model is at fault. A server goes on, whichever its scheduler is."""
    encoder = load_encoder(str(bert), ServeSettings())
    made = encoder.run([*[Encode((300, 4, 5))] * (MOST_FAILURES + 1), Encode((10, 4, 5))])
    assert all(isinstance(each, Failed) and "a fault" in str(each) for each in made[:-1])
    assert isinstance(made[-1], list) and len(made[-1]) == 32


def test_what_is_no_fault_of_a_job_is_told_to_all(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = started(bert)
    with monkeypatch.context() as patch:
        patch.setattr(VectorEncoder, "run", lambda self, jobs: [][len(jobs)])
        with pytest.raises(IndexError):
            ask(worker, Encode((3,))).result(60)
    assert len(ask(worker, Encode((3,))).result(60)) == 32
    worker.close()


def test_prompts_that_are_no_part_of_a_vector(tmp_path: Path) -> None:
    folder = tiny.bert(tmp_path / "model")
    prompts = {"prompts": {"query": "light was ", "document": "and the: "}, "default_prompt_name": "document"}
    tiny.sentence_files(folder, ("Pooling", {"pooling_mode": "mean", "include_prompt": False}), prompts=prompts)
    worker = started(folder)
    assert worker.info.prompt == "and the: " and dict(worker.info.prompts) == prompts["prompts"]
    asked: list[tuple[str, int]] = []
    for prompt, tokens in (("light was ", None), ("and the: ", None), ("", 0), ("and there", 0)):
        # <s>, and those of the prompt; </s> ends the text.
        tokens = encoded(str(folder), prompt)["input_ids"].shape[1] - 1 if tokens is None else tokens
        asked.append((prompt + "god created heaven", tokens))
    made = worker._encoder.run([job_of(folder, text) for text, _ in asked])  # in one batch
    for (text, tokens), vector in zip(asked, made, strict=True):
        same(vector, states(str(folder), text)[tokens:].mean(0))
    worker.close()


def test_warm_up_measures_and_lazy_waits(bert: Path) -> None:
    worker = started(bert, warm_up=True, scheduler="lazy", slo_ms=200.0)
    futures = [ask(worker, job_of(bert, text)) for text in TEXTS[:3]]
    for future in futures:
        assert len(future.result(60)) == 32
    assert worker.stats()["finished"] == 3  # what warm-up runs is not counted
    worker.close()
