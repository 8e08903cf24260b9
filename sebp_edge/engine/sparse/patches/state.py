"""Notices changes of a model that the results of trials depend on, cheaply enough for every call.

A trial shows, for example, that a loss without logits equals the model's own, or that some rows carry no gradient. That
holds for the model as it was:

    modules      which there are, where, and of which class
    forwards     those that were replaced on a module, and those of the classes
    hooks        on every module, and those that torch runs for all modules
    settings     numbers, flags and names that modules and configs hold, such as `is_causal`, a window or eps
    functions    the loss, and the attention and its mask that the config names
    ends         shape, dtype and device of the weights of embedding and head, whether they are tied, and whether there
                 is a bias

The values of weights do not matter. What may differ between calls (the mode, autocast, the keywords, which parameters
are trained) is compared by the caller.

A 3B model with adapters has 2,300 modules; half of them only hold others and are never called. The others have 4,600
tables of hooks, nearly all of them empty. So each comparison is a few calls into C, on lists that are made once.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain, repeat
from operator import itemgetter

from torch import nn
from torch.nn.modules import module as all_modules

from sebp_edge.engine.models.architecture import attention_functions, configs_of
from sebp_edge.engine.models.lora import adapted_layers
from sebp_edge.engine.models.sharding import is_sharded
from sebp_edge.engine.sparse.patches.patch import Patch, foreign_forward, own_attention
from sebp_edge.errors import SparsityError

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")

_SETTING = int | float | str
# Whose hooks are a part of how a model computes: `fully_shard` gathers weights by them, transformers records outputs.
_STREAMING = "sebp_edge.engine.models.streaming"
_OWN_HOOKS = ("torch.distributed.fsdp", "transformers", _STREAMING)
# Returns whether something differs from what it was.
_Comparison = Callable[[], bool]


class ModelState:
    """What trials of a model depend on, as it is when this is made."""

    def __init__(self, model: nn.Module, inner: nn.Module):
        modules = list(model.modules())
        adapted = adapted_layers(model)
        # `plain_projection` compares what is inside of these at every call, but for hooks and forwards.
        inside = {part for layer in adapted for part in layer.modules()}
        outer = [module for module in modules if module not in inside]
        called = [module for module in modules if type(module).forward is not nn.Module.forward]
        classes = list(dict.fromkeys(map(type, modules)))
        ends = list(filter(None, ends_of(inner)))
        self._comparisons: dict[str, _Comparison] = {
            "modules": _compare_tables([vars(module)["_modules"] for module in outer]),
            "classes": _compare(lambda: list(map(type, outer))),
            "replaced forwards": _compare_forwards(called),
            "forwards of classes": _compare(lambda: [getattr(each, "forward", None) for each in classes]),
            "hooks": _compare_hooks(called),
            "settings": _compare_settings(outer),
            "config": _compare_configs(outer),
            "settings of the config": _compare_tables([vars(config) for config in configs_of(model)]),
            "loss function": _compare(lambda: getattr(inner, "loss_function", None)),
            "attention function": _compare(lambda: attention_functions(own_attention(inner))),
            "embedding or head": _compare(lambda: _facts_of_ends(ends)),
        }

    def find_change(self) -> str | None:
        """Returns what has changed since, in words; None if nothing has."""
        return next((name for name, has_changed in self._comparisons.items() if has_changed()), None)


class FollowingPatch(Patch):
    """A handle that attaches itself again if the model changes, so that every part is tried again."""

    # When its parts were last tried, which `_attach` sets; None if that failed later.
    state: ModelState | None
    _attach: Callable[[], None]

    def __init__(self):
        super().__init__()
        self._untried_change: str | None = None

    def remove(self) -> None:
        self._untried_change = None
        super().remove()

    def _follow_changes(self) -> None:
        change = self._untried_change or (self.state.find_change() if self._undo else None)
        if change is None:
            return
        try:
            self.remove()
            self._attach()
        except BaseException as error:
            # The next batch tries again, and graphs of the earlier state are refused.
            self._untried_change, self.state = change, None
            if not isinstance(error, SparsityError):
                raise
            raise SparsityError(f"The model has changed ({change}) and cannot be hoisted any more: {error}") from error


def describe(model: nn.Module, inner: nn.Module) -> list | None:
    """Returns what a trial of a model depends on, besides the values of its weights; equal for equal copies.

    None if it has hooks, replaced forwards or variants of LoRA, which may do anything.
    """
    named = dict(model.named_modules())
    modules, classes, adapted = list(named.values()), dict.fromkeys(map(type, named.values())), adapted_layers(model)
    found = (hook for module in modules for name in HOOKS for hook in vars(module)[name].values())
    hooks = (hook for hook in found if _module_of(hook) != _STREAMING)
    of_all = (getattr(all_modules, "_global" + name) for name in HOOKS)
    if any(chain(hooks, of_all, map(foreign_forward, modules), (layer.lora_variant for layer in adapted))):
        return None
    plain = [[(name, _copy(value)) for name, value in _public_attributes(one) if _is_plain(value)] for one in modules]
    tensors = chain(model.named_parameters(), model.named_buffers())
    return [
        [*zip(named, map(type, modules), strict=True)],
        [each.forward for each in classes],
        plain,
        [(layer.disable_adapters, list(layer.active_adapters)) for layer in adapted],
        [_copy(vars(config)) for config in configs_of(model)],
        [getattr(inner, "loss_function", None), *attention_functions(own_attention(inner))],
        [(name, each.shape, each.dtype, each.device, each.requires_grad) for name, each in tensors],
    ]


def are_equal(one: object, other: object) -> bool:
    """Whether tables are equal; not if they hold tensors or arrays, unless these are the same."""
    try:
        return one == other
    except (RuntimeError, ValueError):
        return False


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks other than those of FSDP, transformers and streaming, or all modules have."""
    hooks = (hook for name in HOOKS for hook in getattr(module, name).values())
    return not all(map(_is_own, hooks)) or any(getattr(all_modules, "_global" + name) for name in HOOKS)


@contextmanager
def without_hooks(model: nn.Module) -> Iterator[None]:
    """Context in which nobody sees a trial: only hooks that `_OWN_HOOKS` names run, and those registered in it."""
    tables = [vars(module)[name] for module in model.modules() for name in HOOKS]
    tables += [getattr(all_modules, "_global" + name) for name in HOOKS]
    kept = [(table, dict(table)) for table in tables if table]
    for table, hooks in kept:
        _refill(table, {number: hook for number, hook in hooks.items() if _is_own(hook)})
    try:
        yield
    finally:
        for table, hooks in kept:
            _refill(table, hooks | table)


def _is_own(hook: Callable) -> bool:
    return _module_of(hook).startswith(_OWN_HOOKS)


def _module_of(hook: Callable) -> str:
    return getattr(hook, "__module__", None) or ""


def _refill(table: dict, hooks: dict) -> None:
    table.clear()
    table.update(hooks)


def _compare(read: Callable[[], object]) -> _Comparison:
    before = read()
    return lambda: read() != before


def _compare_tables(tables: list[dict]) -> _Comparison:
    """Compares the keys and values of tables, most of which may be empty."""
    filled, empty = [table for table in tables if table], [table for table in tables if not table]
    before = [_copy(table) for table in filled]

    def has_changed() -> bool:
        return any(empty) or not are_equal(filled, before)

    return has_changed


def _compare_forwards(modules: list[nn.Module]) -> _Comparison:
    attributes = list(map(vars, modules))

    def read() -> list:
        return list(map(dict.get, attributes, repeat("forward")))

    before, foreign = read(), list(map(foreign_forward, modules))

    def has_changed() -> bool:
        nonlocal before
        now = read()
        if now == before:
            return False
        before = now
        # Patches are exact, so they may come and go.
        return list(map(foreign_forward, modules)) != foreign

    return has_changed


def _compare_hooks(modules: list[nn.Module]) -> _Comparison:
    attributes, read_tables = list(map(vars, modules)), itemgetter(*HOOKS)
    of_all = [getattr(all_modules, "_global" + name) for name in HOOKS]
    # Tables too are read each time, since people clear hooks by setting new ones. Torch never gives two hooks the same
    # number, whatever they are registered on.
    return _compare(
        lambda: list(map(list, filter(None, chain(of_all, chain.from_iterable(map(read_tables, attributes))))))
    )


def _compare_configs(modules: list[nn.Module]) -> _Comparison:
    attributes = [vars(module) for module in modules if "config" in vars(module)]
    # Not by value: an equal copy may be changed later.
    return _compare(lambda: list(map(id, map(dict.get, attributes, repeat("config")))))


def _compare_settings(modules: list[nn.Module]) -> _Comparison:
    # Those that decide what a module computes; models keep other things there too, such as a recurrent state.
    found = [(module, name, value) for module in modules for name, value in _public_attributes(module)]
    names: dict[nn.Module, list[str]] = defaultdict(list)
    for module, name, value in found:
        if isinstance(value, _SETTING):
            names[module].append(name)
    tables, readers = list(map(vars, names)), [itemgetter(*each) for each in names.values()]
    unset = [(vars(module), name) for module, name, value in found if value is None]

    def read() -> list:
        # Attention that has no `is_causal` is causal.
        return [
            list(map(dict.get, tables, repeat("is_causal"))),
            [isinstance(attributes.get(name), _SETTING) for attributes, name in unset],
            list(map(_read, readers, tables)),
        ]

    before = read()
    return lambda: read() != before


def _read(reader: Callable[[dict], object], table: dict) -> object:
    try:
        return reader(table)
    except KeyError:
        return None


def _public_attributes(module: nn.Module) -> Iterator[tuple[str, object]]:
    # Tables of positions, which have buffers only, write down how far they reach.
    has_only_buffers = module._buffers and not (module._parameters or module._modules)
    if not (has_only_buffers or isinstance(module, nn.Linear)):
        for name, value in vars(module).items():
            if name != "training" and not name.startswith("_"):
                yield name, value


def _is_plain(value: object) -> bool:
    return isinstance(value, _SETTING | dict | list | tuple | None)


def _copy(value: object) -> object:
    """Copies tables and lists; anything else is compared as it is."""
    if type(value) is dict:
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if type(value) is list else value


def ends_of(model: nn.Module) -> list[nn.Module | None]:
    """Returns a model's embedding and head; None for one that it does not give."""
    getters = (getattr(model, f"get_{end}_embeddings", lambda: None) for end in ("input", "output"))
    return [end if isinstance(end, nn.Module) else None for end in (get() for get in getters)]


def _facts_of_ends(ends: list[nn.Module]) -> tuple:
    weights = [vars(end)["_parameters"].get("weight") for end in ends]
    are_tied = len(ends) > 1 and weights[0] is weights[1]
    return are_tied, *map(_facts_of_end, ends)


def _facts_of_end(end: nn.Module) -> tuple:
    # Not as attributes: in training, spectral norm changes its vectors whenever a weight is read.
    parameters = vars(end)["_parameters"]
    weight, has_bias = parameters.get("weight"), parameters.get("bias") is not None
    if weight is None:
        return (has_bias,)
    # Within calls, FSDP gathers weights in another dtype.
    return has_bias, weight.shape, *(() if is_sharded(end) else (weight.dtype, weight.device))
