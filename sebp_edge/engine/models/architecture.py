"""Finds what the sparse backward pass needs to know of a transformers model: linear layers, blocks, rows read.

Nothing here changes a model.
"""

from collections.abc import Callable, Iterable

from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.activations import ACT2CLS
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.pytorch_utils import Conv1D

from sebp_edge.engine.models.sharding import own_class

# The activations of torch and transformers that are known to work element by element.
ACTIVATIONS = {nn.GELU} | {one[0] if isinstance(one, tuple) else one for one in ACT2CLS.values()}
# Names of the projections of keys and values in model families; some of these compute the queries too.
KEYS_AND_VALUES = ({"k_proj", "v_proj"}, {"qkv_proj"}, {"c_attn"}, {"key", "value"}, {"k_lin", "v_lin"})
# Other projections of an attention module that work row by row. Anything else, such as the forget gate of a recurrent
# state, may pass one row's gradient to another.
QUERIES_AND_OUTPUTS = {"q_proj", "query", "q_lin", "o_proj", "out_proj", "out_lin", "c_proj", "dense"}
# Torch's own modules that work row by row, besides norms of rows and activations.
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_OF_ROWS = (nn.Linear, nn.Embedding, nn.Identity, nn.modules.dropout._DropoutNd, *_CONTAINERS, *ACTIVATIONS)
# Numbers in an embedding from which it is a lookup table; they take 64 MiB in 16 bits.
LARGE_TABLE = 2**25
# Encoders whose sequence classifier reads the first token only, and whose token heads read each token by itself.
ENCODERS = ("bert", "roberta", "distilbert")


def is_linear(layer: nn.Module) -> bool:
    """Whether a layer computes exactly Y = X Wᵀ + b: torch's Linear, or GPT-2's Conv1D, which stores Wᵀ."""
    return own_class(layer) in (nn.Linear, Conv1D)


def row_mixer(modules: Iterable[nn.Module]) -> str | None:
    """Returns the class name of a module of torch that may mix rows, or None if there is none.

    These are convolutions, recurrences, pooling, norms over more than a row, and everything else that is not known to
    work row by row. What other classes do is not known here.
    """
    return next((own_class(module).__name__ for module in modules if _may_mix_rows(module)), None)


def _may_mix_rows(module: nn.Module) -> bool:
    kinds = (kind for kind in type(module).__mro__ if kind is not nn.Module)
    is_of_torch = any(kind.__module__.startswith("torch.nn.modules.") for kind in kinds)
    return is_of_torch and not (isinstance(module, _OF_ROWS) or is_norm(module))


def is_norm(module: nn.Module) -> bool:
    """Whether a module normalises each row by itself, over the last dimension."""
    shape = getattr(module, "normalized_shape", 1)
    has_rows = isinstance(shape, int) or len(shape) == 1
    return has_rows and (isinstance(module, nn.LayerNorm) or type(module).__name__.endswith("RMSNorm"))


def is_activation(module: nn.Module) -> bool:
    """Whether a module is an element-wise activation that returns a new tensor."""
    # An activation with parameters may have one for each row.
    is_known = own_class(module) in ACTIVATIONS and not any(True for _ in module.parameters())
    return is_known and not getattr(module, "inplace", False)


def weight_MK(layer: nn.Module) -> Tensor:
    """Returns a linear layer's weight as [outputs, inputs]; for GPT-2's Conv1D a view of its [inputs, outputs]."""
    return layer.weight.T if isinstance(layer, Conv1D) else layer.weight


def last_block(model: nn.Module) -> nn.Module | None:
    """Returns the last block between embedding and head; None if not found, or if it shares modules with others."""
    *earlier, last = blocks_of(model) or [None]
    if last is None or {module for block in earlier for module in block.modules()} & set(last.modules()):
        return None
    return last


def blocks_of(model: nn.Module, *, guess: bool = False) -> list[nn.Module]:
    """Returns the blocks between embedding and head, from the first to the last; empty if they are not found.

    A guess is then the module list with the most parameters, or without any list the base model as one block.
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
    """Counts a module's parameters, shared ones once."""
    return sum(parameter.numel() for parameter in module.parameters())


def lookup_tables(model: PreTrainedModel) -> list[nn.Parameter]:
    """Returns the weights of a decoder's large embeddings, except the input's and those that the head shares.

    Only rows of them are read, and an adapter trains none of them.
    """
    ends = (model.get_input_embeddings().weight, model.get_output_embeddings().weight)
    weights = dict.fromkeys(part.weight for part in model.modules() if isinstance(part, nn.Embedding))
    return [each for each in weights if each.numel() >= LARGE_TABLE and all(each is not end for end in ends)]


def per_layer(config: PretrainedConfig) -> list[PretrainedConfig]:
    """Returns the configs of a decoder's layers if these differ, as Gemma 4's do, else one that is true of all."""
    return config.per_layer_config if getattr(config, "per_layer_attributes", None) else [config]


def head_sizes_of(config: PretrainedConfig) -> set[int]:
    """Returns the sizes of the attention heads of a decoder's layers from its config; empty if it has no attention."""
    layers = per_layer(config)
    heads = [getattr(layer, "num_attention_heads", None) for layer in layers]
    pairs = zip(layers, heads, strict=True)
    return {getattr(layer, "head_dim", None) or layer.hidden_size // number for layer, number in pairs if number}


def head_size_of(config: PretrainedConfig) -> int:
    """Returns the size of one attention head from a decoder's config, the largest if layers differ; 0 without any."""
    return max(head_sizes_of(config), default=0)


def first_module_after_attention(block: nn.Module | None) -> nn.Module | None:
    """Returns the first module after the attention of an encoder's block; from there on, all modules work row by row.

    That is the output projection and its norm in BERT and RoBERTa, and the norm in DistilBERT. None if unknown.
    """
    attention = getattr(block, "attention", None)
    return getattr(attention, "output", None) or getattr(block, "sa_layer_norm", None)


def configs_of(model: nn.Module) -> list[PretrainedConfig]:
    """Returns the configs that a model's modules hold, and the configs inside of these."""
    found: dict[int, PretrainedConfig] = {}
    waiting = [vars(module).get("config") for module in model.modules()]
    while waiting:
        config = waiting.pop()
        if isinstance(config, PretrainedConfig) and id(config) not in found:
            found[id(config)] = config
            waiting += vars(config).values()
    return list(found.values())


def attention_functions(name: str | None) -> tuple[Callable | None, Callable | None]:
    """Returns the functions that are registered for attention of this name and its mask; None if there are none."""
    return ALL_ATTENTION_FUNCTIONS.get(name), ALL_MASK_ATTENTION_FUNCTIONS.get(name)


def has_library_loss(model: nn.Module) -> bool:
    """Whether a model's loss function is transformers' own one of causal decoders."""
    return getattr(model, "loss_function", None) is ForCausalLMLoss


def longest_sequence(model: nn.Module) -> int | None:
    """Returns the most tokens that a model has positions for; None if it has no limit."""
    limit = getattr(model.config, "max_position_embeddings", None)
    embeddings = getattr(model.base_model, "embeddings", None)
    # RoBERTa numbers its positions from the one after the padding token's.
    counts_padding = hasattr(embeddings, "create_position_ids_from_input_ids")
    return limit - embeddings.padding_idx - 1 if counts_padding else limit


def is_causal_by_name(model: nn.Module) -> bool:
    """Whether a model is causal by its class name and its config: no logit row depends on later rows.

    Models are excluded whose config allows bidirectional attention, or adds a router's loss over all rows.
    """
    if not (isinstance(model, PreTrainedModel) and type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))):
        return False
    config = model.config.get_text_config()
    # Image tokens may attend to each other in both directions; a router's loss reads every row, whatever its label.
    return not any(getattr(config, name, False) for name in ("use_bidirectional_attention", "output_router_logits"))


def reads_first_token(model: nn.Module) -> bool:
    """Whether a model is an encoder whose head reads only the first token of each sequence."""
    return _is_encoder(model) and type(model).__name__.endswith("ForSequenceClassification")


def reads_labelled_tokens(model: nn.Module) -> bool:
    """Whether a model is an encoder whose loss reads only the outputs of labelled tokens."""
    return _is_encoder(model) and type(model).__name__.endswith(("ForTokenClassification", "ForMaskedLM"))


def _is_encoder(model: nn.Module) -> bool:
    return getattr(getattr(model, "config", None), "model_type", None) in ENCODERS


def layers_after_attention(model: nn.Module) -> set[nn.Module]:
    """Returns the modules that work row by row and feed only the head.

    These are the head's own, and the last block's except those of keys and values. A block whose projections of keys
    and values are not found, or that has modules that may mix rows, contributes none.
    """
    base, block = getattr(model, "base_model", model), last_block(model)
    head = set() if base is model else set(model.modules()) - set(base.modules()) - {model}
    parts = dict(block.named_modules()) if block is not None else {}
    words = {word for path in parts for word in path.split(".")}
    names = {name for group in KEYS_AND_VALUES if group <= words for name in group}
    if not names or row_mixer(parts.values()):
        return head
    attentions = [path.split(".")[:-1] for path in parts if path.split(".")[-1] in names]

    def is_row_by_row(path: list[str]) -> bool:
        depths = [len(attention) for attention in attentions if path[: len(attention)] == attention != path]
        return not names & set(path) and all(path[depth] in QUERIES_AND_OUTPUTS for depth in depths)

    return head | {part for path, part in parts.items() if is_row_by_row(path.split("."))}
