"""Plans and inspects by what is known of a model and of this machine. Imports no torch."""

from dataclasses import replace

from sebp_edge.basics.stopping import StopSignal
from sebp_edge.engine.memory.budget import MemoryBudget
from sebp_edge.engine.memory.memory_plan import Plan
from sebp_edge.engine.models.catalog import resolve
from sebp_edge.events import Sink, silent
from sebp_edge.recipe import Recipe, check_seed
from sebp_edge.run.call import Call
from sebp_edge.run.conditions import Conditions, absent_gpu
from sebp_edge.run.inspection import Inspection
from sebp_edge.run.job import JobSink
from sebp_edge.run.preparation import Preparation
from sebp_edge.run.work_ahead import phases_of_inspection
from sebp_edge.store.adapter_store import AdapterStore


class KnownPlanner:
    """What `Personalizer` plans and inspects, without torch.

    Takes arguments of a Personalizer.

    Raises:
        NotKnown: the model or this machine is not known without torch.
    """

    def __init__(self, model, *, recipe, device, seed, me, memory_budget, store=None, on_event: Sink = silent):
        reference = resolve(model)
        budget = None if memory_budget is None else MemoryBudget.parse(memory_budget)
        self.conditions = Conditions.known(reference, device, 0, budget)
        self._call = Call(
            reference=reference,
            on_gpu=self.conditions.target.on_gpu,
            recipe=Recipe.load(recipe),
            seed=check_seed(seed),
            store=AdapterStore(store),
            me=tuple(me),
            budget=budget,
            job=JobSink(on_event),
            signal=StopSignal(),
        )

    def plan(self, texts, *, name: str | None, gpu: str | int | None = None) -> Plan:
        """See `Personalizer.plan`."""
        conditions = self.conditions
        if (absent := absent_gpu(gpu, self._call.budget)) is not None:
            conditions = replace(conditions, target=absent[0], budget=absent[1])
        return Preparation.under(self._call, texts, name).plan_for_owner(conditions)

    def inspect(self, texts, *, name: str | None) -> Inspection:
        """See `Personalizer.inspect`."""
        with self._call.job as job:
            job.begin(phases_of_inspection())
            found = Inspection.of(Preparation.under(self._call, texts, name), self.conditions)
            job.finish()
        return found
