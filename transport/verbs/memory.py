"""Owns the registration of users' memory with a card: what this process announces is registered while it is there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gfkernels.errors import UnavailableError, UsageError
from gfkernels.trace import log

if TYPE_CHECKING:
    from gfkernels.transport.verbs.device import Device, Registration


class CardMemory:
    """A listener of `announced` for one device. What cannot be registered travels in frames, and a warning says so."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._registrations: dict[int, Registration] = {}
        self._warned = False

    def announced(self, key: int, address: int, nbytes: int) -> None:
        """Registers memory with the card."""
        if nbytes == 0:
            return
        try:
            self._registrations[key] = self._device.register(address, nbytes)
        except (UnavailableError, UsageError) as error:
            # Once: what is short for one array is short for the next.
            (log.debug if self._warned else log.warning)(
                "%s. Until then such memory is copied on its way to and from the card", error
            )
            self._warned = True

    def withdrawn(self, key: int) -> None:
        """Takes memory from the card before it is gone."""
        registration = self._registrations.pop(key, None)
        if registration is not None:
            registration.close()
