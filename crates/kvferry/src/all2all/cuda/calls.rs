//! One call on a GPU.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use kvferry_cuda::{
    CudaError, ExchangeLoop, ExchangeMode, ExchangeQueue, ExchangeRoute, RouteInput, RoutePiece, RouteShape,
    StreamHandle,
};
use kvferry_host::Owner;
use kvferry_layout::{ExchangeOp, Piece};

use super::gate::{Stuck, Through};
use super::{CaptureEnd, CudaBackend, FAREWELL, MARGIN, stream_of};
use crate::all2all::backend::{CaptureId, Launch, Trouble};
use crate::all2all::call::wrong_memory;
use crate::all2all::error::{Fault, FaultKind};
use crate::all2all::options::{ExchangeArray, ExchangeDevice, ExchangeEngine};
use crate::all2all::plan::Plan;
use crate::all2all::protocol::Refusal;
use crate::all2all::result::ResultShape;
use crate::error::{Error, Result};
use crate::memory::Region;
use crate::transfer::lock;

/// From this many bytes of a rank on, one CTA waits for late peers before those that push are launched. It costs 4 us
/// (two H200s), and until then few CTAs push.
const OPENED: u64 = 48 << 20;
/// From this many bytes of a rank on, the copy engine is faster where it can be used.
const COPY_ENGINE: u64 = 256 << 20;
/// Most copies that are still faster then.
const FEW_COPIES: usize = 64;
/// Routes kept with a plan: one per bound on CTAs that is in use.
const KEPT: usize = 4;

/// The routes of a plan, by the bound on CTAs.
type Routes = Mutex<Vec<(Option<u32>, ExchangeRoute)>>;

impl CudaBackend {
    pub(super) fn call(&self, launch: &Launch<'_>) -> std::result::Result<(), Trouble> {
        let stream = stream_of(launch.stream);
        let mut queue = lock(&self.queue);
        let queue = queue.as_mut().ok_or(Trouble::Refused(Error::ExchangeClosed))?;
        let cx = self.gpu.enter().map_err(refused)?;
        let way = queue.look(&cx, stream).map_err(refused)?;
        let capture = way.capture();
        // First of all: should the call be refused, this gives the capture's buffer back.
        let keep = self.kept_by(capture, launch);
        let routes = self.routes(queue, launch).map_err(Trouble::Refused)?;
        let mut routes = lock(routes);
        let found = routes.iter_mut().find(|(num_sms, _)| *num_sms == launch.num_sms);
        let Some((_, route)) = found else { return Err(Trouble::Refused(Error::ExchangeClosed)) };
        let inputs = self.inputs(launch).map_err(Trouble::Refused)?;
        let mode = self.mode(launch, route).map_err(Trouble::Refused)?;
        if capture.is_some() && self.gate.is_some() {
            return Err(Trouble::Refused(Error::Unsupported {
                what: "a captured all2all call between threads of one process".to_owned(),
                why: "launches of the graph cannot wait for each other: use one process per GPU".to_owned(),
            }));
        }
        // Before the gate: the others must not launch for a call that turns out to be too early.
        let slot = launch.place.slot;
        self.fences.open(&cx, slot, stream, capture, self.timeout()).map_err(Trouble::Refused)?;
        let through = self.pass(launch)?;
        let place = launch.place.offset;
        let launched = queue.call(&cx, &way, route, &inputs, place, launch.hash, mode, keep);
        drop(through);
        if let Err(stopped) = launched {
            return Err(if stopped.begun {
                // Peers may wait for the rest.
                Trouble::Fault(self.failed(&stopped.error, launch.plan.op))
            } else {
                Trouble::Refused(stopped.error.into())
            });
        }
        self.fences.filled(slot, stream, capture);
        for array in launch.inputs {
            if let Some(read) = self.slot_of(&array.region) {
                self.fences.read(read, stream);
            }
        }
        match capture {
            None => drop(self.calls.fetch_add(1, Ordering::AcqRel)),
            Some(_) => self.captured.store(true, Ordering::Relaxed),
        }
        if let Some(ticker) = self.ticker.get() {
            ticker.call(self.timeout().saturating_add(MARGIN), capture.is_some());
        }
        self.farewell(queue, launch.plan.op)
    }

    /// Waits for the other ranks of this process.
    fn pass(&self, launch: &Launch<'_>) -> std::result::Result<Option<Through<'_>>, Trouble> {
        let Some(gate) = &self.gate else { return Ok(None) };
        let (mut attending, mut interrupted) = (self.attend.begin(), false);
        let give_up = || {
            interrupted = attending.gives_up();
            interrupted || self.page.aborted() != 0
        };
        let passed = gate.pass(self.rank, self.timeout(), give_up);
        let epoch = self.calls.load(Ordering::Acquire) + 1;
        let fault = |kind, peer| Err(Trouble::Fault(Fault { kind, peer, epoch, op: Some(launch.plan.op) }));
        if interrupted {
            // Those who launch now hear of it by the abort.
            return fault(FaultKind::Interrupted, self.rank);
        }
        match passed {
            Ok(through) => Ok(Some(through)),
            Err(stuck) => {
                let (kind, peer) = match stuck {
                    Stuck::GivenUp => (FaultKind::Aborted, self.rank),
                    Stuck::Late(peer) => (FaultKind::HeaderTimeout { waited: self.timeout() }, peer),
                };
                fault(kind, peer)
            }
        }
    }

    /// A call that a peer has left before will, as a rule, only end by what that peer said before: the caller learns it
    /// now, unless the stream has other work to do first.
    fn farewell(&self, queue: &mut ExchangeQueue, op: ExchangeOp) -> std::result::Result<(), Trouble> {
        if self.left.load(Ordering::Acquire) == 0 {
            return Ok(());
        }
        let settled = queue.settle(FAREWELL + FAREWELL / 4);
        if let Some(record) = self.page.record() {
            return Err(Trouble::Fault(self.fault_of(&record)));
        }
        match settled {
            // All had called before the peer left; or that will be known later.
            Ok(_) => Ok(()),
            Err(error) => Err(Trouble::Fault(self.failed(&error, op))),
        }
    }

    /// Puts a refusal on the stream in place of the call. False if that may not be.
    pub(super) fn publish(&self, op: ExchangeOp, refusal: Refusal, stream: StreamHandle) -> bool {
        let mut queue = lock(&self.queue);
        let Some(queue) = queue.as_mut() else { return false };
        let Ok(cx) = self.gpu.enter() else { return false };
        // Codes of refusals are small.
        let published = match queue.look(&cx, stream) {
            Ok(way) if way.capture().is_none() => queue.refuse(&cx, &way, op.code(), refusal.code() as u32),
            Ok(_) | Err(CudaError::StreamIsCapturing { .. }) => return false,
            // Such as another device's stream, which may be why the call is refused.
            Err(error) => Err(error.into()),
        };
        // It waits for nobody, so nobody need be waited for; and the others must not wait for this rank.
        if let Some(gate) = &self.gate {
            gate.leave(self.rank);
        }
        if let Err(stopped) = published {
            tracing::warn!(error = %stopped.error, "peers are told of a refused call by message: no header can be sent");
            self.mute.store(true, Ordering::Relaxed);
        }
        true
    }

    /// The routes of the plan, the one for this launch among them.
    fn routes<'a>(&self, queue: &mut ExchangeQueue, launch: &'a Launch<'_>) -> Result<&'a Routes> {
        let derived = launch.plan.derived.get_or_init(|| Box::new(Routes::default()));
        let Some(routes) = derived.downcast_ref::<Routes>() else { return Err(Error::ExchangeClosed) };
        if launch.num_sms == Some(0) {
            let expected = "at least 1".to_owned();
            return Err(Error::InvalidOption { option: "num_sms", expected, value: "0".to_owned() });
        }
        let mut kept = lock(routes);
        if !kept.iter().any(|(num_sms, _)| *num_sms == launch.num_sms) {
            let mut route = ExchangeRoute::new(queue.link(), self.shape(launch.plan, launch.num_sms))?;
            route.check(queue.buffer())?;
            if kept.len() >= KEPT {
                kept.remove(0);
            }
            kept.push((launch.num_sms, route));
        }
        drop(kept);
        Ok(routes)
    }

    fn shape(&self, plan: &Plan, num_sms: Option<u32>) -> RouteShape {
        let piece = |piece: &Piece| RoutePiece {
            input: piece.tensor,
            src_offset: piece.src_offset,
            dst_offset: piece.dst_offset,
            run_bytes: piece.run_bytes,
            loops: (piece.loops.iter())
                .map(|l| ExchangeLoop { count: l.count, src_stride: l.src_stride, dst_stride: l.dst_stride })
                .collect(),
        };
        RouteShape {
            op: plan.op.code(),
            inputs: plan.contract.num_tensors(),
            result_bytes: plan.result_bytes.get(self.rank).copied().unwrap_or(0),
            pieces: plan.pieces.iter().map(|list| list.iter().map(piece).collect()).collect(),
            num_sms,
        }
    }

    fn inputs<'a>(&self, launch: &'a Launch<'_>) -> Result<Vec<RouteInput<'a>>> {
        let input = |array: &'a ExchangeArray| match &array.region {
            Region::Device(region) => Ok(RouteInput { region, offset: array.offset }),
            Region::Host(_) => Err(wrong_memory(&array.region, ExchangeDevice::Gpu(self.gpu.ordinal()))),
        };
        launch.inputs.iter().map(input).collect()
    }

    /// Who moves the bytes, and in how many launches.
    fn mode<'a>(&self, launch: &Launch<'a>, route: &mut ExchangeRoute) -> Result<ExchangeMode<'a>> {
        let bytes: u64 = launch.plan.bytes_to.iter().sum();
        let places = launch.out.map(|out| out.places.as_slice());
        let copy = match (launch.engine, places) {
            (ExchangeEngine::Push, _) | (ExchangeEngine::Auto, None) => None,
            (ExchangeEngine::Auto, Some(places)) => {
                let pays = bytes >= COPY_ENGINE && self.world > 1;
                (pays && route.copies().is_some_and(|copies| copies <= FEW_COPIES)).then_some(places)
            }
            (ExchangeEngine::Copy, None) => {
                return Err(Error::Unsupported {
                    what: "engine=\"copy\" without out=".to_owned(),
                    why: "the copy engine writes only where both hosts know the results will land".to_owned(),
                });
            }
            (ExchangeEngine::Copy, Some(places)) => {
                if route.copies().is_none() {
                    return Err(Error::Unsupported {
                        what: "engine=\"copy\" for these strides".to_owned(),
                        why: "it would take thousands of copies: use the kernel".to_owned(),
                    });
                }
                Some(places)
            }
        };
        Ok(match copy {
            Some(places) => ExchangeMode::CopyEngine(places),
            None if bytes >= OPENED && self.world > 1 => ExchangeMode::OpenedPush,
            None => ExchangeMode::Push,
        })
    }

    /// What a graph must keep besides inputs: the buffer that results land in.
    fn kept_by(&self, capture: Option<u64>, launch: &Launch<'_>) -> Option<Owner> {
        let id = CaptureId(capture?);
        let end = {
            let mut captures = lock(&self.captures);
            captures.retain(|end| end.strong_count() > 0);
            let found = captures.iter().filter_map(std::sync::Weak::upgrade).find(|end| end.id == id);
            found.unwrap_or_else(|| {
                let pool = self.attached.get().map(|attached| attached.pool.clone()).unwrap_or_default();
                let end = Arc::new(CaptureEnd { pool, id });
                captures.push(Arc::downgrade(&end));
                end
            })
        };
        let out = launch.out.map(|out| Arc::clone(&out.lease));
        Some(Arc::new((end, out)))
    }
}

fn refused(error: kvferry_cuda::CudaError) -> Trouble {
    Trouble::Refused(error.into())
}

/// Run and loops of the copy of one result from its place in the pool to an array of the same shape.
pub(super) fn loops_out(shape: &ResultShape, array: &ExchangeArray) -> (u64, Vec<ExchangeLoop>) {
    if array.strides == shape.strides {
        return (shape.bytes(), Vec::new());
    }
    let axes = shape.shape.iter().zip(&shape.strides).zip(&array.strides);
    let loops =
        axes.filter(|((count, _), _)| **count > 1).map(|((&count, &src_stride), &dst_stride)| ExchangeLoop {
            count,
            src_stride,
            // A negative one is found to leave the array.
            dst_stride: dst_stride as u64,
        });
    let mut loops: Vec<_> = loops.collect();
    // The innermost of the source last.
    loops.sort_by_key(|l| std::cmp::Reverse(l.src_stride));
    let run = if shape.shape.contains(&0) { 0 } else { shape.shape[3] * shape.dtype.bytes() };
    (run, loops)
}
