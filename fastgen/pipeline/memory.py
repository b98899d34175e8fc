"""The memory that a batch needs, and the largest batch that fits: `--batch-size auto`.

A call of `generate` has two phases, and its peak is that of the larger one:

    encode    the encoder's activations (decoder-only models: those of the prompt, and its K/V)
    decode    K/V of the inputs, once each; K/V of what every sequence has generated, with spare capacity;
              the encoder's output, which the library repeats for every beam; the scores over the vocabulary.
              A captured step has K/V in its own buffers, and at first the other ones are still there

Each is a number of bytes per input plus a number per token, padding included. The sizes come from the model's
configuration; the weights are in memory before anything is planned.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from fastgen import settings as process_settings
from fastgen.memory import capacity, free_host_memory

# Limit of inputs in an automatic batch: more gain little, and on a CPU nothing.
MOST_ROWS = {"cpu": 64, "cuda": 1024}
# The part of the free memory that is planned for. Fragmentation in torch's allocator wastes some; on a CPU, other
# programs share the memory.
SHARE_OF_FREE = {"cpu": 0.5, "cuda": 0.85}
# Tokens of an input that memory is planned for if a model has no input limit.
USUAL_LENGTH = 512

# As in the optimizer, which is not imported where nothing is loaded yet; tests check that they are equal.
MIN_SHARED_PREFIX = 32  # a shorter prefix is repeated for the beams
FIRST_CAPACITY = 256  # the most positions of the suffix that hooks allocate at first
CAPTURED_CAPACITIES = (64, 256)  # suffix of a captured step: least capacity, and largest initial capacity
CAPTURED_PREFIX = 128  # the capacity of its prefix is a multiple of this
CAPTURED_BATCHES = (1, 2, 4, 8, 16, 24, 32)  # its batch sizes; beyond, multiples of 16

# float32 tensors over the vocabulary that exist at the same time: the copy of the logits, log-probabilities, a
# processor's output, and the sum with the running score. Sampling also has probabilities, sorted, with their indices in
# int64; sorting on a GPU needs as much again.
_SCORE_COPIES = {"search": 4, "sample": 8}
_COPIES_OF_SORTING_ON_GPU = 4
# Activations that the library composes of several operations, and how many feed-forward tensors then exist. On the CPU,
# FastGen has an operator for each.
_IN_PARTS = {"gelu_new": 4, "gelu_fast": 4, "quick_gelu": 3}
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function", "dense_act_fn")
_GATES = ("gate_proj.weight", "gate_up_proj.weight", "wi_1.weight")  # of Llama's relatives, of Phi's, and of T5's


@dataclass(frozen=True)
class Need:
    """Bytes for an input, and for each of its tokens."""

    row: float
    token: float

    def of(self, rows: int, tokens: int) -> float:
        """Returns the bytes of a batch of this many inputs, with this many tokens together."""
        return rows * self.row + tokens * self.token


@dataclass(frozen=True)
class MemoryModel:
    """Bytes that a call of `generate` needs beside the weights."""

    layers: int  # of the decoder
    kv_bytes: int  # K and V of a position, in one layer
    hidden: int  # width of a layer; the wider one of encoder and decoder
    inner: int  # width of its feed-forward part
    gated: bool  # that part multiplies two projections
    heads: int  # of attention over the input's own tokens
    vocabulary: int  # scores of a row; all of them for models that predict several tokens ahead
    element: int  # bytes of a weight
    beams: int  # sequences of an input
    new_tokens: int  # the most of a sequence
    encoder_decoder: bool  # there is an encoder's output
    biased: bool  # attention adds a bias for every head
    eager: bool  # attention materializes the matrix of all scores
    samples: bool  # scores are sorted and sampled from
    on_gpu: bool  # it is CUDA's memory
    activation: str  # between the two linear ops of the feed-forward part
    captured: bool  # steps are replayed from a CUDA graph if they can be

    @classmethod
    def of(cls, model: Any, generation: Any) -> MemoryModel:
        """Builds the model for a Transformers model and the generation config of its calls."""
        config = model.config
        # Composite models have the decoder's sizes in a configuration of its own. If encoder and decoder share one, the
        # decoder's configuration is a copy in which its names have the defaults of their class.
        sources = (config, config.get_text_config(decoder=True))

        def size(*names: str, default: int) -> int:
            for source in sources:
                found = [v for name in names if isinstance(v := getattr(source, name, None), int) and v > 0]
                if found:
                    return max(found)
            return default

        hidden = size("hidden_size", "d_model", "n_embd", default=768)
        layers = size("num_hidden_layers", "n_layer", "num_layers", default=12)
        heads = size("num_attention_heads", "n_head", "num_heads", default=12)
        heads = size("decoder_attention_heads", "num_decoder_attention_heads", default=heads)
        head = size("head_dim", "d_kv", default=max(1, hidden // heads))
        inner = ("intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "n_inner")
        element = model.dtype.itemsize
        beams, returned = generation.num_beams or 1, generation.num_return_sequences or 1
        on_gpu = model.device.type == "cuda"
        new_tokens = generation.max_new_tokens or generation.max_length or 20
        # Some configurations have a limit that means none. If there are more tokens after all, a batch is halved.
        new_tokens = min(new_tokens, size("max_position_embeddings", default=new_tokens))
        return cls(
            layers=size("decoder_layers", "num_decoder_layers", default=layers),
            kv_bytes=2 * size("num_key_value_heads", default=heads) * head * element,
            hidden=hidden,
            inner=size(*inner, default=4 * hidden),
            gated=any(name.endswith(_GATES) for name, _ in model.named_parameters()),
            heads=size("encoder_attention_heads", default=heads),
            vocabulary=size("vocab_size", default=32000) * size("ngram", default=1),
            element=element,
            beams=beams if beams > 1 else returned,
            new_tokens=new_tokens,
            encoder_decoder=bool(config.is_encoder_decoder),
            biased=hasattr(config, "relative_attention_num_buckets"),
            eager=getattr(config, "_attn_implementation", None) == "eager",
            samples=bool(generation.do_sample),
            on_gpu=on_gpu,
            activation=next(
                (n for s in sources for a in _ACTIVATIONS if isinstance(n := getattr(s, a, None), str)), ""
            ),
            captured=on_gpu and process_settings.current().captured_step != "never",
        )

    def peak(self, rows: int, width: int) -> int:
        """Returns the bytes of a batch of this many inputs, padded to this many tokens."""
        if self.captured:
            rows = next(size for size in _batches(rows + 16) if size >= rows)
        return math.ceil(max(need.of(rows, rows * width) for need in self._phases(width)))

    def largest(self, free: int, most: int, longest: int) -> tuple[int, int]:
        """Returns the inputs of a batch, and their tokens together, that fit into `free` bytes.

        The inputs may take half of that; the rest is for tokens. There are at least as many tokens as the longest input
        has, whether they fit or not, and at most as many as the inputs can have.

        Args:
            most: limit of inputs.
            longest: tokens of the longest input.
        """
        phases = self._phases(longest)
        rows = max(need.row for need in phases)
        batch = max([size for size in _batches(most) if size * rows <= free / 2], default=1)
        tokens = min((free - batch * need.row) / max(need.token, 1.0) for need in phases)
        return batch, longest * max(1, min(int(tokens) // longest, batch))

    def _phases(self, width: int) -> tuple[Need, Need]:
        """Returns what each phase needs, with inputs of `width` tokens.

        Of a layer, its input and output, a norm, and the feed-forward part before and after its activation exist at the
        same time, with the embeddings and their positions; or else its queries, keys, values and context, and on a GPU
        the mask as numbers. For every pair of tokens there is a byte of a mask, and for every head the bias that
        attention adds; while attention runs, also the scores before and after the softmax, if it materializes them. On
        a GPU, torch does if there is a bias.
        """
        inner = max(3 if self.gated else 2, _IN_PARTS.get(self.activation, 0) if self.on_gpu else 0)
        feed_forward = self.element * (5 * self.hidden + inner * self.inner)
        attention = self.element * (7 * self.hidden + (width if self.on_gpu else 0))
        kept = width * (1 + self.heads * (self.element if self.biased else 0))
        scores = 2 * self.element if self.eager or (self.biased and self.on_gpu) else 0
        attention += width * self.heads * (scores + (4 if self.eager else 0))
        forward = kept + max(feed_forward, attention)
        prefix = self.layers * self.kv_bytes
        # A prefix that is too short to be worth sharing is repeated.
        stored = prefix * (self.beams if width < MIN_SHARED_PREFIX else 1)
        output = self.hidden * self.element if self.encoder_decoder else 0
        choices = self.beams * self._score_bytes()
        capacities = self._suffix_capacities()
        suffix = self.beams * prefix * sum(capacities)
        # Without an encoder, K/V may keep a projection alive that contains the queries as well.
        encode = Need(0, forward + (output if self.encoder_decoder else 1.5 * prefix))
        repeated = output * self.beams
        if not self.captured:
            return encode, Need(choices + suffix, stored + repeated)
        # Every step that was outgrown is kept for the next call, with a prefix of its own.
        padding = len(capacities) * prefix * CAPTURED_PREFIX
        return encode, Need(choices + suffix + padding, len(capacities) * prefix + stored + repeated)

    def _suffix_capacities(self) -> list[int]:
        """Returns the positions allocated for what a sequence generates: one number, or one for each captured step."""
        if self.captured:
            least, most = CAPTURED_CAPACITIES
            capacities = [min(max(least, 1 << (self.new_tokens - 1).bit_length()), most)]
            while capacities[-1] < self.new_tokens - 1:  # the last token is not read again
                capacities.append(2 * capacities[-1])
            return capacities
        positions = min(self.new_tokens, FIRST_CAPACITY)
        while positions < self.new_tokens:
            positions = capacity(positions + 1, positions)
        return [positions]

    def _score_bytes(self) -> int:
        # A captured step also keeps the scores of its first token, and one buffer for scores that the host processes.
        copies = _SCORE_COPIES["sample" if self.samples else "search"] + self.captured
        copies += _COPIES_OF_SORTING_ON_GPU if self.samples and self.on_gpu else 0
        return self.vocabulary * (self.element * (1 + self.captured) + 4 * copies)


def _batches(most: int) -> list[int]:
    """Returns batch sizes for which steps are captured. They are few, so that slightly less memory changes nothing."""
    sizes = [*CAPTURED_BATCHES, *range(CAPTURED_BATCHES[-1] + 16, most + 1, 16)]
    return [size for size in sizes if size <= most]


def automatic_batch(model: Any, generation: Any, longest: int) -> tuple[int, int]:
    """Returns inputs and tokens of a batch that fit into the memory of the model's device.

    Args:
        generation: the generation config; None for an encoder-only model.
        longest: tokens of the longest input.
    """
    from transformers import GenerationConfig

    kind = "cuda" if model.device.type == "cuda" else "cpu"
    free = int(free_memory(model.device) * SHARE_OF_FREE[kind])
    memory = MemoryModel.of(model, generation or GenerationConfig(max_new_tokens=1))
    if generation is None:  # it keeps nothing from layer to layer, and has no scores over a vocabulary
        memory = replace(memory, layers=0, vocabulary=0, captured=False)
    elif kind == "cpu" and process_settings.current().packed_weights != "never":
        # Copies of the weights take at most this much.
        free -= sum(parameter.nbytes for parameter in model.parameters())
    return memory.largest(max(free, 0), MOST_ROWS[kind], longest)


def free_memory(device: Any) -> int:
    """Returns the bytes that are still available on the torch device."""
    if device.type == "cuda":
        import torch

        # Memory that torch's allocator has reserved and does not use is free, too.
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    return free_host_memory()
