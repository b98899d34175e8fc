"""How much memory a batch needs, and the largest that fits: `--batch-size auto`.

A call of `generate` goes through phases, and its peak is that of the largest:

    encode    the encoder's activations (decoder-only models: those of the prompt, and its K/V)
    decode    K/V of the inputs, once each; K/V of what every sequence has generated, with spare capacity;
              the encoder's output, which the library repeats for every beam; the scores over the vocabulary.
              A captured step has K/V in buffers of its own, and at first the other ones are still there

All of it is so many bytes for an input plus so many for each of its tokens, padding included. The sizes come from the
model's configuration, and the weights are in memory before anything is planned.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from fastgen import settings as process_settings
from fastgen.memory import capacity, free_host_memory

# Inputs of an automatic batch: more gain little, and on a CPU nothing.
MOST_ROWS = {"cpu": 64, "cuda": 1024}
# The part of the free memory that is planned for. What torch's allocator holds in pieces is lost to it; on a CPU the
# memory is shared with whatever else runs.
SHARE_OF_FREE = {"cpu": 0.5, "cuda": 0.85}
# Tokens of an input that memory is planned for where a model does not say how long one may be.
USUAL_LENGTH = 512

# As the optimizer has them, which is not imported where nothing is loaded yet; tests see to it that they are the same.
MIN_SHARED_PREFIX = 32  # a shorter prefix is repeated for the beams
FIRST_CAPACITY = 256  # positions of the suffix that the hooks allocate at first, at the most
CAPTURED_CAPACITIES = (64, 256)  # the suffix of a captured step: at the least, and at first at the most
CAPTURED_PREFIX = 128  # the capacity of its prefix is a multiple
CAPTURED_BATCHES = (1, 2, 4, 8, 16, 24, 32)  # its batches; beyond, multiples of 16

# float32 tensors over the vocabulary that are there at the same time: the copy of the logits, log-probabilities, what a
# processor makes of them, with the running score. Sampling also has probabilities, sorted, with their places in int64;
# sorting on a GPU has as much again for itself.
_SCORE_COPIES = {"search": 4, "sample": 8}
_COPIES_OF_SORTING_ON_GPU = 4
# Activations that the library makes of several operations: how many tensors of the feed-forward part are there then.
# On the CPU, FastGen has an operator for each.
_IN_PARTS = {"gelu_new": 4, "gelu_fast": 4, "quick_gelu": 3}
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function", "dense_act_fn")
_GATES = ("gate_proj.weight", "gate_up_proj.weight", "wi_1.weight")  # in Llama's kin, in Phi's, and in T5's


@dataclass(frozen=True)
class Need:
    """Bytes for an input, and for each of its tokens."""

    row: float
    token: float

    def of(self, rows: int, tokens: int) -> float:
        """Bytes of a batch of so many inputs, with so many tokens together."""
        return rows * self.row + tokens * self.token


@dataclass(frozen=True)
class MemoryModel:
    """Bytes that a call of `generate` needs beside the weights."""

    layers: int  # of the decoder
    kv_bytes: int  # K and V of a position, in one layer
    hidden: int  # width of a layer; of encoder and decoder the wider one
    inner: int  # width of its feed-forward part
    gated: bool  # that part multiplies two projections
    heads: int  # of attention over the input's own tokens
    vocabulary: int  # scores of a row; of models that predict several tokens ahead, all of them
    element: int  # bytes of a weight
    beams: int  # sequences of an input
    new_tokens: int  # of a sequence, at the most
    encoder_decoder: bool  # there is an encoder's output
    biased: bool  # attention adds a bias for every head
    eager: bool  # attention makes the matrix of all scores
    samples: bool  # scores are sorted and drawn from
    on_gpu: bool  # it is CUDA's memory
    activation: str  # between the two products of the feed-forward part
    captured: bool  # steps are replayed from a CUDA graph where they can be

    @classmethod
    def of(cls, model: Any, generation: Any) -> MemoryModel:
        """For a model of Transformers and the generation config that it will be called with."""
        config = model.config
        # Composite models have the decoder's in a configuration of its own. Where encoder and decoder share one, asking
        # for the decoder's gives a copy in which its names have the defaults of their class.
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
        # Some configurations have a limit that stands for none. Where there are more after all, a batch is halved.
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
        """Bytes of a batch of so many inputs, padded to so many tokens."""
        if self.captured:
            rows = next(size for size in _batches(rows + 16) if size >= rows)
        return math.ceil(max(need.of(rows, rows * width) for need in self._phases(width)))

    def largest(self, free: int, most: int, longest: int) -> tuple[int, int]:
        """Inputs of a batch, and their tokens together, that fit into `free` bytes.

        The inputs may take half of that; the rest is for tokens. Of these there is at least one input's worth, whether
        it fits or not, and none more than the inputs can have.

        Args:
            most: inputs that are not exceeded.
            longest: tokens of the longest input.
        """
        phases = self._phases(longest)
        rows = max(need.row for need in phases)
        batch = max([size for size in _batches(most) if size * rows <= free / 2], default=1)
        tokens = min((free - batch * need.row) / max(need.token, 1.0) for need in phases)
        return batch, longest * max(1, min(int(tokens) // longest, batch))

    def _phases(self, width: int) -> tuple[Need, Need]:
        """What each phase needs, with inputs of `width` tokens.

        Of a layer, its input and output, a norm, and the feed-forward part before and after its activation are there
        at the same time, and the embeddings with their positions; or else its queries, keys, values and context, and on
        a GPU the mask as numbers. For every pair of tokens there is a byte of a mask, and for every head the bias that
        attention adds; while it runs also the scores before and after the softmax, where it makes them. On a GPU, torch
        makes them where there is a bias.
        """
        inner = max(3 if self.gated else 2, _IN_PARTS.get(self.activation, 0) if self.on_gpu else 0)
        feed_forward = self.element * (5 * self.hidden + inner * self.inner)
        attention = self.element * (7 * self.hidden + (width if self.on_gpu else 0))
        kept = width * (1 + self.heads * (self.element if self.biased else 0))
        scores = 2 * self.element if self.eager or (self.biased and self.on_gpu) else 0
        attention += width * self.heads * (scores + (4 if self.eager else 0))
        forward = kept + max(feed_forward, attention)
        prefix = self.layers * self.kv_bytes
        # What is too short to be worth sharing is repeated.
        stored = prefix * (self.beams if width < MIN_SHARED_PREFIX else 1)
        output = self.hidden * self.element if self.encoder_decoder else 0
        choices = self.beams * self._score_bytes()
        capacities = self._suffix_capacities()
        suffix = self.beams * prefix * sum(capacities)
        # Without an encoder, K/V may hold on to a projection that the queries are in as well.
        encode = Need(0, forward + (output if self.encoder_decoder else 1.5 * prefix))
        repeated = output * self.beams
        if not self.captured:
            return encode, Need(choices + suffix, stored + repeated)
        # Every step that was outgrown is kept for the next call, with a prefix of its own.
        padding = len(capacities) * prefix * CAPTURED_PREFIX
        return encode, Need(choices + suffix + padding, len(capacities) * prefix + stored + repeated)

    def _suffix_capacities(self) -> list[int]:
        """Positions that are allocated for what a sequence generates: one number, or one for each captured step."""
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
        # A captured step has the scores of its first token as well, and one buffer for those that the host works on.
        copies = _SCORE_COPIES["sample" if self.samples else "search"] + self.captured
        copies += _COPIES_OF_SORTING_ON_GPU if self.samples and self.on_gpu else 0
        return self.vocabulary * (self.element * (1 + self.captured) + 4 * copies)


def _batches(most: int) -> list[int]:
    """Sizes of a batch: those that steps are captured for. Few, so that a little less memory changes nothing."""
    sizes = [*CAPTURED_BATCHES, *range(CAPTURED_BATCHES[-1] + 16, most + 1, 16)]
    return [size for size in sizes if size <= most]


def automatic_batch(model: Any, generation: Any, longest: int) -> tuple[int, int]:
    """Inputs and tokens of a batch that fit into the memory of the model's device.

    Args:
        generation: the generation config; None for a model that only encodes.
        longest: tokens of the longest input.
    """
    from transformers import GenerationConfig

    kind = "cuda" if model.device.type == "cuda" else "cpu"
    free = int(free_memory(model.device) * SHARE_OF_FREE[kind])
    memory = MemoryModel.of(model, generation or GenerationConfig(max_new_tokens=1))
    if generation is None:  # it keeps nothing from layer to layer, and has no scores over a vocabulary
        memory = replace(memory, layers=0, vocabulary=0, captured=False)
    elif kind == "cpu" and process_settings.current().packed_weights != "never":
        # Copies of the weights take so much at the most.
        free -= sum(parameter.nbytes for parameter in model.parameters())
    return memory.largest(max(free, 0), MOST_ROWS[kind], longest)


def free_memory(device: Any) -> int:
    """Bytes that can still be had on the torch device."""
    if device.type == "cuda":
        import torch

        # What torch's allocator has and does not use is free, too.
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    return free_host_memory()
