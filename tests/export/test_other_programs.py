"""transformers 4 and mlx-lm, each in an environment of its own, compute what we do with a merged model."""

import os
from pathlib import Path

import pytest
import torch
from export_sources import make_adapter, make_source

from formats import merged_models
from sebp_edge import Personalizer
from sebp_edge.engine.models.catalog import resolve
from sebp_edge.engine.models.loading import local_tokenizer

# What each program is called by `loss_elsewhere`, and the variable that names its interpreter.
ELSEWHERE = {
    "transformers 4": ("transformers", "SEBP_EDGE_TRANSFORMERS_4"),
    "mlx-lm": ("mlx_lm", "SEBP_EDGE_MLX_LM"),
}


def interpreter(variable: str) -> Path:
    if variable not in os.environ:
        pytest.skip(f"set {variable} to an interpreter with it; formats/merged_models.py makes an environment")
    return Path(os.environ[variable])


@pytest.mark.slow
@pytest.mark.parametrize("program", ELSEWHERE)
def test_a_merged_models_loss_is_ours(tmp_path, program):
    called, variable = ELSEWHERE[program]
    python = interpreter(variable)
    model = make_source(tmp_path / "model", "llama-3.1")
    adapter = make_adapter(tmp_path / "adapter", model)
    personalizer = Personalizer(model, device="cpu")
    personalizer.export(adapter, tmp_path / "out", format="merged")
    rows = [torch.randint(3, 320, (200,), generator=torch.Generator().manual_seed(0)).tolist()]
    personalizer.load_adapter(adapter)
    with torch.no_grad():
        expected = personalizer.in_use.adaptation.model(torch.tensor(rows)).logits[0].log_softmax(-1)
    version, (found,) = merged_models.ask(python, called, [(tmp_path / "out", rows)])
    assert program == "mlx-lm" or version.startswith("4.")
    assert found["loss"] == pytest.approx(merged_models.mean_loss([expected], rows), abs=1e-4)
    assert found["tokens"] == local_tokenizer(resolve(model))(merged_models.TEXT)["input_ids"]
