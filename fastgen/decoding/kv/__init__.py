"""The KV cache: K and V of every layer through one call of `generate`, and what the model's attention sees of them.

rows        where rows are: beams, lengths, ancestry; one object for all layers
cache       what is stored of a layer: a prefix per input, a suffix per row
growing     the cache of hooks: eager, its lengths are the host's
fixed       the cache of captured steps: buffers that a recording has, lengths on the device
exchange    more memory for such buffers, behind a recording's back
view        the tensor that stands for K or V of all rows; streams: for several streams of a model
"""
