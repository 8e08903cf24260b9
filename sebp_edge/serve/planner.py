"""Answers one request (plan, inspect, ask, search) without torch, and ends: `python -m sebp_edge.serve.planner PID`.

PID is the supervisor's, which stays as small as it is: the memory that texts take ends with this process.
"""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from sebp_edge.basics.parents import end_with_parent
from sebp_edge.engine.models.catalog import resolve
from sebp_edge.events import finite
from sebp_edge.run.asking import find_reader, quote, search
from sebp_edge.serve.messages import AskParams, PlanParams, SearchParams, error_of, parse, texts_of, turns_of
from sebp_edge.serve.methods import METHODS, check_paths
from sebp_edge.serve.streams import take_streams
from sebp_edge.store.adapter_store import AdapterStore


def main() -> None:
    """Reads a request from standard input, and writes its answer to standard output."""
    end_with_parent(int(sys.argv[-1]))
    reading, writing = take_streams()
    with os.fdopen(reading, "rb") as requests, os.fdopen(writing, "wb") as answers:
        answers.write(json.dumps(_answer(json.load(requests))).encode())


def _answer(request: dict) -> dict:
    try:
        params = parse(METHODS[request["method"]], request["params"], request["method"])
        check_paths(params, [*map(Path, request["folders"])])
        if isinstance(params, AskParams):
            return _answer_without_model(params, request)
        if isinstance(params, SearchParams):
            found = search(params.question, texts_of(params), params.num_passages, params.before)
            return {"result": finite(asdict(found))}
        from sebp_edge.run import without_torch  # which takes as long to import as all else

        settings = {name: getattr(params, name) for name in ("model", "recipe", "device", "seed", "me")}
        settings |= {name: request[name] for name in ("memory_budget", "store", "used")} | {"needs_speed": False}
        if isinstance(params, PlanParams):
            found = without_torch.plan(texts_of(params), params.name, gpu=params.gpu, **settings)
        else:
            found = without_torch.inspect(texts_of(params), params.name, **settings)
        return {"asks": "worker"} if found is None else {"result": finite(found.to_dict())}
    except Exception as error:
        return {"error": error_of(error)}


def _answer_without_model(params: AskParams, request: dict) -> dict:
    """Returns a quotation, or that nothing was found; the worker is asked what a model is to read."""
    turns, reference = turns_of(params), resolve(params.model)
    found = quote(params.question, texts_of(params), before=turns[-1][0] if turns else "")
    is_read = params.adapter is not None or find_reader(AdapterStore(request["store"]), reference) is not None
    return {"result": asdict(found)} if found.is_final or not is_read else {"asks": "worker"}


if __name__ == "__main__":
    main()
