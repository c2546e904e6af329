//! Attention-head exchange between ranks.

mod join;
pub(crate) mod mesh;
pub(crate) mod rendezvous;
pub(crate) mod setup;
pub(crate) mod watch;
pub(crate) mod wire;

pub use rendezvous::{MAX_KEY, MAX_VALUE, Rendezvous, rendezvous};
pub use setup::SetupError;

/// What tests outside the crate drive directly; no part of the interface.
#[doc(hidden)]
pub mod internals {
    pub use super::mesh::{Mesh, Part};
    pub use super::watch::{DeathCause, Event, Watch};
    pub use super::wire::{MAX_GATHER, MAX_LABEL, Notice};
}
