"""Checks and times all algorithms for a linear layer's products on a GPU, and writes the choices that are shipped.

    python kernels/bench/speed/tune.py [--write kernels/ops/choices-h200.json]

Prints for each layer and set of rows the milliseconds of dX and dW together: cuBLAS with a gather and a scatter, our
fastest kernels, and the fastest combination. The limit is cuBLAS on rows that are already compact, plus the zero fill.
"""

import argparse
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1]))

import evidence
from sebp_edge.ops import ActiveRows, choices
from sebp_edge.ops.measure import LayerTimes, fastest, milliseconds, time_products
from speed.layers import LAYERS, NUM_ROWS, SHARES, make_rows

PATTERNS = ("random", "8 spans", "32 spans")
DTYPE = torch.bfloat16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path, help="adds the choices to this file")
    options = parser.parse_args()
    torch.manual_seed(0)
    for num_inputs, num_outputs in LAYERS:
        cases = list(time_cases(num_inputs, num_outputs))
        if options.write:
            found = fastest(num_inputs, num_outputs, DTYPE, cases)
            choices.write(options.write, choices.machine(torch.cuda.current_device()), found)


def time_cases(num_inputs: int, num_outputs: int):
    for num_rows in NUM_ROWS:
        for share in SHARES:
            for pattern in PATTERNS:
                rows = ActiveRows.from_ids(make_rows(num_rows, share, pattern), num_rows)
                times = time_products(num_inputs, num_outputs, rows, DTYPE)
                limit = time_limit(num_inputs, num_outputs, rows)
                case = {"layer": f"{num_inputs}->{num_outputs}", "rows": num_rows, "active": share, "pattern": pattern}
                print_case(case, times, limit)
                yield rows, times


def print_case(case: dict, times: LayerTimes, limit: float) -> None:
    ours = choices.Algorithms(*(min((t for t in part if t), key=part.get) for part in (times.dx, times.dweight)))
    algorithms = [choices.Algorithms(dx, dweight) for dx in times.dx for dweight in times.dweight]
    best = min(algorithms, key=lambda algorithm: times.of("both", algorithm))
    found = {"cuBLAS": choices.Algorithms(), "ours": ours, "best": best}
    case |= {"limit": limit} | {name: times.of("both", algorithm) for name, algorithm in found.items()}
    evidence.show(case | dict(zip(("best dX", "best dW"), best, strict=True)))


def time_limit(num_inputs: int, num_outputs: int, rows: ActiveRows) -> float:
    dout_AM = torch.randn(len(rows.ids), num_outputs, device="cuda", dtype=DTYPE)
    x_AK = torch.randn(len(rows.ids), num_inputs, device="cuda", dtype=DTYPE)
    weight_MK = torch.randn(num_outputs, num_inputs, device="cuda", dtype=DTYPE)

    def limit():
        x_AK.new_zeros(len(rows.slots), num_inputs)
        return dout_AM @ weight_MK, dout_AM.T @ x_AK

    return milliseconds(limit)


if __name__ == "__main__":
    main()
