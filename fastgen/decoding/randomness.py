"""The random state that sampling draws from."""

from __future__ import annotations

import torch


class RandomState:
    """The state of torch's generators as it is now, the CPU's and that of `device`: to draw the same once more."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cpu = torch.get_rng_state()
        self._module = getattr(torch, device.type, None) if device.type != "cpu" else None
        self._state = self._module.get_rng_state(device) if self._module is not None else None

    def restore(self) -> None:
        """Sets the generators back to that state."""
        torch.set_rng_state(self._cpu)
        if self._module is not None:
            self._module.set_rng_state(self._state, self._device)
