from collections.abc import Generator
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias, TypedDict, final

from kvferry._errors import TransferError

__all__ = [
    "All2All",
    "ExchangeArray",
    "HostRegistration",
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
    "calibrate",
    "clear_driver_faults",
    "communicator",
    "describe",
    "device",
    "devices",
    "enable_logging",
    "head_ranges",
    "inject_driver_fault",
    "memcpy_batch",
    "pinned",
    "plan",
    "register_host",
    "settle_memory",
    "system",
    "usable_cpus",
    "vectorized_copy",
]

_Order: TypeAlias = Literal["NHD", "HND", "universal"]
_Engine: TypeAlias = Literal["auto", "host", "batch", "kernel", "staged", "bounce", "disk", "remote"]
_Strategy: TypeAlias = Literal["memcpy", "h2d", "d2h", "d2d", "p2p"]
# A sequence of integers, any one-dimensional integer buffer (array.array, NumPy, memoryview), or a CUDA array
# of int32 or int64.
_Ids: TypeAlias = Any
# A CUDA stream: its handle (0 and 1: the legacy default stream, 2: the thread's own), a stream of torch or
# CuPy, or any object with __cuda_stream__.
_Stream: TypeAlias = Any
# A list of numbers or any integer buffer.
_Words: TypeAlias = Any
# A name, a torch dtype or a NumPy dtype.
_Dtype: TypeAlias = Any
# One array, a list or tuple of them or of (K, V) pairs, or a mapping whose values are either.
_Tensors: TypeAlias = Any
# What must come first: transfers, CUDA streams, CUDA events of torch, CuPy or cuda-python, or a list of them.
_After: TypeAlias = Any

_HeadLayout: TypeAlias = Literal["BNHD", "BHND"]
_ExchangeEngine: TypeAlias = Literal["auto", "push", "copy"]
# An array with batch, tokens, heads and dim (in the order of the layout), or without dim; or a list or tuple
# of them. DLPack, buffer, array interface or CUDA array interface.
_Heads: TypeAlias = Any
# Tokens of each rank; for several tensors also one such list each.
_RankTokens: TypeAlias = Any
# For each rank a range, or a number of heads; for several tensors also one such list each.
_HeadSplits: TypeAlias = Any
# A shape, or a list of shapes.
_Shapes: TypeAlias = Any
# "tcp://host:port", "file:///path", "memory://name", a torch store, or any object with set(key, value) and
# get(key), which gives None or raises KeyError for what is not there yet.
_Rendezvous: TypeAlias = Any

class _ExchangeStats(TypedDict):
    calls: int
    epoch: int
    bytes_sent: int
    bytes_received: int
    copied_out: int
    busy: int
    buffers: int
    buffers_free: int
    resets: int
    transport: str
    why: str

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
class All2All:
    """One rank's end of a group that exchanges attention heads; a context manager that closes it.

    All ranks make the same calls in the same order. A rank that disagrees, refuses its arguments, is late,
    dies or aborts breaks it on every rank: ContractMismatch, PeerTimeout, PeerDied or Aborted, again and
    again until all ranks reset(). Results belong to the caller until dropped, after close() too.
    After close() every method raises ClosedError, in a forked child ForkError, but for what is true anyway:
    rank, world_size, capacity_bytes, device, closed, head_range() and, after close(), stats() and
    record_stream(), as results live on.
    """

    def __new__(
        cls,
        rank: int,
        world_size: int,
        *,
        capacity_bytes: int,
        rendezvous: _Rendezvous | None = None,
        device: int | str | None = None,
        timeout: float = 60.0,
        setup_timeout: float = 60.0,
        buffers: int | None = None,
        name: str = "",
    ) -> Self:
        """Meets the other ranks (processes of this machine, or threads) and shares memory with them.

        capacity_bytes: the largest result of one call on any rank, see capacity_for(). rendezvous: where the
        ranks find each other; a lone rank needs none. device: a GPU's ordinal or such as "cuda:0"; None or
        "cpu" for host memory. timeout: most seconds that a call waits for a rank; setup_timeout: that a step
        of set-up, reset() or empty_output() does. buffers: calls whose results can be held at once (default
        4). name: tells communicators at one rendezvous apart. OptionError for a URL that cannot be one,
        RendezvousError for a place that cannot be used or reached, or a store that gives back something else
        than what ranks have set; what a store raises comes through.
        Every stage ends in the outcome of all: all ranks get a communicator, or all get an error.
        """
    @staticmethod
    def from_group(
        group: Any | None = None,
        *,
        capacity_bytes: int,
        device: int | str | None = None,
        timeout: float = 60.0,
        setup_timeout: float = 60.0,
        buffers: int | None = None,
        name: str = "",
    ) -> All2All:
        """The communicator of the ranks of a torch process group (default: of the whole job).

        They meet in its store. device: default the current GPU for a group with NCCL, else the CPU.
        """
    @staticmethod
    def capacity_for(
        shape: _Shapes,
        dtype: _Dtype | list[_Dtype],
        world_size: int,
        *,
        operation: Literal[
            "send_recv_heads", "gather_heads", "allgather_tokens", "allgather_heads"
        ] = "send_recv_heads",
        rank_tokens: _RankTokens | None = None,
        query_heads: int | None = None,
        head_splits: _HeadSplits | None = None,
    ) -> int:
        """Bytes of the largest result of such a call on any rank: what capacity_bytes must be.

        shape: (B, tokens of all ranks, heads of all ranks, D), or one per tensor of the call.
        """
    def send_recv_heads(
        self,
        tensors: _Heads,
        *,
        rank_tokens: _RankTokens | None = None,
        layout: _HeadLayout = "BNHD",
        num_heads: int | list[int] | None = None,
        query_heads: int | None = None,
        head_splits: _HeadSplits | None = None,
        out: Any | None = None,
        stream: _Stream | None = None,
        num_sms: int | None = None,
        engine: _ExchangeEngine = "auto",
        dtype: _Dtype | None = None,
    ) -> Any:
        """[B, N_r, H, D] on rank r becomes [B, N of all ranks, heads of r, D]; dim must be contiguous.

        One array gives one, a list or tuple a tuple: torch tensors for torch tensors, NumPy arrays for NumPy
        arrays, else ExchangeArray; valid as long as held. On the CPU the result is there on return; on a GPU
        the call is put on `stream`, by default the current one of the library that the arrays belong to.
        rank_tokens: default as many as mine on every rank. layout: order of the axes. num_heads: checked.
        Heads are shared as equally as possible; those of KV tensors (fewer than the largest head count of
        the call, or than query_heads) follow their query heads and are replicated where need be. head_splits:
        another choice. out: a place of empty_output(). num_sms, engine: how a GPU sends; "copy" needs out.
        dtype: what arrays of raw bytes or integers hold.
        Busy where results are held in all buffers (torch: they are then copied out).
        """
    def gather_heads(
        self,
        tensors: _Heads,
        *,
        rank_tokens: _RankTokens | None = None,
        layout: _HeadLayout = "BNHD",
        num_heads: int | list[int] | None = None,
        query_heads: int | None = None,
        head_splits: _HeadSplits | None = None,
        out: Any | None = None,
        stream: _Stream | None = None,
        num_sms: int | None = None,
        engine: _ExchangeEngine = "auto",
        dtype: _Dtype | None = None,
    ) -> Any:
        """The inverse: [B, N of all ranks, heads of r, D] becomes [B, N_r, H, D].

        num_heads: of all ranks together, one number or one per tensor (default: mine times the ranks).
        rank_tokens: default an equal share. Other options as in send_recv_heads().
        """
    def allgather(
        self,
        tensors: _Heads,
        axis: Literal["tokens", "heads"] = "tokens",
        *,
        rank_tokens: _RankTokens | None = None,
        layout: _HeadLayout = "BNHD",
        num_heads: int | list[int] | None = None,
        query_heads: int | None = None,
        head_splits: _HeadSplits | None = None,
        out: Any | None = None,
        stream: _Stream | None = None,
        num_sms: int | None = None,
        engine: _ExchangeEngine = "auto",
        dtype: _Dtype | None = None,
    ) -> Any:
        """Every rank gets the whole along `axis`: [B, N of all ranks, H, D] or [B, N, heads of all ranks, D].

        Options as in send_recv_heads() and, along heads, gather_heads().
        """
    def empty_output(
        self, shape: _Shapes, dtype: _Dtype | list[_Dtype], *, layout: _HeadLayout = "BNHD"
    ) -> Any:
        """A place for this rank's results, known to all ranks, which all make it together; see `out`.

        shape: of a result, or a list with one per result: an ExchangeArray, or a tuple of them. It takes a
        buffer until dropped. A rank whose arguments are refused is not waited for, and nothing is broken.
        """
    def record_stream(self, result: Any, stream: _Stream) -> None:
        """Says that work on `stream` reads a result in GPU memory: it is not overwritten before that is done.

        Not needed for the stream of the call, and for torch's or CuPy's current one where it is dropped.
        """
    def head_range(self, num_heads: int, *, query_heads: int | None = None) -> range:
        """Heads of this rank when `num_heads` are shared by default."""
    def check(self) -> None:
        """Raises what has broken the communicator, if something has; on a GPU also what a kernel found."""
    def abort(self, reason: str = "") -> None:
        """Breaks the communicator on every rank at once, under running calls too. From any thread."""
    def reset(self) -> None:
        """Makes a broken communicator usable again; all ranks call it. Results held stay valid.

        PeerDied or PeerTimeout if a rank is missing: make a new communicator then.
        """
    def close(self) -> None:
        """Lets go of the peers, waiting for them briefly; raises what had broken it. May be called again.

        What another thread of this rank waits in ends with ClosedError, and the peers raise PeerDied.
        """
    def set_timeout(self, timeout: float) -> None:
        """Most seconds that a call waits for a rank, from now on; also a call that is waiting now."""
    def stats(self) -> _ExchangeStats:
        """Counts so far (until close()), and by what the peers' memory is reached."""
    @property
    def rank(self) -> int:
        """This rank."""
    @property
    def world_size(self) -> int:
        """Number of ranks."""
    @property
    def capacity_bytes(self) -> int:
        """Most bytes of one call's results on any rank."""
    @property
    def device(self) -> int | None:
        """Ordinal of its GPU; None for host memory."""
    def _refuse(self, operation: str, reason: str) -> None:
        """Publishes that this rank's next call will not be: for layers above whose own checks failed."""
    @property
    def _handle(self) -> int:
        """Its number in this process, for communicator()."""
    @property
    def closed(self) -> bool:
        """Whether close() has been called."""
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
        /,
    ) -> None: ...

@final
class ExchangeArray:
    """A result of an exchange, or a place for one, as an array that is not copied; keeps its buffer."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its extents, in the order of the call's layout."""
    @property
    def strides(self) -> tuple[int, ...]:
        """Bytes from one index to the next, by axis."""
    @property
    def dtype(self) -> str:
        """Name of the element type."""
    @property
    def addr(self) -> int:
        """Address of its first byte."""
    @property
    def nbytes(self) -> int:
        """Its length in bytes."""
    @property
    def __array_interface__(self) -> dict[str, Any]: ...
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...
    def __len__(self) -> int: ...
    def __dlpack_device__(self) -> tuple[int, int]:
        """DLPack device of the memory: (1, 0) is the CPU, (2, ordinal) a GPU."""
    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A DLPack capsule; nothing is waited for: the exchange runs on the stream of its call.

        BufferError for a copy, another device, or a stream for host memory.
        """
    def __buffer__(self, flags: int, /) -> memoryview:
        """Host memory as a buffer, bfloat16 as "H" and float8 as "B"; BufferError for GPU memory."""

@final
class HostRegistration:
    """Host memory that GPUs can address until close(). Made by register_host(); a context manager."""

    @property
    def addr(self) -> int:
        """Address of its first byte."""
    @property
    def nbytes(self) -> int:
        """Its length in bytes."""
    @property
    def closed(self) -> bool:
        """Whether close() has been called."""
    def close(self) -> None:
        """Gives it up, without waiting: when no job in flight needs it, a thread unregisters the memory.

        Layouts of the memory cannot be transferred to or from a GPU then. May be called again.
        """
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
        /,
    ) -> None: ...

@final
class LayoutConfig:
    """Logical shape of a KV cache: what it holds, not how it lies. Immutable, hashable, picklable."""

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
    ) -> Self:
        """Sizes are at least 1. Give num_heads and head_dim, or inner_dim for one head of that width.

        outer_dim: 2 for K and V (default), 1 for latent caches. page_size: tokens in a block. dtype: a name
        such as "bfloat16", or torch's or NumPy's. alignment: of every block, in bytes, a power of two up to 1
        GiB (default 1). first_head, total_heads: which of the model's heads these are (default: all).
        LayoutError if it cannot be.
        """
    def replace(self, **changes: Any) -> LayoutConfig:
        """A copy with some constructor arguments changed; OptionError for other names.

        total_heads follows num_heads unless given, where the configuration held all heads.
        """
    def shard_heads(self, rank: int, world: int) -> LayoutConfig:
        """What tensor-parallel rank `rank` of `world` holds: an equal share of the heads, in order.

        LayoutError if `world` does not divide the heads or `rank` is not below it.
        """
    @property
    def num_blocks(self) -> int:
        """Blocks; ids are 0 to num_blocks - 1."""
    @property
    def num_layers(self) -> int:
        """Layers."""
    @property
    def outer_dim(self) -> int:
        """2 (K and V) or 1."""
    @property
    def page_size(self) -> int:
        """Tokens in a block."""
    @property
    def num_heads(self) -> int:
        """Heads held here; 1 where inner_dim was given."""
    @property
    def head_dim(self) -> int:
        """Elements in the row of one head and token; inner_dim where that was given."""
    @property
    def dtype(self) -> str:
        """Name of the element type, such as "float16" or "float8_e4m3fn"."""
    @property
    def alignment(self) -> int:
        """Bytes that the start of every block is a multiple of."""
    @property
    def first_head(self) -> int:
        """Global number of this configuration's first head."""
    @property
    def total_heads(self) -> int:
        """Heads of the whole model, over all shards."""
    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, without padding."""
    @property
    def chunk_bytes(self) -> int:
        """Bytes of one block in one layer of K or V, without padding."""
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, Any]]: ...

@final
class Memory:
    """Where a layout is allocated, and how. Made by system(), pinned() and device(); comparable, hashable."""

    @property
    def kind(self) -> str:
        """One of "system", "pinned" and "device"."""
    @property
    def ordinal(self) -> int | None:
        """Number of the GPU; None for host memory."""
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class Region:
    """Part of a layout's memory as an array, not copied; keeps the layout alive."""

    @property
    def addr(self) -> int:
        """Address of its first byte."""
    @property
    def nbytes(self) -> int:
        """Bytes from the first to the last, gaps between strides included."""
    @property
    def memory(self) -> Memory:
        """Where it lies."""
    @property
    def __array_interface__(self) -> dict[str, Any]: ...
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...
    def __dlpack_device__(self) -> tuple[int, int]:
        """DLPack device of the memory: (1, 0) is the CPU, (3, 0) pinned memory, (2, ordinal) a GPU."""
    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A DLPack capsule; versioned if `max_version` is at least (1, 0), which read-only memory needs.

        `stream` is not waited for: wait for the transfers that write here before. `dl_device` may name the
        CPU for pinned memory. BufferError for a copy, another device, or a stream for host memory.
        """
    def __buffer__(self, flags: int, /) -> memoryview:
        """Host memory as a buffer, bfloat16 as "H" and float8 as "B"; BufferError for device memory."""

@final
class PhysicalLayout:
    """Blocks in memory: kvferry's own (freed with the last reference) or arrays of yours (kept alive).

    The allocating constructors raise LayoutError for what cannot be laid out, HostMemoryError or CudaError
    for memory that cannot be had. In `order`, N is tokens, H heads and D elements.
    """

    @staticmethod
    def fully_contiguous(config: LayoutConfig, memory: Memory, *, order: _Order = "NHD") -> PhysicalLayout:
        """One allocation, block after block; in "universal" order a block has its heads outermost."""
    @staticmethod
    def layer_separate(
        config: LayoutConfig,
        memory: Memory,
        *,
        block_dim: Literal["block_first", "outer_first"] = "block_first",
        order: _Order = "NHD",
    ) -> PhysicalLayout:
        """One allocation per layer: [block, outer, …] or, with "outer_first", [outer, block, …].

        `order` is "NHD" or "HND".
        """
    @staticmethod
    def split_kv(config: LayoutConfig, memory: Memory, *, order: _Order = "NHD") -> PhysicalLayout:
        """One allocation for K and one for V per layer, [block, …]; `order` is "NHD" or "HND"."""
    @staticmethod
    def block_pool(config: LayoutConfig, memory: Memory, *, order: _Order = "NHD") -> PhysicalLayout:
        """One region per block, inside as in fully_contiguous."""
    @staticmethod
    def from_tensors(
        tensors: _Tensors,
        *,
        axes: str,
        config: LayoutConfig | None = None,
        dtype: _Dtype | None = None,
    ) -> PhysicalLayout:
        """Wraps arrays (buffer, DLPack or array interface; any positive strides) without copying.

        tensors: one array; a list or dict of one per layer; or of one (K, V) pair per layer. axes: what each
        dimension is, from "block layer outer page head dim"; block and dim are required. config: checked
        against the arrays, and says which shard they are. dtype: what raw bytes or integers of that width
        hold. Doubt is a LayoutError that names the array.
        """
    @staticmethod
    def from_pages(tensors: _Tensors) -> PhysicalLayout:
        """Wraps opaque pages without copying: [blocks, bytes], one array or one per layer.

        LayoutError where a page is not contiguous. The configuration is uint8, one head, one token.
        """
    @staticmethod
    def from_json(text: str, memory: Memory) -> PhysicalLayout:
        """Allocates what to_json() or describe() gave. The text may be hostile: LayoutError if wrong."""
    def to_json(self) -> str:
        """A versioned description of everything but the memory, for from_json() and plan()."""
    @property
    def digest(self) -> str:
        """16 hexadecimal digits of to_json(): equal layouts have equal ones, on any machine."""
    def incompatibilities(self, dst: PhysicalLayout) -> list[str]:
        """Every reason why blocks cannot move from here to `dst`; empty if they can."""
    @property
    def config(self) -> LayoutConfig:
        """Its logical shape."""
    @property
    def kind(self) -> str:
        """One of "FullyContiguous", "LayerSeparate", "SplitKv", "BlockPool" and, wrapped, "Strided"."""
    @property
    def order(self) -> str | None:
        """One of "NHD", "HND" and "universal"; None for wrapped arrays."""
    @property
    def axes(self) -> list[str]:
        """Axes within a block by decreasing stride."""
    @property
    def memory(self) -> Memory:
        """Where it lies, and how it was allocated."""
    @property
    def num_blocks(self) -> int:
        """Blocks; ids are 0 to num_blocks - 1."""
    @property
    def num_regions(self) -> int:
        """Separate pieces of memory."""
    @property
    def nbytes(self) -> int:
        """Bytes of all regions, padding included."""
    @property
    def strides(self) -> dict[str, int]:
        """Bytes from one index to the next, by axis; 0 where that is another region."""
    def region(self, block: int, layer: int, outer: int = 0) -> Region:
        """The bytes of one block, layer and outer index (0 is K, 1 is V), one-dimensional.

        LayoutError where they are not contiguous or an index is out of range.
        """
    @property
    def regions(self) -> list[Region]:
        """Every region as an array with axes `region_axes`; bfloat16 and fp8 appear as unsigned integers.

        LayoutError after with_page_size() into finer pages.
        """
    @property
    def region_axes(self) -> list[str]:
        """What the dimensions of each of `regions` are, outermost first."""
    def numpy(self) -> Any:
        """NumPy views of `regions`, one array if there is one region, else a list. Host memory only."""
    def fill(self, value: int) -> None:
        """Sets every byte (0 to 255) of every region, padding included.

        As with the checks below, wait for transfers first, and for what others have put on CUDA streams.
        """
    def checksum(self, blocks: _Ids | None = None, layers: range | None = None) -> list[int]:
        """One 64-bit sum per block, in the order of `blocks` (default: all), over `layers` (default: all).

        It depends on contents only, not on block id, order, layout or memory; sums of disjoint layers or head
        shards add up modulo 2**64.
        """
    def fill_pattern(self, seed: int, blocks: _Ids | None = None) -> None:
        """Writes reproducible bytes that differ by seed, block, layer, outer, token and global head.

        blocks: default all. Padding is left alone.
        """
    def verify_pattern(
        self,
        seed: int,
        blocks: _Ids | None = None,
        as_blocks: _Ids | None = None,
        layers: range | None = None,
    ) -> None:
        """Checks that blocks[i] holds what fill_pattern(seed) wrote to as_blocks[i]; MismatchError if not.

        blocks: default all. as_blocks: default the same ids. layers: default all.
        """
    def check_fill(self, value: int, except_blocks: _Ids = ()) -> None:
        """Checks that every byte is `value`, apart from the contents (not the padding) of except_blocks.

        GuardError names the first that is not. The counterpart of fill().
        """
    def with_page_size(self, page_size: int) -> PhysicalLayout:
        """The same memory in pages of fewer tokens: page `p` of block `b` gets id b * (old // new) + p.

        LayoutError if `page_size` does not divide the present one.
        """

@final
class TransferResult:
    """What a finished transfer did."""

    @property
    def bytes(self) -> int:
        """Bytes moved, without padding."""
    @property
    def blocks(self) -> int:
        """Blocks moved, counted in the smaller pages if page sizes differ."""
    @property
    def seconds(self) -> float:
        """Time from submission to the last byte."""
    @property
    def engine(self) -> str:
        """The engine that moved them: "host", "kernel", "batch", "staged" or "bounce"."""
    @property
    def direction(self) -> str:
        """One of "memcpy", "h2d", "d2h", "d2d" and "p2p"."""
    @property
    def failed_blocks(self) -> list[int]:
        """Always empty; TransferError has the ones of a failed transfer."""

@final
class Transfer:
    """A submitted transfer; awaitable. Dropping it neither stops the transfer nor frees its layouts early."""

    def done(self, *, layer: int | None = None) -> bool:
        """Whether it has ended, successfully or not; with `layer`, whether that layer has.

        OptionError for a layer that is not moved, or of a transfer made without per_layer=True.
        """
    def wait(self, timeout: float | None = None, *, layer: int | None = None) -> TransferResult:
        """Waits for the end, of one layer if `layer` is given, without the GIL; Ctrl-C interrupts.

        timeout: seconds, None for no limit; WaitTimeout when they are over, and the transfer goes on.
        TransferError if it failed, OptionError as done(), Unsupported if it was captured.
        """
    def wait_on(self, stream: _Stream, *, layer: int | None = None) -> None:
        """Lets what is put on `stream` from now on wait for it, or for one layer of it; returns at once.

        Unsupported for a transfer that host threads take part in or that was captured; OptionError as done().
        """
    @property
    def captured(self) -> bool:
        """Whether a CUDA graph has taken it: it runs whenever that is launched, and this handle never ends.

        What would wait for it, or for its result, is Unsupported.
        """
    def result(self) -> TransferResult:
        """What it did, without waiting: Busy while it runs, TransferError if it failed."""
    def __await__(self) -> Generator[Any, None, TransferResult]:
        """As wait(), without blocking the event loop. Cancelling the task does not stop the transfer."""

@final
class Notifier:
    """Reports ends of transfers through a file descriptor, for event loops; `await` is built on it."""

    def __new__(cls) -> Self: ...
    def fileno(self) -> int:
        """The descriptor, owned by the notifier; readable once a watched job has ended."""
    def watch(self, job: Transfer, key: int) -> None:
        """Has drain() return `key` (0 to 2**64 - 1) once `job` has ended; at once if it already has."""
    def drain(self) -> list[int]:
        """Keys of the jobs that have ended since the last call. Never blocks."""

@final
class TransferPlan:
    """A transfer that was validated and planned, not run."""

    def explain(self) -> str:
        """For people: what moves, in how many copies, by which engine and why."""
    @property
    def blocks(self) -> int:
        """Blocks to move, counted in the smaller pages if page sizes differ."""
    @property
    def bytes(self) -> int:
        """Bytes to move, without padding."""
    @property
    def elementary_runs(self) -> int:
        """Copies before merging: one per block, layer and outer index, or per row where not contiguous."""
    @property
    def num_runs(self) -> int:
        """Copies after merging what is adjacent on both sides."""
    @property
    def run_bytes(self) -> tuple[int, int]:
        """Bytes of the shortest and of the longest run."""
    @property
    def transforms(self) -> bool:
        """Whether the order of a block's axes changes on the way."""
    @property
    def engine(self) -> str:
        """The engine chosen."""
    def runs(self, limit: int = 1000) -> list[_Run]:
        """The first `limit` runs; offsets are bytes from the start of the region with that index."""

@final
class Route:
    """A pair of layouts with options, checked once, for many transfers. Made by TransferContext.route()."""

    def __call__(self, src_blocks: _Ids, dst_blocks: _Ids) -> Transfer:
        """TransferContext.transfer() along the route, with the same checks of the ids."""
    def plan(self, src_blocks: _Ids, dst_blocks: _Ids) -> TransferPlan:
        """TransferContext.plan() along the route."""

@final
class TransferContext:
    """Runs transfers on threads of its own. As a context manager it closes, and so waits, at the end.

    After close() everything but close() raises ClosedError; in a forked child, new jobs raise ForkError.
    """

    def __new__(
        cls,
        device: int | str | None = None,
        *,
        threads: int | None = None,
        ordered: bool = False,
        staging_bytes: int | None = None,
        pinned_bytes: int | None = None,
    ) -> Self:
        """device: a GPU's ordinal or such as "cuda:0"; None or "cpu" for host memory only.

        A GPU's kernels are loaded here: CudaError without a GPU, or with a driver below 580. It copies to and
        from memory of that GPU, and within host memory.
        threads: copy threads, 1 to 1024 (default: the usable CPUs, at most 16); they start with the first job
        that needs them. ordered: jobs in the same direction run one after the other, in order of submission;
        by default nothing orders them.
        staging_bytes, pinned_bytes: most GPU memory (default 50 MiB) and pinned memory (default 14 MiB) that
        it takes beside the layouts, from 1 MiB up.
        """
    def transfer(
        self,
        src: PhysicalLayout,
        dst: PhysicalLayout,
        src_blocks: _Ids,
        dst_blocks: _Ids,
        *,
        layers: range | None = None,
        heads: range | None = None,
        stream: _Stream | None = None,
        after: _After | None = None,
        engine: _Engine = "auto",
        num_sms: int | None = None,
        transform: Literal["auto", "forbid"] = "auto",
        strategy: _Strategy | None = None,
        tag: object | None = None,
        per_layer: bool = False,
    ) -> Transfer:
        """Copies src_blocks[i] of `src` to dst_blocks[i] of `dst`. Checks everything, submits, and returns.

        Wrong input moves nothing: BlockIdError, DuplicateBlockError, OverlapError, LayoutError, OptionError
        or Unsupported. Ids in GPU memory are read and checked there: a bad one is skipped and fails the job;
        that no destination is given twice is then your promise.
        layers: a range, default all. heads: a range of global numbers, default all that both sides hold.
        stream: run on this CUDA stream, after what was put there before and before what comes later. It may
        be capturing a graph (see Transfer.captured). By default a stream of the context's, after the current
        streams of torch and CuPy where the memory is theirs (the calling thread's: others pass after=).
        after: transfers, CUDA streams and events that must come first; it fails if one of the transfers does.
        per_layer: copy from the lowest layer up, so that done() and wait() can be asked for one layer.
        tag: any object; completed() reports the end of this job with it (default None: not reported).
        transform: "forbid" raises LayoutError where the order of a block's axes would change.
        strategy: the direction you expect; OptionError if it is another.
        engine: "auto" chooses by measured speed; one that cannot do this transfer is Unsupported.
        num_sms: most multiprocessors that a copy kernel takes (default: what the link needs).
        Busy where too many long id lists wait behind a stream that does not move.
        """
    def plan(
        self,
        src: PhysicalLayout,
        dst: PhysicalLayout,
        src_blocks: _Ids,
        dst_blocks: _Ids,
        *,
        layers: range | None = None,
        heads: range | None = None,
        stream: _Stream | None = None,
        after: _After | None = None,
        engine: _Engine = "auto",
        num_sms: int | None = None,
        transform: Literal["auto", "forbid"] = "auto",
        strategy: _Strategy | None = None,
    ) -> TransferPlan:
        """What transfer() would do: the same checks, errors and options, but nothing runs."""
    def route(
        self,
        src: PhysicalLayout,
        dst: PhysicalLayout,
        *,
        layers: range | None = None,
        heads: range | None = None,
        stream: _Stream | None = None,
        after: _After | None = None,
        engine: _Engine = "auto",
        num_sms: int | None = None,
        transform: Literal["auto", "forbid"] = "auto",
        strategy: _Strategy | None = None,
        per_layer: bool = False,
    ) -> Route:
        """Checks a pair of layouts once for many transfers; options as in transfer().

        `after` holds for every transfer of the route.
        """
    @property
    def device(self) -> int | None:
        """Ordinal of its GPU; None in a context for host memory."""
    @property
    def threads(self) -> int:
        """Copy threads."""
    @property
    def in_flight(self) -> int:
        """Jobs submitted that have not ended; with per_layer=True, every layer counts."""
    def completed(self) -> list[tuple[Any, TransferResult | TransferError]]:
        """Jobs with a tag that have ended since the last call, in order of their ends; never blocks.

        Pairs of the tag and the result, or the TransferError that wait() would raise.
        """
    def close(self, timeout: float | None = None) -> None:
        """Refuses new jobs and waits for the others. May be called again.

        timeout: seconds, None for no limit; WaitTimeout when they are over: still refusing, not yet closed.
        """
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
) -> Memory:
    """Pageable host memory; allocating a layout raises HostMemoryError where an option cannot be met.

    numa_node: the node that must hold the pages, or "interleave" for all in turn (default: wherever a page is
    first touched). huge_pages: ask for transparent huge pages from 4 MiB up. touch: fault all pages in when
    allocating (about 0.2 s per GiB) and not at first use.
    """

def pinned(*, device: int | None = None) -> Memory:
    """Page-locked host memory that every GPU can address; allocating raises CudaError without a driver.

    device: the GPU through whose context it is allocated (default: the thread's current one, else 0).
    """

def device(ordinal: int) -> Memory:
    """Memory of the GPU `ordinal`; OptionError for a number that no GPU can have."""

def communicator(handle: int) -> All2All:
    """The communicator with a number that All2All._handle gave; ClosedError if it is gone."""

def describe(
    kind: Literal["fully_contiguous", "layer_separate", "split_kv", "block_pool"],
    config: LayoutConfig,
    *,
    order: _Order = "NHD",
    block_dim: Literal["block_first", "outer_first"] | None = None,
) -> str:
    """The JSON that to_json() of such a layout would give, without allocating one.

    block_dim: for "layer_separate" only (default "block_first"), else OptionError.
    """

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
) -> TransferPlan:
    """TransferContext.plan() for layouts given as JSON, with nothing allocated; overlap cannot be checked.

    src_memory, dst_memory: where they would lie, default system(). Other options as in
    TransferContext.transfer().
    """

def register_host(array: Any, *, device: int | None = None) -> HostRegistration:
    """Registers the memory of a contiguous host array with CUDA: layouts wrapped from then on are pinned.

    Slow, as it pins every page; the array is kept alive. Memory inside a registered range shares it.
    OptionError for a range that is registered in part; CudaError where the driver refuses.
    device: the GPU through whose context (default: the thread's current one, else 0); every GPU can use it.
    """

def memcpy_batch(
    src_ptrs: _Words,
    dst_ptrs: _Words,
    sizes: _Words,
    *,
    stream: _Stream,
    mode: Literal[
        "batched_with_fallback", "fallback_only", "batch_without_fallback"
    ] = "batched_with_fallback",
) -> Literal["batched", "per_copy", "nothing"]:
    """Puts copies of sizes[i] bytes from address src_ptrs[i] to dst_ptrs[i] on `stream`; returns how.

    The memory must stay valid until the stream is past the copies; nothing checks it. The copies are not
    ordered among themselves. One driver call, or one per copy if the driver has no batch copy or the stream
    is capturing (Unsupported without fallback). Other refusals are CudaErrors in every mode.
    """

def vectorized_copy(
    src_ptrs: Any,
    dst_ptrs: Any,
    nbytes: int,
    *,
    stream: _Stream,
    num_sms: int | None = None,
) -> None:
    """Copies `nbytes` from each address in src_ptrs to the one in dst_ptrs by a kernel on `stream`.

    Both tables are contiguous arrays of 64-bit integers in GPU or pinned memory, read when the kernel runs;
    they and the memory they name must stay valid until then. Any alignment. May be captured.
    """

def calibrate(
    device: int = 0, *, peer: int | None = None, force: bool = False, show: bool = False
) -> dict[str, Any]:
    """Measures for some seconds how fast each engine is on a GPU, saves it for later contexts, returns it.

    Best on an idle machine. Unsupported if a constant is over twice off the shipped ones, unless `force`.
    peer: another GPU, to measure copies between the two. show: measure nothing, return what is in force.
    """

def head_ranges(num_heads: int, world_size: int, query_heads: int | None = None) -> list[range]:
    """Heads of every rank when `num_heads` are shared by default."""

def inject_driver_fault(call: str, nth: int, code: int) -> None:
    """Lets the nth call of a driver function from now on fail with `code`. Use testing.driver_fault()."""

def clear_driver_faults() -> int:
    """Takes all faults back; how many had not happened."""

def settle_memory() -> bool:
    """Waits, at most ten seconds, until all memory dropped so far is the driver's again; whether it is.

    A thread of the library frees GPU and pinned memory, between transfers: freeing waits for the device.
    """

def build_info() -> _BuildInfo:
    """Version, CUDA mode, toolkit (None without kernels), kernel architectures and profile of this build."""

def devices() -> list[_Device]:
    """The GPUs here; CudaError where there is no driver. total_memory is in bytes."""

def enable_logging(level: str = "warn") -> None:
    """Writes kvferry's log to stderr, which is silent by default; only the first call counts.

    filter: a least level, from "error" to "trace", or a list such as "warn,kvferry::transfer=debug"; else
    OptionError.
    """

def usable_cpus() -> int:
    """CPUs that this process may run on, by affinity and quota."""
