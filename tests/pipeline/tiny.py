"""Tiny models with random weights and a tokenizer trained on a few lines, saved as `save_pretrained` directories."""

from __future__ import annotations

import copy
import functools
import json
import random
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

WORDS = (
    "in the beginning god created heaven and earth was without form void darkness upon face of deep spirit moved "
    "waters said let there be light saw that it good divided from called day night evening morning were first"
).split()


def sentences(count: int, seed: int = 0, longest: int = 14) -> list[str]:
    """Sentences of different lengths, the same each time."""
    source = random.Random(seed)
    return [" ".join(source.choices(WORDS, k=source.randint(1, longest))) for _ in range(count)]


def tokenizer(encoder_decoder: bool):
    """A byte-pair tokenizer of a few hundred tokens; with `encoder_decoder` it puts <s> and </s> around a text."""
    return copy.deepcopy(_tokenizer(encoder_decoder))


@functools.cache
def _tokenizer(encoder_decoder: bool):
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    raw.train_from_iterator(sentences(200), trainer)
    if encoder_decoder:
        raw.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
        )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<s>", pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )


def saved(model, tokens, folder: Path) -> Path:
    model.eval().save_pretrained(folder)
    tokens.save_pretrained(folder)
    return folder


def change_weights(folder: Path, change: Callable[[dict], object], file: str = "model.safetensors") -> None:
    """Has `change` change a dictionary of the weights in a file."""
    weights = load_file(folder / file)
    change(weights)
    save_file(weights, folder / file, metadata={"format": "pt"})


def bart(folder: Path, **changes) -> Path:
    """An encoder-decoder with 64 positions."""
    tokens = tokenizer(encoder_decoder=True)
    torch.manual_seed(0)
    options = dict(
        vocab_size=len(tokens), d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=64,
        bos_token_id=0, pad_token_id=1, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=2, init_std=0.3,
    )  # fmt: skip
    return saved(
        transformers.BartForConditionalGeneration(transformers.BartConfig(**(options | changes))), tokens, folder
    )


def unilm(folder: Path, **changes) -> Path:
    """FastGen's own UniLM, with 64 positions for source and target."""
    from fastgen.models.unilm import UniLMConfig, UniLMForSeq2SeqLM

    tokens = tokenizer(encoder_decoder=True)
    torch.manual_seed(0)
    options = dict(
        vocab_size=len(tokens), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=64, bos_token_id=0, pad_token_id=1, eos_token_id=2, mask_token_id=3,
        decoder_start_token_id=1, initializer_range=0.3,
    )  # fmt: skip
    return saved(UniLMForSeq2SeqLM(UniLMConfig(**(options | changes))), tokens, folder)


def gpt2(folder: Path, **changes) -> Path:
    """A decoder-only model with 64 positions and no padding token."""
    tokens = tokenizer(encoder_decoder=False)
    tokens.pad_token = None
    torch.manual_seed(1)
    options = dict(
        vocab_size=len(tokens), n_embd=32, n_layer=1, n_head=2, n_positions=64, bos_token_id=0, eos_token_id=2,
        initializer_range=0.3,
    )  # fmt: skip
    return saved(transformers.GPT2LMHeadModel(transformers.GPT2Config(**(options | changes))), tokens, folder)


def bert(folder: Path, labels: int = 0, **changes) -> Path:
    """A model that only encodes, with 64 positions; with labels it has a head that tells them apart."""
    tokens = tokenizer(encoder_decoder=True)
    tokens.model_max_length = 64
    torch.manual_seed(0)
    options = dict(
        vocab_size=len(tokens), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=64, pad_token_id=1, initializer_range=0.3,
    )  # fmt: skip
    if labels:
        options["id2label"] = {number: f"kind {number}" for number in range(labels)}
    kind = transformers.BertForSequenceClassification if labels else transformers.BertModel
    return saved(kind(transformers.BertConfig(**(options | changes))), tokens, folder)


def sentence_files(folder: Path, *modules: tuple[str, dict], settings: dict | None = None, prompts: dict | None = None):
    """The files of sentence-transformers: the types of the modules after the model, with their configurations."""
    listed = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    for number, (kind, config) in enumerate(modules, start=1):
        path = f"{number}_{kind}"
        listed.append(
            {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        )
        (folder / path).mkdir(exist_ok=True)
        (folder / path / "config.json").write_text(json.dumps(config))
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 48} | (settings or {})))
    if prompts:
        (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    return folder


# As templates of models that take images are: they write lists of parts, and nothing of a text.
IMAGE_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' }}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def pictures(folder: Path, name: str = "Llava", template: str = IMAGE_TEMPLATE, **changes) -> Path:
    """A decoder-only model that takes images, too, with 256 positions: Llava with its processor, others for text.

    Llava makes 4 tokens of an image.
    """
    tokens = tokenizer(encoder_decoder=False)
    tokens.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokens.chat_template = template
    layers = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    text = {
        **layers, "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
        "vocab_size": len(tokens), "bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "initializer_range": 0.3,
    }  # fmt: skip
    vision = {**layers, "num_hidden_layers": 1, "image_size": 16, "patch_size": 8}
    patches = {"depth": 1, "hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 64, "num_heads": 4}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    image = tokens.convert_tokens_to_ids("<image>")
    options = {
        "Llava": lambda: {
            "vision_config": {**vision, "model_type": "clip_vision_model"}, "image_token_index": image,
            "text_config": {**text, "model_type": "llama"}, "image_seq_length": 4,
        },
        "Gemma3": lambda: {
            "text_config": text, "vision_config": {**vision, "model_type": "siglip_vision_model"},
            "image_token_index": image, "mm_tokens_per_image": 4,
        },
        "Qwen3VL": lambda: {
            "text_config": {**text, "rope_parameters": rope}, "image_token_id": image,
            "vision_config": {**patches, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        },
        "SmolVLM": lambda: {
            "text_config": {**text, "model_type": "llama"}, "vision_config": vision, "image_token_id": image,
            "scale_factor": 2, "pad_token_id": 1,
        },
    }  # fmt: skip
    torch.manual_seed(2)
    config = getattr(transformers, f"{name}Config")(**options[name](), **changes)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    for weight in model.parameters():
        if weight.dim() > 1:  # so that what a model writes depends on what it sees
            torch.nn.init.normal_(weight, std=0.5)
    model.generation_config.update(bos_token_id=0, pad_token_id=1, eos_token_id=2)
    saved(model, tokens, folder)
    if name == "Llava":
        size = {"height": 16, "width": 16}
        kind = getattr(transformers, "CLIPImageProcessorPil", transformers.CLIPImageProcessor)
        seen = kind(size={"shortest_edge": 16}, crop_size=size)
        transformers.LlavaProcessor(
            seen, tokens, patch_size=8, vision_feature_select_strategy="default", num_additional_image_tokens=1,
            chat_template=template,
        ).save_pretrained(folder)  # fmt: skip
    return folder


def whisper(folder: Path, languages: tuple[str, ...] = ("en", "de", "fr"), **changes) -> Path:
    """A Whisper with its processor and windows of 2 seconds, of 20 tokens each; without languages for English alone."""
    trained = json.loads(tokenizer(encoder_decoder=False).backend_tokenizer.to_str())["model"]
    words = [word for word in trained["vocab"] if word not in ("<s>", "<pad>", "</s>", "<unk>")]
    vocabulary = {word: number for number, word in enumerate([*words, "<|endoftext|>"])}
    tokens = transformers.WhisperTokenizer(vocab=vocabulary, merges=[tuple(each) for each in trained["merges"]])
    names = [f"<|{each}|>" for each in languages]
    tasks = ["<|translate|>", "<|transcribe|>"] if languages else []
    others = ["<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"]
    tokens.add_special_tokens({"additional_special_tokens": ["<|startoftranscript|>", *names, *tasks, *others]})
    tokens.add_tokens([f"<|{number * 0.02:.2f}|>" for number in range(101)])
    ids = tokens.get_vocab()
    torch.manual_seed(3)
    end = ids["<|endoftext|>"]
    options = dict(
        vocab_size=len(tokens), num_mel_bins=8, d_model=32, encoder_layers=1, decoder_layers=2,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64,
        max_source_positions=100, max_target_positions=64, init_std=0.3, bos_token_id=end, eos_token_id=end,
        pad_token_id=end, decoder_start_token_id=ids["<|startoftranscript|>"], suppress_tokens=None,
        begin_suppress_tokens=[end],
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**(options | changes)))
    generation = dict(
        max_length=20, return_timestamps=False, is_multilingual=bool(languages), max_initial_timestamp_index=50,
        prev_sot_token_id=ids["<|startofprev|>"], no_timestamps_token_id=ids["<|notimestamps|>"],
        suppress_tokens=[ids[word] for word in (*names, *tasks, *others, *(word for word in words if len(word) == 1))],
    )  # fmt: skip
    if languages:
        generation["lang_to_id"] = {name: ids[name] for name in names}
        generation["task_to_id"] = {task.strip("<|>"): ids[task] for task in tasks}
    model.generation_config._from_model_config = False
    for name, value in generation.items():
        setattr(model.generation_config, name, value)
    extractor = transformers.WhisperFeatureExtractor(feature_size=8, chunk_length=2)
    return saved(model, transformers.WhisperProcessor(extractor, tokens), folder)
