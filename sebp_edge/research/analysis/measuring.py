"""Measures the sparsity of a base model's gradients on texts, for researchers."""

from sebp_edge.research.analysis.analysis import Analysis, analyze
from sebp_edge.run.call import Call
from sebp_edge.run.encoding import TrainingPreparation
from sebp_edge.run.job import GRADIENTS
from sebp_edge.run.phases import LOAD, phases_of_analysis


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
