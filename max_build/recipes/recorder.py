"""The worker's side of recipes: derive, and note what that took."""

from __future__ import annotations

from typing import TYPE_CHECKING

from max_build import compilers
from max_build.compilers import Derivation, Direct, Job
from max_build.recipes.places import within
from max_build.recipes.recipe import Recipe

if TYPE_CHECKING:
    from max_build.recipes.tracing import Tracer

__all__ = ["Recorder"]


class Recorder:
    """Derives one job of a project after another in this process, whose notes add up.

    What an earlier job imported, a later one finds imported. So each recipe is of all that this
    process did, and may be false without need.
    """

    def __init__(self) -> None:
        self._tracer: Tracer | None = None

    def derive(self, job: Job) -> tuple[Derivation, Recipe | None, str]:
        """Derive, and return the recipe with it, or why there is none.

        Raises
        ------
        MaxBuildError
            As the adapter's `derive`.
        """
        adapter = compilers.get(job.unit.compiler)
        if not isinstance(adapter, Direct):
            # What is keyed by reading files alone has nothing that a recipe could save.
            lacks = f"compiler `{adapter.name}` knows no recipes" if adapter.runs_user_code else ""
            return adapter.derive(job), None, lacks
        if self._tracer is None:
            from max_build.recipes.tracing import Tracer

            outside = (one for one in job.python_path if not within(one, str(job.root)))
            self._tracer = Tracer((str(job.root), *outside))
        with self._tracer.tracing(str(job.scratch)):
            derivation = adapter.derive(job)
        if derivation.uncacheable:
            return derivation, None, derivation.uncacheable
        from max_build.recipes.provenance import recipe_of

        return derivation, *recipe_of(self._tracer, job, adapter, derivation)
