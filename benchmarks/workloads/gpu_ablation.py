"""What each part of FastGen adds, in the style of table 2 of the FastSeq paper (Yan et al., ACL 2021).

BART-large summarises a file of articles, and every backend has one more part than the one before it:

* transformers: batches in the order of the file, one after the other: tokenised, generated, decoded, written;
* + n-gram operator: the library's processor replaced by FastGen's operator;
* + pipeline: the same through `fastgen-generate`'s machinery, which sorts by length and works on the next batch's text
  while the model runs;
* + shared K/V: with the hooks;
* + larger batch: all inputs in as few batches as `larger` allows;
* + captured step: with it.

The vocabulary is one of numbers, so that no tokenizer has to be fetched. All backends write the same lines as far as
half precision allows: "same" has the share of them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fastgen
from benchmarks.budget import Budget
from benchmarks.measure import summary, timed
from benchmarks.record import Record
from benchmarks.workload import Context, Workload
from benchmarks.workloads.gpu_models import BART_LARGE, OnGpu
from fastgen import settings
from fastgen.ops.no_repeat_ngram import no_repeat_ngram_

_SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")  # where BART has them


@dataclass(frozen=True, kw_only=True)
class Ablation(Workload):
    """Attributes: the `work` on a batch, how many `inputs` the file has, and how many the `larger` batch takes."""

    work: OnGpu
    inputs: int
    larger: int
    needs_gpu: bool = True
    repetitions: int = 1

    group = "parts"

    def run(self, context: Context, record: Record) -> None:
        record.parameters = {**self.work.parameters(), "inputs": self.inputs, "larger_batch": self.larger}
        model, _ = self.work.build(context.device)
        tokenizer = _tokenizer(model.config.vocab_size)
        batch, budget = self.work.batch, Budget(self.seconds)
        hooks = {"captured_step": "never"}

        def alone(path: Path, out: Path) -> None:
            self._loop(model, tokenizer, path, out)

        def pipeline(size: int) -> Callable[[Path, Path], None]:
            return lambda path, out: self._pipeline(model, tokenizer, path, out, size)

        parts: dict[str, tuple[Callable[[Path, Path], None], list[AbstractContextManager[Any]]]] = {
            "transformers": (alone, [fastgen.disabled()]),
            "+ n-gram operator": (alone, [fastgen.disabled(), _ngram_operator()]),
            "+ pipeline": (pipeline(batch), [fastgen.disabled(), _ngram_operator()]),
            "+ shared K/V": (pipeline(batch), [settings.changed(**hooks)]),
            "+ larger batch": (pipeline(self.larger), [settings.changed(**hooks)]),
            "+ captured step": (pipeline(self.larger), [nullcontext()]),
        }
        record.subject = list(parts)[-1]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "articles.txt")
            path.write_text("".join(f"{line}\n" for line in self._lines(tokenizer)))
            lines: dict[str, list[str]] = {}
            for number, (name, (work, active)) in enumerate(parts.items()):
                out = Path(folder, f"{number}.txt")
                if budget.is_spent:
                    record.skipped[name] = "no time was left"
                    continue
                with ExitStack() as stack:
                    for each in active:
                        stack.enter_context(each)
                    if number > 2 and context.device.type == "cuda":
                        work(path, out)  # graphs are made for the sizes of a whole run
                        out.unlink()
                    seconds, _ = timed(lambda work=work, out=out: work(path, out), context.device)
                record.backends[name] = summary([seconds])
                context.log(f"{name}: {seconds:.3g} s")
                lines[name] = out.read_text().splitlines()
                record.same[name] = _share(lines["transformers"], lines[name])
        record.compare()

    def _lines(self, tokenizer: Any) -> Iterator[str]:
        """As many lines as there are inputs, in the lengths of the work, in random order."""
        torch.manual_seed(self.work.seed)
        assert self.work.lengths is not None
        lengths = self.work.lengths(self.inputs, self.work.length - 2)[torch.randperm(self.inputs)]
        for length in lengths.tolist():
            words = torch.randint(len(_SPECIAL), len(tokenizer), (length,)).tolist()
            yield " ".join(f"w{word}" for word in words)

    def _options(self) -> dict[str, Any]:
        return {**self.work.options, "min_new_tokens": self.work.new_tokens, "max_new_tokens": self.work.new_tokens}

    def _loop(self, model: Any, tokenizer: Any, path: Path, out: Path) -> None:
        texts, batch = path.read_text().splitlines(), self.work.batch
        with out.open("w") as file:
            for start in range(0, len(texts), batch):
                inputs = tokenizer(texts[start : start + batch], return_tensors="pt", padding=True)
                with torch.no_grad():
                    tokens: Tensor = model.generate(
                        input_ids=inputs["input_ids"].to(model.device),
                        attention_mask=inputs["attention_mask"].to(model.device),
                        **self._options(),
                    )
                file.writelines(f"{text}\n" for text in tokenizer.batch_decode(tokens, skip_special_tokens=True))

    def _pipeline(self, model: Any, tokenizer: Any, path: Path, out: Path, batch: int) -> None:
        from fastgen.pipeline import generate_dataset

        generate_dataset(
            model, path, out, tokenizer=tokenizer, generation=self._options(), batch_size=batch, quiet=True,
            device=str(model.device),
        )  # fmt: skip


@contextmanager
def _ngram_operator() -> Iterator[None]:
    """The library's n-gram processor, by FastGen's operator, and nothing else of FastGen."""
    from transformers import NoRepeatNGramLogitsProcessor

    original = NoRepeatNGramLogitsProcessor.__call__

    def ban(self: Any, input_ids: Tensor, scores: Tensor) -> Tensor:
        return no_repeat_ngram_(scores.clone(), input_ids, self.ngram_size)

    NoRepeatNGramLogitsProcessor.__call__ = ban
    try:
        yield
    finally:
        NoRepeatNGramLogitsProcessor.__call__ = original


def _tokenizer(vocabulary: int) -> Any:
    """A tokenizer whose words are w4, w5, ...: the token of each is its number."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    names = [*_SPECIAL, *(f"w{number}" for number in range(len(_SPECIAL), vocabulary))]
    raw = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    raw.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)])
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<s>", pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )


def _share(expected: list[str], found: list[str]) -> float:
    same = sum(a == b for a, b in zip(expected, found, strict=True))
    return same / max(len(expected), 1)


def ablation(seconds: float) -> Ablation:
    """With summaries of half the length, about what trained models write: six backends take their time."""
    return Ablation(
        name="gpu-bart-large-parts",
        title="BART-large, fp16, 128 articles, what each part adds",
        work=replace(BART_LARGE, new_tokens=70),
        inputs=128,
        larger=128,
        seconds=seconds,
    )
