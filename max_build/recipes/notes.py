"""What a trace collects: see `tracing` for how, and `provenance` for what becomes of it."""

from __future__ import annotations

from collections import defaultdict

from max_build.recipes.callers import Stack
from max_build.recipes.recipe import Kind

__all__ = ["Notes"]


class Notes:
    """What was seen so far. Paths are absolute.

    Attributes
    ----------
    files
        File that was read → SHA-256 (hex) as it was then; empty where it could not be read.
    opened
        File that was read → on whose behalf, each time.
    """

    def __init__(self) -> None:
        self.files: dict[str, str] = {}
        self.opened: defaultdict[str, set[Stack]] = defaultdict(set)
        self.written: defaultdict[str, set[Stack]] = defaultdict(set)
        self.made: set[str] = set()
        """What was not there before: nothing of it, or in it, is anybody else's."""
        self.looked: defaultdict[str, set[Stack]] = defaultdict(set)
        self.entered: defaultdict[str, set[Stack]] = defaultdict(set)
        """Directory that was opened: what is done from there has no place to be noted."""
        self.listed: defaultdict[str, set[Stack]] = defaultdict(set)
        self.kinds: dict[str, Kind] = {}
        """What was there when a place was first looked at."""
        self.links: dict[str, str] = {}
        """Place → where it pointed when it was first asked about as a link; see `link_of`."""
        self.sizes: dict[str, int] = {}
        """File → its size when that was first asked for; -1 for what is no file."""
        self.modes: set[str] = set()
        """Place whose permissions were asked for: see `surroundings.kind_of`."""
        self.mapped: dict[str, bool] = {}
        """File that came into memory, by its real path → whether as code."""
        self.listings: dict[str, str] = {}
        """Digest of a directory's names when it was first listed."""
        self.probed: dict[str, dict[str, tuple[str, ...]]] = {}
        """Directory → module that was looked for in it → what there was to choose among."""
        self.located: dict[str, str] = {}
        """Module → its file, or one of its directories."""
        self.asked: defaultdict[str, set[Stack]] = defaultdict(set)
        """Module → who wanted it found."""
        self.imports: defaultdict[str, set[tuple[str, tuple[str, ...]]]] = defaultdict(set)
        """File → what its import statements name: a module, and names from it."""
        self.variables: defaultdict[str, set[Stack]] = defaultdict(set)
        self.settings: defaultdict[tuple[str, str], set[Stack]] = defaultdict(set)
        """Variable and what it was set to."""
        self.enumerated: set[Stack] = set()
        self.deeds: defaultdict[str, set[Stack]] = defaultdict(set)
        """What no recipe can promise, in words → who did it directly."""
        self.questions: defaultdict[str, set[Stack]] = defaultdict(set)
        """What was asked about the machine: libraries do, to choose how they compute."""
        self.talks: defaultdict[str, set[Stack]] = defaultdict(set)
        """The same, whoever it was done through."""
        self.changed: set[str] = set()
        """Files that were not the same at two readings."""
