"""Arrays over raw memory for filling and checking: torch or CuPy on the device, else NumPy on copies."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kvferry.bench.gpu import driver

if TYPE_CHECKING:
    from numpy.typing import NDArray

WORD = 8
_STEP = 1 << 20


class CudaArray:
    """Device memory by its address, as the array interface describes it. Keeps the owner alive."""

    def __init__(self, addr: int, shape: tuple[int, ...], typestr: str, owner: object) -> None:
        self._owner = owner
        self.addr = addr
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": typestr,
            "data": (addr, False),
            "version": 3,
            "strides": None,
        }


class Math(Protocol):
    """The few operations that filling and checking need. Arrays are int64 words."""

    @property
    def name(self) -> str:
        """What does it."""

    def words(self, addr: int, nbytes: int, ordinal: int, /) -> Any:
        """Device memory as words; where NumPy does it a copy of them."""

    def index(self, ids: NDArray[np.int64], ordinal: int, /) -> Any:
        """Block ids as it indexes with them."""

    def order(self, array: Any, axes: tuple[int, ...], /) -> Any:
        """A view with its dimensions in another order."""

    def randomise(self, addr: int, nbytes: int, ordinal: int, seed: int, /) -> None:
        """Fills device memory with data that nothing can guess."""

    def settle(self, ordinal: int, /) -> None:
        """Waits for everything it enqueued."""


class Torch:
    """torch on the device."""

    def __init__(self) -> None:
        self._torch: Any = importlib.import_module("torch")
        self.name = f"torch {self._torch.__version__}"
        if not self._torch.cuda.is_available():
            raise ImportError("torch sees no GPU")

    def words(self, addr: int, nbytes: int, ordinal: int, /) -> Any:
        """The memory as words."""
        array = CudaArray(addr, (nbytes // WORD,), "<i8", None)
        return self._torch.as_tensor(array, device=f"cuda:{ordinal}")

    def index(self, ids: NDArray[np.int64], ordinal: int, /) -> Any:
        """Ids to index with."""
        return self._torch.as_tensor(ids, device=f"cuda:{ordinal}")

    def order(self, array: Any, axes: tuple[int, ...], /) -> Any:
        """Its dimensions in another order."""
        return array.permute(axes)

    def randomise(self, addr: int, nbytes: int, ordinal: int, seed: int, /) -> None:
        """Fills it with random words."""
        generator = self._torch.Generator(device=f"cuda:{ordinal}").manual_seed(seed)
        self.words(addr, nbytes, ordinal).random_(generator=generator)

    def settle(self, ordinal: int, /) -> None:
        """Waits for its own work."""
        self._torch.cuda.synchronize(ordinal)


class Cupy:
    """CuPy on the device."""

    def __init__(self) -> None:
        self._cupy: Any = importlib.import_module("cupy")
        self.name = f"cupy {self._cupy.__version__}"

    def words(self, addr: int, nbytes: int, ordinal: int, /) -> Any:
        """The memory as words."""
        with self._cupy.cuda.Device(ordinal):
            return self._cupy.asarray(CudaArray(addr, (nbytes // WORD,), "<i8", None))

    def index(self, ids: NDArray[np.int64], ordinal: int, /) -> Any:
        """Ids to index with."""
        with self._cupy.cuda.Device(ordinal):
            return self._cupy.asarray(ids)

    def order(self, array: Any, axes: tuple[int, ...], /) -> Any:
        """Its dimensions in another order."""
        return array.transpose(axes)

    def randomise(self, addr: int, nbytes: int, ordinal: int, seed: int, /) -> None:
        """Fills it with random words."""
        with self._cupy.cuda.Device(ordinal):
            words, rng = self.words(addr, nbytes, ordinal), self._cupy.random.default_rng(seed)
            for start in range(0, len(words), _STEP):
                part = words[start : start + _STEP]
                part[...] = rng.integers(-(1 << 62), 1 << 62, len(part), dtype=np.int64)

    def settle(self, ordinal: int, /) -> None:
        """Waits for its own work."""
        with self._cupy.cuda.Device(ordinal):
            self._cupy.cuda.runtime.deviceSynchronize()


class Numpy:
    """NumPy on copies in host memory: slow, but needs nothing."""

    name = "numpy on copies"

    def words(self, addr: int, nbytes: int, ordinal: int, /) -> Any:
        """The memory as words."""
        out = np.empty(nbytes // WORD, np.int64)
        driver.use(ordinal)
        driver.call("cuMemcpyDtoH_v2", out.ctypes.data, addr, nbytes)
        return out

    def index(self, ids: NDArray[np.int64], ordinal: int, /) -> Any:  # noqa: ARG002 - the others need it
        """Ids to index with."""
        return ids

    def order(self, array: Any, axes: tuple[int, ...], /) -> Any:
        """Its dimensions in another order."""
        return array.transpose(axes)

    def randomise(self, addr: int, nbytes: int, ordinal: int, seed: int, /) -> None:
        """Fills it with random words."""
        rng = np.random.default_rng(seed)
        driver.use(ordinal)
        for start in range(0, nbytes, _STEP * WORD):
            part = rng.integers(0, 1 << 64, min(_STEP, (nbytes - start) // WORD), dtype=np.uint64)
            driver.call("cuMemcpyHtoD_v2", addr + start, part.ctypes.data, part.nbytes)

    def settle(self, ordinal: int, /) -> None:
        """Waits for its own work."""


def choose() -> tuple[Math, list[str]]:
    """The best there is, and why the better ones are not."""
    notes: list[str] = []
    for name, make in (("torch", Torch), ("cupy", Cupy)):
        try:
            return make(), notes
        except Exception as error:  # noqa: BLE001 - a broken optional library is a missing one
            notes.append(
                f"no {name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            )
    return Numpy(), notes
