from collections.abc import Generator
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias, TypedDict, final

from kvferry._errors import TransferError

__all__ = [
    "LayoutConfig",
    "Memory",
    "Notifier",
    "PhysicalLayout",
    "Region",
    "Route",
    "Transfer",
    "TransferContext",
    "TransferPlan",
    "TransferResult",
    "build_info",
    "describe",
    "device",
    "devices",
    "pinned",
    "plan",
    "system",
    "usable_cpus",
]

_Order: TypeAlias = Literal["NHD", "HND", "universal"]
_Engine: TypeAlias = Literal["auto", "host", "batch", "kernel", "staged", "disk", "remote"]
_Strategy: TypeAlias = Literal["memcpy", "h2d", "d2h", "d2d", "p2p"]
# A sequence of integers or any one-dimensional integer buffer (array.array, NumPy, memoryview).
_Ids: TypeAlias = Any
# A name, a torch dtype or a NumPy dtype.
_Dtype: TypeAlias = Any
# One array, a list or tuple of them or of (K, V) pairs, or a mapping whose values are either.
_Tensors: TypeAlias = Any
# Jobs that must end first.
_After: TypeAlias = Transfer | list[Transfer] | tuple[Transfer, ...]

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
    @property
    def kind(self) -> str: ...
    @property
    def ordinal(self) -> int | None: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class Region:
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
    @staticmethod
    def fully_contiguous(
        config: LayoutConfig, memory: Memory, *, order: _Order = "NHD"
    ) -> PhysicalLayout: ...
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
        tensors: _Tensors,
        *,
        axes: str,
        config: LayoutConfig | None = None,
        dtype: _Dtype | None = None,
    ) -> PhysicalLayout: ...
    @staticmethod
    def from_pages(tensors: _Tensors) -> PhysicalLayout: ...
    @staticmethod
    def from_json(text: str, memory: Memory) -> PhysicalLayout: ...
    def to_json(self) -> str: ...
    @property
    def digest(self) -> str: ...
    def incompatibilities(self, dst: PhysicalLayout) -> list[str]: ...
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
    def checksum(self, blocks: _Ids | None = None, layers: range | None = None) -> list[int]: ...
    def fill_pattern(self, seed: int, blocks: _Ids | None = None) -> None: ...
    def verify_pattern(
        self,
        seed: int,
        blocks: _Ids | None = None,
        as_blocks: _Ids | None = None,
        layers: range | None = None,
    ) -> None: ...
    def check_fill(self, value: int, except_blocks: _Ids = ()) -> None: ...
    def with_page_size(self, page_size: int) -> PhysicalLayout: ...

@final
class TransferResult:
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
    def done(self, *, layer: int | None = None) -> bool: ...
    def wait(self, timeout: float | None = None, *, layer: int | None = None) -> TransferResult: ...
    def result(self) -> TransferResult: ...
    def __await__(self) -> Generator[Any, None, TransferResult]: ...

@final
class Notifier:
    def __new__(cls) -> Self: ...
    def fileno(self) -> int: ...
    def watch(self, job: Transfer, key: int) -> None: ...
    def drain(self) -> list[int]: ...

@final
class TransferPlan:
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
    def __call__(self, src_blocks: _Ids, dst_blocks: _Ids) -> Transfer: ...
    def plan(self, src_blocks: _Ids, dst_blocks: _Ids) -> TransferPlan: ...

@final
class TransferContext:
    def __new__(
        cls,
        device: int | Literal["cpu"] | None = None,
        *,
        threads: int | None = None,
        ordered: bool = False,
    ) -> Self: ...
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
        after: _After | None = None,
        engine: _Engine = "auto",
        num_sms: int | None = None,
        transform: Literal["auto", "forbid"] = "auto",
        strategy: _Strategy | None = None,
        tag: object | None = None,
        per_layer: bool = False,
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
        after: _After | None = None,
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
        after: _After | None = None,
        engine: _Engine = "auto",
        num_sms: int | None = None,
        transform: Literal["auto", "forbid"] = "auto",
        strategy: _Strategy | None = None,
        per_layer: bool = False,
    ) -> Route: ...
    @property
    def threads(self) -> int: ...
    @property
    def in_flight(self) -> int: ...
    def completed(self) -> list[tuple[Any, TransferResult | TransferError]]: ...
    def close(self, timeout: float | None = None) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
        /,
    ) -> None: ...

def system(
    *,
    numa_node: int | Literal["interleave"] | None = None,
    huge_pages: bool = True,
    touch: bool = False,
) -> Memory: ...
def pinned() -> Memory: ...
def device(ordinal: int) -> Memory: ...
def describe(
    kind: Literal["fully_contiguous", "layer_separate", "split_kv", "block_pool"],
    config: LayoutConfig,
    *,
    order: _Order = "NHD",
    block_dim: Literal["block_first", "outer_first"] | None = None,
) -> str: ...
def plan(
    src: str,
    dst: str,
    src_blocks: _Ids,
    dst_blocks: _Ids,
    *,
    src_memory: Memory | None = None,
    dst_memory: Memory | None = None,
    layers: range | None = None,
    heads: range | None = None,
    engine: _Engine = "auto",
    transform: Literal["auto", "forbid"] = "auto",
    strategy: _Strategy | None = None,
) -> TransferPlan: ...
def build_info() -> _BuildInfo: ...
def devices() -> list[_Device]: ...
def usable_cpus() -> int: ...
