//! One call, from arguments to results.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvferry_layout::exchange::ExchangeOp;

use super::backend::{CaptureId, Launch, Trouble};
use super::comm::{Calls, Shared};
use super::error::{ExchangeFailure, When};
use super::options::{CallOptions, CopyTarget, ExchangeArray, ExchangeDevice, Landing};
use super::plan::Plan;
use super::pool::{Lease, Place};
use super::protocol::Refusal;
use super::result::{ExchangeResult, OutputShared, ResultShape};
use super::stats::add;
use crate::error::{Error, Result};
use crate::memory::Region;

/// A refusal: its class for the peers, its error for the caller.
type Refused = (Refusal, Error);

/// Where a call lands, and what keeps the place.
struct Landed {
    place: Place,
    lease: Option<Arc<Lease>>,
    /// Where to copy the results.
    into: Option<Vec<ExchangeArray>>,
}

impl Shared {
    /// Carries out a call. Concurrent callers queue here, in the order in which they come.
    pub(super) fn exchange(
        &self,
        op: ExchangeOp,
        arrays: &[ExchangeArray],
        options: &CallOptions,
        landing: Landing<'_>,
    ) -> Result<Vec<ExchangeResult>> {
        self.fork.check()?;
        let mut calls = self.turn(op.name())?;
        let _running = self.monitor.begin(op)?;
        let capture = self.backend.capture(options.stream);
        let plan = match self.prepare(&mut calls, op, arrays, options) {
            Ok(plan) => plan,
            Err(refused) => return Err(self.refuse(op, refused, options)),
        };
        let capture = match capture {
            Ok(capture) => capture,
            Err(error) => return Err(self.refuse(op, (Refusal::Device, error), options)),
        };
        let landed = match self.land(&calls, &plan, options, (landing, capture)) {
            Ok(Some(landed)) => landed,
            Ok(None) => {
                add(&self.counters.busy, 1);
                return Err(Error::Busy { what: "the exchange pool", limit: self.buffers.into() });
            }
            Err(refused) => return Err(self.refuse(op, refused, options)),
        };
        if let Err(refused) = self.check_overlap(&plan, landed.place, arrays) {
            return Err(self.refuse(op, refused, options));
        }
        let out = options.out.as_ref().map(|out| &*out.shared);
        let launch = Launch {
            plan: &plan,
            hash: plan.contract.hash(calls.nonce, out.map_or(0, |out| out.id) ^ options.kinds),
            inputs: arrays,
            place: landed.place,
            out,
            stream: options.stream,
            num_sms: options.num_sms,
            engine: options.engine,
        };
        self.monitor.count(capture.is_some())?;
        match self.backend.run(&launch) {
            Ok(()) => {}
            // Nothing is wrong with the call: it may come again.
            Err(Trouble::Refused(error @ Error::Busy { .. })) => {
                self.uncount(capture);
                add(&self.counters.busy, 1);
                return Err(error);
            }
            Err(Trouble::Refused(error)) => {
                self.uncount(capture);
                return Err(self.refuse(op, (Refusal::Device, error), options));
            }
            Err(Trouble::Fault(fault)) => return Err(self.monitor.fault(fault)),
        }
        self.count(&plan, &landed);
        self.results(&plan, landed, options)
    }

    /// The call was not made: it may come again.
    fn uncount(&self, capture: Option<CaptureId>) {
        if capture.is_none() {
            self.monitor.uncount();
        }
    }

    /// The plan of a call whose arguments are in order.
    fn prepare(
        &self,
        calls: &mut Calls,
        op: ExchangeOp,
        arrays: &[ExchangeArray],
        options: &CallOptions,
    ) -> std::result::Result<Arc<Plan>, Refused> {
        if self.device == ExchangeDevice::Cpu && options.stream.is_some() {
            let why = "the CPU backend runs on the calling thread";
            return Err((Refusal::Arguments, unsupported("a stream", why)));
        }
        let plan = calls
            .plans
            .get(op, arrays, options, (self.rank, self.world))
            .map_err(|error| (Refusal::Arguments, error.into()))?;
        for (index, array) in arrays.iter().enumerate() {
            let checked = check_bounds(index, array).and_then(|()| self.backend.accepts(&array.region));
            checked.map_err(|error| (Refusal::Memory, error))?;
        }
        for (rank, &needed) in plan.result_bytes.iter().enumerate() {
            if needed > self.capacity {
                let error = Error::Capacity { rank, needed, capacity: self.capacity };
                return Err((Refusal::Capacity, error));
            }
        }
        Ok(plan)
    }

    /// Finds a place for the results; `None` if every buffer is held and nothing may be copied.
    fn land(
        &self,
        calls: &Calls,
        plan: &Plan,
        options: &CallOptions,
        (landing, capture): (Landing<'_>, Option<CaptureId>),
    ) -> std::result::Result<Option<Landed>, Refused> {
        if let Some(out) = &options.out {
            self.check_output(calls, plan, &out.shared).map_err(|error| (Refusal::Output, error))?;
            let lease = Arc::clone(&out.shared.lease);
            return Ok(Some(Landed { place: lease.place(), lease: Some(lease), into: None }));
        }
        let (target, pool_first) = match landing {
            Landing::Pool => (None, true),
            Landing::PoolOrCopy(target) => (Some(target), true),
            Landing::Copy(target) => (Some(target), false),
        };
        if pool_first && let Some(lease) = self.pool.take(capture) {
            return Ok(Some(Landed { place: lease.place(), lease: Some(lease), into: None }));
        }
        let Some(target) = target else { return Ok(None) };
        if pool_first {
            warn_once_of_copies(self.buffers);
        }
        let into = self.copy_target(plan, target).map_err(|error| (Refusal::CopyTarget, error))?;
        Ok(Some(Landed { place: self.pool.landing(), lease: None, into: Some(into) }))
    }

    /// Asks the caller for memory and looks at what comes.
    fn copy_target(&self, plan: &Plan, target: &mut CopyTarget<'_>) -> Result<Vec<ExchangeArray>> {
        let arrays = target(&plan.results)?;
        let fits = |(array, shape): (&ExchangeArray, &ResultShape)| {
            array.shape == shape.shape && array.dtype == shape.dtype && array.region.writable()
        };
        if arrays.len() != plan.results.len() || !arrays.iter().zip(&plan.results).all(fits) {
            return Err(Error::InvalidOption {
                option: "copy target",
                expected: "one writable array per result, of its shape and dtype".to_owned(),
                value: format!("{} arrays", arrays.len()),
            });
        }
        for (index, array) in arrays.iter().enumerate() {
            check_bounds(index, array)?;
            self.backend.accepts(&array.region)?;
        }
        Ok(arrays)
    }

    fn check_output(&self, calls: &Calls, plan: &Plan, out: &OutputShared) -> Result<()> {
        let invalid =
            |expected: String, value: String| Error::InvalidOption { option: "out", expected, value };
        if !out.lease.is_of(&self.pool) || out.nonce != calls.nonce {
            let expected = "made by this communicator, since its last reset".to_owned();
            return Err(invalid(expected, format!("output {}", out.id)));
        }
        if out.layout != plan.layout {
            return Err(invalid(format!("of layout {}", plan.layout), out.layout.to_string()));
        }
        if out.shapes != plan.results {
            let text = |shapes: &[ResultShape]| {
                let one = |shape: &ResultShape| format!("{:?} {}", shape.shape, shape.dtype);
                shapes.iter().map(one).collect::<Vec<_>>().join(", ")
            };
            return Err(invalid(text(&plan.results), text(&out.shapes)));
        }
        Ok(())
    }

    /// Nothing may be written where an input is still read.
    fn check_overlap(
        &self,
        plan: &Plan,
        place: Place,
        arrays: &[ExchangeArray],
    ) -> std::result::Result<(), Refused> {
        let pool = self.backend.pool().span();
        let start = pool.addr + place.offset;
        let written = start..start + plan.result_bytes.get(self.rank).copied().unwrap_or(0);
        for (index, array) in arrays.iter().enumerate() {
            if let Some(read) = bytes_of(array)
                && written.start < read.end
                && read.start < written.end
            {
                let value = format!("an input (tensor {index}) that lies in it");
                let expected = "apart from every input".to_owned();
                return Err((Refusal::Output, Error::InvalidOption { option: "out", expected, value }));
            }
        }
        Ok(())
    }

    /// Tells the peers that this call will not be, and breaks the communicator, as every rank will.
    pub(super) fn refuse(&self, op: ExchangeOp, (refusal, error): Refused, options: &CallOptions) -> Error {
        // Alone there is nobody whom a refusal could strand. It counts as a call, before anybody can know of it.
        let counted =
            self.world > 1 && self.backend.capture(options.stream).is_ok_and(|capture| capture.is_none());
        if counted {
            // Should a step of others be in the way, they learn of one of the two.
            let _ = self.monitor.count(false);
        }
        if self.world > 1 && self.backend.refuse(op, refusal, options.stream) {
            let when = When { epoch: self.backend.epoch() + 1, op: Some(op) };
            let reason = format!("{refusal}: {error}");
            let failure = ExchangeFailure::Mismatch { rank: self.rank, reason, when };
            let tell = (!self.backend.refusals_are_seen()).then_some(Some(refusal));
            self.monitor.fail(failure, tell);
        }
        error
    }

    fn count(&self, plan: &Plan, landed: &Landed) {
        let all: u64 = plan.bytes_to.iter().sum();
        let own = plan.bytes_to.get(self.rank).copied().unwrap_or(0);
        let result: u64 = plan.results.iter().map(ResultShape::bytes).sum();
        add(&self.counters.calls, 1);
        add(&self.counters.bytes_sent, all - own);
        add(&self.counters.bytes_received, result.saturating_sub(own));
        tracing::debug!(
            op = %plan.op,
            bytes = all,
            epoch = self.backend.epoch(),
            place = ?landed.place.slot,
            copied = landed.into.is_some(),
            "all2all call"
        );
    }

    fn results(&self, plan: &Plan, landed: Landed, options: &CallOptions) -> Result<Vec<ExchangeResult>> {
        match (landed.lease, landed.into) {
            (Some(lease), _) => lease.results(&plan.results, plan.layout),
            (None, into) => {
                let into = into.unwrap_or_default();
                self.backend.copy_out(plan, landed.place, &into, options.stream)?;
                add(&self.counters.copied_out, 1);
                let result = |(array, shape): (ExchangeArray, &ResultShape)| ExchangeResult {
                    region: array.region,
                    start: array.offset,
                    shape: ResultShape { offset: 0, strides: array.strides, ..*shape },
                    layout: plan.layout,
                    lease: None,
                };
                Ok(into.into_iter().zip(&plan.results).map(result).collect())
            }
        }
    }
}

fn unsupported(what: &str, why: &str) -> Error {
    Error::Unsupported { what: what.to_owned(), why: why.to_owned() }
}

/// Offsets from element `[0, 0, 0, 0]` that an array reaches: first byte and end. `None` if it has no elements. The
/// contract, or the shape of a result, bounds the arithmetic.
fn extent(array: &ExchangeArray) -> Option<Range<i128>> {
    if array.shape.contains(&0) {
        return None;
    }
    let run = i128::from(array.shape[3]) * i128::from(array.dtype.bytes());
    let mut reach = 0..run;
    for (&count, &stride) in array.shape.iter().zip(&array.strides) {
        let last = i128::from(count - 1) * i128::from(stride);
        reach = reach.start + last.min(0)..reach.end + last.max(0);
    }
    Some(reach)
}

/// Addresses that an array reaches.
fn bytes_of(array: &ExchangeArray) -> Option<Range<u64>> {
    let reach = extent(array)?;
    let base = i128::from(array.region.span().addr) + i128::from(array.offset);
    // In bounds of a region, hence addresses.
    Some(u64::try_from(base + reach.start).ok()?..u64::try_from(base + reach.end).ok()?)
}

fn check_bounds(index: usize, array: &ExchangeArray) -> Result<()> {
    let Some(reach) = extent(array) else { return Ok(()) };
    let offset = i128::from(array.offset);
    let (start, end) = (offset + reach.start, offset + reach.end);
    let len = array.region.span().len;
    if start < 0 || end > i128::from(len) {
        return Err(Error::ArrayBounds { tensor: index, start, end, len });
    }
    Ok(())
}

fn warn_once_of_copies(buffers: u32) {
    static WARNED: AtomicBool = AtomicBool::new(false);
    if !WARNED.swap(true, Ordering::Relaxed) {
        tracing::warn!(
            buffers,
            "results are held in every buffer of an all2all pool: results are copied out"
        );
    }
}

/// The kind of memory that a backend is given by mistake.
pub(super) fn wrong_memory(region: &Region, device: ExchangeDevice) -> Error {
    unsupported(
        &format!("an array in {} memory", region.kind()),
        &format!("the communicator is for {device}"),
    )
}
