"""Where transformers' architectures keep what the sparse backward must know: linear layers, blocks, what a head reads.

Everything here is read off a model; nothing is changed.
"""

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PretrainedConfig, PreTrainedModel
from transformers.activations import ACT2CLS
from transformers.pytorch_utils import Conv1D

from sebp_edge.models.lora import without_adapter

# Torch's and transformers' own, all of them of single elements.
ACTIVATIONS = {nn.GELU} | {one[0] if isinstance(one, tuple) else one for one in ACT2CLS.values()}
# The projections that make a block's keys and values, by the families' names; some make the queries as well.
KEYS_AND_VALUES = ({"k_proj", "v_proj"}, {"qkv_proj"}, {"c_attn"}, {"key", "value"}, {"k_lin", "v_lin"})
# What is beside them in an attention module and works row by row. Anything else, such as a gate of what a state
# forgets, may carry one row's gradient to another.
QUERIES_AND_OUTPUTS = {"q_proj", "query", "q_lin", "o_proj", "out_proj", "out_lin", "c_proj", "dense"}
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
# Encoders whose sequence classifier reads the first token, and whose token heads read each token alone.
ENCODERS = ("bert", "roberta", "distilbert")


def inner_model(model: nn.Module) -> nn.Module:
    """The transformers model inside DistributedDataParallel and PEFT; any other model itself."""
    return without_adapter(model.module if isinstance(model, DistributedDataParallel) else model)


def is_linear(layer: nn.Module) -> bool:
    """Whether a layer is exactly Y = X Wᵀ + b: torch's, or GPT-2's with its weight transposed."""
    return type(layer) in (nn.Linear, Conv1D)


def is_norm(module: nn.Module) -> bool:
    """Whether a module scales each row by itself, by what the row has in its last dimension."""
    shape = getattr(module, "normalized_shape", 1)
    has_rows = isinstance(shape, int) or len(shape) == 1
    return has_rows and (isinstance(module, nn.LayerNorm) or type(module).__name__.endswith("RMSNorm"))


def is_activation(module: nn.Module) -> bool:
    """Whether a module gives a new tensor, of a function of each element."""
    # One with parameters may have one for each row.
    is_known = type(module) in ACTIVATIONS and not any(True for _ in module.parameters())
    return is_known and not getattr(module, "inplace", False)


def weight_MK(layer: nn.Module) -> Tensor:
    """A linear layer's weight as [outputs, inputs]; GPT-2's is a view of its own [inputs, outputs]."""
    return layer.weight.T if type(layer) is Conv1D else layer.weight


def last_block(model: nn.Module) -> nn.Module | None:
    """The last of the blocks between embedding and head, where they are found and it is no other block as well."""
    *earlier, last = blocks_of(model) or [None]
    if last is None or {module for block in earlier for module in block.modules()} & set(last.modules()):
        return None
    return last


def blocks_of(model: nn.Module, *, guess: bool = False) -> list[nn.Module]:
    """The blocks between embedding and head, from the first to the last; empty if they are not found.

    Args:
        guess: where they are not found, take the list of modules that has the most parameters, or without any list the
            base model as one block.
    """
    for path in ("layers", "h", "encoder.layer", "transformer.layer"):
        blocks = getattr(model, "base_model", None)
        for name in path.split("."):
            blocks = getattr(blocks, name, None)
        if isinstance(blocks, nn.ModuleList) and len(blocks):
            return list(blocks)
    if not guess:
        return []
    lists = [module for module in model.base_model.modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=num_parameters, default=[model.base_model]))


def num_parameters(module: nn.Module) -> int:
    """How many parameters a module has, each counted once."""
    return sum(parameter.numel() for parameter in module.parameters())


def head_size_of(config: PretrainedConfig) -> int:
    """The size of one attention head, by a decoder's config."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def behind_attention(block: nn.Module | None) -> nn.Module | None:
    """The first part of an encoder's block behind its attention; it and all after it work row by row. None if unknown.

    BERT's and RoBERTa's output projection with its norm; DistilBERT's norm.
    """
    attention = getattr(block, "attention", None)
    return getattr(attention, "output", None) or getattr(block, "sa_layer_norm", None)


def is_called_causal(model: nn.Module) -> bool:
    """Whether a model's name says that each row of its logits depends on rows before it only, and its config does not
    say that it depends on what is given, or that the loss looks at other rows."""
    if not (isinstance(model, PreTrainedModel) and type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))):
        return False
    config = model.config.get_text_config()
    # Images in a text may see each other; a router's loss looks at every row, whatever its label.
    return not any(getattr(config, name, False) for name in ("use_bidirectional_attention", "output_router_logits"))


def reads_first_token(model: nn.Module) -> bool:
    """Whether a model is an encoder whose head sees the first token of each sequence and no other."""
    return _is_encoder(model) and type(model).__name__.endswith("ForSequenceClassification")


def reads_labelled_tokens(model: nn.Module) -> bool:
    """Whether a model is an encoder whose loss sees each labelled token's own output and no other."""
    return _is_encoder(model) and type(model).__name__.endswith(("ForTokenClassification", "ForMaskedLM"))


def _is_encoder(model: nn.Module) -> bool:
    return getattr(getattr(model, "config", None), "model_type", None) in ENCODERS


def layers_behind_attention(model: nn.Module) -> set[nn.Module]:
    """The modules that work row by row on what only the head reads: the last block's but for keys and values, the head.

    Of a block whose projections of keys and values are not found, or that has convolutions, none.
    """
    base, block = getattr(model, "base_model", model), last_block(model)
    head = set() if base is model else set(model.modules()) - set(base.modules()) - {model}
    parts = dict(block.named_modules()) if block is not None else {}
    words = {word for path in parts for word in path.split(".")}
    names = {name for group in KEYS_AND_VALUES if group <= words for name in group}
    if not names or any(isinstance(part, CONVOLUTIONS) for part in parts.values()):
        return head
    attentions = [path.split(".")[:-1] for path in parts if path.split(".")[-1] in names]

    def is_row_by_row(path: list[str]) -> bool:
        depths = [len(attention) for attention in attentions if path[: len(attention)] == attention != path]
        return not names & set(path) and all(path[depth] in QUERIES_AND_OUTPUTS for depth in depths)

    return head | {part for path, part in parts.items() if is_row_by_row(path.split("."))}
