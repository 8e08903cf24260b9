"""Plans and inspects for the planner."""

from sebp_edge.basics.stopping import StopSignal
from sebp_edge.engine.memory.budget import MemoryBudget
from sebp_edge.engine.models.catalog import resolve
from sebp_edge.events import finite, silent
from sebp_edge.recipe import Recipe, check_seed
from sebp_edge.run.call import Call
from sebp_edge.run.conditions import Conditions, NotKnown
from sebp_edge.run.inspection import Inspection
from sebp_edge.run.job import JobSink
from sebp_edge.run.preparation import Preparation
from sebp_edge.serve.messages import PlanParams, TextsParams, texts_of
from sebp_edge.store.adapter_store import AdapterStore


def plan(params: TextsParams, request: dict) -> dict:
    """Returns a plan or an inspection as an answer; asks the worker if only a process with torch can make it."""
    try:
        return {"result": finite(_plan(params, request))}
    except NotKnown:
        return {"asks": "worker"}


def _plan(params: TextsParams, request: dict) -> dict:
    reference = resolve(params.model)
    budget = None if request["memory_budget"] is None else MemoryBudget.parse(request["memory_budget"])
    gpu = params.gpu if isinstance(params, PlanParams) else None
    conditions = Conditions.known(reference, params.device, request["used"], budget, gpu)
    call = Call(
        reference=reference,
        on_gpu=conditions.target.on_gpu,
        recipe=Recipe.load(params.recipe),
        seed=check_seed(params.seed),
        store=AdapterStore(request["store"]),
        me=params.me,
        budget=budget,
        job=JobSink(silent),
        signal=StopSignal(),
    )
    preparation = Preparation.under(call, texts_of(params), params.name)
    if not isinstance(params, PlanParams):
        return Inspection.of(preparation, conditions).to_dict()
    return preparation.plan_for_owner(conditions).to_dict()
