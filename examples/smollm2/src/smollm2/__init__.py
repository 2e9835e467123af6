"""Text from SmolLM2-135M-Instruct: the graph, built by max-build, and what serves it."""

from __future__ import annotations
