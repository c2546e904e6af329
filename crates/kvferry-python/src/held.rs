//! A reference to a layout whose end never waits for the device. Freeing a GPU's memory or pinned memory does, and the
//! interpreter may collect garbage anywhere: with the GIL held, on the very thread that a held stream waits for.

use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::sync::Arc;

use kvferry::PhysicalLayout;
use kvferry::cuda::FreeLater;

/// A layout that something of Python's holds.
pub(crate) struct Held(ManuallyDrop<Arc<PhysicalLayout>>);

impl Held {
    pub(crate) fn new(layout: Arc<PhysicalLayout>) -> Held {
        Held(ManuallyDrop::new(layout))
    }
}

impl Deref for Held {
    type Target = Arc<PhysicalLayout>;

    fn deref(&self) -> &Arc<PhysicalLayout> {
        &self.0
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let _later = FreeLater::enter();
        // SAFETY: dropped once, here, and not used afterwards: `self` is going.
        unsafe { ManuallyDrop::drop(&mut self.0) };
    }
}
