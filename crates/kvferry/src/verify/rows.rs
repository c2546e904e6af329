//! A pass over the head rows of some blocks, chunk by chunk, on several threads.

use std::ops::Range;

use kvferry_host::{CopyNest, Loop as NestLoop, RegionError};
use kvferry_layout::{Axis, BlockId, Loop, RowAt, RowChunk, RowChunks};

use super::device::Parts;
use super::spread::spread;
use crate::error::Result;
use crate::memory::Region;
use crate::physical::PhysicalLayout;

/// Chunks fit the second-level cache beside what they are compared with.
const CHUNK_BYTES: u64 = 128 << 10;

/// Which rows to visit, and how to reach them.
pub(super) struct RowJob<'a> {
    layout: &'a PhysicalLayout,
    blocks: &'a [BlockId],
    chunks: RowChunks,
    /// For chunks of `max_tokens`, and for the last chunk of a page.
    nests: [Nests; 2],
}

/// The copies between a chunk and its dense buffer.
struct Nests {
    tokens: u64,
    gather: CopyNest,
    scatter: CopyNest,
    /// The same for device memory, both ways.
    parts: Parts,
}

/// One chunk of one block.
pub(super) struct Piece<'a> {
    job: &'a RowJob<'a>,
    /// Position of the block in the list.
    pub(super) position: usize,
    pub(super) block: BlockId,
    chunk: RowChunk,
    /// For what passes through host memory; the thread's.
    scratch: &'a mut Vec<u8>,
}

impl<'a> RowJob<'a> {
    /// All rows of `blocks`, which must be in range, in `layers` or all layers.
    pub(super) fn new(
        layout: &'a PhysicalLayout,
        blocks: &'a [BlockId],
        layers: Option<Range<u64>>,
    ) -> Result<RowJob<'a>> {
        let view = layout.layout().view();
        let chunks = match layers {
            Some(layers) => RowChunks::new(&view.slice(Axis::Layer, layers)?, CHUNK_BYTES)?,
            None => RowChunks::new(view, CHUNK_BYTES)?,
        };
        let full = chunks.max_tokens();
        let last = match view.extent(Axis::Page) % full {
            0 => full,
            rest => rest,
        };
        let nests = [Nests::new(&chunks, full)?, Nests::new(&chunks, last)?];
        Ok(RowJob { layout, blocks, chunks, nests })
    }

    pub(super) fn row_bytes(&self) -> usize {
        self.chunks.row_bytes() as usize
    }

    /// Number of rows.
    pub(super) fn rows(&self) -> u64 {
        self.blocks.len() as u64 * (self.chunks.block_bytes() / self.chunks.row_bytes())
    }

    /// Calls `visit` for every chunk with a buffer that holds its rows densely. Each thread takes a stretch of chunks,
    /// in order, with a state of its own; the states come back in the order of the stretches.
    pub(super) fn run<S: Send>(
        &self,
        start: impl Fn() -> S + Sync,
        visit: impl Fn(&mut S, &mut Piece<'_>, &mut [u8]) -> Result<()> + Sync,
    ) -> Result<Vec<S>> {
        let per_block = self.chunks.per_block();
        let blocks = self.blocks.len() as u64;
        let bytes = blocks.saturating_mul(self.chunks.block_bytes());
        spread(self.layout.memory_kind(), blocks * per_block, bytes, |range| {
            let mut state = start();
            let mut scratch = Vec::new();
            let mut dense = vec![0; self.chunks.chunk_bytes(self.chunks.max_tokens()) as usize];
            for index in range {
                let position = (index / per_block) as usize;
                let block = self.blocks[position];
                let chunk = self.chunks.chunk(block, index % per_block);
                let len = self.chunks.chunk_bytes(chunk.tokens) as usize;
                let mut piece = Piece { job: self, position, block, chunk, scratch: &mut scratch };
                visit(&mut state, &mut piece, &mut dense[..len])?;
            }
            Ok(state)
        })
    }
}

impl Nests {
    fn new(chunks: &RowChunks, tokens: u64) -> Result<Nests> {
        let (run, loops) = chunks.gather(tokens);
        let nest = |sides: fn(&Loop) -> (u64, u64)| {
            let loops: Vec<NestLoop> = loops
                .iter()
                .map(|l| {
                    // Layout invariants keep strides within 63 bits.
                    let (src, dst) = sides(l);
                    NestLoop { count: l.count, src_stride: src as i64, dst_stride: dst as i64 }
                })
                .collect();
            CopyNest::new(run as usize, &loops).map_err(RegionError::Nest)
        };
        let gather = nest(|l| (l.src_stride, l.dst_stride))?;
        let scatter = nest(|l| (l.dst_stride, l.src_stride))?;
        Ok(Nests { tokens, gather, scatter, parts: Parts::new(run, loops) })
    }
}

impl<'a> Piece<'a> {
    /// Reads the rows into `dense`.
    pub(super) fn gather(&mut self, dense: &mut [u8]) -> Result<()> {
        let (region, offset, nests) = self.place();
        match region {
            Region::Host(memory) => Ok(memory.gather(offset, &nests.gather, dense)?),
            Region::Device(memory) => nests.parts.gather(memory, offset, dense, self.scratch),
        }
    }

    /// Writes the rows from `dense`.
    pub(super) fn scatter(&mut self, dense: &[u8]) -> Result<()> {
        let (region, offset, nests) = self.place();
        match region {
            Region::Host(memory) => Ok(memory.scatter(offset, &nests.scatter, dense)?),
            Region::Device(memory) => nests.parts.scatter(memory, offset, dense, self.scratch),
        }
    }

    /// Where the chunk lies, and how its rows lie there.
    fn place(&self) -> (&'a Region, u64, &'a Nests) {
        let job = self.job;
        let [full, last] = &job.nests;
        let nests = if self.chunk.tokens == full.tokens { full } else { last };
        (&job.layout.regions()[self.chunk.place.region as usize], self.chunk.place.offset, nests)
    }

    /// The rows in `dense` with their coordinates.
    pub(super) fn rows<'d>(&self, dense: &'d [u8]) -> impl Iterator<Item = (&'d [u8], RowAt)> + use<'d> {
        dense.chunks_exact(self.job.row_bytes()).zip(self.job.chunks.rows(&self.chunk))
    }

    /// As [`Piece::rows`], to be written.
    pub(super) fn rows_mut<'d>(
        &self,
        dense: &'d mut [u8],
    ) -> impl Iterator<Item = (&'d mut [u8], RowAt)> + use<'d> {
        dense.chunks_exact_mut(self.job.row_bytes()).zip(self.job.chunks.rows(&self.chunk))
    }
}
