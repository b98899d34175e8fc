"""Workers do what the process itself would do, import nothing heavy, and pass on what fails."""

from __future__ import annotations

from functools import partial

from fastgen.pipeline.postprocess import Outcome, PostprocessJob, PostProcessor, Processor

WORK = PostprocessJob("moses", "de", ("bleu", "exact"))
RECORDS = [(["Das ist ein Haus , sagte er .", "zwei"], "Das ist ein Haus, sagte er."), (["ohne Referenz"], None)]


def _heavy_modules():
    import sys

    return sorted({"torch", "transformers"} & set(sys.modules))


def test_moses_and_metrics_in_a_worker():
    from sacremoses import MosesDetokenizer

    post = PostProcessor(partial(Processor, WORK), workers=1)
    try:
        outcomes = post.submit(RECORDS).result()
        assert post._pool is not None
        assert post._pool.submit(_heavy_modules).result() == []
    finally:
        post.close()
    assert outcomes == PostProcessor(partial(Processor, WORK), workers=0).submit(RECORDS).result()
    assert outcomes[0].texts == [MosesDetokenizer(lang="de").detokenize(text.split()) for text in RECORDS[0][0]]
    assert outcomes[0].statistics is not None
    assert outcomes[0].statistics["exact"] == [1.0]
    assert outcomes[1] == Outcome(["ohne Referenz"])
    assert WORK.any and not PostprocessJob().any


def test_one_text_that_fails_costs_only_its_record(monkeypatch):
    processor = Processor(WORK)
    detokenize = processor._detokenize

    def fails(text):
        if text == "zwei":
            raise RuntimeError("no")
        return detokenize(text)

    monkeypatch.setattr(processor, "_detokenize", fails)
    first, second = processor(RECORDS)
    assert first.error == "no"
    assert second == Outcome(["ohne Referenz"])
