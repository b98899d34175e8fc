"""The model stage: loading, and one batch through `generate` whatever happens on the way."""

from __future__ import annotations

import copy
import hashlib
import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastgen import settings as switches
from fastgen.pipeline.errors import SetupError, one_line
from fastgen.pipeline.generation_fields import check_names, read_generation_file
from fastgen.pipeline.planner import Batch, Prepared, split_rows
from fastgen.pipeline.readers import Problem, quiet_hub
from fastgen.pipeline.settings import Settings

# With this many records failing before the first success, it is not the records.
HOPELESS = 8


@dataclass
class LoadedModel:
    """A model ready to generate, with all that the other stages need to know about it."""

    model: Any
    tokenizer: Any
    generation: Any
    prefix: str
    encoder_decoder: bool
    device: Any
    positions: int | None
    """The most tokens that an input may have; None where the model does not say."""
    pad_id: int = 0

    @property
    def identity(self) -> dict[str, Any]:
        """What the journal compares: the configuration as it is used."""
        values = self.generation.to_dict()
        return {key: value for key, value in values.items() if key != "transformers_version" and key[0] != "_"}


def load(settings: Settings) -> LoadedModel:
    """Load model and tokenizer and settle the generation config; a SetupError where any of it cannot be."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

    import fastgen.models.unilm  # noqa: F401 - makes its type known to the classes above

    quiet_transformers(settings.quiet)
    name = settings.model
    check_path(name)
    device = choose_device(settings.device)
    trust = settings.trust_remote_code
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[settings.dtype]
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust)
        kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust)
        model = kind.from_pretrained(name, config=config, dtype=dtype, trust_remote_code=trust)
        model = model.eval().to(device)
    except SetupError:
        raise
    except Exception as error:
        raise SetupError(f"model {name} cannot be loaded: {one_line(error)}") from error
    return prepare(model, tokenizer, settings)


def check_path(name: str) -> None:
    """A SetupError where a path is given that no model can be at. Done before anything slow is imported."""
    path = Path(name)
    if not path.exists() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise SetupError(f"model {name}: no such directory")
    if path.is_file():
        raise SetupError(f"model {name} is a file: give the directory written by save_pretrained, or a hub name")


def prepare(model: Any, tokenizer: Any, settings: Settings) -> LoadedModel:
    """Settle everything about a model that is in memory already."""
    encoder_decoder = bool(model.config.is_encoder_decoder)
    wanted = settings.task
    if encoder_decoder and wanted == "text-generation":
        raise SetupError(f"model {settings.model} is an encoder-decoder: task text-generation needs a decoder-only one")
    task_name, task_options = _task(model.config, settings)
    prefix = settings.prefix if settings.prefix is not None else task_options.get("prefix", "")
    language_options = _languages(tokenizer, model, settings)
    generation = _generation_config(model, settings, task_options, language_options, f"task {task_name}")
    pad_id = _pad_id(tokenizer, generation)
    if generation.pad_token_id is None:
        generation.pad_token_id = pad_id
    try:
        generation.validate()
    except (ValueError, TypeError, AttributeError) as error:
        raise SetupError(f"the generation options do not fit together: {one_line(error)}") from error
    # On the model as well: what is None here would otherwise be filled in from the model's own defaults.
    model.generation_config = generation
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        generation=generation,
        prefix=prefix,
        encoder_decoder=encoder_decoder,
        device=model.device,
        positions=_input_limit(model.config, generation),
        pad_id=pad_id,
    )


def choose_device(name: str | None) -> Any:
    """The device asked for, or the best there is."""
    import torch

    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except Exception as error:
        raise SetupError(f"device {name} cannot be used: {one_line(error)}") from error
    return device


class _Once(logging.Filter):
    """Lets a message through once: generate warns about the same options at every call."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if message in self._seen:
            return False
        self._seen.add(message)
        return True


def quiet_transformers(quiet: bool) -> None:
    """No progress bars of the library's own beside ours, and every warning once (with `quiet`, none)."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    quiet_hub()
    if quiet:
        transformers_logging.set_verbosity_error()
    for handler in logging.getLogger("transformers").handlers:
        if not any(isinstance(known, _Once) for known in handler.filters):
            handler.addFilter(_Once())


def _task(config: Any, settings: Settings) -> tuple[str, dict[str, Any]]:
    """The task's name in the model's `task_specific_params` and what is listed there."""
    listed = getattr(config, "task_specific_params", None) or {}
    name = settings.task
    if name == "translation" and settings.src_lang and settings.tgt_lang:
        pair = f"translation_{settings.src_lang}_to_{settings.tgt_lang}"
        name = pair if pair in listed else name
    if name == "auto":
        return name, {}
    known = ("text2text", "text-generation", "translation", "summarization")
    if name not in known and name not in listed and not name.startswith("translation_"):
        choices = ", ".join(["auto", *known, *listed])
        raise SetupError(f"unknown task {name!r}: choose from {choices}")
    return name, dict(listed.get(name, {}))


def _languages(tokenizer: Any, model: Any, settings: Settings) -> dict[str, Any]:
    """Set the languages of a multilingual tokenizer; the options that make the model write the target language."""
    if not (settings.src_lang or settings.tgt_lang) or not hasattr(tokenizer, "src_lang"):
        # Models for one pair of languages, or told by a prefix, have nothing to set.
        return {}
    codes = getattr(tokenizer, "lang_code_to_id", None) or {}

    def token_of(lang: str) -> int:
        if hasattr(tokenizer, "get_lang_id"):
            try:
                return int(tokenizer.get_lang_id(lang))
            except KeyError:
                pass
        if lang in codes:
            return int(codes[lang])
        token = tokenizer.convert_tokens_to_ids(lang)
        if token is None or token == tokenizer.unk_token_id:
            known = list(codes) or [t for t in getattr(tokenizer, "additional_special_tokens", []) if "_" in t]
            some = f" (it knows {', '.join(map(str, known[:6]))}, ...)" if known else ""
            raise SetupError(f"the tokenizer does not know the language {lang!r}{some}")
        return int(token)

    if settings.src_lang:
        token_of(settings.src_lang)
        tokenizer.src_lang = settings.src_lang
    if not settings.tgt_lang:
        return {}
    target = token_of(settings.tgt_lang)
    # The first mBART starts the decoder with the language; all later models force it as the first token.
    starts_with_language = type(tokenizer).__name__ in ("MBartTokenizer", "MBartTokenizerFast")
    if starts_with_language:
        return {"decoder_start_token_id": target}
    return {"forced_bos_token_id": target}


def _generation_config(
    model: Any, settings: Settings, task: dict[str, Any], languages: dict[str, Any], task_name: str
) -> Any:
    """The model's own, then the task's, the languages', the file's and the options', the last word last."""
    generation = copy.deepcopy(model.generation_config)
    # Older models list things for a task that are no generation options (its prefix, a vocabulary).
    known = {name: value for name, value in task.items() if name != "prefix" and hasattr(generation, name)}
    layers = [(known, task_name), (languages, "the languages")]
    if settings.generation_config:
        layers.append((read_generation_file(settings.generation_config), settings.generation_config))
    layers.append((check_names(settings.generation, "generation"), "the options"))
    for values, _ in layers:
        for name, value in values.items():
            try:
                setattr(generation, name, _as_config(name, value))
            except Exception as error:
                raise SetupError(f"generation option {name}={value!r}: {one_line(error)}") from error
    if not settings.to_text:
        # Scores of the sequences; the distributions they come from are let go at every step.
        generation.output_scores = True
        generation.return_dict_in_generate = True
    return generation


def _as_config(name: str, value: Any) -> Any:
    """A dictionary as the object that the library wants in its place."""
    from transformers.generation import configuration_utils

    if isinstance(value, dict):
        classes = {"compile_config": "CompileConfig", "watermarking_config": "WatermarkingConfig"}
        if name in classes:
            if name == "watermarking_config" and "ngram_len" in value:
                return configuration_utils.SynthIDTextWatermarkingConfig(**value)
            return getattr(configuration_utils, classes[name])(**value)
    return value


def _pad_id(tokenizer: Any, generation: Any) -> int:
    """A token to pad with: what is padded is masked, so any will do where the model has none."""
    end = generation.eos_token_id
    end = end[0] if isinstance(end, list | tuple) and end else end
    for candidate in (generation.pad_token_id, tokenizer.pad_token_id, end, tokenizer.eos_token_id):
        if isinstance(candidate, int) and candidate >= 0:
            return candidate
    return 0


def _input_limit(config: Any, generation: Any) -> int | None:
    """How many tokens an input may have."""
    if config.is_encoder_decoder:
        text = config.get_text_config(encoder=True)
        for name in ("max_encoder_position_embeddings", "max_position_embeddings"):
            value = getattr(text, name, None)
            if isinstance(value, int) and value > 0:
                follows = getattr(config, "target_follows_source", False)
                target = generation.max_new_tokens or (generation.max_length or 21) - 1
                return _room_beside(value, target) if follows else value
        # T5 and its kin: positions are relative and have no end.
        return None
    positions = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    limits = []
    if isinstance(positions, int) and positions > 0:
        # What is generated takes positions as well.
        limits.append(_room_beside(positions, generation.max_new_tokens or 1))
    if generation.max_new_tokens is None and generation.max_length is not None:
        limits.append(_room_beside(generation.max_length, 1))
    return min(limits) if limits else None


def _room_beside(positions: int, target: int) -> int:
    if positions <= target:
        raise SetupError(f"the model has {positions} positions: no room for an input beside {target} new tokens")
    return positions - target


def depends_on_padding(loaded: LoadedModel) -> bool:
    """Whether options are set whose effect in the library changes with the padding of a batch.

    A total length counts the padding of decoder-only prompts, and a repetition penalty applies to the padding token.
    With such options only inputs of one length share a batch, so that a record's result is its own.
    """
    generation = loaded.generation

    def penalty(value: float | None) -> bool:
        return value is not None and value != 1.0

    if loaded.encoder_decoder:
        return penalty(generation.encoder_repetition_penalty)
    total = generation.max_new_tokens is None and generation.max_length is not None
    shortest = generation.min_new_tokens is None and bool(generation.min_length)
    return total or shortest or penalty(generation.repetition_penalty) or penalty(generation.encoder_repetition_penalty)


@dataclass
class Piece:
    """What the model returned for some rows: all sequences of a row together, best first."""

    rows: list[Prepared]
    sequences: Any
    """An array of token ids, still with everything that `generate` puts around them."""
    scores: list[list[float]] | None
    prompt_width: int
    """Columns that hold the padded prompt (decoder-only) or the start token (encoder-decoder)."""


@dataclass
class Generated:
    """A batch after the model: pieces in the order of the batch, and the rows that failed."""

    batch: Batch
    pieces: list[Piece] = field(default_factory=list)
    failures: list[tuple[Prepared, Problem]] = field(default_factory=list)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, on whichever device."""
    import torch

    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(
        sign in text
        for sign in ("out of memory", "can't allocate memory", "cannot allocate memory", "allocate memory:")
    )


def free_captured_steps(device: Any) -> bool:
    """Gives back what FastGen keeps on a GPU for further batches of the same size; False where that was nothing."""
    import gc

    import torch

    steps = sys.modules.get("fastgen.optimizer.transformers.captured.kept")
    if device.type != "cuda" or steps is None:
        return False
    before = torch.cuda.memory_allocated(device)
    steps.drop_all()
    gc.collect()
    freed = before - torch.cuda.memory_allocated(device)
    torch.cuda.empty_cache()
    return freed > 0


class SequenceScores:
    """A stopping criterion that never stops: it looks at the scores of each step and lets them go.

    `generate` keeps the scores over the whole vocabulary of every step if it is to return the scores of the
    sequences: gigabytes for what ends up as one number a sequence. In place of keeping them, this adds up the
    log-probability of each chosen token (for greedy search and sampling; beam search does its own sum) and empties
    the stored tensor.
    """

    def __init__(self, beams: bool) -> None:
        self._beams = beams
        self._chosen: list[Any] = []
        self._usable = True

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        import torch

        if isinstance(scores, tuple) and scores:
            last = scores[-1]
            if not self._beams:
                # One step, one token: anything else (speculation) has no scores here.
                if len(scores) == len(self._chosen) + 1 and last.shape[0] == input_ids.shape[0]:
                    logs = torch.log_softmax(last.float(), dim=-1)
                    self._chosen.append(logs.gather(1, input_ids[:, -1:]).squeeze(1))
                else:
                    self._usable = False
            last.set_()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    def sums(self, lengths: Sequence[int]) -> list[float] | None:
        """For each sequence the sum over its first `length` tokens; None where it could not be followed."""
        import torch

        if not self._usable or not self._chosen or len(self._chosen) < max(lengths):
            return None
        table = torch.stack(self._chosen, dim=1).double().cpu()
        return [float(row[:length].sum()) for row, length in zip(table, lengths, strict=True)]


class ModelStage:
    """Puts batches through the model. Nothing a record does stops it; what stops it is the same for all records."""

    def __init__(self, loaded: LoadedModel, settings: Settings) -> None:
        self.loaded = loaded
        self.seed = settings.seed
        self.limit: int | None = None
        """The largest size that is still tried, once a larger one has not fitted in memory."""
        self.out_of_memory = 0
        self.seconds = 0.0
        self._cpu_weights = settings.cpu_weights
        self._with_scores = not settings.to_text
        self._sampling = bool(loaded.generation.do_sample)
        self._beams = (loaded.generation.num_beams or 1) > 1
        self._beaten = 0
        self._succeeded = False
        self._first_error = ""

    def size(self, rows: Sequence[Prepared]) -> int:
        """The size of a batch as far as memory goes: padded input tokens, and as many again for each row's output."""
        generation = self.loaded.generation
        room = generation.max_new_tokens or generation.max_length or 20
        return len(rows) * (max(len(row.ids) for row in rows) + room)

    def run(self, batch: Batch) -> Generated:
        """All of a batch: what the model returned, and the rows that it could not do."""
        done = Generated(batch)
        # A stack of row groups, worked on in the order of the batch.
        waiting = list(reversed(self._within_limit(batch.rows)))
        again: list[Prepared] | None = None
        while waiting:
            rows = waiting.pop()
            problem: Problem | None = None
            out_of_memory = False
            try:
                with switches.changed(cpu_weights=self._cpu_weights):
                    done.pieces.append(self._generate(rows, batch))
                self._succeeded = True
            except Exception as error:
                out_of_memory = is_out_of_memory(error)
                problem = Problem("out-of-memory" if out_of_memory else "model-error", one_line(error))
            if problem is None:
                continue
            # Outside the handler: the exception, its frames and their tensors are gone by now.
            if out_of_memory and rows is not again and free_captured_steps(self.loaded.device):
                again = rows
                waiting.append(rows)
                continue
            if out_of_memory:
                self._remember(rows)
            if len(rows) > 1:
                # In halves while it is memory; one by one to find the row that the model does not take.
                parts = split_rows(rows, 2 if out_of_memory else len(rows))
                waiting.extend(reversed(parts))
            else:
                self._give_up(rows[0], problem, done)
        return done

    def finish(self) -> None:
        """A SetupError where not one record succeeded and the model refused some."""
        if self._beaten and not self._succeeded:
            raise SetupError(f"the model failed on every record: {self._first_error}")

    def _within_limit(self, rows: list[Prepared]) -> list[list[Prepared]]:
        """The batch, cut into parts no larger than what is known to fit."""
        if self.limit is None:
            return [rows]
        parts = 1
        while parts < len(rows) and any(self.size(piece) > self.limit for piece in split_rows(rows, parts)):
            parts += 1
        return split_rows(rows, parts)

    def _remember(self, rows: Sequence[Prepared]) -> None:
        import gc

        import torch

        self.out_of_memory += 1
        if len(rows) > 1:
            self.limit = min(self.limit or self.size(rows), max(1, self.size(rows) // 2))
        gc.collect()
        if self.loaded.device.type == "cuda":
            torch.cuda.empty_cache()

    def _give_up(self, row: Prepared, problem: Problem, done: Generated) -> None:
        done.failures.append((row, problem))
        self._beaten += 1
        self._first_error = self._first_error or problem.message
        if self._beaten >= HOPELESS:
            self.finish()

    def _generate(self, rows: list[Prepared], batch: Batch) -> Piece:
        import torch

        loaded = self.loaded
        width = max(len(row.ids) for row in rows)
        ids = torch.full((len(rows), width), loaded.pad_id, dtype=torch.long)
        mask = torch.zeros((len(rows), width), dtype=torch.long)
        for number, row in enumerate(rows):
            # Decoder-only models continue the last column, so the padding must be on the left.
            columns = slice(0, len(row.ids)) if loaded.encoder_decoder else slice(width - len(row.ids), width)
            ids[number, columns] = torch.tensor(row.ids, dtype=torch.long)
            mask[number, columns] = 1
        options: dict[str, Any] = {}
        scores = SequenceScores(self._beams) if self._with_scores else None
        if scores is not None:
            options["stopping_criteria"] = [scores]
        if loaded.generation.stop_strings is not None:
            options["tokenizer"] = loaded.tokenizer
        if self._sampling:
            # A seed of its own for every batch: a resumed run draws what an uninterrupted one would have.
            torch.manual_seed(_seed(self.seed, batch, rows[0].record.position))
        start = time.perf_counter()
        try:
            output = loaded.model.generate(
                input_ids=ids.to(loaded.device),
                attention_mask=mask.to(loaded.device),
                generation_config=loaded.generation,
                **options,
            )
            sequences = (output if torch.is_tensor(output) else output.sequences).cpu().numpy()
        finally:
            self.seconds += time.perf_counter() - start
        prompt_width = 1 if loaded.encoder_decoder else width
        return Piece(rows, sequences, self._scores(scores, output, sequences, prompt_width, len(rows)), prompt_width)

    def _scores(
        self, scores: SequenceScores | None, output: Any, sequences: Any, prompt_width: int, rows: int
    ) -> list[list[float]] | None:
        if scores is None:
            return None
        own = getattr(output, "sequences_scores", None)
        if own is not None:
            flat: list[float] | None = [float(value) for value in own.cpu()]
        else:
            ends = end_ids(self.loaded.generation)
            flat = scores.sums([token_count(row[prompt_width:], ends, self.loaded.pad_id) for row in sequences])
        if flat is None:
            return None
        each = len(flat) // rows
        return [flat[start : start + each] for start in range(0, len(flat), each)]


def _seed(seed: int, batch: Batch, position: int) -> int:
    words = f"{seed}:{batch.window}:{batch.index}:{position}".encode()
    return int.from_bytes(hashlib.blake2b(words, digest_size=7).digest(), "big")


def end_ids(generation: Any) -> frozenset[int]:
    """The tokens that end a sequence."""
    end = generation.eos_token_id
    return frozenset() if end is None else frozenset([end] if isinstance(end, int) else end)


def token_count(generated: Sequence[int], ends: frozenset[int], pad_id: int) -> int:
    """Tokens that the model wrote, its end token included, without the padding after it."""
    for index, token in enumerate(generated):
        if int(token) in ends:
            return index + 1
    count = len(generated)
    while count and int(generated[count - 1]) == pad_id:
        count -= 1
    return count
