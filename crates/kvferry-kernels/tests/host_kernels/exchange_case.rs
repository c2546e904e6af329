//! Head exchanges of any shape, and what must come out.

use kvferry_kernels::{
    ARRIVALS_OFFSET, CONTROL_BYTES, ExchangeArriveParams, ExchangeCall, ExchangeFlags, ExchangeGrid,
    ExchangeLoop, ExchangeParamBuffer, ExchangePeer, ExchangePiece, HostPage, Kernel, LocalState, MAX_RANKS,
    PLACE_ALIGN, RecordKind, header_cell_offset,
};
use zerocopy::{FromBytes, IntoBytes};

use crate::ffi::{Fault, Order};
use crate::world::{CONSUMED, Grant, World};

/// One tensor: heads are scattered, tokens are gathered.
#[derive(Clone, Debug)]
pub(crate) struct Tensor {
    pub(crate) batch: u64,
    /// Per rank.
    pub(crate) tokens: Vec<u64>,
    /// Per rank.
    pub(crate) heads: Vec<u64>,
    /// Bytes of a head.
    pub(crate) dim: u64,
    /// Bytes between heads, between tokens, before the first byte of the input.
    pub(crate) pad: [u64; 3],
    /// Tokens lie in descending order in memory.
    pub(crate) reversed: bool,
    /// Bytes before the tensor in the result.
    pub(crate) gap: u64,
}

/// How a rank does its calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    Whole,
    /// A CTA that waits for headers, then the rest.
    Split,
    Copy,
    /// The first half of a split call, and no more.
    Open,
}

#[derive(Clone, Debug)]
pub(crate) struct RankShape {
    pub(crate) block: u32,
    pub(crate) max_ctas: u32,
    /// Per target.
    pub(crate) lanes: Vec<u32>,
    pub(crate) way: Way,
}

#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) ranks: Vec<RankShape>,
    /// Each call has its tensors.
    pub(crate) calls: Vec<Vec<Tensor>>,
    pub(crate) order: Order,
}

/// Source address, offset from the target's landing place, bytes of a run, loops.
type Runs = (u64, u64, u64, Vec<ExchangeLoop>);

/// What one rank gets of a tensor of another.
struct Piece {
    src: i64,
    dst: u64,
    loops: Vec<ExchangeLoop>,
}

impl Tensor {
    fn total_heads(&self) -> u64 {
        self.heads.iter().sum()
    }

    fn total_tokens(&self) -> u64 {
        self.tokens.iter().sum()
    }

    /// Bytes per step of batch, token and head of the input of a rank.
    fn strides(&self, rank: usize) -> [i64; 3] {
        let head = self.dim + self.pad[0];
        let token = self.total_heads() * head + self.pad[1];
        let batch = token * self.tokens[rank];
        let token = token as i64;
        [batch as i64, if self.reversed { -token } else { token }, head as i64]
    }

    /// Bytes of the input of a rank, and where its first element lies.
    fn input(&self, rank: usize) -> (u64, u64) {
        let [batch, token, _] = self.strides(rank);
        let first =
            if self.reversed { self.tokens[rank].saturating_sub(1) * token.unsigned_abs() } else { 0 };
        (self.pad[2] + batch as u64 * self.batch, self.pad[2] + first)
    }

    fn result_bytes(&self, rank: usize) -> u64 {
        self.batch * self.total_tokens() * self.heads[rank] * self.dim
    }

    fn piece(&self, from: usize, to: usize) -> Piece {
        let [batch, token, head] = self.strides(from);
        let row = self.heads[to] * self.dim;
        let heads_before: u64 = self.heads[..to].iter().sum();
        let tokens_before: u64 = self.tokens[..from].iter().sum();
        Piece {
            src: self.input(from).1 as i64 + heads_before as i64 * head,
            dst: tokens_before * row,
            loops: vec![
                ExchangeLoop { count: self.batch, src_stride: batch, dst_stride: self.total_tokens() * row },
                ExchangeLoop { count: self.tokens[from], src_stride: token, dst_stride: row },
                ExchangeLoop { count: self.heads[to], src_stride: head, dst_stride: self.dim },
            ],
        }
    }
}

/// A byte that tells where it comes from.
fn value(call: usize, tensor: usize, rank: usize, index: u64) -> u8 {
    let mut x = (call as u64) << 56 ^ (tensor as u64) << 48 ^ (rank as u64) << 40 ^ index;
    x = (x ^ x >> 31).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ x >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    // Never what a consumed or a failed place holds.
    let byte = (x >> 56) as u8;
    if byte == CONSUMED || byte == 0xff { 1 } else { byte }
}

/// Where things are.
pub(crate) struct RankMemory {
    pub(crate) shared: usize,
    pub(crate) state: usize,
    pub(crate) page: usize,
    /// Per call and tensor.
    inputs: Vec<Vec<usize>>,
    /// Per call: the consumed result and how often its bytes were stored.
    outs: Vec<(usize, usize)>,
}

/// A case in memory.
pub(crate) struct Stage {
    pub(crate) world: World,
    pub(crate) ranks: Vec<RankMemory>,
    pub(crate) peers: Vec<ExchangePeer>,
    /// What is launched for `exchange` instead.
    pub(crate) body: Option<&'static str>,
    /// Hash of a call as a rank sees it.
    pub(crate) hash: fn(call: usize, rank: usize) -> u64,
    buffer: ExchangeParamBuffer,
}

impl Case {
    pub(crate) fn world_size(&self) -> usize {
        self.ranks.len()
    }

    /// Offsets of the tensors in the result of a rank, and its bytes.
    fn result(&self, call: usize, rank: usize) -> (Vec<u64>, u64) {
        let mut at = 0;
        let offsets = self.calls[call]
            .iter()
            .map(|tensor| {
                let offset = at + tensor.gap;
                at = offset + tensor.result_bytes(rank);
                offset
            })
            .collect();
        (offsets, at)
    }

    pub(crate) fn result_bytes(&self, call: usize, rank: usize) -> u64 {
        self.result(call, rank).1
    }

    /// The one landing place of a rank, used again by every call.
    pub(crate) fn place(&self, rank: usize) -> u64 {
        PLACE_ALIGN * (1 + rank as u64 % 2)
    }

    fn pool_bytes(&self, rank: usize) -> u64 {
        let most = (0..self.calls.len()).map(|call| self.result_bytes(call, rank)).max().unwrap();
        self.place(rank) + most
    }

    pub(crate) fn stage(&self) -> Stage {
        let world_size = self.world_size();
        let mut world = World::default();
        let ranks: Vec<_> = (0..world_size)
            .map(|rank| {
                let pool = self.pool_bytes(rank) as usize;
                let shared = world.block(CONTROL_BYTES as usize + pool, 0);
                world.blocks[shared].bytes_mut()[CONTROL_BYTES as usize..].fill(CONSUMED);
                let state = world.block(size_of::<LocalState>(), 0);
                let page = world.block(size_of::<HostPage>(), 0);
                // One minute: beyond what a run takes unless it is stuck.
                world.blocks[page].set_word(8, 60_000_000_000);
                let both = Grant::READ | Grant::WRITE;
                world.grant(rank, state, both);
                world.grant(rank, page, both);
                for other in 0..world_size {
                    let control = CONTROL_BYTES as usize;
                    let own = other == rank;
                    let may = if own { Grant::READ } else { both };
                    world.grants.push(Grant {
                        rank: other,
                        block: shared,
                        offset: 0,
                        bytes: control,
                        access: may,
                        counted: false,
                    });
                    let may = if own { both } else { Grant::WRITE };
                    world.grants.push(Grant {
                        rank: other,
                        block: shared,
                        offset: control,
                        bytes: pool,
                        access: may,
                        counted: true,
                    });
                }
                let mut inputs = Vec::new();
                let mut outs = Vec::new();
                for (call, tensors) in self.calls.iter().enumerate() {
                    let blocks = tensors.iter().enumerate().map(|(index, tensor)| {
                        let block = world.block(tensor.input(rank).0 as usize, 0);
                        for (at, byte) in world.blocks[block].bytes_mut().iter_mut().enumerate() {
                            *byte = value(call, index, rank, at as u64);
                        }
                        world.grant(rank, block, Grant::READ);
                        block
                    });
                    inputs.push(blocks.collect());
                    let bytes = self.result_bytes(call, rank) as usize;
                    let out = (world.block(bytes, 0x77), world.block(bytes, 0x77));
                    world.grant(rank, out.0, Grant::WRITE);
                    world.grant(rank, out.1, Grant::WRITE);
                    outs.push(out);
                }
                RankMemory { shared, state, page, inputs, outs }
            })
            .collect();
        let peers = ranks
            .iter()
            .enumerate()
            .map(|(rank, memory)| {
                let control = world.blocks[memory.shared].address();
                ExchangePeer { control, pool: control + CONTROL_BYTES, pool_bytes: self.pool_bytes(rank) }
            })
            .collect();
        Stage {
            world,
            ranks,
            peers,
            body: None,
            hash: |call, _| 0x1234_5678_9abc_def0 + call as u64,
            buffer: ExchangeParamBuffer::new(),
        }
    }

    /// Puts a call of a rank into its stream, and behind it somebody who reads the result.
    pub(crate) fn enqueue(&self, stage: &mut Stage, call: usize, rank: usize) {
        let way = self.ranks[rank].way;
        self.enqueue_as(stage, call, rank, way);
        let bytes = self.result_bytes(call, rank);
        let (out, counts) = stage.ranks[rank].outs[call];
        let (out, counts) = (stage.world.blocks[out].address(), stage.world.blocks[counts].address());
        stage.world.consume(rank, stage.peers[rank].pool + self.place(rank), out, counts, bytes);
    }

    /// The launches of a call of a rank.
    pub(crate) fn enqueue_as(&self, stage: &mut Stage, call: usize, rank: usize, way: Way) {
        let Stage { world, ranks, peers, body, hash, buffer } = stage;
        let memory = &ranks[rank];
        let pieces = self.pieces(world, memory, call, rank);
        let lists: Vec<Vec<_>> = pieces
            .iter()
            .map(|list| {
                list.iter()
                    .map(|(src, dst, run, loops)| ExchangePiece {
                        src: *src,
                        dst_offset: *dst,
                        run_bytes: *run,
                        loops,
                    })
                    .collect()
            })
            .collect();
        let shape = &self.ranks[rank];
        let mut lanes = [0; MAX_RANKS];
        lanes[..shape.lanes.len()].copy_from_slice(&shape.lanes);
        let description = ExchangeCall {
            rank,
            peers,
            state: world.blocks[memory.state].address(),
            host_page: world.blocks[memory.page].address(),
            op: 7,
            hash: hash(call, rank),
            place: self.place(rank),
            result_bytes: self.result_bytes(call, rank),
            pieces: &lists,
            grid: ExchangeGrid { block: shape.block, max_ctas: shape.max_ctas, lanes },
            copy_engine: way == Way::Copy,
        };
        let mut launch = description.build(buffer).unwrap();
        let stream = rank as u32;
        let mut put = |world: &mut World, flags, stream, after| {
            let part = launch.part(flags);
            let name = body.unwrap_or(part.kernel.name());
            world.launch_as(name, rank, stream, after, part.params, part.geometry)
        };
        match way {
            Way::Whole => {
                put(world, ExchangeFlags::WHOLE, stream, None);
            }
            Way::Open => {
                put(world, ExchangeFlags::OPEN, stream, None);
            }
            Way::Split => {
                put(world, ExchangeFlags::OPEN, stream, None);
                put(world, ExchangeFlags::MOVE, stream, None);
            }
            Way::Copy => {
                // The own share runs beside, behind whatever the stream held before.
                let before = world.last_of(stream);
                put(world, ExchangeFlags::OPEN, stream, None);
                let own = put(world, ExchangeFlags::OWN, stream + 1000, before);
                let others = || pieces.iter().enumerate().filter(|(target, _)| *target != rank);
                let mut targets = vec![false; peers.len()];
                for (target, list) in others() {
                    let bytes = |(_, _, run, loops): &Runs| *run > 0 && loops.iter().all(|l| l.count > 0);
                    targets[target] = list.iter().any(bytes);
                }
                let state = world.blocks[memory.state].address();
                let arrive = ExchangeArriveParams::new(state, &targets);
                world.small(Kernel::ExchangeArrive, rank, arrive.as_bytes(), ExchangeArriveParams::GEOMETRY);
                for (target, list) in others() {
                    let base = peers[target].pool + self.place(target);
                    for (src, dst, run, loops) in list {
                        pitched(world, rank, *src, base + dst, *run, loops);
                    }
                }
                let row = 8 * MAX_RANKS as u64;
                let line = 64 * MAX_RANKS as u64;
                for (target, _) in others() {
                    let from = state + std::mem::offset_of!(LocalState, staging) as u64 + 8 * target as u64;
                    let to = peers[target].control + ARRIVALS_OFFSET + 64 * rank as u64;
                    world.copy(rank, (from, row), (to, line), 8, 2);
                }
                put(world, ExchangeFlags::CLOSE, stream, Some(own));
            }
        }
    }

    /// Per target.
    fn pieces(&self, world: &World, memory: &RankMemory, call: usize, rank: usize) -> Vec<Vec<Runs>> {
        (0..self.world_size())
            .map(|target| {
                let (offsets, _) = self.result(call, target);
                self.calls[call]
                    .iter()
                    .zip(offsets)
                    .zip(&memory.inputs[call])
                    .map(|((tensor, offset), input)| {
                        let piece = tensor.piece(rank, target);
                        let src = world.blocks[*input].address().wrapping_add_signed(piece.src);
                        let mut run = tensor.dim;
                        let mut loops = piece.loops;
                        // As the planner does: rows that touch are one run.
                        if tensor.pad[0] == 0 {
                            run *= loops.pop().unwrap().count;
                        }
                        (src, offset + piece.dst, run, loops)
                    })
                    .collect()
            })
            .collect()
    }

    /// What a rank holds after a call: a value per byte that was to be written.
    fn expected(&self, call: usize, rank: usize) -> Vec<Option<u8>> {
        let (offsets, bytes) = self.result(call, rank);
        let mut expected = vec![None; bytes as usize];
        for (index, (tensor, offset)) in self.calls[call].iter().zip(offsets).enumerate() {
            for from in 0..self.world_size() {
                let tokens_before: u64 = tensor.tokens[..from].iter().sum();
                let heads_before: u64 = tensor.heads[..rank].iter().sum();
                let [batch_step, token_step, head_step] = tensor.strides(from);
                for b in 0..tensor.batch {
                    for n in 0..tensor.tokens[from] {
                        for h in 0..tensor.heads[rank] {
                            for d in 0..tensor.dim {
                                let at = tensor.input(from).1 as i64
                                    + b as i64 * batch_step
                                    + n as i64 * token_step
                                    + (heads_before + h) as i64 * head_step
                                    + d as i64;
                                let to = ((b * tensor.total_tokens() + tokens_before + n)
                                    * tensor.heads[rank]
                                    + h)
                                    * tensor.dim
                                    + d;
                                expected[(offset + to) as usize] = Some(value(call, index, from, at as u64));
                            }
                        }
                    }
                }
            }
        }
        expected
    }

    /// Whether the consumed result of a call is right, each byte stored once and no other byte touched.
    pub(crate) fn check_result(&self, stage: &Stage, call: usize, rank: usize) -> Result<(), String> {
        let (out, counts) = stage.ranks[rank].outs[call];
        let (out, counts) = (stage.world.blocks[out].bytes(), stage.world.blocks[counts].bytes());
        for (at, expected) in self.expected(call, rank).into_iter().enumerate() {
            let (wanted, times) = expected.map_or((CONSUMED, 0), |value| (value, 1));
            if out[at] != wanted || counts[at] != times {
                return Err(format!(
                    "call {call} rank {rank} byte {at}: {:#04x} stored {} times, wanted {wanted:#04x} {times} times",
                    out[at], counts[at]
                ));
            }
        }
        Ok(())
    }

    /// Whether the consumed result of a call is filled.
    pub(crate) fn check_filled(&self, stage: &Stage, call: usize, rank: usize) -> Result<(), String> {
        let out = stage.world.blocks[stage.ranks[rank].outs[call].0].bytes();
        match out.iter().position(|byte| *byte != 0xff) {
            None => Ok(()),
            Some(at) => Err(format!("call {call} rank {rank} byte {at} is {:#04x}, not 0xff", out[at])),
        }
    }

    /// Runs all calls on all ranks and compares everything.
    pub(crate) fn check(&self) -> Result<(), String> {
        let mut stage = self.stage();
        for call in 0..self.calls.len() {
            for rank in 0..self.world_size() {
                self.enqueue(&mut stage, call, rank);
            }
        }
        self.check_stage(&mut stage)
    }

    pub(crate) fn check_stage(&self, stage: &mut Stage) -> Result<(), String> {
        stage.world.run(self.world_size(), self.order);
        for (rank, report) in stage.world.reports.iter().enumerate() {
            if !report.is_clean() {
                return Err(format!("rank {rank}: {report:?}"));
            }
        }
        for rank in 0..self.world_size() {
            let state = stage.state(rank);
            if (state.epoch, state.ticket, state.poison) != (self.calls.len() as u64, 0, 0) {
                return Err(format!("rank {rank} ends at {} {} {}", state.epoch, state.ticket, state.poison));
            }
            for call in 0..self.calls.len() {
                self.check_result(stage, call, rank)?;
            }
        }
        Ok(())
    }
}

impl Stage {
    pub(crate) fn state(&self, rank: usize) -> LocalState {
        LocalState::read_from_bytes(self.world.blocks[self.ranks[rank].state].bytes()).unwrap()
    }

    pub(crate) fn page(&self, rank: usize) -> HostPage {
        HostPage::read_from_bytes(self.world.blocks[self.ranks[rank].page].bytes()).unwrap()
    }

    pub(crate) fn kind(&self, rank: usize) -> Option<RecordKind> {
        let record = self.page(rank).record;
        if record.state == 1 { RecordKind::from_code(record.kind) } else { None }
    }

    pub(crate) fn state_address(&self, rank: usize) -> u64 {
        self.world.blocks[self.ranks[rank].state].address()
    }

    pub(crate) fn page_address(&self, rank: usize) -> u64 {
        self.world.blocks[self.ranks[rank].page].address()
    }

    pub(crate) fn set_timeout(&mut self, nanoseconds: u64) {
        for rank in &self.ranks {
            self.world.blocks[rank.page].set_word(8, nanoseconds);
        }
    }

    /// All arrivals at a rank so far.
    pub(crate) fn arrivals(&self, rank: usize) -> u64 {
        let words = (0..2 * MAX_RANKS).map(|at| ARRIVALS_OFFSET as usize + 64 * at);
        words.map(|at| self.world.blocks[self.ranks[rank].shared].word(at)).sum()
    }

    /// The epoch for which `from` last told `to` something, by parity.
    pub(crate) fn told(&self, to: usize, from: usize) -> [u32; 2] {
        [0, 1].map(|parity| {
            self.world.blocks[self.ranks[to].shared].word(header_cell_offset(parity, from) as usize) as u32
        })
    }

    /// Faults of any kind but bytes stored twice, which filling does.
    pub(crate) fn other_faults(&self) -> bool {
        use Fault::{BarrierDiverged, LoadOutside, Misaligned, StoreOutside, Stuck};
        let kinds = [Misaligned, LoadOutside, StoreOutside, BarrierDiverged, Stuck];
        self.world.reports.iter().any(|report| kinds.iter().any(|kind| report.count(*kind) > 0))
    }
}

/// The copies of a piece: rows along the innermost loop.
fn pitched(world: &mut World, rank: usize, src: u64, dst: u64, run: u64, loops: &[ExchangeLoop]) {
    match loops {
        [] => world.copy(rank, (src, 0), (dst, 0), run, 1),
        [rows] => world.copy(rank, (src, rows.src_stride as u64), (dst, rows.dst_stride), run, rows.count),
        [outer, inner @ ..] => {
            for i in 0..outer.count {
                let src = src.wrapping_add_signed(i as i64 * outer.src_stride);
                pitched(world, rank, src, dst + i * outer.dst_stride, run, inner);
            }
        }
    }
}
