"""Communicators by number: what a compiled graph keeps of them."""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING

import kvferry as kf
from kvferry._core import communicator

if TYPE_CHECKING:
    from typing import TypeAlias

    from kvferry.torch._distributed import Distributed

    Communicator: TypeAlias = kf.All2All | Distributed
else:
    Communicator = object

# All2All counts from 1 up; these count down.
_numbers = itertools.count(-1, -1)
_distributed: weakref.WeakValueDictionary[int, Distributed] = weakref.WeakValueDictionary()


def register(one: Distributed) -> int:
    """A number for it, which no other has."""
    number = next(_numbers)
    _distributed[number] = one
    return number


def is_communicator(one: object) -> bool:
    return isinstance(one, kf.All2All) or any(one is other for other in _distributed.values())


def find(number: int) -> Communicator:
    """The communicator with a number; ClosedError if it is gone."""
    if number > 0:
        return communicator(number)
    try:
        return _distributed[number]
    except KeyError:
        raise kf.ClosedError("the communicator is gone") from None
