"""Measures a base model on texts for researchers: the sparsity of its gradients, and learning rates."""

from sebp_edge.errors import TextsError
from sebp_edge.research.analysis.analysis import Analysis, analyze
from sebp_edge.research.lr_range import LearningRateRange, growing_rates
from sebp_edge.research.lr_sweep import PHASE, run_range_test
from sebp_edge.run.call import Call
from sebp_edge.run.encoding import TrainingPreparation
from sebp_edge.run.job import GRADIENTS
from sebp_edge.run.phases import LOAD, phases_of_analysis, phases_of_sweep


def analyze_gradients(call: Call, texts, num_examples: int) -> Analysis:
    """See `Personalizer.analyze`."""
    call.job.begin(phases_of_analysis(num_examples))
    with call.make_guard():
        preparation = TrainingPreparation(*call.with_texts(texts))
        call.job.enter(LOAD)
        call.check()
        base = call.in_use.load_analyzed(call.notify, call.seed)
        dataset = preparation.encode(base).dataset
        call.job.enter(GRADIENTS)
        with call.base_model_alone(f"in a dense backward pass over {dataset.context_length} tokens"):
            return analyze(base, dataset, num_examples, call.seed, call.notify)


def sweep_learning_rates(call: Call, texts, lowest: float, highest: float, steps: int) -> LearningRateRange:
    """Trains one step at each of the rates; see `Personalizer.lr_range`."""
    rates = growing_rates(lowest, highest, steps)
    call.job.begin(phases_of_sweep(PHASE, len(rates)))
    preparation = TrainingPreparation(*call.with_texts(texts))
    planned = preparation.plan_within_budget()
    recipe, options = preparation.chosen(planned)
    with call.make_guard(planned and planned.plan) as guard:
        call.job.enter(LOAD)
        base = call.load(recipe)
        dataset = preparation.encode(base, planned).dataset
        if not dataset.examples:
            raise TextsError("These texts have no token to train on; give other texts.")
        with call.base_model_alone("while training"):
            found = run_range_test(base, dataset, recipe, rates, call.seed, call.notify, options, guard)
    return LearningRateRange.of(base.reference.public_name, recipe.name, call.seed, len(rates), found)
