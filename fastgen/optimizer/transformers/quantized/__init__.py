"""Low-bit checkpoints: `from_pretrained` gets layers that keep their weights as the file has them."""
