//! Keeping our calls out of other people's stream captures.

use std::marker::PhantomData;

use cudarc::driver::sys::CUstreamCaptureMode_enum as Mode;

use crate::error::Result;
use crate::raw;

/// While this lives, calls of this thread that are "potentially unsafe" during a capture (allocation, pinning, event
/// queries) neither fail nor spoil a capture that another thread has begun in global mode (CUDA driver API,
/// `cuThreadExchangeStreamCaptureMode`). Dropping it restores the thread's mode.
///
/// Threads of the library hold one for their whole life; entries on a user's thread hold one where they allocate.
#[derive(Debug)]
pub struct RelaxedCapture {
    previous: u32,
    /// The mode belongs to a thread: the guard must stay there.
    not_send: PhantomData<*mut ()>,
}

impl RelaxedCapture {
    /// Switches the calling thread to relaxed mode.
    ///
    /// # Errors
    /// Those of [`Driver::get`](crate::Driver::get), or the driver's refusal.
    pub fn enter() -> Result<RelaxedCapture> {
        crate::driver::Driver::get()?;
        let previous = exchange(Mode::CU_STREAM_CAPTURE_MODE_RELAXED as u32)?;
        Ok(RelaxedCapture { previous, not_send: PhantomData })
    }
}

impl Drop for RelaxedCapture {
    fn drop(&mut self) {
        if let Err(error) = exchange(self.previous) {
            error.log_on_drop("restoring a thread's capture mode");
        }
    }
}

/// Sets the thread's mode and gives the one before.
fn exchange(mut mode: u32) -> Result<u32> {
    // SAFETY: `mode` is a live integer holding a legal mode: relaxed, or one that the driver gave us.
    unsafe { raw::cuThreadExchangeStreamCaptureMode(&mut mode) }?;
    Ok(mode)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::gpu;

    #[test]
    fn the_mode_is_restored() {
        if gpu().is_none() {
            return;
        }
        // The mode is asked for by exchanging it twice.
        let mode = || {
            let mode = exchange(Mode::CU_STREAM_CAPTURE_MODE_RELAXED as u32).unwrap();
            exchange(mode).unwrap();
            mode
        };
        std::thread::spawn(move || {
            let global = Mode::CU_STREAM_CAPTURE_MODE_GLOBAL as u32;
            assert_eq!(mode(), global);
            {
                let _outer = RelaxedCapture::enter().unwrap();
                let _inner = RelaxedCapture::enter().unwrap();
                assert_eq!(mode(), Mode::CU_STREAM_CAPTURE_MODE_RELAXED as u32);
            }
            assert_eq!(mode(), global);
        })
        .join()
        .unwrap();
    }
}
