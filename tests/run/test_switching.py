"""Another adapter of the same shapes takes the place of the one in use: in the same tensors, with the same results."""

import pytest
import torch
from export_sources import make_adapter
from safetensors.torch import load_file, save_file

from sebp_edge import AdapterStore, Personalizer
from sebp_edge.engine.models.adaptation import trainable
from sebp_edge.errors import AdapterError
from sebp_edge.run import model_in_use
from sebp_edge.store.record import AdapterRecord

WEIGHTS = "adapter_model.safetensors"
OPTIONS = {"max_new_tokens": 12, "temperature": 0}


@pytest.fixture
def store(tmp_path, model_folder):
    """A store with three adapters: "b" has the shapes of "a", "damaged" NaN in one of them."""
    store = AdapterStore(tmp_path / "store")
    store.folder.mkdir(parents=True)
    for name, change in (("a", 1), ("b", -1), ("damaged", torch.nan)):
        folder = make_adapter(store.folder / "made", model_folder)
        weights = load_file(folder / WEIGHTS)
        changed = {key: change * each if "lora_B" in key else each for key, each in weights.items()}
        save_file(changed, folder / WEIGHTS)
        store.adapter(name).add(folder, AdapterRecord.read(folder), activate=True)
    return store


def test_it_has_the_same_tensors_and_says_what_it_would_alone(store, model_folder):
    def alone(name):
        return Personalizer(model_folder, device="cpu", store=store).generate("the boat", adapter=name, **OPTIONS)

    personalizer = Personalizer(model_folder, device="cpu", store=store)
    texts, places = [], []
    for name in "abab":
        texts.append(personalizer.generate("the boat", adapter=name, **OPTIONS))
        weights = trainable(personalizer.in_use.adaptation)
        places.append([each.data_ptr() for each in weights])
        saved = load_file(store.find(name).path / WEIGHTS).values()
        assert sorted(each.sum().item() for each in saved) == sorted(each.sum().item() for each in weights)
    assert texts == [alone("a"), alone("b")] * 2 and texts[0] != texts[1]
    assert places == [places[0]] * 4


def test_a_damaged_one_leaves_the_one_in_use(store, model_folder):
    personalizer = Personalizer(model_folder, device="cpu", store=store)
    before = personalizer.generate("the boat", adapter="a", **OPTIONS)
    with pytest.raises(AdapterError, match="NaN"):
        personalizer.generate("the boat", adapter="damaged", **OPTIONS)
    assert personalizer.generate("the boat", **OPTIONS) == before


def test_one_of_another_scale_is_attached_anew(store, model_folder):
    folder = store.find("b").path
    config = (folder / "adapter_config.json").read_text()
    personalizer = Personalizer(model_folder, device="cpu", store=store)
    text = personalizer.generate("the boat", adapter="a", **OPTIONS)
    (folder / "adapter_config.json").write_text(config.replace('"lora_alpha": 32', '"lora_alpha": 320'))
    for name, alpha in (("b", 320), ("a", 32)):
        personalizer.load_adapter(name)
        assert personalizer.in_use.adaptation.model.active_peft_config.lora_alpha == alpha
    assert personalizer.generate("the boat", **OPTIONS) == text


def test_the_base_model_and_the_adapters_keep_what_they_decode_with(store, model_folder, monkeypatch):
    made, decoder = [], model_in_use.Decoder
    monkeypatch.setattr(model_in_use, "Decoder", lambda *given, **options: made.append(0) or decoder(*given, **options))
    personalizer = Personalizer(model_folder, device="cpu", store=store)
    texts = [personalizer.generate("the boat", adapter=name, **OPTIONS) for name in ("a", None, "b", None, "a")]
    assert len(made) == 2
    assert texts[0] == texts[4] and texts[1] == texts[3] and len({*texts}) == 3
    plain = Personalizer(model_folder, device="cpu", store=store).generate("the boat", adapter=None, **OPTIONS)
    assert texts[1] == plain
