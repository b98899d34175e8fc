"""Checkpoints that the tests of the interfaces serve, and what the library makes of an input alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

import fastgen
from fastgen_serve.jobs import Generate
from tests.pipeline import tiny
from tests.serve.servers import BART, GPT2

TEMPLATE = """\
{%- if brief is defined and brief -%}be brief .
{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'system' and not loop.first -%}{{ raise_exception('system comes first') }}{%- endif -%}
{{ message.role }} said {{ message.content }} .
{% endfor -%}
{%- if add_generation_prompt -%}assistant said{%- endif -%}"""

PROMPT, OTHER = "and it came to pass", "fear not for"
SOURCE = "and the lord spake unto moses saying"
USER = {"role": "user", "content": "what is the law"}
GREEDY = {"temperature": 0, "max_tokens": 12}
# What OpenAI's client has keywords for; vLLM's and Transformers' fields go into `extra_body`.
_KEYWORDS = frozenset(
    "best_of echo frequency_penalty logit_bias logprobs max_completion_tokens max_tokens n presence_penalty seed stop "
    "stream stream_options suffix temperature top_logprobs top_p user".split()
)


def folders(under: Path) -> dict[str, str]:
    """By the names that they are served under: a summariser, one for chats, and encoders for vectors and labels."""
    chat = Path(shutil.copytree(GPT2, under / "chat"))
    config = json.loads((chat / "tokenizer_config.json").read_text())
    (chat / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    made = {"bart": BART, "gpt2": GPT2, "chat": str(chat)}
    for name, labels in (("vectors", 0), ("classes", 3), ("pairs", 1)):
        folder = under / name
        folder.mkdir()
        made[name] = str(tiny.bert(folder, labels=labels))
    pooling, prompts = ("Pooling", {"pooling_mode": "mean"}), {"prompts": {"query": "day "}}
    tiny.sentence_files(Path(made["vectors"]), pooling, settings={"max_seq_length": 64}, prompts=prompts)
    return made


@cache
def loaded(path: str) -> tuple[Any, Any]:
    """A model that generates, and its tokenizer."""
    kind = transformers.AutoModelForSeq2SeqLM if "bart" in path else transformers.AutoModelForCausalLM
    return kind.from_pretrained(path).eval(), transformers.AutoTokenizer.from_pretrained(path)


def generated(path: str, prompt: str | Sequence[int], seed: int | None = None, **options: Any) -> Any:
    """What `generate` returns for a prompt alone, without FastGen: a ModelOutput."""
    model, tokenizer = loaded(path)
    ids = tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else list(prompt)
    if seed is not None:
        torch.manual_seed(seed)
    with fastgen.disabled():
        return model.generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), tokenizer=tokenizer,
            return_dict_in_generate=True, **options,
        )  # fmt: skip


def of_job(model: Any, job: Generate, **options: Any) -> list[tuple[tuple[int, ...], float | None]]:
    """The tokens and scores of `generate` for a job alone, cut after the prompt and before EOS."""
    with torch.random.fork_rng():
        torch.manual_seed(job.seed or 0)
        options = {**job.options, **options, "return_dict_in_generate": True, "output_scores": True}
        made = model.generate(torch.tensor([job.tokens]), **options)
    prompt = 1 if model.config.is_encoder_decoder else len(job.tokens)
    ends = (model.generation_config.eos_token_id, model.generation_config.pad_token_id)
    rows = [tuple(token for token in row if token not in ends) for row in made.sequences[:, prompt:].tolist()]
    scores = getattr(made, "sequences_scores", None)
    return list(zip(rows, [None] * len(rows) if scores is None else scores.tolist(), strict=True))


@cache
def encoder(path: str, kind: Any = transformers.AutoModel) -> tuple[Any, Any]:
    """A model that encodes, and its tokenizer."""
    return kind.from_pretrained(path).eval(), transformers.AutoTokenizer.from_pretrained(path)


def encoded(path: str, *text: str | None) -> Any:
    """The inputs of a model for a text, or a pair of texts, alone."""
    return encoder(path)[1](*text, return_tensors="pt")


def states(path: str, text: str) -> Any:
    """The last hidden states of a text alone, [length, hidden]."""
    with torch.no_grad():
        return encoder(path)[0](**encoded(path, text)).last_hidden_state[0]


def logits(path: str, *text: str) -> Any:
    """The numbers of the labels of a text, or a pair of texts, alone, in float64."""
    with torch.no_grad():
        model, _ = encoder(path, transformers.AutoModelForSequenceClassification)
        return model(**encoded(path, *text)).logits[0].double()


def texts(path: str, prompt: str, **options: Any) -> list[str]:
    """The texts that `generate` adds to a prompt, or makes of a source, alone."""
    model, tokenizer = loaded(path)
    sequences = generated(path, prompt, **options).sequences
    whole = tokenizer.batch_decode(sequences, skip_special_tokens=True)
    if model.config.is_encoder_decoder:
        return whole
    begin = len(tokenizer.decode(tokenizer(prompt)["input_ids"], skip_special_tokens=True))
    return [text[begin:] for text in whole]


def complete(client: Any, model: str = "gpt2", prompt: Any = PROMPT, **fields: Any) -> Any:
    """The completion that OpenAI's client gets for these fields."""
    return client.completions.create(model=model, prompt=prompt, **_by_keyword(fields))


def chat(client: Any, *messages: Any, model: str = "chat", **fields: Any) -> Any:
    """The answer to these messages, or to a user's question, that OpenAI's client gets."""
    return client.chat.completions.create(model=model, messages=list(messages or [USER]), **_by_keyword(fields))


def _by_keyword(fields: dict[str, Any]) -> dict[str, Any]:
    own = {name: fields.pop(name) for name in list(fields) if name not in _KEYWORDS}
    return {**fields, "extra_body": own}
