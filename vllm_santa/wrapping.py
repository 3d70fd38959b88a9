"""How methods of vLLM are wrapped at run time."""

from collections.abc import Callable
from functools import wraps
from inspect import getattr_static
from typing import Any


def wrap_once(owner: type, name: str, around: Callable[..., Any]) -> None:
    """Have `around(original, ...)` called in place of a method or class method, own or inherited, with what it is called with, self or
    cls included. A second time changes nothing, so every process may do it as often as vLLM loads the plugin."""
    found = getattr_static(owner, name)
    original = getattr(found, "__func__", found)
    if getattr(original, "wrapped_by_santa", False):
        return

    @wraps(original)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        return around(original, *arguments, **named)

    wrapped.wrapped_by_santa = True  # type: ignore[attr-defined]
    setattr(owner, name, classmethod(wrapped) if isinstance(found, classmethod) else wrapped)
