//! Attention heads exchanged between the ranks of a group.
//!
//! Every rank holds some tokens of all heads; [`All2All::send_recv_heads`] turns that into all tokens of some heads, and
//! [`All2All::gather_heads`] back. The ranks are processes or threads of one host. They meet at a [`rendezvous()`], share
//! memory, and from then on talk only through it: headers, bytes, counters of arrivals.
//!
//! ```
//! use std::time::Duration;
//! use kvferry::all2all::{All2All, CallOptions, ExchangeArray, rendezvous};
//! use kvferry::{Dtype, HostOptions, Region, host::{HostBuffer, HostRegion}};
//!
//! let ranks: Vec<_> = (0..2).map(|rank| std::thread::spawn(move || -> kvferry::Result<()> {
//!     let meet = rendezvous("memory://readme", rank, 2, Duration::from_secs(10))?;
//!     let comm = All2All::builder(rank, 2).capacity_bytes(1 << 20).rendezvous(meet).connect()?;
//!     // Rank r holds 3 of 6 tokens with 4 heads of 8 bytes each.
//!     let buffer = HostBuffer::new(3 * 4 * 8, HostOptions::default())?;
//!     let region = HostRegion::of_buffer(std::sync::Arc::new(buffer));
//!     region.fill(0, 3 * 4 * 8, 1 + rank as u8)?;
//!     let x = ExchangeArray {
//!         region: Region::Host(region), offset: 0, shape: [1, 3, 4, 8], strides: [96, 32, 8], dtype: Dtype::UInt8,
//!     };
//!     let y = comm.send_recv_heads(&[x], &CallOptions::default())?.remove(0);
//!     assert_eq!(y.shape(), [1, 6, 2, 8]);
//!     comm.close()
//! })).collect();
//! for rank in ranks {
//!     rank.join().unwrap()?;
//! }
//! # Ok::<(), kvferry::Error>(())
//! ```

mod attend;
mod backend;
mod builder;
mod call;
mod collective;
mod comm;
mod cpu;
mod cuda;
mod error;
mod join;
pub(crate) mod mesh;
mod options;
mod plan;
mod pool;
mod protocol;
pub(crate) mod rendezvous;
mod result;
pub(crate) mod setup;
mod state;
mod stats;
mod turn;
pub(crate) mod watch;
pub(crate) mod wire;
mod word;

pub use attend::Attend;
pub use backend::Transport;
pub use builder::All2AllBuilder;
pub use comm::{All2All, GatherAxis};
pub use cuda::quarantined_bytes;
pub use error::{ExchangeFailure, When};
pub use options::{CallOptions, CopyTarget, ExchangeArray, ExchangeDevice, ExchangeEngine, Landing};
pub use rendezvous::{MAX_KEY, MAX_VALUE, Rendezvous, rendezvous, rendezvous_attended};
pub use result::{ExchangeResult, Output, ResultShape};
pub use setup::SetupError;
pub use stats::ExchangeStats;
pub use word::refuse_to_join;

/// What tests outside the crate drive directly; no part of the interface.
#[doc(hidden)]
pub mod internals {
    pub use super::mesh::{Mesh, Part};
    pub use super::watch::{DeathCause, Event, Watch};
    pub use super::wire::{MAX_GATHER, MAX_LABEL, Notice};
}
