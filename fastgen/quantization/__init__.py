"""Low-bit weights, and the checkpoint formats that hold them; independent of any toolkit."""
