"""A model that cannot be trained in this machine's memory is refused by its config."""

import json
import shutil

import pytest
import torch
from builders import make_llama, save_model

from sebp_edge import Personalizer, Recipe
from sebp_edge.engine.memory.refusal import refuse_if_too_big
from sebp_edge.engine.models.catalog import resolve
from sebp_edge.errors import MachineError

CUDA = torch.device("cuda")
LORA = Recipe.load("notes").replace(r=8)


def test_a_model_that_does_not_fit_is_refused_with_figures_before_its_weights_are_read(
    two_layer_folder, tmp_path, machine
):
    folder = shutil.copytree(two_layer_folder, tmp_path / "model")
    (folder / "model.safetensors").unlink()
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_hidden_layers": 16}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | sizes))
    machine.has_memory(3e9, 8e9)
    machine.computes_in(torch.float32)
    with pytest.raises(MachineError) as refused:
        Personalizer(folder, device="cpu").generate("the ferry")
    words = str(refused.value)
    assert "'model' has 824 million parameters and needs at least 3.6 GB" in words
    assert "recipe 'notes'" in words
    assert "3.0 GB free of 8.0 GB" in words


def test_the_error_names_a_gpu_without_bf16_as_the_reason(two_layer_folder, machine):
    machine.has_memory(0)
    machine.computes_in(torch.float32)
    with pytest.raises(MachineError, match="this GPU has no bf16, so weights take 4 bytes each"):
        refuse_if_too_big(resolve(two_layer_folder), LORA, CUDA)


def test_a_gpu_that_is_too_small_streams_all_blocks_if_the_host_has_room(tmp_path, machine):
    model = make_llama(num_hidden_layers=6)
    save_model(model, tmp_path)
    machine.computes_in(torch.bfloat16)
    matrices = [p for name, p in model.named_parameters() if "proj" in name]
    adapter = LORA.r * sum(sum(p.shape) for p in matrices) * (4 + 2 + 4 + 8)
    resident = 2 * sum(p.numel() for p in model.parameters()) + adapter
    # Two blocks of six stay.
    streamed = resident - 2 * sum(p.numel() for p in matrices) * 4 // 6
    free = {"cuda": resident, "cpu": 8e9}
    machine.has_memory(free, total=8e9)

    def number():
        return refuse_if_too_big(resolve(tmp_path), LORA, CUDA)

    assert number() == 0
    for free["cuda"] in (resident - 1, streamed):
        assert number() == 6
    free["cpu"] = 10_000
    with pytest.raises(MachineError, match=r"in host memory they need .*, but .* are free; choose a smaller model or"):
        number()
    free["cuda"] = streamed - 1
    with pytest.raises(
        MachineError, match=r"needs at least .*, with two of its blocks on the GPU at a time; this mach"
    ):
        number()
