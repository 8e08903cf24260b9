"""Single rows: decoded in transformers' own loop, and computed on the CPU with all threads.

The loop, with its cache, is for models whose rows cannot share a `RowCache`. For one row in fp32, torch's linear layer
uses one thread, which cannot read weights as fast as the memory delivers them. A batched product of parts of the weight
reads them with one thread each, without a copy of the weight.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

# Smaller weights are read sooner than threads are woken.
MIN_ELEMENTS = 2**16


def decode_alone(
    model: PreTrainedModel, prompt: list[int], max_new_tokens: int, add_next: Callable[[Tensor], int | None]
) -> None:
    """Passes the logits of each next token, [1, vocabulary], to `add_next`, until that returns no token."""
    step = _Step(add_next)
    # The processor chooses, so the config only lets transformers take the largest score.
    bos = model.generation_config.bos_token_id
    config = GenerationConfig(do_sample=False, max_new_tokens=max_new_tokens, pad_token_id=0, bos_token_id=bos)
    own, model.generation_config = model.generation_config, config
    input_ids = torch.tensor([prompt], device=model.device)
    if len(prompt) == 1:
        # RecurrentGemma keeps states in its modules, and one token does not reset them; a pass without a cache does.
        model(input_ids, use_cache=False)
    try:
        model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            generation_config=config,
            logits_processor=LogitsProcessorList([step]),
            stopping_criteria=StoppingCriteriaList([_Ended(step)]),
        )
    finally:
        model.generation_config = own


class _Step(LogitsProcessor):
    """Leaves only the chosen token possible."""

    def __init__(self, add_next: Callable[[Tensor], int | None]):
        self._add_next, self.ended = add_next, False

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        # transformers may stop late and take further steps.
        token = None if self.ended else self._add_next(scores)
        self.ended = token is None
        chosen = torch.full_like(scores, -torch.inf)
        chosen[0, token or 0] = 0
        return chosen


class _Ended(StoppingCriteria):
    def __init__(self, step: _Step):
        self._step = step

    def __call__(self, input_ids: Tensor, scores: Tensor, **options) -> Tensor:
        return torch.full((1,), self._step.ended, device=input_ids.device)


@contextmanager
def threaded_linears(model: PreTrainedModel) -> Iterator[None]:
    """Context in which fp32 linear layers of `model` on the CPU compute single rows with all of torch's threads.

    Layers that something else has patched are left as they are.
    """
    patched = []
    if model.device.type == "cpu" and torch.get_num_threads() > 1:
        patched = [module for module in model.modules() if type(module) is nn.Linear and _pays(module)]
    try:
        for module in patched:
            module.forward = _forward(module)
        yield
    finally:
        for module in patched:
            vars(module).pop("forward", None)


def _pays(module: nn.Linear) -> bool:
    weight = module.weight
    is_plain = "forward" not in vars(module) and type(weight) is nn.Parameter and weight.is_contiguous()
    return is_plain and weight.dtype == torch.float32 and weight.numel() >= MIN_ELEMENTS


def _forward(module: nn.Linear) -> Callable[[Tensor], Tensor]:
    outputs, inputs = module.weight.shape
    parts = next(n for n in range(torch.get_num_threads(), 0, -1) if outputs % n == 0)
    weight, bias, plain = module.weight.detach().view(parts, -1, inputs).mT, module.bias, module.forward

    def forward(x: Tensor) -> Tensor:
        if x.numel() != inputs:
            return plain(x)
        out = torch.bmm(x.reshape(1, 1, inputs).expand(parts, 1, inputs), weight).view(*x.shape[:-1], outputs)
        return out if bias is None else out + bias

    return forward
