"""`Personalizer.generate`: with the adapter in use, with another, with none; prompts are rendered as in training."""

import json
import math

import pytest
import torch
from builders import make_chats
from learnt import RECIPE
from safetensors.torch import load_file, save_file

from sebp_edge import AdapterRecord
from sebp_edge.errors import AdapterError, ModelError, OptionError, TextsError
from sebp_edge.events import silent

pytestmark = pytest.mark.usefixtures("unassessed")

GREEDY = {"temperature": 0, "max_new_tokens": 16}
PROMPT = "the ferry"
CHAT = [{"role": "user", "content": PROMPT}]


@pytest.mark.parametrize("was_enabled", [True, False])
def test_cudnn_which_plans_each_size_anew_attends_in_no_call(make, was_enabled):
    torch.backends.cuda.enable_cudnn_sdp(was_enabled)
    seen = set()
    try:
        make().generate(PROMPT, on_text=lambda piece: seen.add(torch.backends.cuda.cudnn_sdp_enabled()), **GREEDY)
        with pytest.raises(ZeroDivisionError):
            make().generate(PROMPT, on_text=lambda piece: 1 / 0, **GREEDY)
        assert seen == {False}
        assert torch.backends.cuda.cudnn_sdp_enabled() == was_enabled
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


def record_prompts(personalizer):
    """Returns a list that collects the model's decoded inputs from now on."""
    seen, layer = [], personalizer.in_use.load(silent).model.get_input_embeddings()
    tokenizer = personalizer.in_use.load(silent).tokenizer
    layer.register_forward_pre_hook(lambda _, ids: seen.append(tokenizer.decode(ids[0][0])))
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora", "full"])
def test_one_personalizer_shows_before_and_after(make, notes_folder, method):
    """Of an adapter that was learnt before, or of one that it has just made."""
    personalizer = make(after=method == "lora", recipe=RECIPE.replace(method=method))
    if method == "lora":
        personalizer.load_adapter("default")
    else:
        assert personalizer.adapt(notes_folder).passed
    before, after = make().generate(PROMPT, **GREEDY), personalizer.generate(PROMPT, **GREEDY)
    assert before != after
    for _ in range(2):
        assert personalizer.generate(PROMPT, adapter=None, **GREEDY) == before
        assert personalizer.generate(PROMPT, **GREEDY) == after
    with pytest.raises(ZeroDivisionError):
        personalizer.generate(PROMPT, adapter=None, on_text=lambda piece: 1 / 0, **GREEDY)
    assert personalizer.generate(PROMPT, **GREEDY) == after


def test_without_any_adapter_the_default_is_the_base_model(make):
    assert make().generate(PROMPT, adapter=None, **GREEDY) == make().generate(PROMPT, **GREEDY)


@pytest.mark.parametrize("options", [{}, {"adapter": None}])
def test_a_version_without_an_adapter_is_refused(make, options):
    with pytest.raises(OptionError, match="version=2 was given without an adapter"):
        make().generate(PROMPT, version=2, **options)


@pytest.mark.slow
def test_an_adapter_for_chats_uses_the_chat_template_whatever_the_recipe(make):
    personalizer = make()
    assert not personalizer.recipe.chat_template
    path = personalizer.adapt(make_chats(), activate_anyway=True).adapter_path
    assert AdapterRecord.read(path).chat is True
    again = make()
    again.load_adapter("default")
    for one in (personalizer, again):
        seen = record_prompts(one)
        for prompt, options in ((PROMPT, {}), (CHAT, {}), (PROMPT, {"adapter": None}), (CHAT, {"adapter": None})):
            one.in_use._decoders.clear()  # these keep what prompts begin with
            one.generate(prompt, max_new_tokens=1, **options)
        templated = "<|bos|><|user|>the ferry<|end|><|assistant|>"
        assert seen == [templated, templated, "<|bos|>the ferry", templated]


@pytest.fixture
def adapted_folder(make, after_learning):
    """The folder of a version that the default store has."""
    return after_learning(make().store).adapter("default").open().path


def test_an_old_record_follows_its_recipes_chat_template(make, adapted_folder):
    path = adapted_folder / "sebp_edge.json"
    values = json.loads(path.read_text())
    assert values.pop("chat") is False
    for chat_template, prompt in ((True, "<|user|>the ferry<|end|>"), (False, "<|bos|>the ferry")):
        path.write_text(json.dumps(values | {"recipe": values["recipe"] | {"chat_template": chat_template}}))
        again = make()
        again.load_adapter("default")
        seen = record_prompts(again)
        again.generate(PROMPT, max_new_tokens=1)
        assert prompt in seen[0]


def test_nonfinite_logits_are_attributed_to_the_adapter_or_the_model(make, adapted_folder):
    path = adapted_folder / "adapter_model.safetensors"
    # Loading requires finite weights; these are so large that the logits are not finite.
    save_file({name: 0 * weight + 1e30 for name, weight in load_file(path).items()}, path)
    broken = make()
    for temperature in (0, 1):
        with pytest.raises(AdapterError, match="With this adapter, the model computes NaN or infinite logits"):
            broken.generate(PROMPT, adapter="default", temperature=temperature)
    assert broken.generate(PROMPT, adapter=None, max_new_tokens=2) is not None
    broken.in_use.base.model.model.norm.weight.data.fill_(math.nan)
    for temperature in (0, 1):
        with pytest.raises(ModelError, match="The model 'micro-llama' computes NaN or infinite logits"):
            broken.generate(PROMPT, adapter=None, temperature=temperature)


def test_invalid_prompts_are_refused_before_anything_is_loaded(make):
    personalizer = make()
    with pytest.raises(TextsError, match="The prompt is empty"):
        personalizer.generate("")
    with pytest.raises(TextsError, match="The list of messages is empty"):
        personalizer.generate([])
    assert personalizer.in_use.base is None
