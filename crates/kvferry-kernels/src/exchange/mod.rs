//! The head exchange: what ranks say to each other through memory, and the parameters of the kernels in
//! `cuda/include/kvferry/exchange.cuh`.
//!
//! [`words`](HeaderCell) is the protocol's memory, the same for GPUs and for CPU ranks. [`ExchangeCall`] describes one
//! call of one rank, [`ExchangeGrid`] shapes it, and [`ExchangeCall::build`] writes the parameters, which
//! [`ExchangeLaunch::part`] hands out for the whole call or for parts of it.

mod build;
mod error;
mod grid;
mod lower;
mod params;
mod small;
mod template;
mod words;

pub use build::{ExchangeCall, ExchangeLaunch, ExchangeLoop, ExchangePart, ExchangePeer, ExchangePiece};
pub use error::ExchangeBuildError;
pub use grid::{ExchangeGrid, ExchangeLimits};
pub use params::{
    EXCHANGE_ITEM_LOOPS, EXCHANGE_PARAM_BYTES_LARGE, EXCHANGE_PARAM_BYTES_SMALL, EXCHANGE_SHARED_BYTES,
    ExchangeFlags, ExchangeHeader, ExchangeItemParams, ExchangeLoopParams, ExchangeParamBuffer,
    ExchangePeerParams, MAX_EXCHANGE_ITEMS, MAX_EXCHANGE_ITEMS_SMALL, MAX_EXCHANGE_PEERS_SMALL,
};
pub use small::{
    ExchangeArriveParams, ExchangeProbeParams, ExchangeProbePeer, PROBE_BYTES, ProbeReport, ProbeState,
};
pub use template::ExchangeTemplate;
pub use words::{
    ARRIVALS_OFFSET, BEAT_OFFSET, BELL_OFFSET, CELLS_OFFSET, CONTROL_BYTES, HeaderCell, HostPage, LocalState,
    MAX_RANKS, PLACE_ALIGN, POISON_FRESH, POISON_NONE, POISON_OLD, PROBE_OFFSET, Record, RecordKind,
    abort_word, arrival_offset, header_cell_offset, split_abort_word,
};

#[cfg(test)]
mod tests;
