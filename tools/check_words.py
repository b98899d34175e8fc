"""Reports words that have a better one: `make lint` runs it over code, messages and pages.

    python tools/check_words.py [FILE ...]   # all tracked files without arguments; exit status 1 if it finds one

The table only has words with no other meaning here. The field's word stands beside each.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENDINGS = (".py", ".cpp", ".h", ".cu", ".md", ".toml", ".yml", "Makefile")
# By pattern of a word, the one to use.
WORDS = {
    r"[Tt]ier[ _]?[12]": "hooks, captured step",
    r"(?:[Ff]irst|[Pp]rompt)[ _]pass(?:es)?(?![a-z])": "prefill",
    r"[Mm]atrix[ _]registers?": "AMX tiles",
    r"FASTGEN_MATRICES": "FASTGEN_AMX",
    r"(?<!\w)as_they_are\(": "plain_linear",
    r"(?<!\w)in_force\(": "override_attention",
    r"best_two|BEST_TWO": "top_two",
    r"is_spoilt": "has_nan",
    r"take_run|[Rr]un_?[Ss]earch": "commit, SpeculativeSearch",
    r"(?<!\w)own_weights|OwnWeights": "self_draft, DraftWeights",
    r"seen_weight|SeenWeight": "DerivedWeight",
    r"model_state": "guards",
    r"settings as switches": "process_settings",
    r"Computed\[": "BatchResult",
    r"LayerKV|StaticKV|SharedKV|RaggedKV": "GrowingKV, FixedKV, KVView",
    r"CapturedStep|SpeculativeStep|RaggedStep|AssistantStep": "DecodeStep, Drafting",
    r"panel_copies|weight_copies|output_layer\.Step": "linear_ops, derived_weights, lm_head",
    r"GroupedWeight|LinedWeight|TiledWeight|NarrowLines|NarrowPanels": "QuantizedTensor, PackedWeight",
    r"minimums|pack_multiples|scale_units|minimum_units": "mins, super-block scales",
    r"SIGNED_MIDDLE|unless_middle": "zero point",
    r"packed_numbers": "packed_qweight",
    r"[Ff]ew bits|put_into_few_bits": "low-bit",
    r"weights in other numbers": "copies of weights",
    r"rough_copy_of|largest_outputs|largest_output\.\w+\(": "approximate_logits, lm_head",
    r"fastgen[./]ops[./]_(?:plan|team)(?![a-z])": "command_list, thread_pool",
    r"MOST_PAUSES|_pauses_of": "back-off",
    r"QuantizedProduct|quantization[./](?:words|products)(?![a-z])": "layer_weight, checkpoint",
    r"StoreInCache": "ExchangedLayers",
    r"StoredLayer": "KVCacheLayer",
    r"(?:operation|each|argmax|product)\.(?:leaves|fresh)(?![a-z])": "args, outputs",
    r"keep_reach|\.reach\(\)": "max_length",
    r"(?:sizes|prompt|needed)\.stored(?![a-z(])": "cached",
    r"_(?:ahead|back)_seen|_seen_by_tokens|buffers\.seen": "cache_length",
    r"others_r[au]n(?![a-z])|_settled_in|is_settled": "third-party code, validation",
}
_PATTERN = re.compile(rf"(?<![A-Za-z0-9])(?:{'|'.join(WORDS)})")


def found_in(text: str) -> Iterator[tuple[int, str, str]]:
    """Yields the line, the word and the better word of each match in a text."""
    for number, line in enumerate(text.splitlines(), 1):
        for match in _PATTERN.finditer(line):
            better = next(word for pattern, word in WORDS.items() if re.fullmatch(pattern, match[0]))
            yield number, match[0], better


def tracked() -> list[Path]:
    """Returns the files that git tracks, except this one and its test."""
    said = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    own = {"tools/check_words.py", "tests/test_words.py"}
    return [ROOT / name for name in said.splitlines() if name.endswith(ENDINGS) and name not in own]


def main(arguments: Sequence[str] | None = None) -> int:
    given = [Path(name) for name in (sys.argv[1:] if arguments is None else arguments)] or tracked()
    lines = [
        f"{path}:{number}: say {better} in place of {word!r}"
        for path in given
        if path.is_file()
        for number, word, better in found_in(path.read_text(encoding="utf-8"))
    ]
    print("\n".join(lines), end="\n" if lines else "")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
