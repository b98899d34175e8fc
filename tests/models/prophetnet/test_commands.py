"""ProphetNet through FairSeq's commands: from text to a trained model to its output."""

from __future__ import annotations

from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq_cli import generate as generate_command
from fairseq_cli import preprocess as preprocess_command
from fairseq_cli import train as train_command

import fastgen
from tests.fairseq.check import accelerated


def test_from_text_to_a_trained_model_to_its_output(tmp_path, capsys):
    """A model that is taught to copy does so, through FairSeq's own commands."""
    words = [f"w{i}" for i in range(6)]
    lines = [" ".join(words[(i * k + k) % 6] for k in range(1, 4)) for i in range(6)]
    for language in ("src", "tgt"):
        for split in ("train", "valid"):
            (tmp_path / f"{split}.{language}").write_text("\n".join(lines) + "\n")
    split = ["--trainpref", str(tmp_path / "train"), "--validpref", str(tmp_path / "valid"), "--joined-dictionary"]
    languages = ["-s", "src", "-t", "tgt"]
    binary, saved = str(tmp_path / "binary"), str(tmp_path / "saved")
    preprocess = ["--task", "translation_prophetnet", *languages, *split, "--destdir", binary, "--workers", "1"]
    preprocess_command.main(options.get_preprocessing_parser().parse_args(preprocess))
    train = [
        binary, *languages, "--task", "translation_prophetnet", "--arch", "ngram_transformer_prophet_base",
        "--criterion", "ngram_language_loss", "--optimizer", "adam", "--lr", "0.01", "--max-sentences", "6",
        "--max-update", "70", "--cpu", "--save-dir", saved, "--num-workers", "0", "--no-progress-bar",
        "--no-epoch-checkpoints", "--dropout", "0", "--attention-dropout", "0", "--activation-dropout", "0",
        "--encoder-layers", "1", "--decoder-layers", "1", "--encoder-embed-dim", "32", "--decoder-embed-dim", "32",
        "--encoder-ffn-embed-dim", "64", "--decoder-ffn-embed-dim", "64", "--encoder-attention-heads", "4",
        "--decoder-attention-heads", "4", "--disable-validation", "--required-batch-size-multiple", "1",
    ]  # fmt: skip
    args = options.parse_args_and_arch(options.get_training_parser(), input_args=train)
    train_command.main(convert_namespace_to_omegaconf(args))
    fastgen.enable(strict=True)
    generate = [binary, *languages, "--path", f"{saved}/checkpoint_last.pt", "--gen-subset", "valid", "--beam", "3"]
    generate += "--task translation_prophetnet --cpu --num-workers 0 --required-batch-size-multiple 1".split()
    parser = options.get_generation_parser()
    capsys.readouterr()
    generate_command.main(convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, input_args=generate)))
    output = capsys.readouterr().out
    assert accelerated() >= 1
    assert {line.split("\t")[2] for line in output.splitlines() if line.startswith("H-")} == set(lines)
