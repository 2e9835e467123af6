"""Compiling on other machines: a Dask farm, and how a project travels to it."""
