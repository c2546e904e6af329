//! What a call of one shape copies, checked once and used for every call of that shape.

use std::sync::Arc;

use kvferry_kernels::{
    ExchangeArriveParams, ExchangeCall, ExchangeGrid, ExchangeLimits, ExchangeLoop, ExchangeParamBuffer,
    ExchangePiece, ExchangeTemplate, Kernel, PLACE_ALIGN,
};

use super::boxes::{self, CopyBox};
use super::link::ExchangeLink;
use crate::error::{CudaError, Result};
use crate::memory::DeviceRegion;

/// Runs that go from one input of this rank to one target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoutePiece {
    /// Which input.
    pub input: usize,
    /// Bytes from the input's first element to the first run.
    pub src_offset: i64,
    /// Bytes from the target's landing place to where that goes.
    pub dst_offset: u64,
    /// Bytes of every run.
    pub run_bytes: u64,
    /// Loops around it, outermost first; at most three of them go round more than once.
    pub loops: Vec<ExchangeLoop>,
}

/// Everything about a call but where its inputs and results lie.
#[derive(Clone, Debug)]
pub struct RouteShape {
    /// The operation's code, for the record.
    pub op: u32,
    /// Number of inputs.
    pub inputs: usize,
    /// Bytes of the own results, from the landing place on.
    pub result_bytes: u64,
    /// By target, the own share among them. No byte of a result is named twice.
    pub pieces: Vec<Vec<RoutePiece>>,
    /// Most CTAs; `None`: as many as pay.
    pub num_sms: Option<u32>,
}

/// An array of a call: the memory, and where the first element lies in it.
#[derive(Clone, Copy, Debug)]
pub struct RouteInput<'a> {
    /// Memory of the link's device.
    pub region: &'a DeviceRegion,
    /// Bytes from the start of the region.
    pub offset: u64,
}

/// The calls of one shape on one link.
#[derive(Debug)]
pub struct ExchangeRoute {
    link: Arc<ExchangeLink>,
    shape: RouteShape,
    grid: ExchangeGrid,
    /// By input: offsets from its first element that are read, lowest and one past the highest.
    spans: Vec<Option<(i64, i64)>>,
    /// By target: one past the last byte written, from its landing place.
    reaches: Vec<u64>,
    /// Bytes to each target.
    bytes: Vec<u64>,
    push: Option<ExchangeTemplate>,
    copy: Option<ExchangeTemplate>,
    /// By target, with the input of each: the copy engine's share. `None`: not worked out, or not possible.
    boxes: Option<Vec<Vec<(usize, CopyBox)>>>,
    /// Addresses of the inputs of the call being made.
    pub(super) bases: Vec<u64>,
}

impl ExchangeRoute {
    /// A route over `link`.
    ///
    /// # Errors
    /// [`CudaError::Argument`] for lists of other lengths than the link has ranks, inputs that do not exist, pieces
    /// beyond 62 bits, or an own share beyond the own results, which a call finds room for in the pool;
    /// [`CudaError::Exchange`] for what no kernel does, once [`check`](Self::check) or a call asks.
    pub fn new(link: &Arc<ExchangeLink>, shape: RouteShape) -> Result<ExchangeRoute> {
        let refuse = |what, value: usize, rule| Err(CudaError::Argument { what, value: value as u64, rule });
        if shape.pieces.len() != link.world() {
            return refuse("the number of lists of pieces", shape.pieces.len(), "one per rank is needed");
        }
        let mut spans = vec![None; shape.inputs];
        let mut reaches = Vec::with_capacity(link.world());
        let mut bytes = Vec::with_capacity(link.world());
        for pieces in &shape.pieces {
            let (mut reach, mut sum) = (0, 0_u64);
            for piece in pieces {
                let Some(span) = spans.get_mut(piece.input) else {
                    return refuse(
                        "the input of a piece",
                        piece.input,
                        "it must be one of the call's inputs",
                    );
                };
                let loops = || piece.loops.iter();
                let start = i128::from(piece.src_offset);
                let read =
                    boxes::span(start, piece.run_bytes, loops().map(|l| (l.count, l.src_stride.into())))?;
                let dst_steps = loops().map(|l| (l.count, i128::from(l.dst_stride)));
                let written = boxes::span(piece.dst_offset.into(), piece.run_bytes, dst_steps)?;
                *span = hull(*span, read);
                reach = reach.max(written.map_or(0, |(_, end)| end.unsigned_abs()));
                let runs = loops().fold(1_u64, |runs, l| runs.saturating_mul(l.count));
                sum = sum.saturating_add(runs.saturating_mul(piece.run_bytes));
            }
            // Peers say where they want it, and check that themselves; the own share goes where the caller says.
            let own = reaches.len() == link.rank();
            if own && reach > shape.result_bytes {
                let (what, rule) = ("the own share's reach", "it must lie within the own results");
                return Err(CudaError::Argument { what, value: reach, rule });
            }
            reaches.push(reach);
            bytes.push(sum);
        }
        let kernels = link.gpu().kernels();
        // The two forms of the kernel differ in their parameters only.
        let max_block =
            kernels.most_threads(Kernel::Exchange).min(kernels.most_threads(Kernel::ExchangeLarge));
        let limits = ExchangeLimits { sm_count: link.gpu().sm_count(), num_sms: shape.num_sms, max_block };
        let grid = ExchangeGrid::choose(&bytes, &limits);
        let bases = Vec::with_capacity(shape.inputs);
        let link = Arc::clone(link);
        Ok(ExchangeRoute {
            link,
            shape,
            grid,
            spans,
            reaches,
            bytes,
            push: None,
            copy: None,
            boxes: None,
            bases,
        })
    }

    /// Finds out now whether a kernel can do such calls: a call never fails for its shape after this.
    ///
    /// # Errors
    /// [`CudaError::Exchange`].
    pub fn check(&mut self, buffer: &mut ExchangeParamBuffer) -> Result<()> {
        self.bases.clear();
        self.bases.resize(self.shape.inputs, 4096);
        self.build(buffer, false).map(|_| ())
    }

    /// Bytes that this rank sends to others.
    pub fn sent_bytes(&self) -> u64 {
        let own = self.bytes.get(self.link.rank()).copied().unwrap_or(0);
        self.bytes.iter().fold(0_u64, |sum, &bytes| sum.saturating_add(bytes)).saturating_sub(own)
    }

    /// How many copies the copy engine would need for the peers' shares; `None` for more than any call is worth.
    pub fn copies(&mut self) -> Option<usize> {
        if self.boxes.is_none() {
            let rank = self.link.rank();
            let all = self.shape.pieces.iter().enumerate().map(|(target, pieces)| {
                let pieces = if target == rank { &[][..] } else { pieces };
                let mut list = Vec::new();
                for piece in pieces {
                    let mut cut = Vec::new();
                    let (src, dst) = (piece.src_offset, piece.dst_offset);
                    if !boxes::cut(src, dst, piece.run_bytes, &piece.loops, &mut cut) {
                        return None;
                    }
                    list.extend(cut.into_iter().map(|one| (piece.input, one)));
                }
                Some(list)
            });
            self.boxes = all.collect();
        }
        self.boxes.as_ref().map(|all| all.iter().map(Vec::len).sum())
    }

    pub(super) fn link(&self) -> &Arc<ExchangeLink> {
        &self.link
    }

    pub(super) fn op(&self) -> u32 {
        self.shape.op
    }

    pub(super) fn boxes(&self) -> &[Vec<(usize, CopyBox)>] {
        self.boxes.as_deref().unwrap_or_default()
    }

    pub(super) fn reaches(&self) -> &[u64] {
        &self.reaches
    }

    /// Words for those that the copy engine serves.
    pub(super) fn arrive(&self) -> ExchangeArriveParams {
        let rank = self.link.rank();
        let mut targets = [false; kvferry_kernels::MAX_RANKS];
        for (at, (target, &bytes)) in targets.iter_mut().zip(&self.bytes).enumerate() {
            *target = bytes > 0 && at != rank;
        }
        ExchangeArriveParams::new(self.link.state(), targets.get(..self.bytes.len()).unwrap_or(&targets))
    }

    /// Notes the addresses of `inputs`, each found to hold every byte that the route reads of it.
    pub(super) fn place_inputs(&mut self, inputs: &[RouteInput<'_>]) -> Result<()> {
        let ordinal = self.link.gpu().ordinal();
        if inputs.len() != self.spans.len() {
            let (what, value) = ("the number of inputs", inputs.len() as u64);
            return Err(CudaError::Argument { what, value, rule: "the route was made for another number" });
        }
        self.bases.clear();
        for (input, span) in inputs.iter().zip(&self.spans) {
            let region = input.region;
            if region.ordinal() != ordinal {
                return Err(CudaError::WrongDevice { what: "an input", found: region.ordinal(), ordinal });
            }
            let outside = |needs: i128| {
                let (offset, len) = (input.offset as usize, needs.unsigned_abs() as usize);
                CudaError::OutOfBounds { offset, len, limit: region.len() as usize }
            };
            if let Some((low, high)) = *span {
                let [first, end] = [low, high].map(|at| i128::from(input.offset) + i128::from(at));
                if first < 0 || end > i128::from(region.len()) {
                    return Err(outside(if first < 0 { first } else { end }));
                }
            }
            self.bases.push(region.addr().wrapping_add(input.offset));
        }
        Ok(())
    }

    /// The parameters for the inputs placed last.
    ///
    /// `place` is checked: a multiple of [`PLACE_ALIGN`] that leaves room for the results in the own pool.
    pub(super) fn aim(
        &mut self,
        buffer: &mut ExchangeParamBuffer,
        place: u64,
        hash: u64,
        copy_engine: bool,
    ) -> Result<&mut ExchangeTemplate> {
        let pool = self.link.memory().pool_bytes();
        if !place.is_multiple_of(PLACE_ALIGN)
            || place.checked_add(self.shape.result_bytes).is_none_or(|end| end > pool)
        {
            let rule = "it must be a multiple of 256 and leave room for the results";
            return Err(CudaError::Argument { what: "the landing place", value: place, rule });
        }
        let kept = if copy_engine { &self.copy } else { &self.push };
        if !kept.as_ref().is_some_and(|template| template.fits(&self.bases)) {
            self.build(buffer, copy_engine)?;
        }
        let kept = if copy_engine { &mut self.copy } else { &mut self.push };
        match kept {
            Some(template) => {
                template.aim(&self.bases, place, hash);
                Ok(template)
            }
            // `build` has made it, or failed.
            None => Err(CudaError::NoKernels),
        }
    }

    /// The parameters of the call being made by the copy engine, as [`aim`](Self::aim) left them.
    pub(super) fn aimed_copy(&mut self) -> Option<&mut ExchangeTemplate> {
        self.copy.as_mut()
    }

    fn build(&mut self, buffer: &mut ExchangeParamBuffer, copy_engine: bool) -> Result<()> {
        let pieces: Vec<Vec<ExchangePiece<'_>>> = (self.shape.pieces.iter())
            .map(|pieces| {
                let piece = |piece: &RoutePiece| {
                    let base = self.bases.get(piece.input).copied().unwrap_or(0);
                    base.wrapping_add_signed(piece.src_offset)
                };
                let lower = |p| ExchangePiece {
                    src: piece(p),
                    dst_offset: p.dst_offset,
                    run_bytes: p.run_bytes,
                    loops: &p.loops,
                };
                pieces.iter().map(lower).collect()
            })
            .collect();
        let call = ExchangeCall {
            rank: self.link.rank(),
            peers: self.link.table(),
            state: self.link.state(),
            host_page: self.link.page().device_addr(),
            op: self.shape.op,
            hash: 0,
            place: 0,
            result_bytes: self.shape.result_bytes,
            pieces: &pieces,
            grid: self.grid,
            copy_engine,
        };
        let launch = call.build(buffer)?;
        let input = |target: usize, index: usize| {
            self.shape.pieces.get(target).and_then(|list| list.get(index)).map_or(0, |piece| piece.input)
        };
        let template = launch.template(&self.bases, input);
        if copy_engine {
            self.copy = Some(template);
        } else {
            self.push = Some(template);
        }
        Ok(())
    }
}

fn hull(a: Option<(i64, i64)>, b: Option<(i64, i64)>) -> Option<(i64, i64)> {
    match (a, b) {
        (Some(a), Some(b)) => Some((a.0.min(b.0), a.1.max(b.1))),
        (a, b) => a.or(b),
    }
}
