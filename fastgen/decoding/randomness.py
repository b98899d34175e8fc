"""The random state that sampling draws from."""

from __future__ import annotations

import torch


class RandomState:
    """A snapshot of torch's generators, the CPU's and that of `device`, to draw the same numbers again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cpu = torch.get_rng_state()
        self._module = getattr(torch, device.type, None) if device.type != "cpu" else None
        self._state = self._module.get_rng_state(device) if self._module is not None else None

    def restore(self) -> None:
        """Restores the generators' states."""
        torch.set_rng_state(self._cpu)
        if self._module is not None:
            self._module.set_rng_state(self._state, self._device)
