"""Native core of kvferry. Import `kvferry` instead."""

from collections.abc import Generator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias, TypedDict, final

_Order: TypeAlias = Literal["NHD", "HND", "universal"]
_Engine: TypeAlias = Literal["auto", "host", "batch", "kernel", "staged", "disk", "remote"]
_Strategy: TypeAlias = Literal["memcpy", "h2d", "d2h", "d2d", "p2p"]
# A sequence of integers or any one-dimensional integer buffer (array.array, NumPy, memoryview).
_Ids: TypeAlias = Any
# A name, a torch dtype or a NumPy dtype.
_Dtype: TypeAlias = Any

class _BuildInfo(TypedDict):
    version: str
    cuda_mode: str
    toolkit: str | None
    archs: list[str]
    profile: str

class _Device(TypedDict):
    ordinal: int
    name: str
    uuid: str
    compute_capability: tuple[int, int]
    sm_count: int
    total_memory: int
    pci_bus_id: str

class _Run(TypedDict):
    src_region: int
    src_offset: int
    dst_region: int
    dst_offset: int
    bytes: int

@final
class LayoutConfig:
    """Logical shape of a KV cache. Immutable, hashable, picklable."""

    def __new__(
        cls,
        *,
        num_blocks: int,
        num_layers: int,
        page_size: int,
        dtype: _Dtype,
        outer_dim: int | None = None,
        num_heads: int | None = None,
        head_dim: int | None = None,
        inner_dim: int | None = None,
        alignment: int | None = None,
        first_head: int | None = None,
        total_heads: int | None = None,
    ) -> Self: ...
    def replace(self, **changes: Any) -> LayoutConfig: ...
    def shard_heads(self, rank: int, world: int) -> LayoutConfig: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def outer_dim(self) -> int: ...
    @property
    def page_size(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def alignment(self) -> int: ...
    @property
    def first_head(self) -> int: ...
    @property
    def total_heads(self) -> int: ...
    @property
    def block_bytes(self) -> int: ...
    @property
    def chunk_bytes(self) -> int: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, Any]]: ...

@final
class Memory:
    """A kind of memory. Made by `system()`, `pinned()` and `device(ordinal)`."""

    @property
    def kind(self) -> str: ...
    @property
    def ordinal(self) -> int | None: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class Region:
    """A piece of a layout's memory. Keeps the layout alive; NumPy reads it without copying."""

    @property
    def addr(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def memory(self) -> Memory: ...
    @property
    def __array_interface__(self) -> dict[str, Any]: ...
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...

@final
class PhysicalLayout:
    """A layout bound to memory, owned or borrowed."""

    @staticmethod
    def fully_contiguous(config: LayoutConfig, memory: Memory, *, order: _Order = "NHD") -> PhysicalLayout: ...
    @staticmethod
    def layer_separate(
        config: LayoutConfig,
        memory: Memory,
        *,
        block_dim: Literal["block_first", "outer_first"] = "block_first",
        order: _Order = "NHD",
    ) -> PhysicalLayout: ...
    @staticmethod
    def split_kv(config: LayoutConfig, memory: Memory, *, order: _Order = "NHD") -> PhysicalLayout: ...
    @staticmethod
    def block_pool(config: LayoutConfig, memory: Memory, *, order: _Order = "NHD") -> PhysicalLayout: ...
    @staticmethod
    def from_tensors(
        tensors: Any | Sequence[Any] | Mapping[Any, Any],
        *,
        axes: str,
        config: LayoutConfig | None = None,
        dtype: _Dtype | None = None,
    ) -> PhysicalLayout: ...
    @property
    def config(self) -> LayoutConfig: ...
    @property
    def kind(self) -> str: ...
    @property
    def order(self) -> str | None: ...
    @property
    def axes(self) -> list[str]: ...
    @property
    def memory(self) -> Memory: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def num_regions(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def strides(self) -> dict[str, int]: ...
    def region(self, block: int, layer: int, outer: int = 0) -> Region: ...
    @property
    def regions(self) -> list[Region]: ...
    @property
    def region_axes(self) -> list[str]: ...
    def numpy(self) -> Any: ...
    def fill(self, value: int) -> None: ...
    def with_page_size(self, page_size: int) -> PhysicalLayout: ...

@final
class TransferResult:
    """What a finished transfer did."""

    @property
    def bytes(self) -> int: ...
    @property
    def blocks(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    @property
    def engine(self) -> str: ...
    @property
    def direction(self) -> str: ...
    @property
    def failed_blocks(self) -> list[int]: ...

@final
class Transfer:
    """Handle of a submitted transfer. Dropping it does not stop the transfer."""

    def done(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> TransferResult: ...
    def result(self) -> TransferResult: ...
    def __await__(self) -> Generator[Any, None, TransferResult]: ...

@final
class Notifier:
    """A descriptor to watch, and the keys of the jobs that have ended since the last look."""

    def __new__(cls) -> Self: ...
    def fileno(self) -> int: ...
    def watch(self, job: Transfer, key: int) -> None: ...
    def drain(self) -> list[int]: ...

@final
class TransferPlan:
    """A validated plan with its engine."""

    def explain(self) -> str: ...
    @property
    def blocks(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def elementary_runs(self) -> int: ...
    @property
    def num_runs(self) -> int: ...
    @property
    def run_bytes(self) -> tuple[int, int]: ...
    @property
    def transforms(self) -> bool: ...
    @property
    def engine(self) -> str: ...
    def runs(self, limit: int = 1000) -> list[_Run]: ...

@final
class Route:
    """A prepared pair of layouts: call it with two id lists."""

    def __call__(self, src_blocks: _Ids, dst_blocks: _Ids) -> Transfer: ...
    def plan(self, src_blocks: _Ids, dst_blocks: _Ids) -> TransferPlan: ...

@final
class TransferContext:
    """Plans and runs transfers."""

    def __new__(cls, device: int | Literal["cpu"] | None = None, *, threads: int | None = None) -> Self: ...
    def transfer(
        self,
        src: PhysicalLayout,
        dst: PhysicalLayout,
        src_blocks: _Ids,
        dst_blocks: _Ids,
        *,
        layers: range | None = None,
        heads: range | None = None,
        stream: Any | None = None,
        after: Transfer | Sequence[Transfer] | None = None,
        engine: _Engine = "auto",
        num_sms: int | None = None,
        transform: Literal["auto", "forbid"] = "auto",
        strategy: _Strategy | None = None,
    ) -> Transfer: ...
    def plan(
        self,
        src: PhysicalLayout,
        dst: PhysicalLayout,
        src_blocks: _Ids,
        dst_blocks: _Ids,
        *,
        layers: range | None = None,
        heads: range | None = None,
        stream: Any | None = None,
        after: Transfer | Sequence[Transfer] | None = None,
        engine: _Engine = "auto",
        num_sms: int | None = None,
        transform: Literal["auto", "forbid"] = "auto",
        strategy: _Strategy | None = None,
    ) -> TransferPlan: ...
    def route(
        self,
        src: PhysicalLayout,
        dst: PhysicalLayout,
        *,
        layers: range | None = None,
        heads: range | None = None,
        stream: Any | None = None,
        after: Transfer | Sequence[Transfer] | None = None,
        engine: _Engine = "auto",
        num_sms: int | None = None,
        transform: Literal["auto", "forbid"] = "auto",
        strategy: _Strategy | None = None,
    ) -> Route: ...
    @property
    def threads(self) -> int: ...
    @property
    def in_flight(self) -> int: ...
    def close(self, timeout: float | None = None) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
        /,
    ) -> None: ...

def system() -> Memory: ...
def pinned() -> Memory: ...
def device(ordinal: int) -> Memory: ...
def build_info() -> _BuildInfo: ...
def devices() -> list[_Device]: ...
def usable_cpus() -> int: ...
