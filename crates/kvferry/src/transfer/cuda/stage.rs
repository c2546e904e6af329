//! Staging memory: a few slots on the device or in pinned memory, used in turn.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};

use kvferry_cuda::{DeviceBuffer, DeviceRegion, Event, Gpu, GpuMemory, PinnedBuffer};
use kvferry_layout::{Dtype, KvOrder, Layout, LayoutConfig};

use crate::error::Result;
use crate::memory::{MemoryKind, Region};
use crate::physical::PhysicalLayout;
use crate::transfer::lock;

/// Slots of the pinned ring: while one fills, one drains, and two are between.
pub(crate) const SLOTS: usize = 4;
/// Slots of the device ring. The kernel between slot and layout is twenty times as fast as the copy, so two are enough;
/// more would be smaller, and the copy engine pauses between groups (256 blocks of 2 MiB, of one large copy: 0.973 with four
/// slots, 0.985 with two, on an H200).
pub(crate) const DEVICE_SLOTS: usize = 2;
/// Slots start at multiples of this.
const ALIGNMENT: u64 = 4096;

/// A slot of so much memory in all; never nothing.
fn slot_bytes(bytes: u64, slots: usize) -> u64 {
    (bytes / slots as u64 / ALIGNMENT * ALIGNMENT).max(ALIGNMENT)
}

/// Slots of device memory. A slot is free again once its event is done; who takes it next waits for that on a stream,
/// never on the host.
pub(crate) struct DeviceStage {
    slots: Vec<GpuMemory>,
    turn: Mutex<DeviceTurn>,
}

/// Whose turn it is. Held while a job is put on its streams, so that events and slots go together.
pub(crate) struct DeviceTurn {
    next: usize,
    last_use: [Option<Arc<Event>>; DEVICE_SLOTS],
    /// The job that used a slot last waits for a caller's stream: nobody knows how long.
    foreign: [bool; DEVICE_SLOTS],
}

impl DeviceStage {
    pub(super) fn new(gpu: &Gpu, bytes: u64) -> Result<DeviceStage> {
        let slot = slot_bytes(bytes, DEVICE_SLOTS);
        let len = usize::try_from(slot * DEVICE_SLOTS as u64).unwrap_or(usize::MAX);
        let whole = DeviceBuffer::new(len, gpu.ordinal())?;
        // Whatever was there is nobody's business, and tools that watch for reads of it know a fill, not a batch copy.
        whole.memset(0, len, 0)?;
        let whole = DeviceRegion::of_buffer(Arc::new(whole));
        let slots = (0..DEVICE_SLOTS as u64).filter_map(|index| whole.part(index * slot, slot));
        let slots = slots.map(|region| GpuMemory::of_device(&region)).collect();
        let turn = DeviceTurn { next: 0, last_use: Default::default(), foreign: [false; DEVICE_SLOTS] };
        Ok(DeviceStage { slots, turn: Mutex::new(turn) })
    }

    pub(crate) fn slot(&self, index: usize) -> &GpuMemory {
        &self.slots[index]
    }

    pub(crate) fn turn(&self) -> MutexGuard<'_, DeviceTurn> {
        lock(&self.turn)
    }

    /// Whether a slot is held up by a caller's stream. Any of them: a job takes them in turn.
    pub(crate) fn held_up(&self) -> bool {
        // Whoever has it is putting a job on its streams, and may be held up itself.
        let Ok(turn) = self.turn.try_lock() else { return true };
        (0..DEVICE_SLOTS).any(|slot| turn.held_up(slot))
    }
}

impl DeviceTurn {
    fn held_up(&self, slot: usize) -> bool {
        let pending = |event: &Arc<Event>| !event.query().unwrap_or(true);
        self.foreign[slot] && self.last_use[slot].as_ref().is_some_and(pending)
    }

    /// The next slot, the event that frees it, and whether that waits for a caller's stream, as does then whoever has the
    /// slot next.
    pub(crate) fn take(&mut self) -> (usize, Option<Arc<Event>>, bool) {
        let slot = self.next;
        self.next = (slot + 1) % DEVICE_SLOTS;
        let held_up = self.held_up(slot);
        (slot, self.last_use[slot].take(), held_up)
    }

    /// The slot is free again once `event` is done.
    pub(crate) fn give(&mut self, slot: usize, event: Arc<Event>, foreign: bool) {
        self.last_use[slot] = Some(event);
        self.foreign[slot] = foreign;
    }
}

/// A call for whoever gets a slot.
type Waiting = Box<dyn FnOnce(PinnedSlot) + Send>;

/// One slot of pinned memory, as both halves of a bounce want it.
pub(crate) struct PinnedMemory {
    pub(crate) index: usize,
    /// For the GPU.
    pub(crate) memory: GpuMemory,
    /// For copy threads: its one region.
    pub(crate) layout: Arc<PhysicalLayout>,
}

/// Slots of pinned memory, for copies that the host takes part in: who finds none is called when one is free.
pub(crate) struct PinnedStage {
    slots: Vec<Arc<PinnedMemory>>,
    state: Mutex<PinnedState>,
}

#[derive(Default)]
struct PinnedState {
    free: Vec<Arc<PinnedMemory>>,
    waiting: VecDeque<Waiting>,
    /// A thread is calling those who wait; what comes free meanwhile it hands on as well. A call may give its slot back
    /// at once, and thousands may wait.
    handing: bool,
}

/// A slot, given back on drop.
pub(crate) struct PinnedSlot {
    stage: Arc<PinnedStage>,
    memory: Arc<PinnedMemory>,
}

impl PinnedStage {
    pub(super) fn new(gpu: &Gpu, bytes: u64) -> Result<Arc<PinnedStage>> {
        let slot = slot_bytes(bytes, SLOTS);
        let len = usize::try_from(slot * SLOTS as u64).unwrap_or(usize::MAX);
        let whole = PinnedBuffer::new(len, gpu.ordinal())?.into_region();
        let plain =
            LayoutConfig::builder().num_blocks(1).num_layers(1).outer_dim(1).page_size(1).inner_dim(slot);
        let plain = Layout::fully_contiguous(plain.dtype(Dtype::UInt8).build()?, KvOrder::Nhd)?;
        let mut slots = Vec::with_capacity(SLOTS);
        for index in 0..SLOTS {
            let region = whole.part(index as u64 * slot, slot)?;
            let memory = GpuMemory::of_host(&region)?;
            let regions = vec![Region::Host(region)];
            let layout = PhysicalLayout::from_regions(plain.clone(), MemoryKind::Pinned, regions)?;
            slots.push(Arc::new(PinnedMemory { index, memory, layout }));
        }
        let state = PinnedState { free: slots.clone(), ..PinnedState::default() };
        Ok(Arc::new(PinnedStage { slots, state: Mutex::new(state) }))
    }

    pub(crate) fn slots(&self) -> &[Arc<PinnedMemory>] {
        &self.slots
    }

    /// Calls `ready` with a slot: now, or on the thread that gives one back. First come, first served.
    pub(crate) fn with_slot(self: &Arc<Self>, ready: impl FnOnce(PinnedSlot) + Send + 'static) {
        lock(&self.state).waiting.push_back(Box::new(ready));
        self.hand_on();
    }

    /// Calls those who wait while there are slots, unless a thread is at it.
    fn hand_on(self: &Arc<Self>) {
        let mut state = lock(&self.state);
        if std::mem::replace(&mut state.handing, true) {
            return;
        }
        loop {
            if state.waiting.is_empty() || state.free.is_empty() {
                state.handing = false;
                return;
            }
            let (Some(next), Some(memory)) = (state.waiting.pop_front(), state.free.pop()) else { return };
            drop(state);
            next(PinnedSlot { stage: self.clone(), memory });
            state = lock(&self.state);
        }
    }
}

impl PinnedSlot {
    pub(crate) const fn memory(&self) -> &Arc<PinnedMemory> {
        &self.memory
    }
}

impl Drop for PinnedSlot {
    fn drop(&mut self) {
        lock(&self.stage.state).free.push(self.memory.clone());
        self.stage.hand_on();
    }
}
