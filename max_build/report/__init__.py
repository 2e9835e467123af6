"""A page that shows a build or a cache: what was noted, what is gathered of it, how it looks."""
