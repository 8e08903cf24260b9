"""Plans and inspects without torch; None if only a process with torch can tell."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sebp_edge.basics.stopping import StopSignal
from sebp_edge.engine.memory.budget import MemoryBudget
from sebp_edge.engine.memory.memory_plan import Plan
from sebp_edge.engine.models.catalog import resolve
from sebp_edge.events import Sink, silent
from sebp_edge.recipe import Recipe, check_seed
from sebp_edge.run.call import Call
from sebp_edge.run.conditions import Conditions, NotKnown
from sebp_edge.run.inspection import Inspection
from sebp_edge.run.job import JobSink
from sebp_edge.run.preparation import Preparation
from sebp_edge.run.work_ahead import phases_of_inspection
from sebp_edge.store.adapter_store import AdapterStore


def plan(texts, name: str | None, on_event: Sink = silent, **settings) -> Plan | None:
    """Returns what `Personalizer.plan` would; see `_called`."""
    with suppress(NotKnown), _called(on_event, **settings) as (call, conditions):
        return Preparation.under(call, texts, name).plan_for_owner(conditions)
    return None


def inspect(texts, name: str | None, on_event: Sink = silent, **settings) -> Inspection | None:
    """Returns what `Personalizer.inspect` would; see `_called`."""
    with suppress(NotKnown), _called(on_event, **settings) as (call, conditions):
        call.job.begin(phases_of_inspection())
        found = Inspection.of(Preparation.under(call, texts, name), conditions)
        call.job.finish()
        return found
    return None


@contextmanager
def _called(
    on_event: Sink,
    *,
    model: str,
    recipe: Recipe | str | None,
    device: str | None,
    seed: int,
    me,
    memory_budget: str | int | None,
    gpu: str | int | None = None,
    store: str | Path | None = None,
    used: int = 0,
    needs_speed: bool = True,
) -> Iterator[tuple[Call, Conditions]]:
    """Context of a call, and what it is planned for.

    Args:
        gpu, used, needs_speed: see `Conditions.known`.

    Raises:
        NotKnown: only a process with torch can tell.
    """
    reference, budget = resolve(model), None if memory_budget is None else MemoryBudget.parse(memory_budget)
    conditions = Conditions.known(reference, device, used, budget, gpu, needs_speed=needs_speed)
    recipe = recipe if isinstance(recipe, Recipe) else Recipe.load(recipe)
    on_gpu, seed, stop = conditions.target.on_gpu, check_seed(seed), StopSignal()
    with JobSink(on_event) as job:
        yield Call(reference, on_gpu, recipe, seed, AdapterStore(store), me, budget, job, stop), conditions
