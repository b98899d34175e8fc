from torch import Tensor


def near_ties(scores: Tensor) -> Tensor:
    best = scores.amax(-1, keepdim=True)
    return (scores >= best - best.abs() * 1e-5).sum(-1) > 1
