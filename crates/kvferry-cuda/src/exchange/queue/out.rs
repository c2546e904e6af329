//! Copies out of the pool.

use kvferry_kernels::ExchangeLoop;

use super::ExchangeQueue;
use crate::context::ContextGuard;
use crate::error::{CudaError, Result};
use crate::exchange::boxes;
use crate::exchange::route::RouteInput;
use crate::gpu::StreamHandle;

/// One stretch of a copy out of the pool.
#[derive(Clone, Copy, Debug)]
pub struct ExchangeOut<'a> {
    /// Bytes from the start of the pool to the first run.
    pub from: u64,
    /// Where it goes; memory of the link's device.
    pub to: RouteInput<'a>,
    /// Bytes of every run.
    pub run_bytes: u64,
    /// Loops around it: `src_stride` steps the pool, `dst_stride` the target.
    pub loops: &'a [ExchangeLoop],
}

impl ExchangeQueue {
    /// Copies parts of the own pool out on `stream`, after the last call.
    ///
    /// # Errors
    /// [`CudaError::OutOfBounds`], [`CudaError::WrongDevice`], [`CudaError::ReadOnlyMemory`] or [`CudaError::Argument`]
    /// before anything is copied; the driver's refusal.
    pub fn copy_out(
        &mut self,
        cx: &ContextGuard<'_>,
        stream: StreamHandle,
        outs: &[ExchangeOut<'_>],
    ) -> Result<()> {
        let mut copies = Vec::with_capacity(outs.len());
        for out in outs {
            self.check_out(out)?;
            let mut list = Vec::with_capacity(1);
            if !boxes::cut(0, 0, out.run_bytes, out.loops, &mut list) {
                let rule = "copies with fewer and longer runs are possible";
                return Err(CudaError::Argument {
                    what: "copies of one result",
                    value: list.len() as u64,
                    rule,
                });
            }
            copies.push(list);
        }
        let way = self.look(cx, stream)?;
        self.set_out(cx, &way)?;
        let owners = self.owners(outs.iter().map(|out| out.to.region), None);
        self.hold_for_graph(cx, &way, &owners)?;
        let pool = self.link.memory().addr() + kvferry_kernels::CONTROL_BYTES;
        let mut copied = Ok(());
        for (out, list) in outs.iter().zip(&copies) {
            let (src, dst) = (pool + out.from, out.to.region.addr() + out.to.offset);
            for one in list {
                // SAFETY: `check_out` found both sides inside their memory, which the trip (or the graph) holds until the
                // stream is done; the stream is one of the current context (`look`).
                copied = copied.and_then(|()| unsafe { one.enqueue(src, dst, way.handle) });
            }
        }
        let kept = self.arrive(cx, &way, owners);
        copied.and(kept)
    }

    fn check_out(&self, out: &ExchangeOut<'_>) -> Result<()> {
        let ordinal = self.link.gpu().ordinal();
        let region = out.to.region;
        if region.ordinal() != ordinal {
            return Err(CudaError::WrongDevice { what: "a target", found: region.ordinal(), ordinal });
        }
        if !region.writable() {
            return Err(CudaError::ReadOnlyMemory { addr: region.addr() });
        }
        let src = out.loops.iter().map(|l| (l.count, i128::from(l.src_stride)));
        let dst = out.loops.iter().map(|l| (l.count, i128::from(l.dst_stride)));
        let sides = [
            (boxes::span(out.from.into(), out.run_bytes, src)?, self.link.memory().pool_bytes()),
            (boxes::span(out.to.offset.into(), out.run_bytes, dst)?, region.len()),
        ];
        for (span, limit) in sides {
            if let Some((low, high)) = span
                && (low < 0 || high.unsigned_abs() > limit)
            {
                let (offset, len) =
                    (low.unsigned_abs() as usize, high.saturating_sub(low).unsigned_abs() as usize);
                return Err(CudaError::OutOfBounds { offset, len, limit: limit as usize });
            }
        }
        Ok(())
    }
}
