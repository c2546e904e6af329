//! What breaks a communicator, or keeps ranks from meeting, as Python's exceptions.

use kvferry::all2all::{ExchangeFailure, SetupError, When};
use kvferry::layout::ExchangeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors::{plain, raise};

fn of_peer(d: &Bound<'_, PyDict>, peer: usize, when: When) -> PyResult<()> {
    d.set_item("peer", peer)?;
    d.set_item("op", when.op.map(|op| op.name()))?;
    d.set_item("epoch", when.epoch)
}

/// A communicator that stopped working.
pub(crate) fn failure(py: Python<'_>, failure: ExchangeFailure) -> PyErr {
    let message = failure.to_string();
    match failure {
        ExchangeFailure::Mismatch { rank, reason, .. } => mismatch(py, message, rank, &reason),
        ExchangeFailure::PeerTimeout { peer, waited, when } => raise(py, "PeerTimeout", message, |d| {
            of_peer(d, peer, when)?;
            d.set_item("seconds", waited.as_secs_f64())
        }),
        ExchangeFailure::PeerDied { peer, pid, when } | ExchangeFailure::PeerClosed { peer, pid, when } => {
            raise(py, "PeerDied", message, |d| {
                of_peer(d, peer, when)?;
                d.set_item("pid", pid)
            })
        }
        ExchangeFailure::Aborted { rank, reason, .. } | ExchangeFailure::Failed { rank, reason, .. } => {
            raise(py, "Aborted", message, |d| {
                d.set_item("rank", rank)?;
                d.set_item("reason", reason)
            })
        }
        ExchangeFailure::Interrupted { rank, .. } => raise(py, "Aborted", message, |d| {
            d.set_item("rank", rank)?;
            d.set_item("reason", "it was interrupted")
        }),
        _ => plain(py, "Error", message),
    }
}

fn mismatch(py: Python<'_>, message: String, rank: usize, reason: &str) -> PyErr {
    raise(py, "ContractMismatch", message, |d| {
        d.set_item("rank", rank)?;
        d.set_item("reason", reason)
    })
}

/// The class of what a contract refuses: an option that cannot be, or tensors that do not fit.
pub(crate) fn refusal(error: &ExchangeError) -> &'static str {
    match error {
        ExchangeError::World { .. }
        | ExchangeError::Rank { .. }
        | ExchangeError::ListCount { .. }
        | ExchangeError::ListLength { .. }
        | ExchangeError::UnusedOption { .. }
        | ExchangeError::Exclusive { .. }
        | ExchangeError::UnknownLayout { .. } => "OptionError",
        _ => "LayoutError",
    }
}

/// Ranks that did not find each other, or did not agree.
pub(crate) fn setup(py: Python<'_>, error: SetupError) -> PyErr {
    let message = error.to_string();
    let late = |message: String, peer: Option<usize>, op: &str, seconds: f64| {
        raise(py, "PeerTimeout", message, |d| {
            d.set_item("peer", peer)?;
            d.set_item("op", op)?;
            d.set_item("epoch", 0)?;
            d.set_item("seconds", seconds)
        })
    };
    let gone = |message: String, peer: usize, pid: u32, op: &str| {
        raise(py, "PeerDied", message, |d| {
            d.set_item("peer", peer)?;
            d.set_item("pid", pid)?;
            d.set_item("op", op)?;
            d.set_item("epoch", 0)
        })
    };
    match error {
        SetupError::Url { .. } | SetupError::Range { .. } | SetupError::TooLarge { .. } => {
            plain(py, "OptionError", message)
        }
        SetupError::Place { source, .. } => {
            let errno = source.raw_os_error();
            raise(py, "RendezvousError", message, |d| d.set_item("errno", errno))
        }
        SetupError::Unreachable { .. } | SetupError::Store { .. } => plain(py, "RendezvousError", message),
        SetupError::AddressInUse { .. } => plain(py, "Busy", message),
        SetupError::RendezvousTimeout { waited, .. } => late(message, None, "connect", waited.as_secs_f64()),
        SetupError::Missing { missing, waited, .. } => {
            late(message, missing.first().copied(), "connect", waited.as_secs_f64())
        }
        SetupError::GatherTimeout { what, missing, waited } => {
            late(message, missing.first().copied(), &what, waited.as_secs_f64())
        }
        SetupError::Diverged { rank, .. }
        | SetupError::Withdrawn { rank, .. }
        | SetupError::PeerRefused { rank, .. }
        | SetupError::Duplicate { rank, .. }
        | SetupError::WrongUser { rank, .. }
        | SetupError::Disagree { rank, .. } => mismatch(py, message.clone(), rank, &message),
        SetupError::PeerDied { rank, pid, what } => gone(message, rank, pid, &what),
        SetupError::PeerLeft { rank, what } => gone(message, rank, 0, &what),
        SetupError::Io { source, .. } => {
            let errno = source.raw_os_error();
            raise(py, "HostMemoryError", message, |d| d.set_item("errno", errno))
        }
        SetupError::Fork(_) => plain(py, "ForkError", message),
        _ => plain(py, "Error", message),
    }
}
