"""The captured decoding step: what does not depend on the toolkit.

A step that a CUDA graph replays has the same addresses and sizes every time. What changes is on the device.

    kv            K and V in buffers of a fixed capacity, where the step is in them, and how attention reads them
    streams       K and V that several streams of a model have in common, with further ones of each
    search        the bookkeeping of beam search, and of greedy search and sampling
    graph         a CUDA graph: captured once, replayed for every step

The design is in docs/captured-step.md.
"""
