"""Arrays that are not kvferry's, to wrap."""

from __future__ import annotations

from typing import Any

import numpy as np

import kvferry as kf

AXES = "block page head dim"
wrap = kf.PhysicalLayout.from_tensors


def cache(dtype: Any = np.float16, shape: tuple[int, ...] = (7, 4, 6, 5)) -> Any:
    return np.zeros(shape, dtype)
