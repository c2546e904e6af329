//! What one rank writes into the result of another: strided boxes with the longest possible runs.

use super::contract::Contract;
use super::request::ExchangeOp;
use super::splits::without;

/// One loop around a run: how often, and how far both sides step each time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct PieceLoop {
    /// Iterations, at least 2.
    pub count: u64,
    /// Bytes the input steps.
    pub src_stride: i64,
    /// Bytes the result steps.
    pub dst_stride: u64,
}

/// A box of one tensor that one rank copies into the result of a peer.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Piece {
    /// Which tensor of the call.
    pub tensor: usize,
    /// Where it begins, in bytes from element `[0, 0, 0, 0]` of the input.
    pub src_offset: i64,
    /// Where it lands, in bytes from the landing place of the peer.
    pub dst_offset: u64,
    /// Bytes contiguous on both sides.
    pub run_bytes: u64,
    /// Loops around a run, outermost (largest step of the result) first; at most three.
    pub loops: Vec<PieceLoop>,
}

impl Piece {
    /// Bytes of the whole box.
    pub fn bytes(&self) -> u64 {
        self.loops.iter().map(|l| l.count).product::<u64>() * self.run_bytes
    }
}

/// One axis of a box: where it begins on either side, and how many steps it has.
#[derive(Clone, Copy)]
pub(super) struct Span {
    pub(super) src: u64,
    pub(super) dst: u64,
    pub(super) count: u64,
}

impl Contract {
    /// The pieces that `rank` copies from its inputs into the result of `peer` (which may be itself), empty ones left
    /// out. `strides` are those of the inputs of `rank`, per tensor, as [`Contract::new`] has checked them on that
    /// rank. Each byte of a result is in exactly one piece of exactly one rank.
    ///
    /// A piece has the longest runs and the fewest loops that its strides allow. Costs under a microsecond per tensor
    /// of a few ranks, whatever the sizes; meant to be called once per contract and strides.
    ///
    /// # Panics
    /// Ranks out of range, or another number of strides than tensors.
    pub fn pieces(&self, rank: usize, peer: usize, strides: &[[i64; 3]]) -> Vec<Piece> {
        assert_eq!(strides.len(), self.num_tensors(), "one entry of strides per tensor");
        let mut pieces = Vec::with_capacity(self.num_tensors());
        for (tensor, src_strides) in strides.iter().enumerate() {
            let tokens = self.token_span(tensor, rank, peer);
            if tokens.count == 0 {
                continue;
            }
            let dst_strides = self.result_strides(peer, tensor);
            let at = self.result_offset(peer, tensor);
            let row = self.row_bytes(tensor);
            for heads in self.head_spans(tensor, rank, peer) {
                let batch = Span { src: 0, dst: 0, count: self.batch(tensor) };
                let axes = [batch, tokens, heads];
                pieces.push(piece(tensor, at, row, axes, src_strides, &dst_strides));
            }
        }
        pieces
    }

    /// Tokens that go from `rank` to `peer`.
    pub(super) fn token_span(&self, tensor: usize, rank: usize, peer: usize) -> Span {
        match self.op() {
            ExchangeOp::GatherHeads => {
                let theirs = self.token_range(tensor, peer);
                Span { src: theirs.start, dst: 0, count: theirs.end - theirs.start }
            }
            _ => {
                let mine = self.token_range(tensor, rank);
                Span { src: 0, dst: mine.start, count: mine.end - mine.start }
            }
        }
    }

    /// Heads that go from `rank` to `peer`, none empty. Where ranks bring their own heads, the lowest rank that has a
    /// head sends it.
    pub(super) fn head_spans(&self, tensor: usize, rank: usize, peer: usize) -> Vec<Span> {
        if self.op().joins_heads() {
            let ranges = self.head_ranges_of(tensor);
            let first = ranges[rank].start;
            without(ranges[rank].clone(), &ranges[..rank])
                .into_iter()
                .map(|part| Span { src: part.start - first, dst: part.start, count: part.end - part.start })
                .collect()
        } else {
            let theirs = self.head_range(tensor, peer);
            let count = theirs.end - theirs.start;
            let span = Span { src: theirs.start, dst: 0, count };
            if count == 0 { Vec::new() } else { vec![span] }
        }
    }
}

/// The box over `axes` (batch, token, head; none empty) and one row, merged.
fn piece(
    tensor: usize,
    result_offset: u64,
    row: u64,
    axes: [Span; 3],
    src_strides: &[i64; 3],
    dst_strides: &[i64; 3],
) -> Piece {
    // Strides that were not checked may wrap here; checked ones cannot, as every start is a coordinate of the input.
    let mut src_offset = 0_i64;
    let mut dst_offset = result_offset;
    let mut loops = Vec::with_capacity(axes.len());
    for ((axis, &src_stride), &dst_stride) in axes.iter().zip(src_strides).zip(dst_strides) {
        let dst_stride = dst_stride.unsigned_abs();
        src_offset = src_offset.wrapping_add(src_stride.wrapping_mul(axis.src as i64));
        dst_offset += axis.dst * dst_stride;
        if axis.count > 1 {
            loops.push(PieceLoop { count: axis.count, src_stride, dst_stride });
        }
    }
    loops.sort_by_key(|l| std::cmp::Reverse(l.dst_stride));
    // Steps of a result are multiples of one another, so whatever carries a run on, or merges with a loop, is the
    // next loop out: going outwards once finds everything.
    let mut run_bytes = row;
    let mut merged: Vec<PieceLoop> = Vec::with_capacity(loops.len());
    for outer in loops.into_iter().rev() {
        match merged.last_mut() {
            None if outer.dst_stride == run_bytes && i64::try_from(run_bytes) == Ok(outer.src_stride) => {
                run_bytes *= outer.count;
            }
            Some(inner) if wraps(&outer, inner) => inner.count *= outer.count,
            _ => merged.push(outer),
        }
    }
    merged.reverse();
    Piece { tensor, src_offset, dst_offset, run_bytes, loops: merged }
}

/// Whether one step of `outer` is exactly all the steps of `inner`, on both sides.
fn wraps(outer: &PieceLoop, inner: &PieceLoop) -> bool {
    let count = inner.count;
    i64::try_from(count).ok().and_then(|n| inner.src_stride.checked_mul(n)) == Some(outer.src_stride)
        && inner.dst_stride.checked_mul(count) == Some(outer.dst_stride)
}
