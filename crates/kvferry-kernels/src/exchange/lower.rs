//! From one piece to items: loops that count, word widths, parts that a kernel can count through.

use super::grid::IN_FLIGHT;
use super::params::{ExchangeItemParams, ExchangeLoopParams};
use super::{EXCHANGE_ITEM_LOOPS, ExchangeBuildError, ExchangeLoop, ExchangePiece, MAX_EXCHANGE_ITEMS};
use crate::Divisor;

/// Words and offsets stay far from the end of 64 bits.
const MAX_BYTES: u64 = 1 << 62;
/// Most words of an item.
const MAX_WORDS: u64 = Divisor::LIMIT as u64 - 1;

/// Appends the items of a piece; returns where it ends in the target's landing place.
pub(super) fn lower(
    target: usize,
    index: usize,
    piece: &ExchangePiece<'_>,
    chunk_words: u64,
    chunks: &mut u64,
    items: &mut Vec<ExchangeItemParams>,
) -> Result<u64, ExchangeBuildError> {
    if piece.run_bytes == 0 || piece.loops.iter().any(|l| l.count == 0) {
        return Ok(0);
    }
    let mut loops = [ExchangeLoop { count: 1, src_stride: 0, dst_stride: 0 }; EXCHANGE_ITEM_LOOPS];
    let mut used = 0;
    for l in piece.loops.iter().filter(|l| l.count > 1) {
        if let Some(slot) = loops.get_mut(used) {
            *slot = *l;
        }
        used += 1;
    }
    if used > EXCHANGE_ITEM_LOOPS {
        let limit = EXCHANGE_ITEM_LOOPS;
        return Err(ExchangeBuildError::TooManyLoops { target, piece: index, loops: used, limit });
    }
    let loops = loops.get(..used).unwrap_or(&loops);
    let reach = reach(piece, loops).ok_or(ExchangeBuildError::TooLarge { target, piece: index })?;
    split(piece.src, piece.dst_offset, piece.run_bytes, loops, &mut |item: Item<'_>| {
        if items.len() > MAX_EXCHANGE_ITEMS {
            return;
        }
        items.push(item.params(*chunks));
        *chunks += u64::from(item.words).div_ceil(chunk_words);
    });
    Ok(reach)
}

/// One past the last destination byte; `None` if that, or what is copied, exceeds the limit.
fn reach(piece: &ExchangePiece<'_>, loops: &[ExchangeLoop]) -> Option<u64> {
    let mut end = piece.dst_offset.checked_add(piece.run_bytes)?;
    let mut bytes = piece.run_bytes;
    for l in loops {
        end = end.checked_add((l.count - 1).checked_mul(l.dst_stride)?)?;
        bytes = bytes.checked_mul(l.count)?;
        if l.src_stride.unsigned_abs().checked_mul(l.count - 1)? > MAX_BYTES {
            return None;
        }
    }
    (end <= MAX_BYTES && bytes <= MAX_BYTES).then_some(end)
}

/// A piece, or a part of one, with few enough words.
struct Item<'a> {
    src: u64,
    dst_offset: u64,
    run_bytes: u64,
    loops: &'a [ExchangeLoop],
    word_shift: u32,
    words: u32,
}

impl Item<'_> {
    fn params(&self, first_chunk: u64) -> ExchangeItemParams {
        let mut params = ExchangeItemParams::EMPTY;
        params.src = self.src;
        params.dst_offset = self.dst_offset;
        params.words = self.words;
        // Their sum is checked once all are known.
        params.first_chunk = first_chunk as u32;
        params.word_shift = self.word_shift;
        params.loops = self.loops.len() as u32;
        params.run = Divisor::new(self.run_bytes >> self.word_shift).unwrap_or(Divisor::ONE);
        for (slot, l) in params.loop_.iter_mut().zip(self.loops) {
            *slot = ExchangeLoopParams {
                src_stride: l.src_stride as u64,
                dst_stride: l.dst_stride,
                count: Divisor::new(l.count).unwrap_or(Divisor::ONE),
            };
        }
        params
    }
}

/// Hands out the piece, in parts of at most [`MAX_WORDS`] words: whole steps of the outermost loop, or parts of a run.
fn split(src: u64, dst_offset: u64, run_bytes: u64, loops: &[ExchangeLoop], out: &mut dyn FnMut(Item<'_>)) {
    // Landing places and pools are multiples of 16.
    let bits = loops
        .iter()
        .fold(src | dst_offset | run_bytes | 16, |bits, l| bits | l.src_stride as u64 | l.dst_stride);
    let word_shift = bits.trailing_zeros();
    let runs = loops.iter().fold(1, |runs, l| runs * l.count);
    // Within 62 bits: `reach` has seen to it.
    let words = (run_bytes >> word_shift) * runs;
    if words <= MAX_WORDS {
        let words = words as u32;
        return out(Item { src, dst_offset, run_bytes, loops, word_shift, words });
    }
    match loops.split_first() {
        Some((outer, inner)) => {
            let per_step = words / outer.count;
            // At least two parts; 1 step at a time when a single one is too long as well.
            let steps = (MAX_WORDS / per_step).max(1);
            let mut at = 0;
            while at < outer.count {
                let count = steps.min(outer.count - at);
                let src = src.wrapping_add_signed((at as i64).wrapping_mul(outer.src_stride));
                let dst_offset = dst_offset + at * outer.dst_stride;
                if count == 1 {
                    split(src, dst_offset, run_bytes, inner, out);
                } else {
                    let mut part = [*outer; EXCHANGE_ITEM_LOOPS];
                    for (slot, l) in
                        part.iter_mut().zip(std::iter::once(&ExchangeLoop { count, ..*outer }).chain(inner))
                    {
                        *slot = *l;
                    }
                    split(src, dst_offset, run_bytes, part.get(..loops.len()).unwrap_or(&part), out);
                }
                at += count;
            }
        }
        None => {
            // Parts stay as aligned as the whole.
            let most = (MAX_WORDS - MAX_WORDS % (16 * IN_FLIGHT)) << word_shift;
            let mut at = 0;
            while at < run_bytes {
                split(src + at, dst_offset + at, most.min(run_bytes - at), &[], out);
                at += most;
            }
        }
    }
}
