"""Triton 3.6's interpreter without the work that it repeats: the same numbers in less than half of the time.

An interpreted kernel is hundreds of thousands of small calls. Most of their time goes into facts that do not change:
which functions of the language are replaced, what the type of a shape is, which NumPy type belongs to which of Triton.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any


def quicken_triton_interpreter(interpreter: Any) -> None:
    """`interpreter` is the module triton.runtime.interpreter; call it once."""
    _replace_the_language_once_a_launch(interpreter)
    _make_a_shape_once(interpreter.tl.core)
    _make_the_table_of_types_once(interpreter)
    _take_what_is_alike_as_it_is(interpreter)
    # It adds and multiplies integers a second time, in int64, for an assertion that is made only where `debug` is set.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)


def _replace_the_language_once_a_launch(interpreter: Any) -> None:
    """Every call of a device function would look through triton.language for what the launch has replaced already."""
    core, semantic, replace_all = interpreter.tl.core, interpreter.interpreter_semantic, interpreter._patch_lang
    scopes: list[Any] = []
    done: set[str] = set()

    def with_semantic(member: Callable) -> Callable:
        inner = inspect.unwrap(member)  # what is around it looks whether there is a `_semantic`
        return lambda *args, _semantic=None, **kwargs: inner(*args, **kwargs, _semantic=semantic)

    @cache
    def replacements(package: Any) -> list[tuple[str, Callable]]:
        members = inspect.getmembers(package, core.is_builtin)
        return [(name, with_semantic(member)) for name, member in members]

    @cache
    def languages_of(fn: Callable) -> frozenset[str]:
        modules = (value for value in fn.__globals__.values() if inspect.ismodule(value))
        return frozenset(module.__name__ for module in modules if module in (interpreter.tl, core))

    def replace_builtins(package: Any, builder: Any, scope: Any) -> None:
        for name, replacement in replacements(package):
            scope.set_attr(package, name, replacement)

    class Scopes:
        def restore(self) -> None:
            while scopes:
                scopes.pop().restore()
            done.clear()

    def replace_once(fn: Callable) -> Scopes:
        if not languages_of(fn) <= done:
            done.update(languages_of(fn))
            scopes.append(replace_all(fn))
        return Scopes()

    interpreter._patch_builtin = replace_builtins
    interpreter._patch_lang = replace_once


def _make_a_shape_once(core: Any) -> None:
    """A type spells its shape out, and a tensor wraps each size of it: there are many tensors of few shapes."""
    spell_out, unwrap_any = core.block_type.__init__, core._unwrap_if_constexpr

    plain = {int, float, bool, type(None), core.tensor, core.dtype}

    def unwrap(value: Any) -> Any:
        if type(value) in plain:
            return value
        if isinstance(value, core.constexpr):
            return value.value
        return unwrap_any(value) if isinstance(value, (list, tuple, core.tuple)) else value

    @cache
    def of_sizes(*sizes: int) -> tuple[Any, ...]:
        """What a type and a tensor of this shape hold."""
        model = object.__new__(core.block_type)
        spell_out(model, core.int1, list(sizes))
        wrapped = core.tuple([core.constexpr(size) for size in sizes])
        return model.shape, model.numel, sizes, wrapped, core.constexpr(model.numel)

    @cache
    def spelled(element: str, *sizes: int) -> str:
        return f"<{of_sizes(*sizes)[0]}, {element}>"

    def make_type(self, element_ty: Any, shape: Any) -> None:
        sizes = [size if type(size) is int else unwrap(size) for size in shape]
        self.element_ty = element_ty
        self.shape, self.numel, self.sizes, *self.of_tensor = of_sizes(*sizes)
        self.name = spelled(element_ty.name, *sizes)

    of_scalar = (core.tuple([]), core.constexpr(1))

    def make_tensor(self, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.of_tensor if type.is_block() else of_scalar

    types: dict[tuple[str, tuple[int, ...]], Any] = {}

    def with_element_ty(self, element: Any) -> Any:
        if type(element) is not core.dtype:  # a pointer's name does not tell all of it
            return core.block_type(element, self.shape)
        key = element.name, self.sizes
        if key not in types:
            types[key] = core.block_type(element, self.shape)
        return types[key]

    core._unwrap_if_constexpr, core.block_type.with_element_ty = unwrap, with_element_ty
    core.block_type.__init__, core.tensor.__init__ = make_type, make_tensor


def _make_the_table_of_types_once(interpreter: Any) -> None:
    """Each load, store and conversion would make a dictionary of all types to look one up."""
    look_up, core = interpreter._get_np_dtype, interpreter.tl.core
    by_name: dict[str, Any] = {}

    def numpy_type(type: Any) -> Any:
        scalar = type.scalar
        name = "pointer" if isinstance(scalar, core.pointer_type) else scalar.name
        if name not in by_name:
            by_name[name] = look_up(type)
        return by_name[name]

    interpreter._get_np_dtype = numpy_type


def _take_what_is_alike_as_it_is(interpreter: Any) -> None:
    """Operands of one type and shape, and a number beside a block in fp32 or int32, need no look at the rules by which
    types and shapes become the same. And a handle's type is looked up, not asked for its width.
    """
    core, semantic = interpreter.tl.core, interpreter.TritonSemantic
    broadcast, make_alike = semantic.broadcast_impl_value, semantic.binary_op_type_checking_impl
    make_tensor = semantic.to_tensor
    halves = {"fp16", "bf16"}  # which are divided in fp32
    most: dict[str, int] = {}  # bytes of an element that a type may have, by its name

    @cache
    def common(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...] | None:
        """The shape that both become; None: Triton says what it makes of them."""
        is_usual = len(left) == len(right) and all(n == m or 1 in (n, m) for n, m in zip(left, right, strict=True))
        return tuple(max(pair) for pair in zip(left, right, strict=True)) if is_usual else None

    def spread(self, value: Any, sizes: tuple[int, ...]) -> Any:
        if value.type.sizes == sizes:
            return value
        handle = self.builder.create_broadcast(value.handle, sizes)
        return core.tensor(handle, core.block_type(value.dtype, sizes))

    def broadcast_where_needed(self, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if left.is_block() and right.is_block():
            if left.sizes == right.sizes:
                return lhs, rhs
            sizes = common(left.sizes, right.sizes)
            return broadcast(self, lhs, rhs) if sizes is None else (spread(self, lhs, sizes), spread(self, rhs, sizes))
        if left.is_block():
            right = left.with_element_ty(right)
            return lhs, core.tensor(self.builder.create_splat(right, rhs.handle), right)
        if right.is_block():
            left = right.with_element_ty(left)
            return core.tensor(self.builder.create_splat(left, lhs.handle), left), rhs
        return lhs, rhs

    def fits(number: Any, other: Any) -> bool:
        name, kind = other.dtype.name, type(number)
        return (name == "fp32" and kind in (int, float)) or (name == "int32" and kind is int and abs(number) < 2**31)

    def check(self, lhs: Any, rhs: Any, left_ptr=False, right_ptr=False, arithmetic=True, div_or_mod=False) -> Any:
        is_left, is_right = type(lhs) is core.tensor, type(rhs) is core.tensor
        if is_left and is_right:
            name = lhs.dtype.name
            if type(lhs.dtype) is core.dtype and rhs.dtype.name == name and not (div_or_mod and name in halves):
                return broadcast_where_needed(self, lhs, rhs)
            if left_ptr and lhs.dtype.is_ptr() and rhs.dtype.is_int():  # an offset
                return broadcast_where_needed(self, lhs, rhs)
        elif arithmetic and is_left and fits(rhs, lhs):
            return broadcast_where_needed(self, lhs, self.scalar_constant(rhs, lhs.dtype))
        elif arithmetic and is_right and fits(lhs, rhs):
            return broadcast_where_needed(self, self.scalar_constant(lhs, rhs.dtype), rhs)
        return make_alike(self, lhs, rhs, left_ptr, right_ptr, arithmetic, div_or_mod)

    def to_tensor(self, value: Any, check_type: bool = True) -> Any:
        return value if type(value) is core.tensor else make_tensor(self, value, check_type)

    def is_wide_enough(array: Any, type: Any) -> bool:
        if isinstance(type, core.pointer_type):
            return True
        if type.name not in most:
            most[type.name] = max(type.primitive_bitwidth, 8) // 8
        return array.itemsize <= most[type.name]

    interpreter._validate_np_data_size, semantic.to_tensor = is_wide_enough, to_tensor
    semantic.broadcast_impl_value, semantic.binary_op_type_checking_impl = broadcast_where_needed, check
