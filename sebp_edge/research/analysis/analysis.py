"""Analyzes how sparse the gradients of a model are on its owner's texts."""

import random
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from sebp_edge.basics.pages import chart
from sebp_edge.basics.pages.render import mark, render
from sebp_edge.basics.units import percent
from sebp_edge.engine.models.loading import BaseModel
from sebp_edge.engine.sparse.rows.batches import Collator
from sebp_edge.errors import OptionError, TextsError
from sebp_edge.events import ExampleAnalyzed, Sink
from sebp_edge.personalizer import Personalizer
from sebp_edge.research.analysis.gradient_sparsity import GradientSparsity, sparsity_of
from sebp_edge.research.analysis.gradients import row_gradients
from sebp_edge.research.analysis.objectives import objectives_of
from sebp_edge.run.encoding import TrainingPreparation
from sebp_edge.run.job import GRADIENTS
from sebp_edge.run.work_ahead import LOAD, phases_of_analysis
from sebp_edge.values.dataset import Dataset
from sebp_edge.values.example import Example

MARK = mark("analyze")


@dataclass(frozen=True)
class Lengths:
    """Token counts of examples, and the share of padding if each is padded to the context length."""

    examples: int
    tokens: int
    mean: float
    longest: int
    shortest: int
    padding_share: float

    @classmethod
    def of(cls, examples: list[Example], context_length: int) -> "Lengths":
        """Counts the tokens of `examples`."""
        lengths = [len(example.input_ids) for example in examples]
        padding_share = 1 - sum(lengths) / (len(lengths) * context_length)
        return cls(len(lengths), sum(lengths), fmean(lengths), max(lengths), min(lengths), padding_share)


@dataclass(frozen=True)
class Analysis:
    """How sparse the gradients of a base model are on its owner's texts, before any training.

    Attributes:
        model: its public name.
        dtype, device: what the model ran in and on.
        context_length: tokens that each example was padded to.
        seed: seed of the draw of examples, and of an encoder's classes and new head.
        has_new_head: whether the model is an encoder without a classification head, and got one with random weights.
        texts: all examples of the texts.
        analyzed: the examples whose gradients were computed.
        losses: the sparsity with a loss on every token and, if that differs, on the trained tokens only; or that of an
            encoder.
    """

    model: str
    dtype: str
    device: str
    context_length: int
    seed: int
    has_new_head: bool
    texts: Lengths
    analyzed: Lengths
    losses: tuple[GradientSparsity, ...]

    def to_dict(self) -> dict:
        """The analysis as JSON-ready values, without the heat maps."""
        values = asdict(self)
        for loss, sparsity in zip(values["losses"], self.losses, strict=True):
            del loss["examples"], loss["projections"]
            loss |= {name: getattr(sparsity, name) for name in ("zero_share", "top_rows_share", "energy_below_knee")}
        return {"event": "analysis", **values}

    def to_html(self) -> str:
        """The analysis as one self-contained HTML page, with tables and figures, and none of the user's text."""
        return render(
            Path(__file__).with_name("report.html"),
            {"percent": percent, "power": chart.power_of_10},
            mark=MARK,
            analysis=self,
            figures=chart,
            scale_of=lambda sparsity: chart.Scale.of([*sparsity.examples, *sparsity.projections]),
        )


def analyze_examples(base: BaseModel, dataset: Dataset, examples: int, seed: int, on_event: Sink) -> Analysis:
    """Analyzes the gradients of some examples."""
    if not isinstance(examples, int) or examples < 1:
        raise OptionError(f"examples={examples!r}; expected a whole number of at least 1.")
    if not dataset.examples:
        raise TextsError("These texts have no token to train on, so there is no gradient to analyze; give other texts.")
    chosen = random.Random(seed).sample(dataset.examples, min(examples, len(dataset.examples)))
    collator = Collator(dataset.context_length, base.pad_token_id)
    objectives = objectives_of(base.model, chosen, collator, seed)
    done, total = iter(range(1, len(objectives) * len(chosen) + 1)), len(objectives) * len(chosen)
    found = []
    for objective in objectives:
        gradients = row_gradients(base.model, objective, lambda: on_event(ExampleAnalyzed(next(done), total)))
        found.append(sparsity_of(objective, gradients))
    return Analysis(
        model=base.reference.public_name,
        dtype=str(base.dtype).removeprefix("torch."),
        device=base.device.type,
        context_length=dataset.context_length,
        seed=seed,
        has_new_head=base.has_new_head,
        texts=Lengths.of(dataset.examples, dataset.context_length),
        analyzed=Lengths.of(chosen, dataset.context_length),
        losses=tuple(found),
    )


def analyze(
    personalizer: Personalizer, texts, *, examples: int = 16, stop_when: threading.Event | None = None
) -> Analysis:
    """Measures how sparse the gradients of a Personalizer's base model are on `texts`; changes nothing.

    The model may also be a local folder with an encoder (BERT, RoBERTa, DistilBERT). Its loss is that of classes drawn
    by the seed; a head that it lacks gets random weights.

    Args:
        examples: the most examples, which the seed draws.
        texts, stop_when: see `Personalizer`.
    """
    with personalizer.begin_call(stop_when) as call, call.make_guard():
        call.job.begin(phases_of_analysis(examples))
        preparation = TrainingPreparation(*call.with_texts(texts))
        call.job.enter(LOAD)
        call.check()
        base = call.in_use.load_analyzed(call.notify, call.seed)
        dataset = preparation.encode(base).dataset
        call.job.enter(GRADIENTS)
        with call.base_model_alone(f"in a dense backward pass over {dataset.context_length} tokens"):
            return analyze_examples(base, dataset, examples, call.seed, call.notify)
