"""Train the two small models of the demo on the King James text.

    apt-get install bible-kjv bible-kjv-text        # the text (public domain) and the program that unpacks it
    python examples/train.py                        # data, tokenizers, both models, evaluation

The steps, each of which can be run alone (``python examples/train.py data bart``):

``data``      Split the text by whole chapters into training, validation and held-out parts; write the held-out pairs to
              ``data/heldout.src.txt`` and ``data/heldout.ref.txt``, a sample a line.
``bart``      Train ``models/kjv-bart``, a BART-type encoder-decoder that restores the punctuation and the capitals of
              text that was stripped to lower-case words.
``gpt2``      Train ``models/kjv-gpt2``, a GPT-2-type language model of the same text.
``evaluate``  Generate for the held-out sources with plain Transformers (4 beams) and print BLEU and ROUGE-L
              for the model and for the source copied as it is; print the perplexity of the language model.

The defaults are the ones with which the shipped models were made. One thread, fixed seeds, and a number of updates
rather than a time; more updates give better models (``--bart-updates 8000 --bart-horizon 8000 --gpt2-updates 4000``).
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    BartConfig,
    BartForConditionalGeneration,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

HERE = Path(__file__).resolve().parent
STEPS = ("data", "bart", "gpt2", "evaluate")
BOS, PAD, EOS, UNK = "<s>", "<pad>", "</s>", "<unk>"
BOS_ID, PAD_ID, EOS_ID = 0, 1, 2
MAX_TOKENS = 200  # the longest target, in tokens; the models have some more positions


# --------------------------------------------------------------------------------------------------------------- data


@dataclass
class Corpus:
    """Chapters, each a list of verses, in three parts that share no chapter."""

    train: list[list[str]]
    valid: list[list[str]]
    heldout: list[list[str]]
    dropped: int  # training verses left out because they repeat held-out text


def read_chapters() -> dict[str, list[str]]:
    """Return the text as ``{"Ge1": [verse, ...], ...}``, printed by the ``bible`` program from its compressed data."""
    command = ["bible", "-f", "gen1:1-rev22:21"]
    try:
        text = subprocess.run(command, check=True, capture_output=True, text=True, encoding="utf-8").stdout
    except FileNotFoundError:
        raise SystemExit("train.py needs the text: apt-get install bible-kjv bible-kjv-text") from None
    chapters: dict[str, list[str]] = {}
    for line in text.splitlines():
        reference, verse = line.split(" ", 1)
        chapters.setdefault(reference.split(":")[0], []).append(" ".join(verse.split()))
    if (len(chapters), sum(map(len, chapters.values()))) != (1189, 31102):
        raise SystemExit(f"unexpected output of {' '.join(command)!r}")
    return chapters


def strip_text(text: str) -> str:
    """Return lower-case words without punctuation: the source of a target."""
    return " ".join(re.sub(r"[^a-z ]", "", text.lower().replace("-", " ")).split())


def ngrams(text: str, n: int = 12) -> set[tuple[str, ...]]:
    words = strip_text(text).split()
    return {tuple(words[i : i + n]) for i in range(len(words) - n + 1)}


def split_corpus(heldout_chapters: int = 44, valid_chapters: int = 8, seed: int = 1611) -> Corpus:
    """Hold out whole chapters, and drop training verses that repeat them (Kings and Isaiah, the Gospels, ...).

    A training verse is dropped when it equals a held-out verse as stripped words, or shares 12 words in a row with one.
    """
    chapters = read_chapters()
    names = list(chapters)
    random.Random(seed).shuffle(names)
    heldout_names, valid_names = set(names[:heldout_chapters]), set(names[heldout_chapters:][:valid_chapters])
    heldout = [verses for name, verses in chapters.items() if name in heldout_names]
    valid = [verses for name, verses in chapters.items() if name in valid_names]
    seen = {strip_text(verse) for verses in heldout for verse in verses}
    seen_ngrams = set().union(*(ngrams(verse) for verses in heldout for verse in verses))
    train, dropped = [], 0
    for name, verses in chapters.items():
        if name in heldout_names or name in valid_names:
            continue
        kept = [v for v in verses if strip_text(v) not in seen and seen_ngrams.isdisjoint(ngrams(v))]
        dropped += len(verses) - len(kept)
        if kept:
            train.append(kept)
    return Corpus(train, valid, heldout, dropped)


def passages(chapter: list[str], rng: random.Random, max_words: int = 80) -> Iterator[list[int]]:
    """Cut a chapter into passages of one to three consecutive verses (as indices) of at most ``max_words`` words."""
    lengths = [len(verse.split()) for verse in chapter]
    start = 0
    while start < len(chapter):
        size = rng.choice((1, 2, 2, 3))
        end, words = start + 1, lengths[start]
        while end < min(start + size, len(chapter)) and words + lengths[end] <= max_words:
            words += lengths[end]
            end += 1
        yield list(range(start, end))
        start = end


def heldout_pairs(corpus: Corpus, count: int = 500, seed: int = 7) -> list[tuple[str, str]]:
    rng = random.Random(seed)
    targets = [" ".join(chapter[i] for i in part) for chapter in corpus.heldout for part in passages(chapter, rng)]
    if len(targets) < count:
        raise SystemExit(f"only {len(targets)} held-out pairs: hold out more chapters")
    chosen = sorted(rng.sample(range(len(targets)), count))
    return [(strip_text(targets[i]), targets[i]) for i in chosen]


def write_data(corpus: Corpus, out: Path) -> None:
    pairs = heldout_pairs(corpus)
    out.mkdir(parents=True, exist_ok=True)
    for name, column in (("heldout.src.txt", 0), ("heldout.ref.txt", 1)):
        (out / name).write_text("".join(pair[column] + "\n" for pair in pairs), encoding="utf-8")
    words = [len(source.split()) for source, _ in pairs]
    print(
        f"data: {sum(map(len, corpus.train))} training verses ({corpus.dropped} dropped as repeats of held-out text), "
        f"{sum(map(len, corpus.heldout))} held-out verses; {len(pairs)} pairs, {min(words)} to {max(words)} words, "
        f"{sum(words) / len(words):.1f} on average"
    )


def train_tokenizer(corpus: Corpus, vocab_size: int, causal: bool) -> PreTrainedTokenizerFast:
    """Train byte-level BPE on the text and, for the restoring model, also on its stripped form."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, PAD, EOS, UNK],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    verses = [verse for chapter in corpus.train for verse in chapter]
    tokenizer.train_from_iterator(verses if causal else verses + [strip_text(verse) for verse in verses], trainer)
    if not causal:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"$A {EOS}", pair=f"$A {EOS} $B {EOS}", special_tokens=[(EOS, EOS_ID)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        model_max_length=512 if causal else 256,
        padding_side="left" if causal else "right",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


# ----------------------------------------------------------------------------------------------------------- training

Batch = dict[str, torch.Tensor]


def fit(
    model: PreTrainedModel,
    batches: Iterator[Batch],
    validation: list[Batch],
    save: Callable[[], None],
    args: argparse.Namespace,
    *,
    updates: int,
    horizon: int,
    warmup: int,
    label_smoothing: float,
) -> None:
    """Train with AdamW for a fixed number of updates; warm-up, then cosine decay with its minimum at ``horizon``."""
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}],
        lr=args.lr,
        betas=(0.9, 0.98),
        fused=True,
    )

    def rate(step: int) -> float:
        return min(1.0, (step + 1) / warmup) * (0.02 + 0.49 * (1 + math.cos(math.pi * min(1.0, step / horizon))))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    start, tokens, running = time.perf_counter(), 0, 0.0
    for update in range(1, updates + 1):
        model.train()
        batch = next(batches)
        loss = batch_loss(model, batch, args.bf16, label_smoothing)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        tokens += int((batch["labels"] != -100).sum())
        running = loss.item() if update == 1 else 0.98 * running + 0.02 * loss.item()
        if update % args.log_every == 0 or update == updates:
            seconds = time.perf_counter() - start
            print(
                f"update {update:6d}  loss {running:.4f}  {update / seconds:.2f} updates/s  {tokens / seconds:.0f} "
                f"target tokens/s  {seconds:.0f} s",
                flush=True,
            )
        if update % args.save_every == 0 or update == updates:
            print(f"update {update:6d}  validation loss {validation_loss(model, validation):.4f}", flush=True)
            save()


def batch_loss(model: PreTrainedModel, batch: Batch, bf16: bool, label_smoothing: float) -> torch.Tensor:
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
        logits = model(**inputs, use_cache=False).logits
    return F.cross_entropy(
        logits.float().flatten(0, 1), batch["labels"].flatten(), ignore_index=-100, label_smoothing=label_smoothing
    )


@torch.no_grad()
def validation_loss(model: PreTrainedModel, validation: list[Batch]) -> float:
    model.eval()
    total, count = 0.0, 0
    for batch in validation:
        size = int((batch["labels"] != -100).sum())
        total += batch_loss(model, batch, False, 0.0).item() * size
        count += size
    return total / count


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, path: Path) -> None:
    """Save the weights in float16, to halve the files, under a configuration that loads them as float32."""
    path.mkdir(parents=True, exist_ok=True)
    copy.deepcopy(model).half().save_pretrained(path)
    (path / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(path)
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    config["dtype"] = "float32"
    (path / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def set_seed(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)


# --------------------------------------------------------------------------------------------------- restoring model


def pad(rows: list[list[int]], value: int) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [value] * (width - len(row)) for row in rows])


def pair_batch(pairs: list[tuple[list[int], list[int]]]) -> Batch:
    sources = pad([source for source, _ in pairs], PAD_ID)
    return {
        "input_ids": sources,
        "attention_mask": (sources != PAD_ID).long(),
        "decoder_input_ids": pad([[EOS_ID] + target[:-1] for _, target in pairs], PAD_ID),
        "labels": pad([target for _, target in pairs], -100),
    }


class PairData:
    """Batches of source and target of similar length; every epoch cuts the passages anew."""

    def __init__(self, chapters: list[list[str]], tokenizer: PreTrainedTokenizerFast, batch_tokens: int):
        def encode(text: str) -> list[int]:
            return tokenizer(text, add_special_tokens=False)["input_ids"]

        self.chapters = chapters
        self.encoded = [[(encode(strip_text(verse)), encode(verse)) for verse in chapter] for chapter in chapters]
        self.batch_tokens = batch_tokens

    def epoch(self, rng: random.Random) -> list[Batch]:
        pairs = []
        for chapter, encoded in zip(self.chapters, self.encoded, strict=True):
            for part in passages(chapter, rng):
                source = [token for i in part for token in encoded[i][0]] + [EOS_ID]
                target = [token for i in part for token in encoded[i][1]] + [EOS_ID]
                if max(len(source), len(target)) <= MAX_TOKENS:
                    pairs.append((source, target))
        pairs.sort(key=lambda pair: len(pair[1]) * rng.uniform(0.95, 1.05))
        batches, start = [], 0
        while start < len(pairs):
            end, width = start, 0
            while end < len(pairs) and max(width, len(pairs[end][1])) * (end - start + 1) <= self.batch_tokens:
                width = max(width, len(pairs[end][1]))
                end += 1
            batches.append(pairs[start:end])
            start = end
        rng.shuffle(batches)
        return [pair_batch(batch) for batch in batches]

    def forever(self, seed: int) -> Iterator[Batch]:
        rng = random.Random(seed)
        while True:
            yield from self.epoch(rng)


def sinusoids(rows: int, width: int) -> torch.Tensor:
    angles = torch.arange(rows).unsqueeze(1) / 10000 ** (torch.arange(0, width, 2) / width)
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def train_bart(args: argparse.Namespace, corpus: Corpus) -> None:
    tokenizer = train_tokenizer(corpus, args.vocab_size, causal=False)
    config = BartConfig(
        vocab_size=len(tokenizer),
        d_model=192,
        encoder_layers=3,
        decoder_layers=3,
        encoder_attention_heads=6,
        decoder_attention_heads=6,
        encoder_ffn_dim=384,
        decoder_ffn_dim=384,
        max_position_embeddings=256,
        dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        init_std=0.05,
        bos_token_id=BOS_ID,
        pad_token_id=PAD_ID,
        eos_token_id=EOS_ID,
        decoder_start_token_id=EOS_ID,
        forced_eos_token_id=None,
    )
    set_seed(args.seed)
    model = BartForConditionalGeneration._from_config(config, attn_implementation="eager")  # faster in bf16
    with torch.no_grad():  # equal positions on both sides, as large as the embeddings: speeds up learning the alignment
        for part in (model.model.encoder, model.model.decoder):
            weight = part.embed_positions.weight
            weight.copy_(sinusoids(*weight.shape) * config.init_std * math.sqrt(2))
    model.generation_config = GenerationConfig(
        num_beams=4,
        max_new_tokens=MAX_TOKENS,
        early_stopping=True,
        length_penalty=1.0,
        no_repeat_ngram_size=0,
        bos_token_id=BOS_ID,
        pad_token_id=PAD_ID,
        eos_token_id=EOS_ID,
        decoder_start_token_id=EOS_ID,
    )
    print(f"bart: {sum(p.numel() for p in model.parameters())} parameters, vocabulary {len(tokenizer)}")
    path = args.models / "kjv-bart"
    fit(
        model,
        PairData(corpus.train, tokenizer, args.batch_tokens).forever(args.seed),
        PairData(corpus.valid, tokenizer, args.batch_tokens).epoch(random.Random(0)),
        lambda: save_model(model, tokenizer, path),
        args,
        updates=args.bart_updates,
        horizon=args.bart_horizon,
        warmup=300,
        label_smoothing=args.label_smoothing,
    )


# ----------------------------------------------------------------------------------------------------- language model


def text_stream(chapters: list[list[str]], tokenizer: PreTrainedTokenizerFast, order: list[int]) -> torch.Tensor:
    """Return the chapters in this order, each ended by EOS, as one row of tokens."""
    tokens: list[int] = []
    for i in order:
        tokens += tokenizer(" ".join(chapters[i]), verbose=False)["input_ids"] + [EOS_ID]
    return torch.tensor(tokens)


def block_batches(stream: torch.Tensor, block: int, batch_size: int) -> list[Batch]:
    blocks = stream[: (len(stream) - 1) // block * block + 1]
    inputs, labels = blocks[:-1].view(-1, block), blocks[1:].reshape(-1, block)
    return [
        {"input_ids": inputs[i : i + batch_size], "labels": labels[i : i + batch_size]}
        for i in range(0, len(inputs), batch_size)
    ]


def lm_batches(
    chapters: list[list[str]], tokenizer: PreTrainedTokenizerFast, block: int, size: int, seed: int
) -> Iterator[Batch]:
    rng = random.Random(seed)
    encoded = [text_stream([chapter], tokenizer, [0]) for chapter in chapters]
    while True:
        order = list(range(len(encoded)))
        rng.shuffle(order)
        stream = torch.cat([encoded[i] for i in order])
        batches = block_batches(stream[rng.randrange(block) :], block, size)
        rng.shuffle(batches)
        yield from batches


def train_gpt2(args: argparse.Namespace, corpus: Corpus) -> None:
    tokenizer = train_tokenizer(corpus, args.vocab_size, causal=True)
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=512,
        n_embd=192,
        n_layer=3,
        n_head=6,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )
    set_seed(args.seed)
    model = GPT2LMHeadModel._from_config(config, attn_implementation="eager")
    model.generation_config = GenerationConfig(
        num_beams=4,
        max_new_tokens=64,
        early_stopping=True,
        no_repeat_ngram_size=3,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )
    print(f"gpt2: {sum(p.numel() for p in model.parameters())} parameters, vocabulary {len(tokenizer)}")
    path = args.models / "kjv-gpt2"
    size = max(1, args.batch_tokens // args.block)
    validation = text_stream(corpus.valid, tokenizer, list(range(len(corpus.valid))))
    fit(
        model,
        lm_batches(corpus.train, tokenizer, args.block, size, args.seed),
        block_batches(validation, args.block, size),
        lambda: save_model(model, tokenizer, path),
        args,
        updates=args.gpt2_updates,
        horizon=args.gpt2_updates,
        warmup=60,
        label_smoothing=0.0,
    )


# --------------------------------------------------------------------------------------------------------- evaluation


@torch.no_grad()
def restore(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, sources: list[str]) -> list[str]:
    """Generate with the model's own defaults, 32 sources of similar length at a time."""
    outputs = [""] * len(sources)
    order = sorted(range(len(sources)), key=lambda i: len(sources[i]))
    for start in range(0, len(order), 32):
        rows = order[start : start + 32]
        inputs = tokenizer([sources[i] for i in rows], padding=True, return_tensors="pt")
        generated = tokenizer.batch_decode(model.generate(**inputs), skip_special_tokens=True)
        for i, text in zip(rows, generated, strict=True):
            outputs[i] = text
    return outputs


def print_scores(name: str, outputs: list[str], references: list[str]) -> None:
    import sacrebleu
    from rouge_score import rouge_scorer, tokenizers

    class WordsAndMarks(tokenizers.Tokenizer):
        """Keeps capitals and punctuation, which the tokenizer of rouge-score discards."""

        def tokenize(self, text: str) -> list[str]:
            return re.findall(r"\w+|[^\w\s]", text)

    def rouge(scorer: rouge_scorer.RougeScorer) -> float:
        scores = [scorer.score(r, o)["rougeL"].fmeasure for r, o in zip(references, outputs, strict=True)]
        return 100 * sum(scores) / len(scores)

    bleu = sacrebleu.corpus_bleu(outputs, [references]).score
    usual = rouge(rouge_scorer.RougeScorer(["rougeL"]))
    cased = rouge(rouge_scorer.RougeScorer(["rougeL"], tokenizer=WordsAndMarks()))
    exact = sum(o == r for o, r in zip(outputs, references, strict=True)) / len(outputs)
    words = sum(strip_text(o) == strip_text(r) for o, r in zip(outputs, references, strict=True)) / len(outputs)
    print(
        f"{name}: BLEU {bleu:.2f}  ROUGE-L {usual:.2f}  ROUGE-L with capitals and punctuation {cased:.2f}  "
        f"exact {exact:.1%}  same words {words:.1%}"
    )


@torch.no_grad()
def evaluate(args: argparse.Namespace, corpus: Corpus) -> None:
    sources = (args.data / "heldout.src.txt").read_text(encoding="utf-8").splitlines()[: args.limit]
    references = (args.data / "heldout.ref.txt").read_text(encoding="utf-8").splitlines()[: args.limit]
    if (args.models / "kjv-bart").exists():
        tokenizer = AutoTokenizer.from_pretrained(args.models / "kjv-bart")
        model = AutoModelForSeq2SeqLM.from_pretrained(args.models / "kjv-bart").eval()
        start = time.perf_counter()
        outputs = restore(model, tokenizer, sources)
        print(f"bart: {len(sources)} samples in {time.perf_counter() - start:.1f} s ({model.dtype})")
        print_scores("copy of the source", sources, references)
        print_scores("model, 4 beams", outputs, references)
        for i in range(0, len(sources), max(1, len(sources) // args.examples)):
            print(f"\n  source     {sources[i]}\n  output     {outputs[i]}\n  reference  {references[i]}")
    if (args.models / "kjv-gpt2").exists():
        tokenizer = AutoTokenizer.from_pretrained(args.models / "kjv-gpt2")
        model = AutoModelForCausalLM.from_pretrained(args.models / "kjv-gpt2").eval()
        stream = text_stream(corpus.heldout, tokenizer, list(range(len(corpus.heldout))))
        loss = validation_loss(model, block_batches(stream, args.block, 8))
        words = sum(len(verse.split()) for chapter in corpus.heldout for verse in chapter)
        per_word = math.exp(loss * len(stream) / words)
        print(f"\ngpt2: held-out perplexity {math.exp(loss):.2f} per token, {per_word:.1f} per word ({model.dtype})")
        for prompt in ("And it came to pass", "The LORD is my", "And Jesus answered and said"):
            generated = model.generate(**tokenizer(prompt, return_tensors="pt"))
            print(f"  {tokenizer.decode(generated[0], skip_special_tokens=True)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"of {', '.join(STEPS)} (default: all)")
    parser.add_argument("--data", type=Path, default=HERE / "data", help="folder of the held-out pairs")
    parser.add_argument("--models", type=Path, default=HERE / "models", help="folder of the two models")
    parser.add_argument("--vocab-size", type=int, default=2500)
    parser.add_argument("--batch-tokens", type=int, default=1024, help="target tokens in a batch")
    parser.add_argument("--block", type=int, default=256, help="tokens in a training row of the language model")
    parser.add_argument("--bart-updates", type=int, default=2000)
    parser.add_argument("--bart-horizon", type=int, default=2600, help="updates until its learning rate is lowest")
    parser.add_argument("--gpt2-updates", type=int, default=2000)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--label-smoothing", type=float, default=0.05, help="for the restoring model")
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=True, help="bfloat16 autocast")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--log-every", type=int, default=100, help="updates")
    parser.add_argument(
        "--save-every", type=int, default=1000, help="updates between validations, each followed by a save"
    )
    parser.add_argument("--limit", type=int, help="evaluate only the first so many held-out pairs")
    parser.add_argument("--examples", type=int, default=8, help="samples that the evaluation prints")
    args = parser.parse_args()
    unknown = set(args.steps) - set(STEPS)
    if unknown:
        parser.error(f"unknown step {', '.join(sorted(unknown))}")
    steps = args.steps or STEPS
    torch.set_num_threads(args.threads)
    corpus = split_corpus()
    if "data" in steps:
        write_data(corpus, args.data)
    if "bart" in steps:
        train_bart(args, corpus)
    if "gpt2" in steps:
        train_gpt2(args, corpus)
    if "evaluate" in steps:
        evaluate(args, corpus)


if __name__ == "__main__":
    main()
