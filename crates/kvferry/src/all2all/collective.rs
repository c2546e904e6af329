//! What all ranks do together, outside calls: outputs, reset, closing.

use std::sync::Arc;
use std::time::Duration;

use kvferry_layout::Dtype;
use kvferry_layout::exchange::{HeadLayout, RESULT_ALIGN, TensorInput};

use super::attend::Attend;
use super::comm::{Calls, Shared};
use super::error::{ExchangeFailure, When};
use super::mesh::CALL;

use super::result::{Output, OutputShared, ResultShape};
use super::setup::SetupError;
use super::stats::add;
use super::wire::Notice;
use crate::error::{Error, Result};
use crate::transfer::lock;

/// How long closing waits for the peers to close too. Only tidiness hangs on it: whoever closes late finds the memory it
/// maps still there.
const GOODBYE: Duration = Duration::from_secs(2);

/// Steps that others gave up without this rank, which a reset passes over.
const DEAD_STEPS: usize = 16;

/// Reads the next eight bytes of a message.
pub(super) fn word(bytes: &[u8], index: usize) -> Option<u64> {
    let at = bytes.get(index * 8..index * 8 + 8)?;
    Some(u64::from_le_bytes(at.try_into().ok()?))
}

pub(super) fn message(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// What a rank says of its part in an output, in the first word.
mod part {
    pub(super) const READY: u64 = 0;
    pub(super) const BUSY: u64 = 1;
    pub(super) const TOO_LARGE: u64 = 2;
    pub(super) const REFUSED: u64 = 3;
}

pub(super) fn empty_output(
    shared: &Shared,
    results: &[([u64; 4], Dtype)],
    layout: HeadLayout,
) -> Result<Output> {
    shared.fork.check()?;
    let mut calls = shared.turn("empty_output")?;
    shared.monitor.check()?;
    let shapes = shapes_of(results, layout);
    let bytes = match &shapes {
        Ok(shapes) => shapes.last().map_or(0, |last| last.offset + last.bytes()),
        Err(_) => 0,
    };
    let lease = if shapes.is_ok() && bytes <= shared.capacity { shared.pool.take(None) } else { None };
    let status = match (&shapes, &lease) {
        (Err(_), _) => part::REFUSED,
        _ if bytes > shared.capacity => part::TOO_LARGE,
        (_, None) => part::BUSY,
        (_, Some(_)) => part::READY,
    };
    let place = lease.as_ref().map_or(0, |lease| lease.place().offset);
    let counted = shared.monitor.counted();
    let mine = message(&[status, calls.next_output, place, bytes, counted]);
    let goes_on = || shared.monitor.check().is_ok();
    let parts = shared.mesh.gather_while("output", &mine, shared.patience, &goes_on);
    let parts = parts.map_err(|error| ended(shared, error))?;
    check_counts(shared, &parts)?;
    // The highest proposal: a rank that missed an earlier attempt which others took for done proposes less.
    let id = parts.iter().filter_map(|part| word(part, 1)).max().unwrap_or(calls.next_output);
    calls.next_output = id + 1;
    let shapes = shapes?;
    let mut places = Vec::with_capacity(parts.len());
    for (rank, part) in parts.iter().enumerate() {
        match (word(part, 0), word(part, 2)) {
            (Some(part::READY), Some(place)) => places.push(place),
            (Some(part::BUSY), _) => {
                return Err(Error::Busy { what: "the exchange pool", limit: shared.buffers.into() });
            }
            (Some(part::TOO_LARGE), _) => {
                let needed = word(part, 3).unwrap_or(0);
                return Err(Error::Capacity { rank, needed, capacity: shared.capacity });
            }
            _ => {
                let reason = "its shapes for an output were refused".to_owned();
                return Err(SetupError::Disagree { rank, reason }.into());
            }
        }
    }
    let Some(lease) = lease else {
        return Err(Error::Busy { what: "the exchange pool", limit: shared.buffers.into() });
    };
    tracing::debug!(id, bytes, "all2all output");
    let nonce = calls.nonce;
    Ok(Output { shared: Arc::new(OutputShared { id, nonce, places, layout, shapes, lease }) })
}

/// Ranks that have begun another number of calls than this one are in another place of their program: on a GPU the calls
/// that they are ahead by still wait.
fn check_counts(shared: &Shared, parts: &[Vec<u8>]) -> Result<()> {
    // All ranks see the same, and so fail alike.
    let counts = parts.iter().map(|part| word(part, 4).filter(|&calls| calls != u64::MAX));
    let mut known = counts.enumerate().filter_map(|(rank, calls)| Some((rank, calls?)));
    let Some((_, first)) = known.next() else { return Ok(()) };
    match known.find(|&(_, calls)| calls != first) {
        Some((rank, _)) => Err(shared.monitor.crossed_by(rank).into()),
        None => Ok(()),
    }
}

/// The results of a call as [`Contract`](kvferry_layout::exchange::Contract) lays them out.
fn shapes_of(results: &[([u64; 4], Dtype)], layout: HeadLayout) -> Result<Vec<ResultShape>> {
    let mut shapes = Vec::with_capacity(results.len());
    let mut offset = 0_u64;
    for &(shape, dtype) in results {
        let TensorInput { strides, .. } = TensorInput::contiguous(shape, layout, dtype)?;
        let one = ResultShape { offset, shape, strides, dtype };
        let overflow = || Error::InvalidOption {
            option: "shape",
            expected: "less than 2^63 bytes in all".to_owned(),
            value: format!("{shape:?}"),
        };
        let end = offset.checked_add(one.bytes()).ok_or_else(overflow)?;
        offset = end.checked_next_multiple_of(RESULT_ALIGN).ok_or_else(overflow)?;
        shapes.push(one);
    }
    if shapes.is_empty() {
        return Err(Error::InvalidOption {
            option: "shape",
            expected: "one per result".to_owned(),
            value: "none".to_owned(),
        });
    }
    Ok(shapes)
}

/// What ended a step of all ranks, for its caller.
fn ended(shared: &Shared, error: SetupError) -> Error {
    match error {
        SetupError::Interrupted { what } => shared.monitor.interrupted(&what),
        _ if shared.monitor.is_closed() => Error::ExchangeClosed,
        SetupError::Withdrawn { what, .. } if what == CALL => shared.monitor.crossed_by(shared.rank).into(),
        // Whatever made it so is worth more.
        error @ SetupError::Abandoned { .. } => shared.monitor.check().err().unwrap_or(error.into()),
        error => error.into(),
    }
}

pub(super) fn reset(shared: &Shared) -> Result<()> {
    shared.fork.check()?;
    if shared.monitor.is_closed() {
        return Err(Error::ExchangeClosed);
    }
    let mut calls = shared.turn("reset")?;
    if shared.monitor.is_closed() {
        return Err(Error::ExchangeClosed);
    }
    if let Some(missing) = shared.monitor.missing() {
        return Err(missing.into());
    }
    if calls.beyond_repair {
        let reason = "an earlier reset failed half way: set the communicator up anew";
        return Err(SetupError::Disagree { rank: shared.rank, reason: reason.to_owned() }.into());
    }
    reset_together(shared, &mut calls)
}

/// Whether a step failed because some rank was not in a reset, rather than in one that did not come off.
fn is_dead(error: &SetupError) -> bool {
    match error {
        SetupError::Withdrawn { what, .. } => what != "reset",
        SetupError::Diverged { theirs, .. } => theirs == "output",
        _ => false,
    }
}

/// Between the first and the second meeting no rank is in a call, and none begins one: what peers write into this rank's
/// control words has been written, and nothing more is. Notices of the old session came before the first meeting, on the
/// same sockets; those of the new one come after the second.
fn reset_together(shared: &Shared, calls: &mut Calls) -> Result<()> {
    let quiet = shared.backend.quiesce();
    // A rank that resets what is broken is where it should be, though others may still be in the call that finds out.
    let broken = shared.monitor.broken_by().is_some();
    let counted = if broken { u64::MAX } else { shared.monitor.counted() };
    let mine = message(&[nonce()?, u64::from(quiet.is_ok()), counted]);
    let mut tries = 0..DEAD_STEPS;
    let words = loop {
        match shared.mesh.gather_while("reset", &mine, shared.patience, &|| true) {
            // A step of ranks that did not know yet that all is broken: they hear of it, and come to the next one.
            Err(error) if broken && is_dead(&error) && tries.next().is_some() => {}
            met => break met.map_err(|error| ended(shared, error))?,
        }
    };
    quiet?;
    // From here on a failure leaves ranks in different sessions.
    calls.beyond_repair = true;
    let agreed = words.first().and_then(|first| word(first, 0));
    let cleared = match agreed {
        Some(nonce) if words.iter().all(|part| word(part, 1) == Some(1)) => {
            calls.nonce = nonce;
            shared.monitor.mend(|| shared.backend.reset())
        }
        _ => Err(SetupError::Disagree {
            rank: words.iter().position(|part| word(part, 1) != Some(1)).unwrap_or(0),
            reason: "its device does not come to rest".to_owned(),
        }
        .into()),
    };
    let together = shared.mesh.agree("reset agreed", cleared);
    if let Err(error) = together {
        let when = When { epoch: 0, op: None };
        let reason = format!("reset failed: {error}");
        shared.monitor.fail(ExchangeFailure::Failed { rank: shared.rank, reason, when }, None);
        return Err(error);
    }
    calls.beyond_repair = false;
    add(&shared.counters.resets, 1);
    tracing::debug!(rank = shared.rank, "all2all communicator reset");
    shared.monitor.check()
}

pub(super) fn close(shared: &Shared) -> Result<()> {
    shared.fork.check()?;
    // A call of another thread ends; that of this one has.
    let now = shared.calls.is_taken() && shared.monitor.close_now();
    let Some(_calls) = shared.calls.take(&Attend::default()) else { return Ok(()) };
    if !now && shared.monitor.is_closed() {
        return Ok(());
    }
    // Still open: the death of a peer ends what waits for it. Then what the last calls found is found here, too.
    let quiet = shared.backend.quiesce();
    let _ = shared.monitor.check();
    shared.monitor.close();
    shared.mesh.tell(Notice::Bye);
    let failure = shared.monitor.broken_by();
    // The ranks of a broken communicator may never close: nobody is waited for.
    let patience = if now || failure.is_some() { Duration::ZERO } else { GOODBYE };
    let waited = shared.monitor.wait_for_all_gone(patience, shared.mesh.attend());
    let all_gone = waited == Some(true);
    if !all_gone {
        tracing::debug!(rank = shared.rank, "closed before all peers did");
    }
    shared.backend.close(all_gone);
    drop(lock(&shared.watch).take());
    match failure {
        _ if waited.is_none() => Err(Error::Interrupted { what: "close".to_owned() }),
        Some(failure) => Err(failure.into()),
        None => quiet,
    }
}

/// A number that no other session has, but for chance.
pub(super) fn nonce() -> Result<u64> {
    let io = |source| SetupError::Io { what: "random bytes".to_owned(), source };
    Ok(u64::from_le_bytes(kvferry_host::random_bytes::<8>().map_err(io)?))
}
