"""Arguments of the operators, refused by name. Of what torch's dispatcher refuses no rank would hear."""

from __future__ import annotations

import operator
from typing import Any

import torch

import kvferry as kf
from kvferry.torch._registry import is_communicator

_MOST = 2**63 - 1


def check_communicator(comm: Any) -> None:
    if not torch.compiler.is_compiling() and not is_communicator(comm):
        raise TypeError(f"comm must be a kvferry.All2All or a Distributed, got {type(comm).__name__}")


def check_layout(layout: Any) -> None:
    if not isinstance(layout, str):
        raise TypeError(f"layout must be a string, got {type(layout).__name__}")
    if layout not in ("BNHD", "BHND"):
        raise kf.OptionError(f'layout must be "BNHD" or "BHND", got {layout!r}')


def check_axis(axis: Any) -> None:
    if not isinstance(axis, str):
        raise TypeError(f"axis must be a string, got {type(axis).__name__}")
    if axis not in ("tokens", "heads"):
        raise kf.OptionError(f'axis must be "tokens" or "heads", got {axis!r}')


def no_others(operation: str, unknown: dict[str, Any]) -> None:
    """What Python says of keywords that a function does not have."""
    for name in unknown:
        method = "allgather" if operation.startswith("allgather") else operation
        raise TypeError(f"{method}() got an unexpected keyword argument '{name}'")


def is_number(value: Any) -> bool:
    """Whether it is an integer, of NumPy or torch too."""
    if isinstance(value, (int, list, tuple, range)):
        return isinstance(value, int)
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


def number(name: str, value: Any) -> int:
    """An integer that the operator can take."""
    if isinstance(value, bool) or not is_number(value):
        raise TypeError(f"{name} must be an integer, got {type(value).__name__}")
    found = value if isinstance(value, int) else operator.index(value)
    if found < 0 or found > _MOST:
        raise kf.OptionError(f"{name} must be a number from 0 to {_MOST}, got {found}")
    return found


def listed(name: str, value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return list(value)
    if isinstance(value, (str, bytes)) or not hasattr(value, "__iter__"):
        raise TypeError(f"{name} must be a list, got {type(value).__name__}")
    return list(value)


def numbers(name: str, value: Any) -> list[int]:
    return [number(name, each) for each in listed(name, value)]
