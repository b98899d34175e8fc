"""Checkpoints in few bits: `from_pretrained` gets layers that keep their weights as the file has them."""
