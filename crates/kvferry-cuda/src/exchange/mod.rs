//! The device side of the head exchange: shared memory, launches, and what orders them.
//!
//! | type | what |
//! |---|---|
//! | [`ExchangeMemory`], [`PeerMemory`] | the allocation a rank exports, and its peers' as this device sees them |
//! | [`ExchangePage`] | abort word, timeout and record, in memory that host and kernels share |
//! | [`ExchangeLink`] | all of that for one rank, with its state; the probe |
//! | [`ExchangeRoute`] | what calls of one shape copy, checked once |
//! | [`ExchangeQueue`] | puts calls on streams, one after the other |
//!
//! A link is what kernels use; whatever is on a stream, or in a graph, holds it.

mod boxes;
mod link;
mod memory;
mod page;
mod queue;
mod route;

pub use link::{ExchangeLink, ExchangeProbe};
pub use memory::{ExchangeMemory, PeerMemory, PeerReach};
pub use page::ExchangePage;
pub use queue::{ExchangeMode, ExchangeOut, ExchangeQueue, ExchangeStopped, ExchangeWay};
pub use route::{ExchangeRoute, RouteInput, RoutePiece, RouteShape};
