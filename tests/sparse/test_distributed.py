"""The drop-in in several processes: gradients equal those of one process on the whole batch."""

import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from against_dense import assert_same, padded_batch, record_rows, with_lora
from builders import make_encoder, make_encoder_batch, make_llama
from processes import Processes, process_group
from torch import nn
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

from sebp_edge import sparsify
from sebp_edge.errors import SparsityError
from sebp_edge.ops import detect
from sebp_edge.rows.row_plan import IGNORE

COUNT = 2
# Losses are computed in fp32, all else in fp64.
TOLERANCE = 1e-5
# The longest sequences differ, and only the second rank has prompts, whose rows have no loss.
LENGTHS, PROMPTS = ((11, 1), (24, 6)), (0, 5)


@pytest.fixture(scope="module")
def processes():
    # Processes import this module by its name.
    sys.path.insert(0, folder := str(Path(__file__).parents[__name__.count(".")]))
    with Processes(COUNT) as started:
        yield started
    sys.path.remove(folder)


def batches(*, ignored_rank=None):
    """The right-padded batch of each rank; all labels of `ignored_rank` are ignored."""
    found = [padded_batch(lengths, prompt=prompt) for lengths, prompt in zip(LENGTHS, PROMPTS, strict=True)]
    if ignored_rank is not None:
        found[ignored_rank]["labels"].fill_(IGNORE)
    return found


def whole(parts):
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def num_items(batch):
    return int((batch["labels"][:, 1:] != IGNORE).sum())


def make(weights):
    if weights == "gpt2":
        sizes = {"vocab_size": 320, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4}
        with torch.random.fork_rng():
            torch.manual_seed(0)
            drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
            return GPT2LMHeadModel(GPT2Config(**sizes, **drops, bos_token_id=0, eos_token_id=1)).double()
    model = make_llama(num_hidden_layers=3, tie_word_embeddings=weights != "untied").double()
    return with_lora(model) if weights == "lora" else model


def decoder_of(model):
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def shard(model, how, **options):
    """Applies `fully_shard` to the model and to parts of it."""
    decoder = decoder_of(model)
    base, head = decoder.base_model, decoder.lm_head
    if how != "root":
        for block in base.layers if hasattr(base, "layers") else base.h:
            if how == "layers":
                for layer in (block.self_attn.q_proj, block.mlp.down_proj, block.mlp):
                    fully_shard(layer, **options)
            fully_shard(block, **options)
    if how == "blocks and ends":
        # As accelerate does.
        if head.weight is base.embed_tokens.weight:
            fully_shard([base.norm, base.embed_tokens, head], **options | {"reshard_after_forward": False})
        else:
            fully_shard(base.embed_tokens, **options)
            fully_shard([base.norm, head], **options | {"reshard_after_forward": False})
    return fully_shard(model, **options)


def wrap(model, how):
    return DistributedDataParallel(model) if how == "ddp" else shard(model, how)


def loss_and_gradients(model, batch, items):
    """The loss as a sum over `items`, and the gradients, which processes share."""
    loss = model(**batch, num_items_in_batch=torch.tensor(items)).loss
    loss.backward()
    return loss.detach(), gradients_of(model)


def gradients_of(model):
    found = {name.removeprefix("module."): p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: g.full_tensor() if hasattr(g, "full_tensor") else g.clone() for name, g in found.items()}


def mean(loss):
    loss = loss.clone()
    torch.distributed.all_reduce(loss)
    return loss / COUNT


def like_one_process(rank, how, weights, sharded_first, ignored_rank=None, checkpointing=False):
    """Compares three steps with one process's dense step: the first detects its rows, the others have verified ones."""
    parts = batches(ignored_rank=ignored_rank)
    dense = loss_and_gradients(make(weights), whole(parts), num_items(whole(parts)))
    for keep_logits in (True, False):
        model = make(weights)
        if checkpointing:
            decoder_of(model).enable_input_require_grads()
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if sharded_first:
            model = wrap(model, how)
        with sparsify(model, keep_logits=keep_logits):
            wrapped = model if sharded_first else wrap(model, how)
            for _ in range(3):
                wrapped.zero_grad()
                # Each process's gradients are averaged.
                loss, sparse = loss_and_gradients(wrapped, parts[rank], num_items(whole(parts)) / COUNT)
                assert_same(dense, (mean(loss), sparse), TOLERANCE)


@pytest.mark.parametrize("sharded_first", [True, False])
@pytest.mark.parametrize("weights", ["tied", "untied", "lora"])
@pytest.mark.parametrize("how", ["ddp", "root", "blocks", "blocks and ends"])
def test_gradients_are_those_of_one_process(processes, how, weights, sharded_first):
    processes.run(like_one_process, how, weights, sharded_first)


@pytest.mark.parametrize("weights", ["tied", "lora"])
@pytest.mark.parametrize("how", ["ddp", "blocks"])
def test_a_rank_without_labels_adds_nothing(processes, how, weights):
    processes.run(like_one_process, how, weights, True, 0)


@pytest.mark.parametrize("weights", ["tied", "lora"])
@pytest.mark.parametrize("how", ["ddp", "blocks and ends"])
def test_gradients_are_exact_with_checkpoints(processes, how, weights):
    processes.run(like_one_process, how, weights, True, None, True)


@pytest.mark.parametrize(("how", "weights"), [("layers", "tied"), ("blocks", "gpt2")])
def test_layers_of_other_classes_are_exact(processes, how, weights):
    processes.run(like_one_process, how, weights, True)
