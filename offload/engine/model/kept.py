"""What a layer keeps between two calls outside its tensors: numbers, flags and lists of them.

A layer that counts its calls in an attribute, in a global or in a variable of a closure may compute
something else each time. Layer by layer it is called more often, and in another order. So what it
keeps is read before and after a call, where Python code can keep it: attributes of its modules, and
globals and closures that their `forward` and hooks name. What a hook that can return nothing keeps
for itself is its own affair: it only records.
"""

import dis
from collections.abc import Iterator, Mapping, Set
from typing import Any

from torch import nn

_OWN_TO_TORCH = frozenset(vars(nn.Module()))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_VALUES = (bool, int, float, complex, str)
_MAX_ITEMS = 256  # of a container that is looked into
_MAX_DEPTH = 4  # of containers, and of functions that closures hold


def kept_by(layer: nn.Module) -> dict[str, object]:
    """Return all that is found, by name."""
    found: dict[str, object] = {}
    seen: set[int] = set()
    for path, module in layer.named_modules():
        place = f"{path}." if path else ""
        for name, value in vars(module).items():
            if name not in _OWN_TO_TORCH:
                _note(f"{place}{name}", value, found, seen, 0)
        for hooks in _HOOKS:
            for function in vars(module).get(hooks, {}).values():
                if not _returns_nothing(function):
                    _note(f"{place}{hooks}", function, found, seen, 0)
        _note(f"{place}forward", type(module).forward, found, seen, 0)
    return found


def changed_in(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """Return the names of what is not as it was before."""
    names = [*before, *(name for name in after if name not in before)]
    return [name for name in names if before.get(name) != after.get(name)]


def _note(name: str, value: Any, found: dict[str, object], seen: set[int], depth: int) -> None:
    """Note a value if it is one, and look into it if it holds others."""
    if isinstance(value, _VALUES):
        found[name] = repr(value)  # not a number equals itself
        return
    if id(value) in seen or depth > _MAX_DEPTH:
        return
    if isinstance(value, Mapping | list | tuple | Set):
        seen.add(id(value))
        found[f"{name} (length)"] = len(value)
        for key, part in _items(value):
            _note(f"{name}[{key!r}]", part, found, seen, depth + 1)
        return
    function = getattr(value, "__func__", value)
    code = getattr(function, "__code__", None)
    if code is None or id(function) in seen:
        return
    seen.add(id(function))
    cells = zip(code.co_freevars, function.__closure__ or (), strict=False)
    for variable, cell in cells:
        _note(f"{variable} (in {name})", _content(cell), found, seen, depth + 1)
    for variable in code.co_names:
        held = function.__globals__.get(variable)
        if not callable(held):
            _note(f"{variable} (in {name})", held, found, seen, depth + 1)


def _items(value: Any) -> Iterator[tuple[object, object]]:
    if len(value) > _MAX_ITEMS or isinstance(value, Set):
        return
    pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
    yield from ((key, part) for key, part in pairs if isinstance(key, _VALUES))


def _returns_nothing(function: Any) -> bool:
    """Tell whether each way through a function ends in `return None`."""
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    steps = list(dis.get_instructions(code)) if code else []
    ends = [i for i, step in enumerate(steps) if step.opname.startswith("RETURN_")]
    return bool(ends) and all(_is_return_none(steps[i - 1], steps[i]) for i in ends)


def _is_return_none(before: dis.Instruction, step: dis.Instruction) -> bool:
    if step.opname == "RETURN_CONST":
        return step.argval is None
    is_none = before.opname == "LOAD_CONST" and before.argval is None
    return step.opname == "RETURN_VALUE" and is_none and not step.is_jump_target


def _content(cell: Any) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not yet assigned
        return None
