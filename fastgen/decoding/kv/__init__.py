"""The KV cache: K and V of every layer during one call of `generate`, and what the model's attention sees of them.

rows        the beams, lengths and ancestry of rows; one object for all layers
cache       the storage of a layer: a prefix per input, a suffix per row
growing     the cache of hooks: eager, with lengths on the host
fixed       the cache of captured steps: buffers that a recording refers to, with lengths on the device
exchange    gives these buffers more memory without a new recording
view        the tensor that stands for K or V of all rows; streams: for several streams of a model
"""
