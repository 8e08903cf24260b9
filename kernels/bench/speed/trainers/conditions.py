"""What a GPU was like while a step was timed: its clock, its power, and how fast it multiplies as many rows.

The same commit's step took 92.6 to 111 ms on GPUs of one kind. These figures tell a slower GPU from a slower step.
"""

import subprocess

import torch
import torch.nn.functional as F
from transformers import PretrainedConfig

from sebp_edge.ops.measure import milliseconds
from speed.trainers.steps import Step

QUERY = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw.instant", "--format=csv,noheader,nounits", "-i"]


def conditions(step: Step, config: PretrainedConfig, num_rows: int) -> dict[str, float]:
    """The clock in MHz and the power in watts, asked for while the step repeats, and the rate of a product in TFLOP/s.

    The product is that of an MLP's up projection in bf16, on random data.
    """
    asked = [*QUERY, f"GPU-{torch.cuda.get_device_properties().uuid}"]
    with subprocess.Popen(asked, stdout=subprocess.PIPE, text=True) as query:
        while query.poll() is None:
            step(lambda part: None)
            torch.cuda.synchronize()
        clock, power = map(float, query.stdout.read().split(","))
    sizes = num_rows, config.hidden_size, config.intermediate_size
    rows, weight = (torch.randn(count, sizes[1], dtype=torch.bfloat16, device="cuda") for count in sizes[::2])
    seconds = milliseconds(lambda: F.linear(rows, weight), calls=20, repeats=9) / 1e3
    return {"clock_mhz": clock, "watts": power, "product_tflops": 2e-12 * sizes[0] * sizes[1] * sizes[2] / seconds}
