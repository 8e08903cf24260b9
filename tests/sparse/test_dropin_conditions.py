"""The drop-in under the conditions of training loops: dense gradients for each pair of conditions."""

import contextlib
import copy
import inspect
import itertools
import math

import pytest
import torch
from accelerate import Accelerator
from against_dense import assert_same, assert_same_training, loss_and_gradients, padded_batch, record_rows, with_lora
from builders import IGNORE, SIZES, checkpoint_activations, make_llama
from pairwise import pairwise
from peft import LoraConfig, get_peft_model
from torch.utils.checkpoint import checkpoint
from transformers import Trainer, TrainingArguments

from sebp_edge import sparsify
from sebp_edge.errors import SparsityError
from sebp_edge.ops import detect

CONDITIONS = {
    "padding": ["right", "left", "none", "packed"],
    "weights": ["full", "untied", "lora", "frozen layers"],
    "checkpointing": ["no", "reentrant", "non-reentrant"],
    "backward": ["once", "accumulated", "repeated", "interleaved"],
    "prompt": [0, 5],
    "keep_logits": [False, True],
    "autocast": [False, True],
}


def covering_pairs(conditions):
    """Returns few combinations that cover every pair of values of two conditions, by greedy choice."""
    product = list(itertools.product(*conditions.values()))
    pairs = {choice: set(itertools.combinations(enumerate(choice), 2)) for choice in product}
    wanted, chosen = set().union(*pairs.values()), []
    while wanted:
        best = max(product, key=lambda choice: len(pairs[choice] & wanted))
        chosen.append(dict(zip(conditions, best, strict=True)))
        wanted -= pairs[best]
    return chosen


def batch_of(padding, prompt):
    if padding == "none":
        return padded_batch(lengths=(24, 24, 24), prompt=prompt)
    if padding != "packed":
        return padded_batch(side=padding, prompt=prompt)
    lengths = (11, 6, 7)
    input_ids = torch.cat(
        [padded_batch(lengths=(length,), length=length)["input_ids"] + 1 for length in lengths], dim=1
    )
    position_ids = torch.cat([torch.arange(length) for length in lengths])[None]
    # A document's first token is not predicted from the one before it.
    labels = input_ids.masked_fill(position_ids <= prompt, IGNORE)
    return {"input_ids": input_ids, "position_ids": position_ids, "labels": labels}


def model_with(weights, checkpointing):
    model = make_llama(tie_word_embeddings=weights != "untied", use_cache=False).double()
    decoder = model
    if weights == "lora":
        torch.manual_seed(3)
        model = get_peft_model(model, LoraConfig(r=3, target_modules="all-linear", init_lora_weights=False)).double()
    if weights == "frozen layers":
        model.model.embed_tokens.requires_grad_(False)
        model.model.layers[0].requires_grad_(False)
        model.model.layers[1].mlp.requires_grad_(False)
    if checkpointing != "no":
        # A re-entrant checkpoint passes no gradient on if its input needs none.
        decoder.enable_input_require_grads()
        checkpoint_activations(decoder, checkpointing == "reentrant")
    return model.train()


def train(model, batch, backward):
    """Returns one update's gradients, by the given order of backward passes."""
    other = {name: values.flip(0) if name != "position_ids" else values for name, values in batch.items()}
    if backward == "once":
        return loss_and_gradients(model, batch)
    model.zero_grad()
    loss = model(**batch).loss
    if backward == "repeated":
        loss.backward(retain_graph=True)
        loss.backward()
    if backward == "accumulated":
        loss.backward()
        model(**other).loss.backward()
    if backward == "interleaved":
        second = model(**other).loss
        loss.backward()
        second.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("chosen", covering_pairs(CONDITIONS), ids=lambda chosen: ", ".join(map(str, chosen.values())))
def test_each_pair_of_conditions_trains_like_dense(chosen):
    model, batch = model_with(chosen["weights"], chosen["checkpointing"]), batch_of(chosen["padding"], chosen["prompt"])
    exact = train(model, batch, chosen["backward"])
    model, dense = (model.float(), None) if chosen["autocast"] else (model, exact)
    with torch.autocast("cpu", torch.bfloat16, enabled=chosen["autocast"]):
        dense = dense or train(model, batch, chosen["backward"])
        with sparsify(model, keep_logits=chosen["keep_logits"]):
            sparse = train(model, batch, chosen["backward"])
    if chosen["autocast"]:
        assert_as_close(exact, dense, sparse)
    else:
        assert_same(dense, sparse, tolerance=1e-10 if chosen["keep_logits"] else 1e-5)


def assert_as_close(exact, dense, sparse):
    """Checks bf16 gradients: they are as close to the fp64 gradients as the dense ones."""
    (exact_loss, exact), (_, dense), (sparse_loss, sparse) = exact, dense, sparse
    assert abs(sparse_loss - exact_loss) <= 1e-2 * exact_loss
    assert exact.keys() == dense.keys() == sparse.keys()
    for name, gradient in exact.items():
        allowed = 2 * (dense[name] - gradient).norm() + 1e-2 * gradient.norm()
        assert (sparse[name] - gradient).norm() <= allowed, name


# A trial, which has no gradients, runs through the checkpoints too.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pairwise(
    reentrant=[True, False], adapt={"full": lambda model: model, "lora": with_lora}, backward=["once", "interleaved"]
)
def test_checkpoints_added_by_the_user_train_like_dense(reentrant, adapt, backward):
    model, batch = make_llama(use_cache=False, num_hidden_layers=3).double(), padded_batch(prompt=5)
    model.enable_input_require_grads()
    blocks, model = model.model.layers, adapt(model).train()
    dense = train(model, batch, backward)
    for block in (blocks[0], blocks[2]):
        block.forward = _checkpointed(block.forward, reentrant)
    with sparsify(model):
        assert_same(dense, train(model, batch, backward), tolerance=1e-5)


def test_only_layers_within_a_checkpoint_detect_their_rows():
    model, batch = make_llama(num_hidden_layers=3, use_cache=False).double().train(), padded_batch(prompt=5)
    block = model.model.layers[1]
    block.forward = _checkpointed(block.forward, reentrant=False)
    with sparsify(model) as sparsified:
        model(**batch).loss.backward()  # runs the trials and verifies the rows
        recorded = record_rows(sparsified)
        model(**batch)
    found = [rows is detect for rows in recorded if rows is not None]
    assert found == [False] * 7 + [True] * 7 + [False] * 2  # in the last layer, only keys and values are not restricted


def _checkpointed(forward, reentrant):
    return lambda x, **kwargs: checkpoint(lambda x: forward(x, **kwargs), x, use_reentrant=reentrant)


def test_num_items_in_batch_divides_the_loss():
    model, batch = make_llama().double(), padded_batch()
    assert_same_training(model, batch | {"num_items_in_batch": 100})
    assert_same_training(model, batch | {"num_items_in_batch": torch.tensor(77)})


def test_shifted_labels_train_like_dense():
    batch = padded_batch()
    shifted = batch["labels"].roll(-1, 1)
    assert_same_training(make_llama().double(), batch | {"shift_labels": shifted})


def test_an_additional_loss_on_hidden_states_trains_like_dense():
    model, batch = make_llama().double(), padded_batch(prompt=5) | {"output_hidden_states": True}

    def gradients():
        model.zero_grad()
        out = model(**batch)
        (out.loss + sum(hidden.square().mean() for hidden in out.hidden_states)).backward()
        return out.loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}

    dense = gradients()
    with sparsify(model):
        assert_same(dense, gradients(), tolerance=1e-5)


def test_outputs_keep_all_but_the_logits():
    model, batch = make_llama(), padded_batch()
    dense = model(**batch, output_hidden_states=True)
    with sparsify(model):
        out = model(**batch, output_hidden_states=True)
        loss, *others = model(**batch, return_dict=False)
    assert type(out) is type(dense)
    assert out.logits is None
    assert out.past_key_values.get_seq_length() == 24
    for one, other in zip(out.hidden_states, dense.hidden_states, strict=True):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(loss, dense.loss)
    assert [type(other) for other in others] == [type(out.past_key_values)]


def test_positional_arguments_train_like_keywords():
    model, batch = make_llama().double(), padded_batch()
    expected = loss_and_gradients(model, batch)
    with sparsify(model):
        model.zero_grad()
        loss = model(batch["input_ids"], batch["attention_mask"], labels=batch["labels"]).loss
        loss.backward()
    assert_same(expected, (loss.detach(), {name: p.grad for name, p in model.named_parameters()}), 1e-5)


def test_a_batch_without_labels_has_the_dense_loss_and_zero_gradients():
    model, batch = make_llama(), padded_batch()
    batch["labels"] = torch.full_like(batch["labels"], IGNORE)
    with sparsify(model):
        assert model(**batch).loss.isnan()
        loss = model(**batch, num_items_in_batch=5).loss
        loss.backward()
    assert loss == 0
    assert all(p.grad.eq(0).all() for p in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("bf16", [False, True])
def test_the_trainer_trains_the_same_weights(bf16, tmp_path):
    batch = padded_batch(lengths=(11, 3, 24, 6, 9, 14, 2, 20), prompt=2)
    examples = [{name: values[row] for name, values in batch.items()} for row in range(8)]
    args = TrainingArguments(
        tmp_path, max_steps=2, per_device_train_batch_size=2, gradient_accumulation_steps=2, bf16=bf16, use_cpu=True,
        report_to=[], save_strategy="no", disable_tqdm=True, learning_rate=1e-3, optim="sgd",
        eval_strategy="steps", eval_steps=1,
    )  # fmt: skip

    def trained(around):
        model = make_llama()
        trainer = Trainer(model=model, args=args, train_dataset=examples, eval_dataset=examples[:3])
        with around(model):
            trainer.train()
        losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
        return {name: p.detach() for name, p in model.named_parameters()}, torch.tensor(losses)

    dense, dense_losses = trained(contextlib.nullcontext)
    sparse, sparse_losses = trained(sparsify)
    start = dict(make_llama().named_parameters())
    torch.testing.assert_close(sparse_losses, dense_losses, rtol=1e-4, atol=0)
    for name, weight in dense.items():
        moved = (weight - start[name].detach()).norm()
        assert moved > 0
        assert (weight - sparse[name]).norm() <= (0.05 if bf16 else 1e-3) * moved, name


def test_a_wrapped_model_keeps_its_own_loss():
    model = make_llama()
    model.forward = wrapper = lambda *args, **kwargs: type(model).forward(model, *args, **kwargs)
    with sparsify(model):
        assert model(**padded_batch()).logits is not None
    assert model.forward is wrapper


def test_a_wrapper_around_the_sparse_forward_works_after_its_removal():
    model, batch = make_llama(), padded_batch()
    with sparsify(model):
        ours = model.forward
        model.forward = wrapper = lambda *args, **kwargs: ours(*args, **kwargs)
        assert model(**batch).logits is None
    assert model.forward is wrapper
    assert model(**batch).logits is not None


def test_accelerates_mixed_precision_can_be_taken_off_again_and_a_copy_has_its_own_weights():
    model, batch, accelerator = make_llama(), padded_batch(), Accelerator(cpu=True, mixed_precision="bf16")
    dense = loss_and_gradients(model, batch)
    handle = sparsify(model)
    copied = copy.deepcopy(accelerator.prepare_model(model))
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert model(**batch).loss.item() != pytest.approx(math.log(SIZES["vocab_size"]), rel=1e-3)
    assert copied(**batch).loss.item() == pytest.approx(math.log(SIZES["vocab_size"]), rel=1e-3)
    assert list(inspect.signature(model.forward).parameters)[:2] == ["input_ids", "attention_mask"]
    accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    assert_same(dense, loss_and_gradients(model, batch), tolerance=1e-4)
    handle.remove()
    assert_same(dense, loss_and_gradients(model, batch), tolerance=0)


def test_the_signature_is_unchanged_and_generation_works():
    model = make_llama().eval()
    prompt = {"input_ids": torch.arange(10, 15)[None], "max_new_tokens": 4, "do_sample": False}
    expected, signature = model.generate(**prompt), inspect.signature(model.forward)
    with sparsify(model):
        assert inspect.signature(model.forward) == signature
        assert torch.equal(model.generate(**prompt), expected)


def test_labels_of_another_length_are_refused():
    model, batch = make_llama(), padded_batch()
    batch["labels"] = batch["labels"][:, :20]
    with sparsify(model), pytest.raises(SparsityError, match="80 labels for 96 tokens; expected one label per token"):
        model(**batch)


class CountedReads(dict):
    """Counts how often a value is read."""

    reads = 0

    def __getitem__(self, key):
        self.reads += 1
        return super().__getitem__(key)


def test_each_lora_layer_is_inspected_once_per_pass():
    model, batch = model_with("lora", "no"), padded_batch()
    layers = [module for module in model.modules() if hasattr(module, "lora_A")]
    for layer in layers:
        layer.scaling = CountedReads(layer.scaling)
    with sparsify(model):
        model(**batch)
        for layer in layers:
            layer.scaling.reads = 0
        model(**batch).loss.backward()
    assert [layer.scaling.reads for layer in layers] == [1] * 2 * 7


def saved_rows(model, batch):
    """Returns what the linear layers of a forward pass keep: each saved matrix's storage, rows and size."""
    saved = []

    def note(tensor):
        if tensor.dim() == 2 and not tensor.requires_grad:
            saved.append((tensor.untyped_storage().data_ptr(), len(tensor), tensor.untyped_storage().nbytes() // 4))
        return tensor

    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = model(**batch).loss
    assert loss.requires_grad
    return [entry for entry in saved if entry[0] not in parameters]


@pytest.mark.parametrize(("lengths", "length"), [((7, 5, 3), 24), ((9,), 24)], ids=["ids", "one span"])
def test_layers_that_read_the_same_input_keep_one_copy_of_its_active_rows(lengths, length):
    model, batch = make_llama(), padded_batch(lengths=lengths, length=length)
    active = sum(lengths) - len(lengths)
    seen = []
    with sparsify(model, keep_logits=True) as sparsified:
        model.model.norm.register_forward_hook(lambda *_: seen.append(sparsified._call.inputs))
        model(**batch).loss.backward()  # verifies the rows
        # Inputs of 32 columns: of q, k, v; o; gate, up; twice. Inputs of 48 columns: of down. And the head's.
        of_layers = [entry for entry in saved_rows(model, batch) if entry[1] == active]
        assert seen[-1]._kept is None
    assert len(of_layers) == 15
    assert sorted(size for _, _, size in set(of_layers)) == [active * 32] * 7 + [active * 48] * 2
