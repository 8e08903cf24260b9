"""The drop-in in several processes: gradients equal those of one process on the whole batch."""

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from against_dense import assert_same, assert_same_gradients, padded_batch, record_rows, with_lora
from builders import IGNORE, checkpoint_activations, make_encoder, make_encoder_batch, make_llama, seeded
from command import start
from processes import Processes, process_group
from torch import distributed, nn
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

from sebp_edge import sparsify
from sebp_edge.errors import SparsityError
from sebp_edge.ops import detect

ROOT = Path(__file__).parents[2]
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
    return [{name: value.cuda() for name, value in part.items()} for part in found] if on_gpus() else found


def whole(parts):
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def num_items(batch):
    return int((batch["labels"][:, 1:] != IGNORE).sum())


def make(weights):
    if weights == "gpt2":
        sizes = {"vocab_size": 320, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4}
        with seeded(0):
            drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
            return GPT2LMHeadModel(GPT2Config(**sizes, **drops, bos_token_id=0, eos_token_id=1)).double()
    model = make_llama(tie_word_embeddings=weights != "untied").double()
    model = with_lora(model) if weights == "lora" else model
    # In fp32, the GPU runs our kernels.
    return model.float().cuda() if on_gpus() else model


def on_gpus():
    return torch.distributed.is_initialized() and torch.distributed.get_backend() == "nccl"


def decoder_of(model):
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def shard(model, how, **options):
    """Applies `fully_shard` to the model and to parts of it."""
    if how == "accelerate":
        return shard_by_accelerate(model)
    decoder = decoder_of(model)
    base, head = decoder.base_model, decoder.lm_head
    if how != "root":
        for block in base.layers if hasattr(base, "layers") else base.h:
            if how == "layers":
                for layer in (block.self_attn.q_proj, block.mlp.down_proj, block.mlp):
                    fully_shard(layer, **options)
            fully_shard(block, **options)
    if how == "layers" and head.weight is not base.embed_tokens.weight:
        fully_shard(head, **options)
    if how == "blocks and ends":
        if head.weight is base.embed_tokens.weight:
            fully_shard([base.norm, base.embed_tokens, head], **options | {"reshard_after_forward": False})
        else:
            fully_shard(base.embed_tokens, **options)
            fully_shard([base.norm, head], **options | {"reshard_after_forward": False})
    return fully_shard(model, **options)


def shard_by_accelerate(model):
    """Calls what `Accelerator.prepare` calls, which itself refuses to shard on the CPU."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        reshard_after_forward=True,
        cpu_ram_efficient_loading=False,
    )
    state = SimpleNamespace(fsdp_plugin=plugin)
    device = next(model.parameters()).device
    accelerator = SimpleNamespace(state=state, mixed_precision="no", is_main_process=True, device=device)
    return fsdp2_prepare_model(accelerator, model)


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


def like_one_process(rank, how, weights, sharded_first, ignored_rank=None, checkpointing=False, keeps=(True, False)):
    """Compares three steps with one process's dense step: the first detects its rows, the others have verified ones."""
    parts, tolerance = batches(ignored_rank=ignored_rank), 2e-3 if on_gpus() else TOLERANCE
    dense = loss_and_gradients(make(weights), whole(parts), num_items(whole(parts)))
    for keep_logits in keeps:
        model = make(weights)
        if checkpointing:
            decoder_of(model).enable_input_require_grads()
            checkpoint_activations(model, False)
        if sharded_first:
            model = wrap(model, how)
        with sparsify(model, keep_logits=keep_logits) as sparsified:
            wrapped = model if sharded_first else wrap(model, how)
            for _ in range(2 if keep_logits else 3):
                wrapped.zero_grad()
                # Each process's gradients are averaged.
                loss, sparse = loss_and_gradients(wrapped, parts[rank], num_items(whole(parts)) / COUNT)
                assert_same(dense, (mean(loss), sparse), tolerance)
            assert keep_logits or sparsified._findings.loss._reason_to_keep is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "weights", "sharded_first", "keeps"),
    [
        ("ddp", "untied", False, (False,)),
        ("root", "lora", False, (False,)),
        ("blocks and ends", "tied", True, (True, False)),
        ("layers", "untied", True, (False,)),
        ("accelerate", "lora", False, (True,)),
        ("blocks", "gpt2", True, (True,)),
    ],
)
def test_gradients_are_those_of_one_process(processes, how, weights, sharded_first, keeps):
    processes.run(like_one_process, how, weights, sharded_first, None, False, keeps)


@pytest.mark.slow
@pytest.mark.parametrize(("how", "weights"), [("ddp", "lora"), ("blocks", "tied")])
def test_a_rank_without_labels_adds_nothing(processes, how, weights):
    processes.run(like_one_process, how, weights, True, 0, False, (False,))


@pytest.mark.slow
@pytest.mark.parametrize(("how", "weights"), [("ddp", "tied"), ("blocks and ends", "lora")])
def test_gradients_are_exact_with_checkpoints(processes, how, weights):
    processes.run(like_one_process, how, weights, True, None, True, (False,))


def accumulates(rank, how):
    # Each micro-batch is one sequence of each rank's batch.
    parts = batches()
    items = num_items(whole(parts))
    dense = loss_and_gradients(make("tied"), whole(parts), items)
    model = wrap(make("tied"), how)
    micro_batches = [{name: value[[row]] for name, value in parts[rank].items()} for row in range(2)]
    with sparsify(model):
        for _ in range(2):
            model.zero_grad()
            for number, micro_batch in enumerate(micro_batches):
                is_last = number + 1 == len(micro_batches)
                if how != "ddp":
                    model.set_requires_gradient_sync(is_last)
                with model.no_sync() if how == "ddp" and not is_last else nullcontext():
                    model(**micro_batch, num_items_in_batch=torch.tensor(items / COUNT)).loss.backward()
            assert_same(dense, (dense[0], gradients_of(model)), TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ddp", "blocks"])
def test_gradients_are_exact_when_accumulated(processes, how):
    processes.run(accumulates, how)


def options_change_nothing(rank):
    parts = batches()
    items = num_items(whole(parts))
    dense = loss_and_gradients(make("tied"), whole(parts), items)
    replicas_of_one_shard = init_device_mesh("cpu", (COUNT, 1), mesh_dim_names=("replicate", "shard"))
    for options in ({"reshard_after_forward": True}, {"mesh": replicas_of_one_shard}):
        model = shard(make("tied"), "blocks", **options)
        with sparsify(model):
            for _ in range(2):
                model.zero_grad()
                loss, sparse = loss_and_gradients(model, parts[rank], items / COUNT)
                assert_same(dense, (mean(loss), sparse), TOLERANCE)


@pytest.mark.slow
def test_replicas_of_shards_and_weights_that_are_freed_are_exact(processes):
    processes.run(options_change_nothing)


def trains_in_mixed_precision(rank):
    batch, policy = batches()[rank], MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    exact = loss_and_gradients(shard(make("tied").float(), "blocks"), batch, num_items(batch))[1]
    rounded, model = (shard(make("tied").float(), "blocks and ends", mp_policy=policy) for _ in range(2))
    dense = loss_and_gradients(rounded, batch, num_items(batch))[1]
    with sparsify(model) as sparsified:
        for _ in range(2):
            model.zero_grad()
            _, sparse = loss_and_gradients(model, batch, num_items(batch))
        # The trial allows for the precision that weights are gathered in.
        assert sparsified._findings.loss._reason_to_keep is None
    for name, gradient in exact.items():
        assert (sparse[name] - gradient).norm() <= 2 * (dense[name] - gradient).norm() + 1e-4 * gradient.norm(), name


@pytest.mark.slow
def test_mixed_precision_is_as_exact_as_dense(processes):
    processes.run(trains_in_mixed_precision)


def takes_rows_from_labels(rank, how, weights):
    """Whether layers compute the batch's rows, and the last layer loss rows only, once a kind of call is verified."""
    model, batch = wrap(make(weights), how), padded_batch(LENGTHS[rank], prompt=5)
    with sparsify(model) as sparsified:
        for _ in range(2):
            model(**batch).loss.backward()
        rows = record_rows(sparsified)
        model(**batch).loss.backward()
        assert rows and detect not in rows
        assert sparsified._last_layer._verdicts and all(sparsified._last_layer._verdicts.values())
        # The last layer's query, output and MLP compute all of the rows that they get, which are the loss rows.
        assert sum(each is None for each in rows) >= 5


@pytest.mark.slow
@pytest.mark.parametrize(("how", "weights"), [("ddp", "tied"), ("blocks and ends", "lora")])
def test_rows_come_from_labels(processes, how, weights):
    processes.run(takes_rows_from_labels, how, weights)


def trains_an_encoder(rank):
    dense, batch = make_encoder("bert", "token").double(), make_encoder_batch("bert", "token", seed=rank)
    dense(**batch).loss.backward()
    expected = gradients_of(dense)
    for gradient in expected.values():
        torch.distributed.all_reduce(gradient)
    model = make_encoder("bert", "token").double()
    for block in model.bert.encoder.layer:
        fully_shard(block)
    fully_shard(model)
    with sparsify(model):
        for _ in range(2):
            model.zero_grad()
            model(**batch).loss.backward()
    sparse = {name: COUNT * gradient for name, gradient in gradients_of(model).items()}
    assert_same_gradients(expected, sparse, 1e-10, 1e-15)


@pytest.mark.slow
def test_sharded_encoders_are_exact(processes):
    processes.run(trains_an_encoder)


def leaves_the_model_as_it_was(rank, sharded_first):
    model, batch = make("lora"), batches()[rank]
    if sharded_first:
        shard(model, "blocks")
    with sparsify(model) as sparsified:
        if not sharded_first:
            shard(model, "blocks")
        model(**batch).loss.backward()
        # Stacked weights would never be freed.
        assert not sparsified._fused_lora._groups
        sparse = gradients_of(model)
    model.zero_grad()
    model(**batch).loss.backward()
    assert_same_gradients(gradients_of(model), sparse, TOLERANCE, 1e-15)
    assert model(**batch).logits is not None
    model.eval()
    assert model.generate(batch["input_ids"][:1, :4], max_new_tokens=2, min_new_tokens=2).shape == (1, 6)


@pytest.mark.slow
@pytest.mark.parametrize("sharded_first", [True, False])
def test_a_sharded_model_works_after_removal(processes, sharded_first):
    processes.run(leaves_the_model_as_it_was, sharded_first)


def refuses_tensor_parallelism(rank):
    grid = init_device_mesh("cpu", (1, COUNT), mesh_dim_names=("dp", "tp"))

    def split(model):
        for layer in model.model.layers:
            parallelize_module(layer, grid["tp"], {"mlp.up_proj": ColwiseParallel()})
        return model

    for wrapping in (split, lambda model: fully_shard(split(model), mesh=grid["dp"])):
        with pytest.raises(SparsityError, match="tensor parallelism"):
            sparsify(wrapping(make("tied")))
        with sparsify(model := make("tied")), pytest.raises(SparsityError, match="tensor parallelism"):
            wrapping(model)(**batches()[rank])


@pytest.mark.slow
def test_tensor_parallelism_is_refused(processes):
    processes.run(refuses_tensor_parallelism)


@pytest.mark.parametrize(("mark", "words"), [("ds_id", "ZeRO-3"), ("_fsdp_flattened", "FSDP1")])
def test_weights_that_others_split_are_refused(mark, words):
    # As DeepSpeed and FSDP1 mark parameters; both need a GPU.
    model = make("tied")
    setattr(model.lm_head.weight, mark, True)
    with pytest.raises(SparsityError, match=words):
        sparsify(model)


class Outer(nn.Module):
    def __init__(self, decoder):
        super().__init__()
        self.decoder = decoder

    def forward(self, **batch):
        return self.decoder(**batch)


def refuses_a_model_within_a_sharded_module(rank):
    outer = Outer(make("tied"))
    for block in outer.decoder.model.layers:
        fully_shard(block)
    fully_shard(outer)
    with sparsify(outer.decoder), pytest.raises(SparsityError, match="give sparsify that module"):
        outer(**batches()[rank])


@pytest.mark.slow
def test_a_model_within_a_sharded_module_is_refused(processes):
    processes.run(refuses_a_model_within_a_sharded_module)


@pytest.mark.parametrize("how", ["ddp", "blocks"])
def test_one_process_trains_like_dense(tmp_path, how):
    batch = batches()[1]
    dense = loss_and_gradients(make("tied"), batch, num_items(batch))
    with process_group(f"file://{tmp_path}/rendezvous"):
        model = wrap(make("tied"), how)
        with sparsify(model):
            for _ in range(2):
                model.zero_grad()
                assert_same(dense, loss_and_gradients(model, batch, num_items(batch)), TOLERANCE)
        del model


EXAMPLE = ROOT / "examples" / "accelerate_loop.py"


@pytest.fixture
def few_notes(notes_folder):
    for note in sorted(notes_folder.glob("*.md"))[8:]:
        note.unlink()
    return notes_folder


@pytest.mark.slow
def test_the_example_trains_in_two_processes(few_notes):
    # As `accelerate launch` starts them, which does so on GPUs only. Most of 512 tokens would be padding.
    code = (
        "import sys; from pathlib import Path; file = sys.argv.pop(1); "
        "source = Path(file).read_text().replace('CONTEXT_LENGTH = 512', 'CONTEXT_LENGTH = 64'); "
        "exec(compile(source, file, 'exec'), {'__name__': '__main__', '__file__': file})"
    )
    # Of this process, as an agent's, so that nobody else can take its port before the first one of them does.
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    address |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    started = []
    for rank in map(str, range(COUNT)):
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(COUNT), "LOCAL_WORLD_SIZE": str(COUNT)}
        environment = os.environ | address | own | {"ACCELERATE_USE_CPU": "true"}
        started.append(start([code, EXAMPLE, few_notes], env=environment))
    outputs = [one.communicate(timeout=300) for one in started]
    assert [one.returncode for one in started] == [0] * COUNT, outputs
    assert "step 1/1  loss" in outputs[0][0]


# ------------------------------------------------------------------------------------------------------------- two GPUs

needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < COUNT, reason="needs two CUDA GPUs")


@pytest.fixture(scope="module")
def gpu_processes():
    sys.path.insert(0, folder := str(Path(__file__).parents[__name__.count(".")]))
    with Processes(COUNT, "nccl") as started:
        yield started
    sys.path.remove(folder)


@pytest.mark.gpu
@needs_two_gpus
@pytest.mark.parametrize("weights", ["tied", "lora"])
@pytest.mark.parametrize("how", ["ddp", "blocks", "accelerate"])
def test_gradients_on_two_gpus_are_those_of_one(gpu_processes, how, weights):
    gpu_processes.run(like_one_process, how, weights, how != "accelerate")


def refuses_fsdp_1(rank):
    for options in ({}, {"use_orig_params": True}):
        with pytest.raises(SparsityError, match="FSDP1"):
            sparsify(FullyShardedDataParallel(make("tied"), **options))
        with sparsify(model := make("tied")):
            wrapped = FullyShardedDataParallel(model, **options)
            with pytest.raises(SparsityError, match="FSDP1"):
                wrapped(**batches()[rank])


@pytest.mark.gpu
@needs_two_gpus
def test_fsdp_1_is_refused_on_two_gpus(gpu_processes):
    gpu_processes.run(refuses_fsdp_1)


@pytest.mark.gpu
@needs_two_gpus
def test_the_example_trains_sharded_on_two_gpus(few_notes):
    config = ROOT / "examples" / "accelerate_fsdp2.yaml"
    launcher = ["accelerate.commands.launch", "--config_file", config, "--main_process_port=0"]
    command = [sys.executable, "-m", *launcher, EXAMPLE, few_notes]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "step 1/1  loss" in done.stdout
