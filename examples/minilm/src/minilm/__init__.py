"""Sentence embeddings by all-MiniLM-L6-v2: the graph, built by max-build, and what serves it."""

from __future__ import annotations
