"""Low-bit checkpoints: `from_pretrained` creates layers that keep their weights as they are in the file."""
