//! The thread that hears of deaths and aborts, whatever the other threads of the process are stuck in.

use std::fmt;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use kvferry_host::{Doorbell, ForkGuard};

use super::mesh::Mesh;
use super::setup::SetupError;

/// How a peer's death was seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeathCause {
    /// Its process ended.
    Exited,
    /// Its end of the socket closed without a goodbye.
    HungUp,
    /// It sent what no rank sends. It is not listened to any more.
    Garbled,
}

impl fmt::Display for DeathCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DeathCause::Exited => "its process ended",
            DeathCause::HungUp => "its connection closed without a goodbye",
            DeathCause::Garbled => "it sent garbage",
        })
    }
}

/// What happened to another rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// It is gone without a goodbye. Nothing more comes from it.
    Death {
        /// The rank.
        peer: usize,
        /// Its process, 0 if unknown.
        pid: u32,
        /// How it was seen.
        how: DeathCause,
    },
    /// Its communicator is broken.
    Abort {
        /// The rank that tells.
        from: usize,
        /// Its reason, a code.
        kind: u32,
        /// The rank at fault, as it sees it.
        peer: usize,
        /// Epoch of the call that broke.
        epoch: u64,
    },
    /// It takes part in a step between calls that this rank has not begun.
    Step {
        /// The rank.
        peer: usize,
        /// Number of the step.
        sequence: u64,
    },
    /// It closed in order. Nothing more comes from it.
    Bye {
        /// The rank.
        peer: usize,
    },
}

/// One native thread that sleeps until something happens to a peer, and then calls back: once per event, in each peer's
/// order, with no lock of the mesh held. It never enters Python or CUDA. Dropping the watch ends the thread and waits
/// for it, unless the callback itself drops it.
#[derive(Debug)]
pub struct Watch {
    wake: Arc<Bell>,
    thread: Option<JoinHandle<()>>,
    fork: ForkGuard,
}

#[derive(Debug)]
struct Bell {
    door: Doorbell,
    stop: AtomicBool,
}

impl Watch {
    /// Starts to watch. Events since the mesh was joined come first.
    ///
    /// # Errors
    /// The mesh is watched already, belongs to the parent of this process, or the system refuses a thread or descriptor.
    pub fn start(mesh: &Arc<Mesh>, callback: impl Fn(Event) + Send + 'static) -> Result<Watch, SetupError> {
        let fork = ForkGuard::new();
        let wake = Arc::new(Bell {
            door: Doorbell::new().map_err(SetupError::io("a descriptor to end the watch with"))?,
            stop: AtomicBool::new(false),
        });
        if mesh.watched.swap(true, Ordering::AcqRel) {
            return Err(SetupError::Watched);
        }
        // Moved into the thread; dropped here if there will be none.
        let watched = Watched(Arc::clone(mesh));
        let thread = std::thread::Builder::new()
            .name("kvf-watch".to_owned())
            .spawn({
                let wake = Arc::clone(&wake);
                move || watched.run(&wake, &callback)
            })
            .map_err(SetupError::io("the thread that watches other ranks"))?;
        Ok(Watch { wake, thread: Some(thread), fork })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        if self.fork.check().is_err() {
            // The thread exists in the parent only.
            std::mem::forget(thread);
            return;
        }
        self.wake.stop.store(true, Ordering::Release);
        self.wake.door.ring();
        if thread.thread().id() != std::thread::current().id() && thread.join().is_err() {
            tracing::error!("the watch of other ranks had panicked");
        }
    }
}

/// Marks the mesh as watched until dropped.
struct Watched(Arc<Mesh>);

impl Watched {
    fn run(&self, wake: &Bell, callback: &dyn Fn(Event)) {
        while !wake.stop.load(Ordering::Acquire) {
            match self.0.read_watched(wake.door.as_fd()) {
                Ok(events) => events.into_iter().for_each(callback),
                Err(error) => {
                    // Out of kernel memory, or the limit of descriptors was lowered: neither lasts for ever.
                    tracing::error!(%error, "cannot watch other ranks, trying again");
                    std::thread::sleep(Duration::from_millis(100));
                }
            }
        }
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.0.unwatched();
    }
}
