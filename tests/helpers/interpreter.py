"""Makes Triton's interpreter do once in a process what it otherwise does in each operation."""

import functools
import math
from functools import wraps

from triton.language import core, semantic
from triton.runtime import interpreter


def work_once():
    """Saves two thirds of the interpreter's time. In a process that interprets kernels, none is compiled."""
    _convert_numbers()
    _stay_patched()
    _remember_types()
    _remember_shapes()
    # Looks for overflows with six blocks of int64, and asserts nothing then: that takes the option `debug`.
    semantic.TritonSemantic.binary_op_sanitize_overflow_impl = lambda *_: None


def _convert_numbers():
    """Makes a block of one element a number as Triton 3.7 does; NumPy 2.4 refuses what Triton 3.6 does."""
    patch = interpreter._patch_lang_tensor

    @wraps(patch)
    def patch_tensor(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda block: block.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor


def _stay_patched():
    """Patches Triton's language once for each module with kernels, and leaves it patched."""
    patch, patched = interpreter._patch_lang, set()
    scope = interpreter._LangPatchScope()

    @wraps(patch)
    def patch_once(function):
        module = id(function.__globals__)
        if module not in patched:
            patched.add(module)
            patch(function)
        return scope

    interpreter._patch_lang = patch_once


def _remember_types():
    """Makes the type of a block, and numpy's type for it, once for each element type and shape."""
    make, made = core.block_type.__init__, {}

    @wraps(make)
    def make_once(block, element_ty, shape):
        key = element_ty.name, *map(int, shape)
        if key not in made:
            make(block, element_ty, shape)
            made[key] = vars(block)
        vars(block).update(made[key])

    look_up, found = interpreter._get_np_dtype, {}

    @wraps(look_up)
    def look_up_once(kind):
        if kind.name not in found:
            found[kind.name] = look_up(kind)
        return found[kind.name]

    core.block_type.__init__, interpreter._get_np_dtype = make_once, look_up_once


def _remember_shapes():
    """Makes what blocks of a shape have in common once, and broadcasts only blocks whose shapes differ."""
    make, broadcast = core.tensor.__init__, semantic.TritonSemantic.broadcast_impl_value

    @functools.cache
    def common(*shape):
        return core.tuple([core.constexpr(size) for size in shape]), core.constexpr(math.prod(shape))

    @wraps(make)
    def make_once(tensor, handle, type):
        tensor.handle, tensor.type, tensor.dtype = handle, type, type.scalar
        tensor.shape, tensor.numel = common(*type.shape.values) if type.is_block() else common()

    @wraps(broadcast)
    def broadcast_once(self, lhs, rhs):
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    core.tensor.__init__, semantic.TritonSemantic.broadcast_impl_value = make_once, broadcast_once
