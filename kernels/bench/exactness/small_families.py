"""Compares gradients of all causal families of transformers, as small random models, with the dense ones on a CPU.

    python kernels/bench/exactness/small_families.py [--only NAME ...] [--processes 2] [--record [FILE]]
    python kernels/bench/exactness/small_families.py --gpu [...]            hoisted in bf16 on a GPU, with our kernels

A family's default config is made small by the endings of its names, and `FITTING` has what these do not fit. Models are
in fp64, or in fp32 if fp64 gives NaN, and train in full and with LoRA. Texts are shorter and longer than the windows,
padded on the right and on the left, and some tokens in the middle have no label. Each case runs twice: rows are
detected, then predicted.

The reference is the dense model with a loss in fp64. transformers' loss, like ours, is in fp32, which small gradients
that cancel out magnify: so an error counts if it exceeds both TOLERANCE and TIMES_DENSE times the dense model's own.
Beside the drop-in, each family is hoisted, if the trial accepts it. On a GPU the losses of its rows may err twice as
much as those of the padded model in bf16, plus 1e-3, beside that in full precision.
"""

import copy
import inspect
import itertools
import logging
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FunctionType, SimpleNamespace

import torch
import torch.nn.functional as F
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

sys.path.append(str(Path(__file__).parents[1]))

import evidence
import side_by_side
from sebp_edge import sparsify
from sebp_edge.engine.models.small_copy import NUM_EXPERTS, NUM_EXPERTS_PER_TOKEN, WINDOW
from sebp_edge.engine.sparse.copy_trial import padded_losses
from sebp_edge.engine.sparse.hoist_if_exact import hoist_if_exact
from sebp_edge.engine.sparse.patches.packed_layers import RULE
from sebp_edge.engine.sparse.rows.row_plan import IGNORE
from sebp_edge.errors import SparsityError
from sebp_edge.research import ActiveTokens, Hoisted, RowPlan

TOLERANCE, TOLERANCE_FP32, TIMES_DENSE = 1e-6, 2e-4, 3
# In seconds, for one family.
LIMIT = 200
VOCABULARY, LENGTHS = 160, (1, 3, 18, 37)
# What a config's numbers become, by the first pattern that their names end with.
SIZES = {
    "vocab_size vocab_size_per_layer_input": VOCABULARY,
    "per_layer_input laurel_rank": 16,
    "num_experts_per_tok num_experts_per_token top_k moe_topk moe_k top_k_experts": NUM_EXPERTS_PER_TOKEN,
    "experts": NUM_EXPERTS,
    "moe_intermediate_size shared_intermediate_size expert_ffn_hidden_size": 32,
    "intermediate_size ffn_dim ffn_hidden_size d_ff d_inner n_inner dff dim_ff intermediate_size_mlp": 96,
    "hidden_size d_model n_embd emb_dim embedding_size embed_proj_dim lru_width": 64,
    "num_hidden_layers num_layers n_layer n_layers decoder_layers encoder_layers num_blocks": 2,
    "key_value_heads kv_heads n_groups": 2,
    "attention_heads num_heads n_head n_heads": 4,
    "head_dim rope_dim nope_dim q_lora_rank kv_lora_rank mamba_d_head": 16,
    "attention_interval": 2,
    "state_size d_state dt_rank time_step_rank": 8,
    "window window_size chunk_size sliding_window_size local_attention": WINDOW,
    "max_position_embeddings n_positions n_ctx max_seq_len max_sequence_length index_topk": 128,
    "dropout dropout_prob pdrop drop_rate jitter_noise layerdrop": 0,
}
# What does not follow from the names.
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "per_layer_config": None}
GEMMA4 = {
    "num_hidden_layers": 4,
    "layer_types": 2 * SLIDING["layer_types"],
    "per_layer_config": {layer: {"head_dim": 32, "num_key_value_heads": 1} for layer in (1, 3)},
}
FITTING = {
    "bamba": {"mamba_n_heads": 8, "attn_layer_indices": [1]},
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": SLIDING,
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64},
    },
    "dots1": {"n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    "dots3_note_text": {"per_layer_config": None},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {"num_kv_shared_layers": 0, "layer_types": SLIDING["layer_types"]},
    "gemma4_text": GEMMA4,
    "gemma4_unified_text": GEMMA4,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "xlstm": {"embedding_dim": 64, "num_heads": 4},
    "xmod": {"default_language": "en_XX"},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {"mamba_n_heads": 8, "layer_types": ["mamba", "attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "axk1": {"head_dim": 32, "qk_rope_head_dim": 16},
    "deepseek_v2": {"head_dim": 32, "qk_rope_head_dim": 16},
    "reformer": {"axial_pos_shape": [8, 16], "axial_pos_embds_dim": [32, 32], "attn_layers": ["local", "local"]},
    "xlnet": {"d_head": 16},
    "zaya": {"num_experts_per_tok": 1},
    "longcat_flash": {"head_dim": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "qk_head_dim": 32},
}
VARIANTS = (
    {},
    {"num_key_value_heads": 4},
    {"num_hidden_layers": 4},
    {"head_dim": 32},
    {"num_key_value_heads": 4, "head_dim": 16, "qk_rope_head_dim": 16, "q_lora_rank": None},
    {"num_key_value_heads": 4, "head_dim": 8, "qk_rope_head_dim": 8},
)
# Lists with an entry for each layer no longer fit, and classes make their own; nor do these.
PER_LAYER = ("attention_layers", "layer_types", "layers_block_type", "no_rope_layers", "moe_layers", "mlp_layer_types")
NOT_OF_A_MODEL = (
    "model_type",
    "architectures",
    "transformers_version",
    "dtype",
    "_name_or_path",
    "id2label",
    "id2label",
    "label2id",
)


def main() -> None:
    parser = evidence.parser(__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--gpu", action="store_true")
    options = parser.parse_args()
    families = options.only or list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    compare, name = (compare_on_gpu, "small-families-gpu") if options.gpu else (compare_family, "small-families")
    found = side_by_side.run(partial(measure, compare), families, options.processes)
    rows = sorted(map(evidence.show, found), key=lambda row: row["family"])
    sources = (*evidence.STEP, "sebp_edge/engine/models", "kernels/bench/side_by_side.py", __file__)
    evidence.record(name, sources, rows, options.record, on_cpu=not options.gpu)
    sys.exit(any("wrong" in row.values() for row in rows))


def measure(compare: Callable[[nn.Module], dict], family: str) -> dict:
    """One family's row: what a comparison of a small model found."""
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    begin, row = time.monotonic(), dict.fromkeys(("drop-in", "error", "dense error", "LoRA", "hoisted", "note"), "")
    # Configs of some families make models that never end.
    signal.signal(signal.SIGALRM, _end)
    signal.alarm(LIMIT)
    try:
        model = make(family)
        row |= {"class": type(model).__name__, "dtype": str(model.dtype).removeprefix("torch.")}
        row |= compare(model)
    except Exception as error:
        row["note"] = f"not made: {type(error).__name__}: {' '.join(str(error).split())[:110]}"
    finally:
        signal.alarm(0)
    return {"family": family, "class": "", "dtype": ""} | row | {"seconds": round(time.monotonic() - begin)}


def _end(_signal, _frame) -> None:
    raise TimeoutError(f"took more than {LIMIT} s")


def make(family: str) -> nn.Module:
    """A small random model with gradients that are finite, in fp64 if possible."""
    problem: Exception | None = None
    for fitted, dtype in itertools.product(VARIANTS, (torch.float64, torch.float32)):
        try:
            model = make_with(small_config(family, fitted), dtype)
            if is_finite(model):
                return model
            problem = problem or ValueError("its dense gradients are NaN")
        except TimeoutError:
            raise
        except Exception as error:
            problem = problem or error
    raise problem


def is_finite(model: nn.Module) -> bool:
    for side in ("right", "left"):
        loss, gradients = own_loss(model, make_batch(side))
        if not all(bool(tensor.isfinite().all()) for tensor in (loss, *gradients.values())):
            return False
    return True


def make_with(config: PretrainedConfig, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(dtype).train()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    with torch.no_grad():
        for module in model.modules():
            # A square root of an embedding that is zero has a gradient of NaN in Gemma 3n.
            if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                module.weight[module.padding_idx].normal_(std=0.02)
    return model


def small_config(family: str, fitted: dict) -> PretrainedConfig:
    kind = CONFIG_MAPPING[family]
    return kind(**_smaller(kind().to_dict()) | {"use_cache": False} | FITTING.get(family, {}) | fitted)


def _smaller(values: dict) -> dict:
    found = {}
    for name, value in values.items():
        if name in NOT_OF_A_MODEL or name in PER_LAYER or (name.endswith("_id") and name != "pad_token_id"):
            continue
        if isinstance(value, list) and len(value) == values.get("num_hidden_layers"):
            continue
        if isinstance(value, dict) and name.endswith("config"):
            value = _smaller(value)
        elif name in ("pad_token_id", "is_decoder"):
            value = name == "is_decoder" or 0
        elif isinstance(value, int | float) and not isinstance(value, bool):
            value = type(value)(
                next((size for names, size in SIZES.items() if name.endswith(tuple(names.split()))), value)
            )
        found[name] = value
    return found


def make_batch(side: str) -> dict[str, Tensor]:
    draw, width = torch.Generator().manual_seed(1), max(LENGTHS) + 2
    ids, mask = torch.zeros(len(LENGTHS), width, dtype=torch.int64), torch.zeros(len(LENGTHS), width, dtype=torch.int64)
    labels = torch.full_like(ids, IGNORE)
    for row, length in enumerate(LENGTHS):
        span = slice(0, length) if side == "right" else slice(width - length, width)
        ids[row, span] = labels[row, span] = torch.randint(3, VOCABULARY, (length,), generator=draw)
        mask[row, span] = 1
        # A prompt, and an answer of a tool in the middle.
        for share in (slice(0, length // 5), slice(length // 2, length // 2 + length // 6)):
            labels[row, span][share] = IGNORE
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


Found = tuple[Tensor, dict[str, Tensor]]


def gradients_of(model: nn.Module, loss: Callable[[], Tensor]) -> Found:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(2)
    result = loss()
    result.backward()
    return result.detach(), {
        name: parameter.grad.double() for name, parameter in model.named_parameters() if parameter.grad is not None
    }


def own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Found:
    return gradients_of(model, lambda: model(**batch).loss)


def exact_loss(model: nn.Module, batch: dict[str, Tensor], *, of_next_tokens: bool = False) -> Found:
    """Of the dense model, with the loss in fp64; its own if that is not the loss of the next tokens, which may be asked
    for."""

    def loss() -> Tensor:
        output = model(**batch)
        logits, labels = output.logits.double()[:, :-1], batch["labels"][:, 1:]
        usual = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE)
        # By gradients, since every loss of a fresh model is about the same.
        kept = {"retain_graph": True, "allow_unused": True}
        ours, own = (torch.autograd.grad(each, output.logits, **kept)[0] for each in (usual, output.loss))
        is_usual = own is not None and bool((ours - own).norm() <= 1e-4 * ours.norm())
        return usual if is_usual or of_next_tokens else output.loss

    return gradients_of(model, loss)


def error_of(reference: Found, found: Found) -> float:
    """The largest error of a parameter's gradient, relative to its norm, and to a small share of the largest norm."""
    (_, expected), (_, gradients) = reference, found
    largest = max(gradient.norm() for gradient in expected.values())
    names = expected.keys() | gradients.keys()
    nothing = torch.zeros((), dtype=torch.float64)
    pairs = ((expected.get(name, nothing), gradients.get(name, nothing)) for name in names)
    return max(float((one - other).norm() / (one.norm() + 1e-6 * largest)) for one, other in pairs)


def compare_family(model: nn.Module) -> dict:
    row = {}
    for name, each in (("drop-in", model), ("LoRA", with_lora(model))):
        if each is None:
            row[name] = "not made"
            continue
        dense, worst, random = compare(each)
        allowed = max(TOLERANCE if each.dtype == torch.float64 else TOLERANCE_FP32, TIMES_DENSE * dense)
        row[name] = "exact" if worst <= allowed else "wrong"
        if random:
            row["note"] = "random in training; compared without"
        if name == "drop-in":
            row |= {"dense error": dense, "error": worst}
    return row | {"hoisted": compare_hoisted(model, row["dense error"])}


def with_lora(model: nn.Module) -> nn.Module | None:
    for targets in ("all-linear", ["q_proj", "v_proj"]):
        try:
            torch.manual_seed(3)
            config = LoraConfig(r=3, target_modules=targets, init_lora_weights=False)
            lora = get_peft_model(copy.deepcopy(model), config, autocast_adapter_dtype=False).to(model.dtype).train()
            if is_finite(lora):
                return lora
        except Exception:
            continue
    return None


def compare(model: nn.Module) -> tuple[float, float, bool]:
    """Returns the largest errors of the dense model's own loss and of the drop-in, and whether training is random."""
    batches = [make_batch(side) for side in ("right", "left")]
    random = error_of(own_loss(model, batches[0]), _with_other_seed(model, batches[0])) > 0
    if random:
        top = model.get_base_model() if hasattr(model, "get_base_model") else model
        model.eval()
        top.training = True
    references = [exact_loss(model, batch) for batch in batches]
    dense = max(error_of(exact, own_loss(model, batch)) for exact, batch in zip(references, batches, strict=True))
    worst = 0.0
    for keep_logits in (True, False):
        with sparsify(model, keep_logits=keep_logits):
            for exact, batch in zip(references, batches, strict=True):
                for _ in range(2):
                    worst = max(worst, error_of(exact, own_loss(model, batch)))
    return dense, worst, random


def _with_other_seed(model: nn.Module, batch: dict[str, Tensor]) -> Found:
    def loss() -> Tensor:
        torch.manual_seed(5)
        return model(**batch).loss

    return gradients_of(model, loss)


def compare_hoisted(model: nn.Module, dense: float) -> str:
    """Whether the hoisted model is exact, or why it is refused; `dense` is the dense model's own error."""
    batch = make_batch("right")
    plan = RowPlan.from_labels(batch["labels"])
    with rule_in_fp64(model):
        reference = exact_loss(model, batch, of_next_tokens=True)
    try:
        with Hoisted(model) as hoisted:
            tokens = ActiveTokens.gather(batch["input_ids"], plan)
            found = gradients_of(model, lambda: hoisted.row_losses(tokens).mean())
    except SparsityError as error:
        return f"refused: {error}"
    tolerance = TOLERANCE if model.dtype == torch.float64 else TOLERANCE_FP32
    return "exact" if error_of(reference, found) <= max(tolerance, TIMES_DENSE * dense) else "wrong"


@contextmanager
def rule_in_fp64(model: nn.Module) -> Iterator[None]:
    """Context in which transformers' linear attention computes in fp64, and not in fp32, which errs by up to 4e-4."""
    scope = vars(sys.modules[type(model).__module__])
    own = scope.get(RULE)
    if own is None:
        yield
        return
    plain = inspect.unwrap(own)
    wide = SimpleNamespace(**vars(torch) | {"float32": torch.float64})
    scope[RULE] = FunctionType(plain.__code__, plain.__globals__ | {"torch": wide}, RULE, plain.__defaults__)
    scope[RULE].__kwdefaults__ = plain.__kwdefaults__
    try:
        yield
    finally:
        scope[RULE] = own


def compare_on_gpu(model: nn.Module, device: str = "cuda") -> dict:
    """The same in bf16 by its losses, since gradients of random models round to anything; those must be finite."""
    batch, model = make_batch("right"), model.eval()
    plan = RowPlan.from_labels(batch["labels"])
    with torch.no_grad():
        exact = padded_losses(model, batch["input_ids"], plan).double()
        model, ids, plan = model.to(device, torch.bfloat16), batch["input_ids"].to(device), plan.to(device)
        dense = _relative(padded_losses(model, ids, plan), exact)
    texts = [row[keep.bool()].tolist() for row, keep in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
    hoisted, reason = hoist_if_exact(model, texts[-2:], 0)
    if hoisted is None:
        return {"dtype": "bfloat16", "dense error": dense, "hoisted": f"refused: {reason}"}
    losses = hoisted.row_losses(ActiveTokens.gather(ids, plan))
    error = _relative(losses.detach(), exact)
    losses.sum().backward()
    hoisted.remove()
    is_finite = all(each.grad is None or bool(each.grad.isfinite().all()) for each in model.parameters())
    return {
        "dtype": "bfloat16",
        "error": error,
        "dense error": dense,
        "hoisted": "exact" if is_finite and error <= 2 * dense + 1e-3 else "wrong",
    }


def _relative(losses: Tensor, exact: Tensor) -> float:
    return float((losses.cpu().double() - exact).norm() / exact.norm())


if __name__ == "__main__":
    main()
