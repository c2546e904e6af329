//! Registering host memory that somebody else allocated, so that GPUs can reach it.
//!
//! The driver refuses to register a page twice, so the process keeps one map of what this library registered: a range
//! inside a registered one shares it. The map holds no driver state of its own.
//!
//! **Fork.** A child shares registered pages with its parent until one of them writes; the writer then gets a copy, and if
//! that is the parent, the GPU goes on reading the old page. Linux copies pinned pages at the fork itself since 5.12 and
//! 5.15 (huge pages), which keeps the parent right; on older kernels, register after the last fork or use `spawn`.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use kvferry_host::memory::page_size;
use kvferry_host::{HostRegion, Owner};

use crate::capture::RelaxedCapture;
use crate::context::PrimaryContext;
use crate::deferred::{drain_deferred, run_later};
use crate::error::{CudaError, Result};
use crate::memory::pointer;
use crate::raw;

/// `CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP`: for every context, and for kernels.
const FLAGS: u32 = 1 | 2;
/// Bytes registered by one driver call. Larger ranges are registered in several, so that a refusal comes before the whole
/// range is pinned, and no single call pins for minutes.
const CHUNK: u64 = 64 << 30;

/// A range of whole pages registered by this library. Unregistered when the last holder is gone.
#[derive(Debug)]
pub(crate) struct Pages {
    start: u64,
    end: u64,
    chunk: u64,
    context: Arc<PrimaryContext>,
    /// The memory, which stays mapped while it is registered.
    owner: KeepAlive,
}

/// An owner; somebody else's type, of which nothing can be printed.
struct KeepAlive(Owner);

impl fmt::Debug for KeepAlive {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an owner")
    }
}

/// Ranges by first address, with their ends; they do not overlap. Weak: a static must not own driver state.
static MAP: Mutex<BTreeMap<u64, (u64, Weak<Pages>)>> = Mutex::new(BTreeMap::new());
/// Held while ranges are registered, which may take seconds; the map's own lock never is.
static CHANGING: Mutex<()> = Mutex::new(());

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // The map is changed by single inserts and removals: valid after any panic.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Keeps a range of host memory registered while it lives; it is unregistered a moment after the last holder is gone (wait
/// for that with [`drain_deferred`]). Memory made reachable by it stays registered for longer if
/// work or a layout still uses it; the memory itself must outlive that, see [`register_host`].
#[derive(Debug)]
pub struct HostRegistration {
    /// None: somebody else had pinned the range before.
    pages: Option<Arc<Pages>>,
    region: HostRegion,
}

impl HostRegistration {
    /// The memory that is registered.
    pub fn region(&self) -> &HostRegion {
        &self.region
    }

    /// Whether the range had been pinned by somebody else: it stays pinned for as long as they choose.
    pub fn foreign(&self) -> bool {
        self.pages.is_none()
    }
}

/// Registers the pages of `region` for every device through the context of device `ordinal`. Slow (it pins every page):
/// never on a hot path. A range inside one that is registered already shares it; a range that somebody else has pinned
/// in whole (their registration, or pinned memory) is taken as it is. The region's owner is kept while it is registered.
///
/// # Errors
/// [`CudaError::RegistrationOverlap`] with a range registered in part, [`CudaError::AliasDiffers`] where kernels would
/// see another address, [`CudaError::OutOfMemory`], or the driver's refusal (712: somebody else registered a part of it).
/// Nothing stays registered then.
pub fn register_host(region: &HostRegion, ordinal: u32) -> Result<HostRegistration> {
    register_in_chunks(region, ordinal, CHUNK)
}

/// [`register_host`] with `chunk` bytes a driver call, a multiple of the page size.
#[doc(hidden)]
pub fn register_in_chunks(region: &HostRegion, ordinal: u32, chunk: u64) -> Result<HostRegistration> {
    if region.is_empty() {
        return Err(CudaError::ZeroLength { what: "registered" });
    }
    if chunk == 0 || !chunk.is_multiple_of(page_size() as u64) {
        let rule = "it must be whole pages, at least one";
        return Err(CudaError::Argument { what: "the chunk of a registration", value: chunk, rule });
    }
    let context = PrimaryContext::get(ordinal)?;
    let (start, end) = pages_of(region.addr(), region.len());
    let registration = |pages| HostRegistration { pages, region: region.clone() };
    loop {
        let changing = lock(&CHANGING);
        match look(start, end) {
            Found::Inside(pages) => return Ok(registration(Some(pages))),
            Found::Across(pages) => {
                return Err(CudaError::RegistrationOverlap {
                    start,
                    end,
                    other_start: pages.start,
                    other_end: pages.end,
                });
            }
            // Its last holder is gone, and it is about to be unregistered.
            Found::Leaving => {
                drop(changing);
                if !drain_deferred() {
                    std::thread::yield_now();
                }
            }
            Found::Nothing => {
                if super::gpu_memory::pinned_in_whole(region.addr(), region.len())? {
                    return Ok(registration(None));
                }
                register_pages(&context, start, end, chunk)?;
                let owner = KeepAlive(Arc::clone(region.owner()));
                let pages = Arc::new(Pages { start, end, chunk, context, owner });
                lock(&MAP).insert(start, (end, Arc::downgrade(&pages)));
                return Ok(registration(Some(pages)));
            }
        }
    }
}

/// The pages that a range touches. `HostRegion` promises that the range exists, so rounding cannot overflow in earnest.
fn pages_of(addr: u64, len: u64) -> (u64, u64) {
    let page = page_size() as u64;
    let end = addr.saturating_add(len);
    (addr & !(page - 1), end.checked_next_multiple_of(page).unwrap_or(!(page - 1)))
}

enum Found {
    Nothing,
    Inside(Arc<Pages>),
    Across(Arc<Pages>),
    Leaving,
}

/// What the map holds about a range.
fn look(start: u64, end: u64) -> Found {
    let map = lock(&MAP);
    // Ranges do not overlap: only the last one that begins before `end` can reach into this one.
    let Some((_, (other_end, weak))) = map.range(..end).next_back() else { return Found::Nothing };
    if *other_end <= start {
        return Found::Nothing;
    }
    // The caller lets go of what is upgraded here, where no lock is held: it may be the last holder.
    match weak.upgrade() {
        None => Found::Leaving,
        Some(pages) if pages.start <= start && end <= pages.end => Found::Inside(pages),
        Some(pages) => Found::Across(pages),
    }
}

/// The registered range that holds all of `addr..addr + len`, if this library registered one.
pub(super) fn find(addr: u64, len: u64) -> Option<Arc<Pages>> {
    let end = addr.checked_add(len)?;
    match look(addr, end.max(addr + 1)) {
        Found::Inside(pages) => Some(pages),
        _ => None,
    }
}

impl Pages {
    /// Offsets within `addr..addr + len`, part of this range, at which two registrations meet.
    pub(super) fn seams_within(&self, addr: u64, len: u64) -> Vec<u64> {
        let first = self.start + (addr - self.start + 1).next_multiple_of(self.chunk);
        let mut seams = Vec::new();
        let mut at = first;
        while at < addr + len {
            seams.push(at - addr);
            at += self.chunk;
        }
        seams
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // Unregistering waits for all work of the device; whoever drops a layout need not. Until it is done the map says
        // that the range is leaving, so nobody registers it anew.
        let (start, end, chunk) = (self.start, self.end, self.chunk);
        let (context, owner) = (Arc::clone(&self.context), KeepAlive(Arc::clone(&self.owner.0)));
        run_later(move || {
            unregister_pages(&context, start, end, chunk);
            lock(&MAP).remove(&start);
            drop(owner);
        });
    }
}

/// Registers `start..end`, all or nothing.
fn register_pages(context: &Arc<PrimaryContext>, start: u64, end: u64, chunk: u64) -> Result<()> {
    let _current = context.enter()?;
    let _relaxed = RelaxedCapture::enter()?;
    let mut at = start;
    while at < end {
        let len = chunk.min(end - at);
        let pointer: *mut c_void = std::ptr::with_exposed_provenance_mut(at as usize);
        // SAFETY: whole pages of a region that its owner keeps mapped; the registration holds that owner. The context is
        // current.
        let pinned = unsafe { raw::cuMemHostRegister_v2(pointer, len as usize, FLAGS) };
        let outcome = pinned
            .map_err(|error| error.for_allocation((end - start) as usize, context.ordinal()))
            .and_then(|()| same_address(at).inspect_err(|_| unregister(at)));
        if let Err(error) = outcome {
            unregister_pages(context, start, at, chunk);
            return Err(error);
        }
        at += len;
    }
    Ok(())
}

/// Kernels must see the address that the CPU sees: a range of several registrations would be several ranges to them.
fn same_address(addr: u64) -> Result<()> {
    let alias = pointer::device_alias(addr)?;
    if alias == addr { Ok(()) } else { Err(CudaError::AliasDiffers { addr, alias }) }
}

/// Unregisters what `register_pages` registered from `start` up to `end`.
fn unregister_pages(context: &Arc<PrimaryContext>, start: u64, end: u64, chunk: u64) {
    if start >= end {
        return;
    }
    match (context.enter(), RelaxedCapture::enter()) {
        (Ok(_current), Ok(_relaxed)) => {
            let mut at = start;
            while at < end {
                unregister(at);
                at = at.saturating_add(chunk);
            }
        }
        (Err(error), _) | (_, Err(error)) => {
            error.log_on_drop("entering a context to unregister host memory")
        }
    }
}

/// Unregisters one chunk by its first address.
fn unregister(addr: u64) {
    // SAFETY: registered by us at this address, unregistered once, with its context current.
    let outcome = unsafe { raw::cuMemHostUnregister(std::ptr::with_exposed_provenance_mut(addr as usize)) };
    if let Err(error) = outcome {
        error.log_on_drop("unregistering host memory");
    }
}
