"""The paper's sparsity tables as printed, with remarks on comparing them with other figures.

Topchii, Panchenko, Chekalina: Acceleration of Backpropagation in Linear Layers of Transformer Models Based on Gradient
Structure, Tables 1, 2 and 11. Rows are the average, the maximum and the minimum: of token counts over samples, of
shares over layers.
"""

from dataclasses import dataclass

# The MLP layers that the paper calls "intermediate" and "output", by their names in the model families.
INTERMEDIATE = (
    "gate_proj",
    "up_proj",
    "gate_up_proj",
    "c_fc",
    "fc1",
    "fc_in",
    "dense_h_to_4h",
    "intermediate.dense",
    "lin1",
)
OUTPUT = ("down_proj", "mlp.c_proj", "fc2", "fc_out", "dense_4h_to_h", "output.dense", "lin2")

STATISTICS = ("AVG", "Max", "Min")
Rows = tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]


@dataclass(frozen=True)
class PaperTable:
    """One table of the paper.

    Attributes:
        number, model: as printed.
        contexts: context lengths that samples may have been padded to; the paper states the first.
        datasets: the columns.
        tokens, intermediate, output: the rows, by `STATISTICS`.
        remark: what the figures can and cannot mean.
    """

    number: int
    model: str
    contexts: tuple[int, ...]
    datasets: tuple[str, ...]
    tokens: Rows
    intermediate: Rows
    output: Rows
    remark: str

    def padding(self, context: int) -> tuple[float, ...]:
        """Share of padding in each dataset, from the printed average length of its samples."""
        return tuple(max(0.0, 1 - mean / context) for mean in self.tokens[0])


_GLUE = ("WikiText", "STSB", "CoLA", "WNLI", "MRPC", "RTE", "QQP", "SST2", "MNLI")

TABLES = (
    PaperTable(
        number=2,
        model="Llama-3.2-3B-Instruct",
        contexts=(4096,),
        datasets=("WikiText", "PTB", "Winogrande", "ARC-E", "ARC-C", "HellaSwag", "OASST1 (512)", "OASST1 (4096)"),
        tokens=(
            (104, 27, 32, 57, 67, 194, 512, 4096),
            (582, 112, 48, 196, 194, 364, 512, 4096),
            (3, 3, 26, 26, 26, 53, 512, 4096),
        ),
        intermediate=(
            (0.82, 0.81, 0.80, 0.80, 0.80, 0.79, 0.87, 0.007),
            (0.99, 0.99, 0.99, 0.99, 0.99, 1.00, 0.87, 0.009),
            (0.49, 0.48, 0.50, 0.51, 0.51, 0.49, 0.87, 0.002),
        ),
        output=(
            (0.50, 0.49, 0.48, 0.48, 0.48, 0.47, 0.87, 0.002),
            (0.94, 0.94, 0.94, 0.94, 0.94, 0.94, 0.87, 0.002),
            (0.08, 0.07, 0.08, 0.08, 0.08, 0.08, 0.87, 0.002),
        ),
        remark=(
            "The OASST1 columns equal the share of padding, up to noise. The others cannot be shares of zero rows: if "
            "padding has no loss, its rows are zero in every layer, so no layer could be below the padding's share, "
            "but these go down to 0.07. In the scripts that the authors published, padding does have a loss, and rows "
            "below a threshold count as zero."
        ),
    ),
    PaperTable(
        number=1,
        model="BERT-base",
        contexts=(512, 128),
        datasets=_GLUE,
        tokens=(
            (512, 27, 47, 37, 53, 66, 30, 13, 39),
            (512, 125, 111, 108, 103, 128, 128, 66, 128),
            (512, 10, 4, 16, 19, 13, 6, 3, 5),
        ),
        intermediate=(
            (0.08, 0.71, 0.86, 0.91, 0.89, 0.78, 0.79, 0.77, 0.54),
            (0.14, 0.79, 0.98, 0.97, 0.94, 0.88, 0.82, 0.81, 0.62),
            (0.01, 0.60, 0.90, 0.75, 0.86, 0.85, 0.74, 0.72, 0.48),
        ),
        output=(
            (0.10, 0.54, 0.40, 0.66, 0.26, 0.52, 0.84, 0.85, 0.81),
            (0.11, 0.94, 0.51, 0.91, 0.34, 0.73, 0.94, 0.96, 0.94),
            (0.01, 0.41, 0.27, 0.56, 0.19, 0.48, 0.78, 0.77, 0.77),
        ),
        remark=(
            "BERT reads in both directions: its layers can be compared with another encoder's, but hardly with a "
            "decoder's. Padded to 512, every layer would be above 0.85 on all of these except WikiText. Two averages "
            "(CoLA and RTE, intermediate) are below their minimum. CoLA's sentences have about 11 tokens, and at most "
            "47: its average and its maximum seem to be swapped."
        ),
    ),
    PaperTable(
        number=11,
        model="RoBERTa-base",
        contexts=(512, 128),
        datasets=_GLUE,
        tokens=(
            (512, 27, 47, 37, 53, 66, 30, 13, 39),
            (512, 125, 11, 108, 103, 128, 128, 66, 128),
            (512, 10, 4, 16, 19, 13, 6, 3, 5),
        ),
        intermediate=(
            (0.16, 0.79, 0.92, 0.75, 0.60, 0.48, 0.80, 0.88, 0.70),
            (0.19, 0.79, 0.99, 0.99, 0.99, 0.99, 0.99, 0.99, 0.99),
            (0.07, 0.77, 0.92, 0.72, 0.56, 0.43, 0.78, 0.87, 0.67),
        ),
        output=(
            (0.11, 0.81, 0.93, 0.77, 0.64, 0.53, 0.82, 0.89, 0.73),
            (0.15, 0.81, 0.99, 0.99, 0.99, 0.99, 0.99, 0.99, 0.99),
            (0.08, 0.79, 0.92, 0.75, 0.61, 0.49, 0.80, 0.88, 0.71),
        ),
        remark=(
            "The intermediate averages are within 0.05 of the share of padding at 128 tokens, not at the 512 that the "
            "paper states (CoLA's at its true average of 11 tokens; WikiText has no padding): padding alone explains "
            "them. As with BERT, layers can hardly be compared with a decoder's."
        ),
    ),
)
