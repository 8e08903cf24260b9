"""Plans and inspects for the planner."""

from sebp_edge.events import finite
from sebp_edge.run import without_torch
from sebp_edge.serve.messages import PlanParams, TextsParams, texts_of


def plan(params: TextsParams, request: dict) -> dict:
    """Returns a plan or an inspection as an answer; asks the worker if only a process with torch can make it."""
    settings = {name: getattr(params, name) for name in ("model", "recipe", "device", "seed", "me")}
    settings |= {name: request[name] for name in ("memory_budget", "store", "used")} | {"needs_speed": False}
    if isinstance(params, PlanParams):
        found = without_torch.plan(texts_of(params), params.name, gpu=params.gpu, **settings)
    else:
        found = without_torch.inspect(texts_of(params), params.name, **settings)
    return {"asks": "worker"} if found is None else {"result": finite(found.to_dict())}
