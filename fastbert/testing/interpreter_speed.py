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
    # It adds and multiplies integers a second time, in int64, for an assertion that is made only where `debug` is set.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)


def _replace_the_language_once_a_launch(interpreter: Any) -> None:
    """Every call of a device function would look through triton.language for what the launch has replaced already."""
    core, semantic, replace_all = interpreter.tl.core, interpreter.interpreter_semantic, interpreter._patch_lang
    scopes: list[Any] = []
    done: set[str] = set()

    def with_semantic(member: Callable) -> Callable:
        return lambda *args, _semantic=None, **kwargs: member(*args, **kwargs, _semantic=semantic)

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

    def unwrap(value: Any) -> Any:
        if isinstance(value, core.constexpr):
            return value.value
        return unwrap_any(value) if isinstance(value, (list, tuple, core.tuple)) else value

    @cache
    def of_sizes(*sizes: int) -> tuple[Any, int, Any, Any]:
        """What a type and a tensor of this shape hold."""
        model = object.__new__(core.block_type)
        spell_out(model, core.int1, list(sizes))
        wrapped = core.tuple([core.constexpr(size) for size in sizes])
        return model.shape, model.numel, wrapped, core.constexpr(model.numel)

    @cache
    def spelled(element: str, *sizes: int) -> str:
        return f"<{of_sizes(*sizes)[0]}, {element}>"

    def make_type(self, element_ty: Any, shape: Any) -> None:
        sizes = [unwrap(size) for size in shape]
        self.element_ty = element_ty
        self.shape, self.numel, *self.of_tensor = of_sizes(*sizes)
        self.name = spelled(element_ty.name, *sizes)

    of_scalar = (core.tuple([]), core.constexpr(1))

    def make_tensor(self, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.of_tensor if type.is_block() else of_scalar

    core._unwrap_if_constexpr = unwrap
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
