//! The launches and copies of one call.

use std::sync::Arc;

use kvferry_kernels::{
    ExchangeArriveParams, ExchangeFlags, ExchangePart, Kernel, LocalState, arrival_offset,
};

use super::{ExchangeMode, ExchangeQueue, ExchangeStopped, ExchangeWay, Outcome};
use crate::context::ContextGuard;
use crate::error::{CudaError, Result};
use crate::exchange::boxes::CopyBox;
use crate::exchange::link::ExchangeLink;
use crate::exchange::route::ExchangeRoute;
use crate::raw::CUstream;

impl ExchangeQueue {
    /// Finds every place at which the copy engine would write inside its pool.
    pub(super) fn check_places(&self, route: &mut ExchangeRoute, place: u64, places: &[u64]) -> Result<()> {
        let refuse = |what, value, rule| Err(CudaError::Argument { what, value, rule });
        if route.copies().is_none() {
            return refuse("copies of a call", 4096, "the copy engine would need more than this");
        }
        if places.len() != self.link.world() || places.get(self.link.rank()) != Some(&place) {
            return refuse(
                "places of a call",
                places.len() as u64,
                "one per rank is needed, the own one among them",
            );
        }
        for ((peer, &at), &reach) in self.link.table().iter().zip(places).zip(route.reaches()) {
            if at.checked_add(reach).is_none_or(|end| end > peer.pool_bytes) {
                return refuse(
                    "the landing place of a peer",
                    at,
                    "it must leave room for the results in its pool",
                );
            }
        }
        Ok(())
    }

    /// Puts a checked call on its way.
    pub(super) fn launch(
        &mut self,
        cx: &ContextGuard<'_>,
        way: &ExchangeWay,
        route: &mut ExchangeRoute,
        place: u64,
        hash: u64,
        mode: ExchangeMode<'_>,
    ) -> Outcome {
        let link = Arc::clone(&self.link);
        let begun = |error| ExchangeStopped { error, begun: true };
        match mode {
            ExchangeMode::Push => {
                let template = route.aim(&mut self.buffer, place, hash, false)?;
                Ok(enqueue(&link, template.part(ExchangeFlags::WHOLE), way.handle)?)
            }
            ExchangeMode::OpenedPush => {
                let template = route.aim(&mut self.buffer, place, hash, false)?;
                enqueue(&link, template.part(ExchangeFlags::OPEN), way.handle)?;
                enqueue(&link, template.part(ExchangeFlags::MOVE), way.handle).map_err(begun)
            }
            ExchangeMode::CopyEngine(places) => self.copies(cx, way, route, (place, hash), places),
        }
    }

    /// A call whose peers' shares the copy engine carries.
    fn copies(
        &mut self,
        cx: &ContextGuard<'_>,
        way: &ExchangeWay,
        route: &mut ExchangeRoute,
        (place, hash): (u64, u64),
        places: &[u64],
    ) -> Outcome {
        let (link, side) = (Arc::clone(&self.link), self.side.handle());
        let gpu = link.gpu();
        let beside = gpu.own_stream(cx, side)?;
        // The own share waits for nobody, and runs beside all the rest. The side stream comes back also after a failure,
        // or a capture that it has joined could not end.
        let (fork, open, join) = (gpu.event(cx)?, gpu.event(cx)?, gpu.event(cx)?);
        let template = route.aim(&mut self.buffer, place, hash, true)?;
        fork.record(cx, way.stream)?;
        gpu.wait_event(cx, side, &fork)?;
        let own = enqueue(&link, template.part(ExchangeFlags::OWN), beside);
        let posted = own.and_then(|()| enqueue(&link, template.part(ExchangeFlags::OPEN), way.handle));
        let begun = posted.is_ok();
        // The flags are readied after all that may fail the call, headers and own share, and beside the payload: a kernel
        // between payload and flags would cost 10 us.
        let staged = posted.and_then(|()| {
            open.record(cx, way.stream)?;
            gpu.wait_event(cx, side, &open)?;
            self.stage(beside, route)
        });
        let moved = staged.and_then(|()| self.payload(way, route, places));
        let joined = join.record(cx, side).and_then(|()| gpu.wait_event(cx, way.stream, &join));
        let told = moved.and(joined).and_then(|()| self.flags(way));
        let closed = told.and_then(|()| match route.aimed_copy() {
            Some(template) => enqueue(&link, template.part(ExchangeFlags::CLOSE), way.handle),
            None => Ok(()),
        });
        closed.map_err(|error| ExchangeStopped { error, begun })
    }

    /// Readies the words that [`flags`](Self::flags) copies.
    fn stage(&self, beside: CUstream, route: &ExchangeRoute) -> Result<()> {
        let params = route.arrive();
        let (kernel, geometry) = (Kernel::ExchangeArrive, ExchangeArriveParams::GEOMETRY);
        // SAFETY: the context is current and the stream one of it (`own_stream`); the struct is that kernel's; it writes the
        // state only, which the link keeps.
        unsafe { self.link.gpu().kernels().launch(kernel, geometry, (&raw const params).cast(), beside) }
    }

    fn payload(&self, way: &ExchangeWay, route: &ExchangeRoute, places: &[u64]) -> Result<()> {
        let targets = self.link.table().iter().zip(places).zip(route.boxes());
        for ((peer, &place), list) in targets {
            for (input, one) in list {
                let one: &CopyBox = one;
                let src = route.bases.get(*input).copied().unwrap_or(0);
                // SAFETY: `place_inputs` found the source inside its region, `check_places` the destination inside the
                // peer's pool; both are kept by the trip or the graph. The stream is one of the current context.
                unsafe { one.enqueue(src, peer.pool + place, way.handle) }?;
            }
        }
        Ok(())
    }

    /// Tells every peer of the arrival, by copies behind own share and payload: both parities' words, of which one says
    /// what it has said before.
    fn flags(&self, way: &ExchangeWay) -> Result<()> {
        let rank = self.link.rank();
        let staging = self.link.state() + std::mem::offset_of!(LocalState, staging) as u64;
        let step = arrival_offset(1, rank) - arrival_offset(0, rank);
        let words = CopyBox::rows(8, 2, 8 * kvferry_kernels::MAX_RANKS as u64, step);
        for (target, peer) in self.link.table().iter().enumerate().filter(|&(target, _)| target != rank) {
            let (src, dst) = (staging + 8 * target as u64, peer.control + arrival_offset(0, rank));
            // SAFETY: two words of the state (a row of `staging` apart, which has two) and two of the peer's control block
            // (a parity's arrival words apart, likewise), both kept by the link; the stream is one of the current context.
            unsafe { words.enqueue(src, dst, way.handle) }?;
        }
        Ok(())
    }
}

/// Puts a part of a call on a stream of the current context.
pub(super) fn enqueue(link: &ExchangeLink, part: ExchangePart<'_>, stream: CUstream) -> Result<()> {
    // SAFETY: callers got `stream` from `look` or `own_stream`, with the context current. The parameters were built for
    // this kernel from the link's own addresses, with inputs that `place_inputs` found inside their regions, a landing
    // place that `aim` found inside the own pool, and pieces whose reach the kernel compares with the peers' pools before
    // it writes. Link and inputs are kept until the stream is done (`arrive`), or by the graph (`hold_for_graph`).
    unsafe { link.gpu().kernels().launch(part.kernel, part.geometry, part.params.as_ptr(), stream) }
}
