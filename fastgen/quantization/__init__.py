"""Weights of few bits: what they are, and the checkpoint formats that hold them; knows no toolkit."""
