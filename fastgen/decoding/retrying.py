"""What a retry needs: when to try again what did not pay, and the random state to draw the same numbers again."""

from __future__ import annotations

import torch


class BackOff:
    """Waits `first` times, and twice as often after each failure, up to `most`. Less than once means not at all."""

    def __init__(self, first: float, most: float) -> None:
        self._first, self._most = first, most
        self.succeed()

    def waits(self) -> bool:
        """Whether to wait once more. To be called once each time."""
        self._left -= 1
        return self._left >= 0

    def succeed(self) -> None:
        self._interval = self._left = self._first

    def fail(self) -> None:
        self._interval = self._left = min(2 * self._interval, self._most)

    def give_up(self) -> None:
        """Waits as long as possible: whatever the next trial brings, it cannot pay."""
        self._interval = self._left = self._most


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
