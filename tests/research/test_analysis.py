"""An analysis counts what plain PyTorch computes for dL/dY, and does not change the model."""

import json
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from builders import dataset_of, make_encoder, make_examples, make_llama, make_sentences, save_model
from model_families import MODELS
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

from sebp_edge import AdapterStore, Personalizer, Recipe
from sebp_edge.engine.sparse.rows.batches import Collator
from sebp_edge.errors import MachineError, ModelError, OptionError, TextsError
from sebp_edge.events import ExampleAnalyzed
from sebp_edge.research.analysis.analysis import analyze, analyze_examples
from sebp_edge.research.analysis.gradient_sparsity import threshold_elements
from sebp_edge.research.analysis.gradients import linear_layers, row_gradients
from sebp_edge.research.analysis.objectives import objectives_of
from sebp_edge.research.rules.histogram import LogHistogram
from sebp_edge.research.rules.row_rules import NormHistogram
from sebp_edge.values.example import Example

CONTEXT, PAD = 23, 2


def make_gpt2():
    sizes = {"vocab_size": 320, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=1)).eval()


def random_examples(count=5, prompt=0):
    lengths = torch.randint(2, CONTEXT + 1, (count,)).tolist()
    return [
        Example(ids, [-100] * min(prompt, len(ids) - 1) + ids[min(prompt, len(ids) - 1) :], number)
        for number, ids in enumerate(torch.randint(3, 320, (length,)).tolist() for length in lengths)
    ]


def analyzed(model, examples, context=CONTEXT, **options):
    """The analysis of a dataset with these examples, of all of them by default."""
    base = SimpleNamespace(
        model=model,
        pad_token_id=PAD,
        dtype=next(model.parameters()).dtype,
        device=torch.device("cpu"),
        reference=SimpleNamespace(public_name="micro-llama"),
        has_new_head=False,
    )
    dataset = dataset_of(examples, context)
    options = {"count": len(examples), "seed": 0, "on_event": lambda event: None} | options
    return analyze_examples(base, dataset, options["count"], options["seed"], options["on_event"])


def objective_of(model, examples):
    """The loss on the trained tokens of these examples."""
    return objectives_of(model, examples, Collator(CONTEXT, PAD), seed=0)[-1]


def plain_gradients(model, examples, context=CONTEXT):
    """dL/dY of every linear layer, by name, [E, T, M]: one batch with transformers' own loss, summed."""
    batch = Collator(context, PAD)(examples)
    outputs = {}
    handles = [
        layer.register_forward_hook(lambda layer, _, output, name=name: outputs.update({name: output}))
        for name, layer in model.named_modules()
        if isinstance(layer, torch.nn.Linear | Conv1D)
    ]
    inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask, "labels": batch.labels}
    loss = model(**inputs, num_items_in_batch=1).loss
    gradients = torch.autograd.grad(loss, list(outputs.values()))
    for handle in handles:
        handle.remove()
    return dict(zip(outputs, gradients, strict=True))


# ----------------------------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize(
    ("make", "prompt"),
    [(lambda: make_llama(num_hidden_layers=3), 0), (make_llama, 4), (make_gpt2, 4), (MODELS["gemma3"], 0)],
    ids=["llama", "llama with a prompt", "gpt2", "gemma3"],
)
def test_row_norms_and_zeros_equal_those_of_one_dense_batch(make, prompt):
    model, examples = make().eval(), random_examples(prompt=prompt)
    expected = plain_gradients(model, examples)
    found = row_gradients(model, objective_of(model, examples), lambda: None)
    names = {layer: name for name, layer in model.named_modules()}
    assert len(found) == len(expected)
    for layer, one in zip(linear_layers(model), found, strict=True):
        dout = expected[names[layer]].double()
        torch.testing.assert_close(one.energy_ET, dout.square().sum(2), rtol=1e-4, atol=1e-10)
        if one.info.projection not in ("q_proj", "c_attn"):  # their first rows are zero except for rounding errors
            assert torch.equal(one.is_zero_ET, (dout == 0).all(2))


def test_the_model_is_not_changed():
    model = make_llama()
    model.model.norm.weight.requires_grad_(False)
    before = {name: (parameter.clone(), parameter.requires_grad) for name, parameter in model.named_parameters()}
    analyzed(model, random_examples())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name][0])
        assert (parameter.requires_grad, parameter.grad) == (before[name][1], None)
    assert not any(module._forward_hooks for module in model.modules())


def test_a_model_that_routes_rows_to_experts_is_refused_and_not_changed():
    model = make_llama()
    mlp = model.model.layers[0].mlp
    mlp.forward = lambda x: F.pad(mlp.down_proj(mlp.up_proj(x[:, ::2])), (0, 0, 0, x.shape[1] // 2))
    with pytest.raises(ModelError, match="computes 12 rows for a sequence of 23 tokens"):
        analyzed(model, random_examples())
    assert not any(module._forward_hooks for module in model.modules())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_nan_gradients_are_refused():
    model = make_llama()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0] = float("nan")
    with pytest.raises(ModelError, match="all zero or not finite"):
        analyzed(model, random_examples())


# -------------------------------------------------------------------------------------------------------------- counts


def by_hand(energy_N, is_zero_N):
    """The counts of one layer, by sorting and plain comparisons."""
    histogram = NormHistogram(energy_N.device)
    histogram.add(energy_N)
    knee = histogram.epsilon(1)
    norms, total = energy_N.sqrt(), energy_N.sum()
    active = norms[norms > 0].sort().values
    below = norms < knee * active[(len(active) - 1) // 2]
    reached, top_rows = 0.0, 0
    for energy in sorted(energy_N.tolist(), reverse=True):
        reached, top_rows = reached + energy, top_rows + 1
        if reached >= 0.99 * total:
            break
    return int(is_zero_N.sum()), int(below.sum()), top_rows, float(knee), float(energy_N[below].sum() / total)


def test_the_counts_of_each_layer_equal_those_by_hand():
    model, examples = make_llama(num_hidden_layers=3).eval(), random_examples(7)
    (sparsity,) = analyzed(model, examples).losses
    gradients = row_gradients(model, objective_of(model, examples), lambda: None)
    # Examples are drawn in another order, which changes sums only by rounding.
    for layer, one in zip(sparsity.layers, gradients, strict=True):
        zero, below, top_rows, knee, energy = by_hand(one.energy_ET.flatten(), one.is_zero_ET.flatten())
        assert (layer.block, layer.projection, layer.rows) == (one.info.block, one.info.projection, 7 * CONTEXT)
        assert (layer.zero, layer.below_knee, layer.top_rows) == (zero, below, top_rows)
        assert (layer.knee, layer.energy_below_knee) == (pytest.approx(knee), pytest.approx(energy))
    assert sparsity.knee > 0
    assert sum(count for _, count in sparsity.histogram) == sum(int((one.energy_ET > 0).sum()) for one in gradients)


def test_with_a_loss_on_every_token_only_padding_and_last_tokens_are_zero():
    examples = random_examples(6)
    analysis = analyzed(make_llama(), examples)
    (sparsity,) = analysis.losses
    tokens = sum(len(example.input_ids) for example in examples)
    assert (sparsity.loss, sparsity.rows, sparsity.loss_rows) == ("every token", 6 * CONTEXT, tokens - 6)
    num_inactive = 6 * CONTEXT - (tokens - 6)
    for layer in sparsity.layers:
        assert layer.computed == tokens - 6
        # A token that attends only to itself has no gradient through its query, nor through its key if no other token
        # attends to it: zero, or a rounding error.
        extra = {"q_proj": 6, "k_proj": sum(len(example.input_ids) == 2 for example in examples)}
        assert num_inactive <= layer.zero <= num_inactive + extra.get(layer.projection, 0)
    assert sparsity.computed_share == pytest.approx((tokens - 6) / (6 * CONTEXT))
    assert analysis.analyzed.padding_share == pytest.approx(1 - tokens / (6 * CONTEXT))


def test_a_loss_on_completions_adds_zeros_only_in_the_last_block_and_the_head():
    examples = make_examples([19, 7, 23, 12], prompt=5)
    analysis = analyzed(make_llama(num_hidden_layers=3), examples)
    every, trained = analysis.losses
    assert (every.loss, trained.loss) == ("every token", "trained tokens")
    assert every.loss_rows == 19 + 7 + 23 + 12 - 4
    assert trained.loss_rows == every.loss_rows - 4 * 4  # the prompt's last token predicts the first trained one
    for one, other in zip(every.layers, trained.layers, strict=True):
        more = 16 if one.block in (2, None) and one.projection not in ("k_proj", "v_proj") else 0
        assert one.computed - other.computed == more
        if one.projection != "q_proj":
            assert other.zero - one.zero == more


@pytest.mark.parametrize(("context", "positions", "columns"), [(23, 1, 23), (64, 1, 64), (65, 2, 33), (128, 2, 64)])
def test_heat_maps_are_root_mean_squares_in_bins_of_positions(context, positions, columns):
    model, examples = make_llama().eval(), make_examples([21, 8, 3])
    (sparsity,) = analyzed(model, examples, context).losses
    gradients = {name: dout.double() for name, dout in plain_gradients(model, examples, context).items()}
    assert [one.title for one in sparsity.projections] == [
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    ]
    down = sparsity.projections[-1]
    assert (down.blocks, down.positions, len(down.norms[0])) == ((0, 1), positions, columns)
    energy_T = gradients["model.layers.1.mlp.down_proj"].square().sum(2).mean(0)
    for column, norm in enumerate(down.norms[1]):
        part = energy_T[column * positions : (column + 1) * positions]
        assert norm == pytest.approx(float(part.mean().sqrt()), rel=1e-4)
        assert (norm == 0) == bool((part == 0).all())
    longest, shortest = sparsity.examples
    assert (longest.title, shortest.title) == ("the longest example, 21 tokens", "the shortest example, 3 tokens")
    in_block = sum(dout[0, :positions].square().sum() for name, dout in gradients.items() if ".layers.0." in name)
    assert longest.norms[0][0] == pytest.approx(float((in_block / positions).sqrt()), rel=1e-4)


def test_the_seed_draws_the_examples_and_each_has_an_event():
    examples, events = random_examples(30), []
    options = {"count": 3, "on_event": events.append}
    one, same = (analyzed(make_llama(), examples, seed=1, **options) for _ in range(2))
    assert one == same
    assert (one.texts.examples, one.analyzed.examples) == (30, 3)
    assert events[:3] == [ExampleAnalyzed(number, 3) for number in (1, 2, 3)]
    assert analyzed(make_llama(), examples, seed=2, **options).losses[0].layers != one.losses[0].layers


def test_invalid_counts_and_empty_texts_are_refused():
    for wrong in (0, -1, "3", 1.5):
        with pytest.raises(OptionError, match=r"examples=.*; expected a whole number of at least 1\."):
            analyzed(make_llama(), random_examples(), count=wrong)
    with pytest.raises(TextsError, match="These texts have no token to train on"):
        analyzed(make_llama(), [], count=4)


# ------------------------------------------------------------------------------------------------ the paper's threshold


def test_elements_below_the_papers_threshold_equal_those_by_hand():
    model, examples = make_llama(num_hidden_layers=3).eval(), random_examples(6)
    (sparsity,) = analyzed(model, examples).losses
    # The gradient of each example's mean loss, as transformers computes it for a batch of one.
    losses = torch.tensor([len(example.input_ids) - 1 for example in examples])[:, None, None]
    gradients = {name: dout / losses for name, dout in plain_gradients(model, examples).items()}
    elements = torch.cat([dout.flatten() for name, dout in gradients.items() if name != "lm_head"])
    found, edge = sparsity.elements, sparsity.elements.epsilon
    # A few elements of rounding errors in q_proj's first rows are zero in one pass and not in the other.
    assert found.zero == pytest.approx(float((elements == 0).double().mean()), abs=1e-3)
    assert found.below == pytest.approx(float((elements.abs() < edge).double().mean()), abs=1e-3)
    assert found.energy_below == pytest.approx(
        float(elements[elements.abs() < edge].square().sum() / elements.square().sum()), abs=1e-3
    )
    down = next(layer for layer in sparsity.layers if (layer.block, layer.projection) == (1, "down_proj"))
    dout = gradients["model.layers.1.mlp.down_proj"]
    assert down.below_epsilon == pytest.approx(float((dout.abs() < edge).double().mean()), abs=1e-3)


def test_the_papers_threshold_separates_noise_from_signal():
    histogram = LogHistogram(torch.device("cpu"))
    for decade, count in ((-7, 9000), (-2, 1000)):
        magnitudes = 10 ** (decade + 0.2 * torch.randn(count, generator=torch.Generator().manual_seed(0)))
        histogram.count(magnitudes, magnitudes.square())
    gradients = SimpleNamespace(info=SimpleNamespace(block=0), elements=histogram, num_elements=20000)
    found = threshold_elements([gradients])
    assert 1e-7 < found.epsilon < 1e-5
    assert found.zero == 0.5
    assert 0.9 < found.below < 0.951
    assert found.energy_below < 1e-6


# ------------------------------------------------------------------------------------------------------------- encoders


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert"])
def test_an_encoders_gradients_are_zero_on_padding_and_in_the_last_block_off_the_first_token(family):
    examples = random_examples(5)
    (sparsity,) = analyzed(make_encoder(family, "sequence").eval(), examples).losses
    tokens = sum(len(example.input_ids) for example in examples)
    assert (sparsity.loss, sparsity.loss_rows, len(sparsity.layers)) == ("random classes", 5, 12)
    names = [layer.projection for layer in sparsity.layers[:6]]
    assert len(set(names)) == 6
    for layer in sparsity.layers:
        reads_all = layer.block == 0 or layer.projection.split(".")[-1] in ("key", "value", "k_lin", "v_lin")
        assert layer.rows - layer.zero == layer.computed == (tokens if reads_all else 5)


def test_an_encoder_with_one_output_is_refused():
    with pytest.raises(ModelError, match=r"head has 1 output; expected a head with two classes or more\."):
        analyzed(make_encoder("bert", "sequence", num_labels=1).eval(), random_examples())


@pytest.fixture
def encoder_folder(tmp_path):
    """A folder with a tiny random BERT without a head, and a tokenizer."""
    return save_model(make_encoder("bert", "sequence").base_model, tmp_path / "micro-bert")


@pytest.mark.slow
def test_an_encoder_gets_a_head_drawn_by_the_seed_and_is_not_kept(encoder_folder, tmp_path):
    def analysis(seed):
        personalizer = Personalizer(encoder_folder, device="cpu", store=tmp_path / "store", seed=seed)
        found = analyze(personalizer, make_sentences(9), examples=2)
        assert personalizer.in_use.base is None
        return found

    state = torch.get_rng_state()
    one, same, other = analysis(0), analysis(0), analysis(1)
    assert one == same
    assert one.has_new_head
    assert one.losses[0].histogram != other.losses[0].histogram
    assert torch.equal(torch.get_rng_state(), state)
    assert "a new one was drawn, with seed 1" in other.to_html()


def test_an_encoder_can_be_analyzed_but_not_adapted(encoder_folder, tmp_path):
    personalizer = Personalizer(encoder_folder, device="cpu", store=tmp_path / "store")
    with pytest.raises(ModelError, match="is a bert model; expected a decoder that generates text"):
        personalizer.adapt(make_sentences(40))


def test_an_encoder_without_some_of_its_blocks_weights_is_refused(encoder_folder, tmp_path):
    model = make_encoder("bert", "sequence", num_hidden_layers=1)
    model.save_pretrained(encoder_folder)
    config = json.loads((encoder_folder / "config.json").read_text())
    (encoder_folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    with pytest.raises(ModelError, match="'micro-bert' lacks 16 of its weight tensors"):
        analyze(Personalizer(encoder_folder, device="cpu", store=tmp_path / "store"), make_sentences(9))


# --------------------------------------------------------------------------------------------------------- Personalizer


@pytest.fixture
def personalizer(model_folder, tmp_path):
    recipe = Recipe(name="test", description="", r=4, learning_rate=2e-2, epochs=3, batch_tokens=200, context_length=64)
    return Personalizer(model_folder, recipe=recipe, device="cpu", store=AdapterStore(tmp_path / "store"))


def test_an_analysis_is_json_ready(personalizer):
    analysis = analyze(personalizer, make_sentences(9), examples=4)
    record = json.loads(json.dumps(analysis.to_dict()))
    assert (record["event"], record["model"], record["context_length"]) == ("analysis", "micro-llama", 64)
    assert (record["texts"]["examples"], record["analyzed"]["examples"]) == (9, 4)
    (loss,) = record["losses"]
    assert set(loss) == {
        *("loss", "rows", "loss_rows", "computed_share", "layers", "knee", "histogram", "elements"),
        *("zero_share", "top_rows_share", "energy_below_knee"),
    }
    assert len(loss["layers"]) == 8
    assert loss["zero_share"] == pytest.approx(1 - loss["computed_share"], abs=0.01)


def test_a_conversation_is_analyzed_with_both_losses(personalizer):
    messages = [
        {"role": "user", "content": "the ferry left"},
        {"role": "assistant", "content": "at six, from the west"},
    ]
    analysis = analyze(personalizer, [{"messages": messages}, "the old map of the ferry"])
    assert [sparsity.loss for sparsity in analysis.losses] == ["every token", "trained tokens"]


@pytest.mark.slow
def test_an_adapter_is_disabled_during_the_analysis_only(personalizer, notes_folder, after_learning, tmp_path):
    before = analyze(personalizer, notes_folder)
    learnt = after_learning(AdapterStore(tmp_path / "learnt"))
    personalizer.load_adapter(learnt.adapter("default").open().path)
    logits = [personalizer.in_use.adaptation.model(torch.arange(7, 27)[None]).logits]
    assert analyze(personalizer, notes_folder) == before
    logits.append(personalizer.in_use.adaptation.model(torch.arange(7, 27)[None]).logits)
    assert torch.equal(*logits)


def test_running_out_of_memory_is_one_sentence(personalizer):
    def run_out(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    analyze(personalizer, make_sentences(9), examples=1)
    personalizer.in_use.base.model.register_forward_pre_hook(run_out)
    with pytest.raises(
        MachineError, match="Out of CPU memory in a dense backward pass over 64 tokens; choose a smaller"
    ):
        analyze(personalizer, make_sentences(9))
