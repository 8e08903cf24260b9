"""Makes learners on a GPU that run captured graphs, and drops the graphs for eager runs."""

from contextlib import nullcontext
from dataclasses import replace

import torch
from builders import disturb, evaluated, gpu_sync_forbidden, make_examples, make_llama, make_step, outlined, schedule_of
from peft import LoraConfig, get_peft_model

from sebp_edge import Recipe
from sebp_edge.engine.memory.memory_options import FASTEST
from sebp_edge.engine.models.adaptation import attach, trainable
from sebp_edge.engine.sparse.rows.batches import Collator
from sebp_edge.engine.training.recovery import RecoveringLearner

RECIPE = Recipe(name="test", description="", r=4, learning_rate=1e-2, batch_tokens=200, context_length=64)


class LoraAdaptation:
    """An adaptation: a small model with a random adapter."""

    def __init__(self, model=None, dtype=torch.bfloat16):
        model = (model or make_llama(hidden_size=64, intermediate_size=96, num_hidden_layers=3)).to("cuda", dtype)
        config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
        with torch.random.fork_rng(devices=[0]):
            torch.manual_seed(3)
            self.model = get_peft_model(model, config).eval()

    def detach(self):
        self.model.unload()


class FullAdaptation:
    """An adaptation: a model in bf16 with all weights trained."""

    def __init__(self, **changes):
        self.model = make_llama(**changes).to("cuda", torch.bfloat16).requires_grad_(True).eval()


def make_learner(adapted, examples, events=None, options=FASTEST, **changes):
    recipe = RECIPE.replace(method="full") if isinstance(adapted, FullAdaptation) else RECIPE
    on_event = (events if events is not None else []).append
    return RecoveringLearner(adapted, recipe, examples, Collator(64, 2), on_event, replace(options, **changes))


def drop_graphs(learner):
    """Drops the learner's graphs, so that it runs eagerly; returns the learner."""
    learner.plain.graphs = None
    return learner


def error(found, truth):
    """Returns the relative error of a list of tensors, in the Euclidean norm."""
    difference = sum(
        float((one.double() - other.double()).square().sum()) for one, other in zip(found, truth, strict=True)
    )
    return (difference / sum(float(other.double().square().sum()) for other in truth)) ** 0.5


def step_gradients(learner, micro_batches):
    """Runs micro-batches without an update; returns the loss and the gradients."""
    loss_tokens = sum(example.num_loss_tokens for group in micro_batches for example in group)
    learner.plain._loss.zero_()
    for group in micro_batches:
        (micro_batch,) = learner.limit.cut(outlined(learner, group))
        learner.plain.accumulate(micro_batch, loss_tokens)
    found = [parameter.grad.clone() for parameter in trainable(learner.adaptation)]
    learner.plain.update.reset()
    return float(learner.plain._loss), found


def with_adapter(base):
    """Attaches an adapter that changes what the model computes."""
    return disturb(attach(base, RECIPE, seed=1))


def losses_and_steps(base, options, *, with_graphs=True):
    """Losses before and after two steps, whose graphs and evaluations overwrite each other's buffers."""
    examples = make_examples([31, 2, 17, 64, 5, 40], prompt=3)
    micro_batches = [examples[:3], examples[3:4], examples[4:]]
    adaptation = with_adapter(base)
    found = []
    with make_learner(adaptation, examples, options=options) as learner:
        if not with_graphs:
            drop_graphs(learner)
        learner.lay_out(schedule_of(learner, [micro_batches]))
        for _ in range(2):
            found += [losses for _, losses, _ in learner.losses(evaluated(learner, examples))]
            outcome = learner.step(make_step(learner, examples), 1e-3)
            found += [outcome.loss.cpu(), outcome.grad_norm.cpu()]
        with gpu_sync_forbidden() if with_graphs else nullcontext():
            learner.step(make_step(learner, examples), 1e-3)
        assert (learner.plain.graphs is not None) == with_graphs
        found += [parameter.detach().cpu() for parameter in trainable(adaptation)]
    adaptation.detach()
    return found
