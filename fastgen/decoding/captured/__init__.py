"""The captured decoding step: what does not depend on the toolkit.

A step that a CUDA graph replays has the same addresses and sizes every time. What changes is on the device.

    step_state    where the step is: positions, lengths, and the beam ancestry
    kv            K and V in buffers of a fixed capacity
    beam_search   the bookkeeping of beam search
    row_search    the same for sequences that are continued independently: greedy search and sampling
    graph         a CUDA graph: captured once, replayed for every step

The design is in docs/captured-step.md.
"""
