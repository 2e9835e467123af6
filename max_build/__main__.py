"""`python -m max_build` is the command `max-build`."""

from __future__ import annotations

import sys

from max_build.cli import main

if __name__ == "__main__":
    sys.exit(main())
