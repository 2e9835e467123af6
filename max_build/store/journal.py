"""Faults that were worked around: counted all, told once each."""

from __future__ import annotations

import logging
import threading

from max_build.errors import StoreError
from max_build.store.stats import Stats

__all__ = ["Journal"]

log = logging.getLogger(__name__)


class Journal:
    """Where the tiers of one process report to."""

    def __init__(self) -> None:
        self.stats = Stats()
        self.warnings: list[str] = []
        self._told: set[tuple[str, str]] = set()
        self._lock = threading.Lock()

    def note(self, tier: str, error: StoreError) -> None:
        """Count a fault of a tier, and warn of the first of its kind."""
        if error.kind == "missing":  # that a thing is not there is no fault
            return
        if error.kind != "closed":
            self.stats.fault(tier, error.kind)
        log.debug("%s: %s", tier, error.message)
        with self._lock:
            if (tier, error.kind) in self._told:
                return
            self._told.add((tier, error.kind))
        self.warn(error.message)

    def warn(self, text: str) -> None:
        """Add a line that the user should see."""
        self.warnings.append(text)
