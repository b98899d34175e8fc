"""The names that releases of Transformers use, and the differences between releases: the only place that knows them.

A name that some release has changed appears here and nowhere else. If a release differs in more than names, the
function itself is inspected (its parameters, the names that it uses, its result for two numbers), so that a release
between two tested ones is served, too. Importing this module imports neither torch nor Transformers.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from fastgen import counters, patching
from fastgen._version import __version__

# The first and the last release that the equivalence tests run against. Others are served if their functions look the
# same.
TESTED = ("5.4", "5.24")
# Models that every tested release accelerates in all ways of decoding: the first table of docs/support.md.
MODELS = frozenset(
    """
    BartForConditionalGeneration BlenderbotForConditionalGeneration BlenderbotSmallForConditionalGeneration
    BloomForCausalLM GPT2LMHeadModel GPTNeoXForCausalLM Gemma2ForCausalLM GemmaForCausalLM GptOssForCausalLM
    LEDForConditionalGeneration LlamaForCausalLM M2M100ForConditionalGeneration MBartForConditionalGeneration
    MT5ForConditionalGeneration MarianMTModel MistralForCausalLM MixtralForCausalLM OPTForCausalLM
    PegasusForConditionalGeneration PhiForCausalLM ProphetNetForConditionalGeneration Qwen2ForCausalLM
    Qwen3ForCausalLM T5ForConditionalGeneration UMT5ForConditionalGeneration WhisperForConditionalGeneration
    """.split()
)

# Further models, which every tested release accelerates in some way of decoding: the second table.
OTHER_MODELS = frozenset(
    """
    BertLMHeadModel BioGptForCausalLM CTRLLMHeadModel CodeGenForCausalLM CohereForCausalLM DeepseekV3ForCausalLM
    FSMTForConditionalGeneration FalconForCausalLM GPTBigCodeForCausalLM GPTJForCausalLM GPTNeoForCausalLM
    Gemma3ForCausalLM GraniteForCausalLM LongT5ForConditionalGeneration MptForCausalLM MvpForConditionalGeneration
    Olmo2ForCausalLM PLBartForConditionalGeneration PegasusXForConditionalGeneration Phi3ForCausalLM
    Qwen2MoeForCausalLM StableLmForCausalLM Starcoder2ForCausalLM SwitchTransformersForConditionalGeneration
    XGLMForCausalLM
    """.split()
)

Function = TypeVar("Function", bound=Callable[..., Any])

# ---- the KV cache

# Its names among the arguments and outputs of models, newest first: releases up to 5.23 use one of the others.
CACHE_NAMES = ("cache", "past_key_values", "cache_params")
# For conditions of patches (`patching.has`): a parameter with one of these names.
TAKES_CACHE = "|".join(CACHE_NAMES[:2])


@functools.cache
def _known_cache_name() -> str | None:
    from transformers.generation.utils import GenerationMixin

    parameters = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    return next((name for name in CACHE_NAMES if name in parameters), None)


def cache_name() -> str:
    """Returns the name of the KV cache in the arguments and outputs of models of the installed release."""
    return _known_cache_name() or CACHE_NAMES[0]


def why_no_cache() -> str:
    """Returns why a call of `generate` with a cache has none where FastGen looks for it."""
    unknown = f"the release has another name for it than {', '.join(CACHE_NAMES)}"
    return f"no K/V cache ({'a model without one' if _known_cache_name() else unknown})"


def with_cache(cache: Any) -> dict[str, Any]:
    """Returns the KV cache as a keyword of a model, of its output, or of `generate`."""
    return {cache_name(): cache}


def cache_in(given: Mapping[str, Any]) -> Any:
    """Returns the KV cache in the arguments or the output of a model; None if there is none."""
    return given.get(cache_name())


@functools.cache
def streams_behind_criteria() -> bool:
    """Whether the library's loop runs the criteria on a token before it passes it to the streamer: since 5.17."""
    from transformers.generation import utils

    return hasattr(utils, "StopCheck")


def has_own_cache(arguments: Mapping[str, Any]) -> bool:
    """Whether the arguments of `generate` include a cache of the user's, by a name of any release."""
    return any(arguments.get(name) is not None for name in CACHE_NAMES)


def is_cache(name: str) -> bool:
    """Whether an argument or an output of this name is the KV cache."""
    return name in CACHE_NAMES


def has_former_names(given: Mapping[str, Any]) -> bool:
    """Whether keywords use a name that the installed release has deprecated, of which it warns."""
    return cache_name() == CACHE_NAMES[0] and any(name in given for name in CACHE_NAMES[1:])


def with_current_names(arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns arguments of `generate` with deprecated names replaced by the present ones.

    The library does the same, and warns; if it is called twice, one warning is enough.
    """
    if not has_former_names(arguments):
        return arguments
    former = [name for name in CACHE_NAMES[1:] if name in arguments]
    found = {name: value for name, value in arguments.items() if name not in former}
    return {cache_name(): arguments[former[0]], **found}


def takes_cache(forward: Function) -> Function:
    """Decorates the forward pass of one of FastGen's models: renames its parameter `cache` as in the installed release.

    A call may use either name. `generate` finds the release's own name in the signature.
    """

    @functools.wraps(forward)
    def renamed(*args: Any, **kwargs: Any) -> Any:
        given = [kwargs.pop(name) for name in CACHE_NAMES if name in kwargs]
        if len(given) > 1:
            raise TypeError(f"the K/V cache is given by two names ({' and '.join(CACHE_NAMES[:2])}): give one of them")
        return forward(*args, **kwargs, **dict.fromkeys(CACHE_NAMES[: len(given)], *given))

    signature = inspect.signature(forward)
    parameters = [
        each.replace(name=cache_name()) if each.name == CACHE_NAMES[0] else each
        for each in signature.parameters.values()
    ]
    renamed.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]  # of functions, too
    return renamed  # type: ignore[return-value]  # the same one, but for a name


# ---- the contents of a KV cache


class CacheLayerNames:
    """The names of releases for the capacity of a layer of the KV cache: the second is a former one."""

    def capacity(self) -> int:
        """Returns the largest number of positions; -1 for no limit."""
        raise NotImplementedError

    def get_max_length(self) -> int:
        return self.capacity()

    def get_max_cache_shape(self) -> int:
        return self.capacity()


# Method of a cache, since 5.17: positions before the queries, where masks of a layer begin.
QUERY_OFFSET = "get_query_offset"


def records_past(layer: Any) -> bool:
    """Whether a layer of the KV cache records states to go back to: possible since 5.17."""
    return bool(getattr(layer, "record_past", False))


def keep_past_of(result: Any) -> None:
    """Lets the KV cache that a call returns record states to go back to, as the library does behind drafts."""
    record = getattr(cache_in(result), "activate_past_recording", None) if isinstance(result, Mapping) else None
    if record is not None:
        record()


@functools.cache
def keeps_states_in_cache() -> bool:
    """Whether layers of the KV cache keep the states of Mamba and similar models, by number: since 5.14."""
    from transformers import cache_utils

    layer = getattr(cache_utils, "LinearAttentionLayer", None)
    return layer is not None and "number_of_states" in inspect.signature(layer.__init__).parameters


# ---- generate

# The model input that holds encoders' outputs for images.
ENCODED = "mm_encoder_outputs"


@functools.cache
def read_in_prefill() -> frozenset[str]:
    """Returns the inputs that models read only in the prefill, such as images: later releases list them."""
    from transformers.generation import utils

    return frozenset(getattr(utils, "MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL", ()))


@functools.cache
def repeats_images_together() -> bool:
    """Whether each sequence of an input gets all of its images: former releases repeat each image separately."""
    from transformers.generation.utils import GenerationMixin

    return hasattr(GenerationMixin, "_expand_multimodal_outputs")


# The method of `generate` that runs the encoder: its present name, and a former one.
RUN_ENCODER = ("_prepare_text_encoder_decoder_kwargs_for_generation", "_prepare_encoder_decoder_kwargs_for_generation")
# Options of assisted generation that only later releases have.
ASSISTANCE = ("assistant_ensemble_weight", "speculation_type", "use_mtp")
# Up to 5.23, attention functions get the paged cache of continuous batching under this name.
PAGED_CACHE = "cache"


def is_tokenizer(value: Any) -> bool:
    """Whether an argument of a model is the tokenizer of `stop_strings`: up to 5.10 it is among them."""
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

    return isinstance(value, PreTrainedTokenizerBase)


# ---- logits processors

# Attribute of a `SequenceBiasLogitsProcessor` that groups sequences by length; other releases process them one by one.
GROUPED_BIASES = "multi_token_biases"
# Attribute of `TopKLogitsWarper` since 5.10, which it does not use.
KEPT_BY_TOP_K = "min_tokens_to_keep"


# ---- GGUF files

# The function that reads a file's header, since 5.17, and its module relative to "transformers.".
GGUF_HEADER = ("integrations.gguf.reader", "read_gguf_metadata")


def gguf_quantizer() -> type[Any]:
    """Returns the library's quantizer for GGUF files. Raises ImportError up to 5.10, which has none."""
    from transformers.quantizers.quantizer_gguf import GgufHfQuantizer

    return GgufHfQuantizer


# ---- behaviour


def sorts_drawn_candidates() -> bool:
    """Whether beam sampling sorts the candidates that it has drawn: since 5.24."""
    from transformers.generation.utils import GenerationMixin

    return "sort" in patching.names_in(GenerationMixin._get_top_k_continuations)


# ---- releases that are not tested


class Usual(str):
    """A reason not to accelerate that lies in the call, or in the user's changes: it occurs in any release."""


def version() -> str:
    """Returns the imported release of Transformers; "" before it is imported."""
    return str(getattr(sys.modules.get("transformers"), "__version__", ""))


def is_tested(release: str, tested: tuple[str, str] = TESTED) -> bool:
    """Whether a release lies between the first and the last tested ones."""
    first, last = (_numbers(each) for each in tested)
    return first <= _numbers(release) <= last


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", release)[:2])


_has_warned = False
# Modules between the user's call and the code that warns.
_LIBRARIES = ("transformers.", "torch.", "contextlib", "wrapt.", "importlib.")


def note(model: Any, reason: str, what: str = "generate runs on the original code") -> None:
    """Warns, once, that a call of `model` is not accelerated, if an untested release causes that.

    It does if every tested release accelerates this Transformers model, unless the reason is a `Usual` one.
    """
    if _is_known(type(model)) and not isinstance(reason, Usual):
        _warn(f"{type(model).__name__}.{what}", reason)


def note_encoder(model: Any, reason: str) -> None:
    """As `note`, for an encoder whose padding every tested release can skip."""
    _warn(f"{type(model).__name__} computes padding", reason)


_failed: dict[type, str] = {}


def note_failure(model: Any, failure: Exception) -> str | None:
    """Returns why an accelerated call of `model` failed and was repeated, if the release is to blame as in `note`.

    If so, warns likewise, and `failed_before` keeps later calls of such models from being tried.
    """
    if is_tested(version()) or not _is_known(type(model)):
        return None
    reason = f"{type(failure).__name__} in the accelerated call: {failure}"
    _failed[type(model)] = reason
    note(model, reason)
    return reason


def failed_before(kind: type) -> str | None:
    """Returns why accelerated calls of such models are not tried any more; None if they are."""
    return _failed.get(kind)


def _is_known(kind: type) -> bool:
    """Whether this is, or derives from, a model that every tested release accelerates."""
    return any(
        base.__module__.startswith("transformers.models.") and base.__name__ in MODELS | OTHER_MODELS
        for base in kind.__mro__
    )


def note_patch(patch: patching.Patch, reason: str) -> None:
    """Warns as `note` does if `generate` itself cannot be hooked, because then no call could warn."""
    if patch.target.endswith(".generate"):
        _warn("generate runs on the original code", reason)


def _warn(what: str, reason: str) -> None:
    global _has_warned
    release = version()
    if _has_warned or not release or is_tested(release):
        return
    _has_warned = True
    first, last = TESTED
    major, minor = _numbers(last)
    is_newer = _numbers(release) > _numbers(last)
    wanted = f"transformers<{major}.{minor + 1}" if is_newer else f"transformers>={first}"
    remedy = "upgrade FastGen, or install" if is_newer else "install"
    warnings.warn(
        f"FastGen {__version__} is tested with Transformers {first} to {last}, not with {release}. There "
        f"{what}: {reason}. To have it accelerated, {remedy} a tested release: pip install '{wanted}'",
        RuntimeWarning,
        stacklevel=counters.level_of_caller(_LIBRARIES),
    )
