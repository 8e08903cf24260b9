"""Full fine-tuning with `[sparsity]` in a recipe: what is trained, tested, saved and planned."""

import pytest
import torch
from builders import make_llama, make_sentences, schedule_of
from graph_learners import make_learners_eager
from torch import nn

from sebp_edge import Recipe
from sebp_edge.errors import AdapterError, Interrupted, RecipeError, SparsityError
from sebp_edge.events import Evaluated, GraphCaptured, StepDone, silent
from sebp_edge.models.compressed import CompressedFile
from sebp_edge.recipe import PruningRecipe
from sebp_edge.research.pruning.nm_sparse import nm_sparse
from sebp_edge.research.pruning.pruning import Pruning
from sebp_edge.texts.batches import Collator
from sebp_edge.texts.examples import Example, outlines
from sebp_edge.training.losses import RowLosses
from sebp_edge.training.recovery import RecoveringLearner

RECIPE = Recipe(
    name="test",
    description="",
    method="full",
    learning_rate=3e-3,
    max_grad_norm=0.5,
    epochs=4,
    batch_tokens=64,
    context_length=64,
    sparsity=PruningRecipe(pattern="2:4"),
)


def kept(weight):
    """The numbers of non-zero weights in groups of four."""
    return set((weight.reshape(-1, 4) != 0).sum(1).tolist())


def saved_model(folder):
    file = CompressedFile(folder / "compressed.safetensors")
    model = make_llama(num_hidden_layers=1)
    model.load_state_dict({name: file.read(name) for name in file.shapes}, strict=False)
    return model


def check_saved(result, names=None):
    """Checks that the saved model's layers have the pattern, if they are named, and that others are dense."""
    model = saved_model(result.adapter_path)
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear):
            pruned = layer is not model.lm_head and (names is None or name.rpartition(".")[2] in names)
            assert max(kept(layer.weight)) == (2 if pruned else 4), name
    assert "pruned to 2:4" in (result.adapter_path / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("unassessed")
def test_the_saved_model_has_the_pattern_and_was_compared_with_the_dense_base(make):
    losses = {}

    def on_event(event):
        if isinstance(event, Evaluated) and event.split == "test":
            losses.setdefault(recipe, []).append(event.loss)

    # Geometric groups have 32 inputs, but down_proj has 48.
    names = ("q_proj", "o_proj", "up_proj")
    texts = make_sentences(24, words=40)
    recipe = Recipe(**vars(RECIPE) | {"sparsity": None, "epochs": 1})
    make(recipe=recipe, on_event=on_event).adapt(texts)
    recipe = RECIPE.replace(sparsity=PruningRecipe(pattern="2:4", method="sdgf-geometric", dense=0.2, layers=names))
    result = make(recipe=recipe, on_event=on_event).adapt(texts, name="pruned")
    assert result.passed
    check_saved(result, names)
    dense, pruned = losses.values()
    assert pruned[0] == dense[0]
    assert result.heldout_loss_after == pruned[1]


@pytest.mark.slow
def test_folds_and_a_last_training_each_begin_with_dense_weights(make):
    result = make(recipe=RECIPE.replace(refit=True, epochs=2)).adapt(make_sentences(9, words=60))
    assert result.trained_on_all
    check_saved(result)
    for number in (1, 2, 3):
        model = saved_model(result.adapter_path / "judged" / str(number))
        assert max(kept(model.model.layers[0].mlp.up_proj.weight)) == 2


@pytest.mark.slow
def test_a_saved_version_generates_after_loading_and_a_damaged_one_is_refused(make):
    personalizer = make(recipe=RECIPE)
    result = personalizer.adapt(make_sentences(24, words=40))
    expected = personalizer.generate("the ferry", max_new_tokens=9, temperature=0)
    other = make()
    other.load_adapter("default")
    assert other.generate("the ferry", max_new_tokens=9, temperature=0) == expected
    path = result.adapter_path / "compressed.safetensors"
    content = bytearray(path.read_bytes())
    content[-100:] = bytes(100)
    path.write_bytes(content)
    with pytest.raises(AdapterError, match=r"is damaged|contains NaN"):
        make().load_adapter("default")


@pytest.mark.parametrize("step", [1, 12])
def test_an_interruption_in_any_phase_saves_a_pruned_model(make, step):
    """Once the loss of a state was measured."""

    def on_event(event):
        if isinstance(event, StepDone) and event.epoch == 2 and event.step >= step:
            raise KeyboardInterrupt

    recipe = RECIPE.replace(sparsity=PruningRecipe(pattern="2:4", dense=0.4), epochs=2, patience=2)
    personalizer = make(recipe=recipe, on_event=on_event)
    with pytest.raises(Interrupted, match="saved as version 1"):
        personalizer.adapt(make_sentences(24, words=40))
    model = saved_model(personalizer.store.adapter("default").open(1).path)
    assert max(kept(model.model.layers[0].self_attn.q_proj.weight)) == 2


class PrunedAdaptation:
    """An adaptation: a model with all weights trained, and some pruned."""

    def __init__(self, model, sparsity):
        self.model, self.sparsity = model.requires_grad_(True).eval(), sparsity

    def training_hook(self):
        return Pruning(self.model, self.sparsity)


def make_examples():
    draw = torch.Generator().manual_seed(5)
    ids = [torch.randint(3, 40, (length,), generator=draw).tolist() for length in [31, 2, 17, 64, 5, 40, 23, 8]]
    return [Example(tokens, tokens, number) for number, tokens in enumerate(ids)]


def model_for(method, dtype=torch.float32):
    sparsity = PruningRecipe(pattern="1:4", method=method)
    return make_llama(intermediate_size=64, num_hidden_layers=1).to(dtype), RECIPE.replace(sparsity=sparsity)


def train_with_the_learner(model, recipe, steps, rate, has_graphs):
    examples = make_examples()
    adaptation = PrunedAdaptation(model, recipe.sparsity)
    with RecoveringLearner(adaptation, recipe, examples, Collator(64, 2), silent) as learner:
        if has_graphs:
            learner.begin_graphs()
        learner.lay_out(schedule_of(learner, [[examples[:4]], [examples[4:]]]))
        learner.hook.begin(steps)
        groups = [group for epoch in learner.schedule.epochs for group in epoch]
        for step in range(steps):
            learner.step(groups[step % 2], rate)
        learner.hook.finish()
        return [parameter.detach().clone() for parameter in model.parameters()]


def train_with_torch(model, recipe, steps, rate, clips_each):
    examples = make_examples()
    known = outlines(examples)
    optimizer = torch.optim.AdamW(model.requires_grad_(True).eval().parameters(), lr=rate, weight_decay=0)
    with RowLosses(model, examples, Collator(64, 2), torch.device("cpu"), silent) as rows:
        method = recipe.sparsity.method
        with nm_sparse(model, "1:4", method, num_steps=steps) as sparse:
            for step in range(steps):
                losses, _ = rows(known[4:] if step % 2 else known[:4])
                optimizer.zero_grad()
                losses.mean().backward()
                groups = [[p] for p in model.parameters()] if clips_each else [list(model.parameters())]
                for group in groups:
                    nn.utils.clip_grad_norm_(group, recipe.max_grad_norm)
                optimizer.step()
                sparse.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *(("sr-ste", path) for path in ("eager", "graphs", "update in backward")),
        ("mdgf-linear", "graphs"),
        ("sdgf-stepwise", "update in backward"),
    ],
)
def test_a_training_is_that_of_ones_own_loop(method, path, request):
    if path == "graphs":
        request.getfixturevalue("plain_graphs")
    if path == "update in backward":
        request.getfixturevalue("updated_in_backward")
    model, recipe = model_for(method)
    found = train_with_the_learner(model, recipe, 8, 1e-3, has_graphs=path == "graphs")
    model, recipe = model_for(method)
    expected = train_with_torch(model, recipe, 8, 1e-3, clips_each=path == "update in backward")
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=2e-6)


def test_a_plan_counts_the_dense_weights(make):
    texts = make_sentences(24, words=40)
    dense = make(recipe=Recipe(**vars(RECIPE) | {"sparsity": None}))
    found = [one.plan(texts).chosen.footprint.weights for one in (dense, make(recipe=RECIPE))]
    layers = [layer for layer in make_llama(num_hidden_layers=1).model.modules() if isinstance(layer, nn.Linear)]
    assert found[1] - found[0] == 4 * sum(layer.weight.numel() for layer in layers)


def test_a_pattern_that_does_not_divide_is_refused_before_training(make):
    with pytest.raises(SparsityError, match=r"has 32 inputs, which groups of 3 do not divide"):
        make(recipe=RECIPE.replace(sparsity=PruningRecipe(pattern="1:3"))).adapt(make_sentences(24, words=40))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[sparsity]\npattern = "2:4"', "an adapter is dense, .* use method 'full'"),
        ('method = "full"\n[sparsity]\npattern = "4:2"', "The pattern is '4:2'; expected N:M"),
        ('method = "full"\n[sparsity]\nmethod = "sr-ste"', "sparsity has no pattern"),
        ('method = "full"\n[sparsity]\npatern = "2:4"', "unknown key 'patern' in sparsity; did you mean 'pattern'"),
        ('method = "full"\nsparsity = "2:4"', "sparsity must be a table, but is '2:4'"),
        ('method = "full"\n[sparsity]\npattern = "2:4"\nlayers = "up_proj"', "must be a list"),
        ('method = "full"\n[sparsity]\npattern = "2:4"\ndecay = 1.5', "the decay phase 1.5 of the steps"),
        ('method = "full"\n[sparsity]\npattern = 0.5', "The pattern is '0.5'"),
    ],
)
def test_an_invalid_sparsity_is_one_sentence(text, message, tmp_path):
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(RecipeError, match=message):
        Recipe.load(tmp_path / "mine.toml")


def test_a_recipe_reads_its_sparsity_from_a_table(tmp_path):
    (tmp_path / "mine.toml").write_text(
        'method = "full"\n[sparsity]\npattern = "1:16"\nmethod = "sr-ste"\nlayers = ["up_proj", "down_proj"]\n'
    )
    expected = PruningRecipe(pattern="1:16", method="sr-ste", layers=("up_proj", "down_proj"))
    assert Recipe.load(tmp_path / "mine.toml").sparsity == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and there is none here")
@pytest.mark.parametrize("method", ["sr-ste", "mdgf-exponential", "sdgf-stepwise"])
def test_captured_steps_are_pruned_as_eager_ones_and_nothing_is_captured_again(make, method, monkeypatch):
    recipe = RECIPE.replace(sparsity=PruningRecipe(pattern="2:4", method=method, dense=0.2), refit=False)

    def run(name, recipe):
        events = []
        result = make(recipe=recipe, device="cuda", on_event=events.append).adapt(make_sentences(24, 40), name=name)
        if recipe.sparsity:
            check_saved(result)
        losses = torch.tensor([event.loss for event in events if isinstance(event, StepDone)])
        return losses, [event.part for event in events if isinstance(event, GraphCaptured)]

    captured, parts = run("captured", recipe)
    # As many graphs as for dense weights: no stage needs new ones.
    assert parts == run("dense", Recipe(**vars(recipe) | {"sparsity": None}))[1]

    make_learners_eager(monkeypatch)
    (eager, _), (again, _) = run("eager", recipe), run("again", recipe)
    assert (captured - eager).abs().max() <= 3 * (eager - again).abs().max() + 2e-2
    assert captured[-1] < captured[0] - 0.1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and there is none here")
def test_a_saved_version_generates_with_sparse_kernels_on_a_gpu(make):
    personalizer = make(recipe=RECIPE, device="cuda")
    personalizer.adapt(make_sentences(24, words=40))
    options = {"max_new_tokens": 3, "temperature": 0}
    expected = personalizer.generate("the ferry", **options)
    before = [parameter.detach().clone() for parameter in personalizer.in_use.base.model.parameters()]
    assert personalizer.generate("the ferry", sparse_kernels=True, **options) == expected
    after = personalizer.in_use.base.model.parameters()
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    with pytest.raises(SparsityError, match="no 2:4 linear layers"):
        personalizer.generate("the ferry", adapter=None, sparse_kernels=True)
    assert personalizer.generate("the ferry", **options) == expected
