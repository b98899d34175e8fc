"""Low-bit weights: what they are, and the checkpoint formats that hold them; knows no toolkit."""
