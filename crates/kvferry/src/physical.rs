//! Layouts bound to memory.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use kvferry_host::{HostOptions, HostRegion};
use kvferry_layout::{Layout, PairPlan, PairRequest, Part, RegionSpan, Transform};

use crate::error::{Error, Result};
use crate::memory::{MemoryKind, Region, allocate};

/// What keeps something per layout, and has to let go of it with the layout.
pub(crate) trait Forget: Send + Sync {
    /// The layout of this number is going.
    fn forget(&self, layout: u64);
}

/// A layout and the memory it describes, owned or borrowed. Immutable; a pending transfer keeps both of its own alive.
pub struct PhysicalLayout {
    id: u64,
    layout: Layout,
    kind: MemoryKind,
    regions: Vec<Region>,
    spans: Vec<RegionSpan>,
    /// How the memory was allocated; `None` when it is borrowed.
    allocated: Option<HostOptions>,
    aliased: Option<(usize, usize)>,
    told: Mutex<Vec<Weak<dyn Forget>>>,
}

impl PhysicalLayout {
    /// Allocates memory for `layout`, zeroed when it is host memory.
    ///
    /// System memory is mapped and not touched: that takes microseconds for any size, and the first access to each page
    /// pays for it (a first transfer into cold memory is three to four times slower). [`HostOptions`] has the numbers.
    ///
    /// Pinned memory comes as [`allocate_pinned`](Self::allocate_pinned) has it by default.
    ///
    /// # Errors
    /// No memory, no driver or no such GPU.
    pub fn allocate(layout: Layout, kind: MemoryKind) -> Result<Arc<PhysicalLayout>> {
        PhysicalLayout::allocate_with(layout, kind, &HostOptions::default())
    }

    /// As [`allocate`](Self::allocate), with a choice of memory nodes, page size and first touch for system memory.
    ///
    /// ```
    /// use kvferry::{Dtype, HostOptions, KvOrder, Layout, LayoutConfig, MemoryKind, NumaPolicy, PhysicalLayout};
    ///
    /// let cfg = LayoutConfig::builder()
    ///     .num_blocks(8).num_layers(4).page_size(16).num_heads(2).head_dim(64).dtype(Dtype::BFloat16)
    ///     .build()?;
    /// let node = kvferry::host::memory_nodes().ok().and_then(|nodes| nodes.first().copied());
    /// let numa = node.map_or(NumaPolicy::Default, NumaPolicy::Bind);
    /// let options = HostOptions { numa, first_touch_threads: usize::MAX, ..HostOptions::default() };
    /// let pool = Layout::fully_contiguous(cfg, KvOrder::Universal)?;
    /// let pool = PhysicalLayout::allocate_with(pool, MemoryKind::System, &options)?;
    /// assert_eq!(pool.host_options(), Some(&options));
    /// # Ok::<(), kvferry::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`allocate`](Self::allocate); a memory node that this process cannot use, a system that places no memory
    /// (nothing falls back silently); options other than the default for memory that is not [`MemoryKind::System`].
    pub fn allocate_with(
        layout: Layout,
        kind: MemoryKind,
        options: &HostOptions,
    ) -> Result<Arc<PhysicalLayout>> {
        let regions = allocate(&layout, kind, *options, None)?;
        PhysicalLayout::bind(layout, kind, regions, Some(*options))
    }

    /// Allocates pinned memory through the context of device `via`, which that call creates if nobody has used the device
    /// yet. By default it is the device that is current for the calling thread, else device 0. Every GPU can address the
    /// memory, whichever it was.
    ///
    /// # Errors
    /// As [`allocate`](Self::allocate).
    pub fn allocate_pinned(layout: Layout, via: Option<u32>) -> Result<Arc<PhysicalLayout>> {
        let options = HostOptions::default();
        let regions = allocate(&layout, MemoryKind::Pinned, options, via)?;
        PhysicalLayout::bind(layout, MemoryKind::Pinned, regions, Some(options))
    }

    /// Binds `layout` to memory that somebody else owns; each region's owner keeps it alive.
    ///
    /// # Errors
    /// Regions that are too few, too small, misaligned, or of different kinds of memory.
    pub fn from_regions(
        layout: Layout,
        kind: MemoryKind,
        regions: Vec<Region>,
    ) -> Result<Arc<PhysicalLayout>> {
        PhysicalLayout::bind(layout, kind, regions, None)
    }

    fn bind(
        layout: Layout,
        kind: MemoryKind,
        regions: Vec<Region>,
        allocated: Option<HostOptions>,
    ) -> Result<Arc<PhysicalLayout>> {
        static NEXT_ID: AtomicU64 = AtomicU64::new(0);
        if let Some((region, found)) = regions.iter().enumerate().find(|(_, region)| !region.is_of(kind)) {
            return Err(Error::MixedMemory { region, found: found.kind(), expected: kind });
        }
        let spans: Vec<RegionSpan> = regions.iter().map(Region::span).collect();
        layout.check_regions(&spans)?;
        // Engines that share a layer's cache hand us one tensor twice: fine to read, ruinous to write.
        let aliased = if allocated.is_some() { None } else { layout.aliased_regions(&spans) };
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        Ok(Arc::new(PhysicalLayout {
            id,
            layout,
            kind,
            regions,
            spans,
            allocated,
            aliased,
            told: Mutex::default(),
        }))
    }

    /// The same memory re-addressed in pages of `page_size` tokens: `id = parts · block + part`.
    ///
    /// # Errors
    /// `page_size` does not divide this layout's.
    pub fn with_page_size(&self, page_size: u64) -> Result<Arc<PhysicalLayout>> {
        let layout = self.layout.with_page_size(page_size)?;
        PhysicalLayout::bind(layout, self.kind, self.regions.clone(), self.allocated)
    }

    /// Has `who` told when this layout goes; once, however often it asks.
    pub(crate) fn tell_when_dropped(&self, who: &Arc<dyn Forget>) {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        let who = Arc::downgrade(who);
        if !told.iter().any(|known| Weak::ptr_eq(known, &who)) {
            told.retain(|known| known.strong_count() > 0);
            told.push(who);
        }
    }

    /// Number of this binding, unique in the process: a key for caches of plans.
    pub const fn id(&self) -> u64 {
        self.id
    }

    /// The address-free layout.
    pub const fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Where the memory lies.
    pub const fn memory_kind(&self) -> MemoryKind {
        self.kind
    }

    /// Whether kvferry allocated the memory.
    pub const fn is_owned(&self) -> bool {
        self.allocated.is_some()
    }

    /// What the memory was allocated with; `None` if kvferry did not allocate it.
    pub const fn host_options(&self) -> Option<&HostOptions> {
        self.allocated.as_ref()
    }

    /// The regions, in region-table order.
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// Addresses and lengths of the regions.
    pub fn spans(&self) -> &[RegionSpan] {
        &self.spans
    }

    /// First region that must not be written, if any.
    pub fn read_only_region(&self) -> Option<usize> {
        self.regions.iter().position(|region| !region.writable())
    }

    /// The first two regions that share bytes, if any; such a layout can be a source, never a destination.
    pub const fn aliased_regions(&self) -> Option<(usize, usize)> {
        self.aliased
    }

    /// Address and length of (block, layer, outer).
    ///
    /// # Errors
    /// A coordinate out of range, or a part that is not contiguous.
    pub fn memory_region(&self, block: u64, layer: u64, outer: u64) -> Result<RegionSpan> {
        let Part { place, nbytes } = self.layout.memory_region(block, layer, outer)?;
        let base = self.spans[place.region as usize].addr;
        Ok(RegionSpan { addr: base + place.offset, len: nbytes })
    }

    /// Sets every byte of every region, padding included, and returns when that is done. Not ordered against transfers:
    /// wait for those first. Device memory is ordered as [`DeviceRegion`](crate::cuda::DeviceRegion) says.
    ///
    /// # Errors
    /// Read-only memory; nothing is written then. The CUDA driver's refusal, for device memory.
    pub fn fill(&self, value: u8) -> Result<()> {
        if let Some(region) = self.read_only_region() {
            return Err(Error::ReadOnlyDestination { region });
        }
        self.regions.iter().try_for_each(|region| region.fill(value))
    }

    /// Region `index` for the CPU.
    ///
    /// # Errors
    /// No such region, or memory the CPU cannot address.
    pub fn host_region(&self, index: usize) -> Result<&HostRegion> {
        let region = self.regions.get(index).ok_or_else(|| Error::InvalidOption {
            option: "region",
            expected: format!("below {}", self.regions.len()),
            value: index.to_string(),
        })?;
        region.host().ok_or_else(|| Error::Unsupported {
            what: format!("CPU access to {} memory", self.kind),
            why: "only system and pinned memory are addressable by the CPU".to_owned(),
        })
    }
}

impl Drop for PhysicalLayout {
    fn drop(&mut self) {
        let told = std::mem::take(self.told.get_mut().unwrap_or_else(PoisonError::into_inner));
        for who in told.iter().filter_map(Weak::upgrade) {
            who.forget(self.id);
        }
    }
}

impl fmt::Debug for PhysicalLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PhysicalLayout")
            .field("id", &self.id)
            .field("kind", &self.layout.kind())
            .field("memory", &self.kind)
            .field("regions", &self.spans.len())
            .field("region_bytes", &self.layout.region_bytes())
            .finish()
    }
}

/// Whether blocks can move between two layouts at all, and if `transform` is forbidden, without an order change.
///
/// # Errors
/// The first of layer count, outer dimension, dtype, head width, heads, page size and order that does not fit.
pub fn validate_layout_compatibility(
    src: &PhysicalLayout,
    dst: &PhysicalLayout,
    transform: Transform,
) -> Result<()> {
    PairPlan::new(src.layout(), dst.layout(), &PairRequest { transform, ..PairRequest::default() })?;
    Ok(())
}

/// Whether the plan between two layouts moves each block as one run: same order, nothing left out, both contiguous.
pub fn can_use_whole_block_transfer(
    src: &PhysicalLayout,
    dst: &PhysicalLayout,
    layers: Option<std::ops::Range<u64>>,
) -> Result<bool> {
    let request = PairRequest { layers, ..PairRequest::default() };
    Ok(PairPlan::new(src.layout(), dst.layout(), &request)?.whole_block())
}
