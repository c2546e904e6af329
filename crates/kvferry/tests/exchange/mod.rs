//! Communicators of threads, inputs with keyed elements in guarded memory, and results computed element by element.
#![allow(dead_code, unreachable_pub, reason = "every test file uses a part of it")]

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kvferry::all2all::{All2All, All2AllBuilder, CallOptions, ExchangeArray, ExchangeResult, rendezvous};
use kvferry::host::{HostBuffer, HostRegion};
use kvferry::layout::exchange::{ExchangeOp, HeadLayout};
use kvferry::{Dtype, HostOptions, HugePages, Region};

/// Long enough for anything that is not a hang.
pub const PATIENCE: Duration = Duration::from_secs(60);

pub const POISON: u8 = 0xEE;
const GUARD: u64 = 64;

/// A name that no other test of this process uses.
pub fn fresh_name() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    format!("test-{}", NEXT.fetch_add(1, Ordering::Relaxed))
}

/// Runs every rank in a thread of its own, with a communicator that `configure` has had a say in.
pub fn ranks<T: Send>(
    world: usize,
    configure: impl Fn(All2AllBuilder) -> All2AllBuilder + Sync,
    body: impl Fn(All2All) -> T + Sync,
) -> Vec<T> {
    let name = fresh_name();
    threads(world, |rank| body(configure(builder(rank, world, &name)).connect().expect("set-up")))
}

pub fn builder(rank: usize, world: usize, name: &str) -> All2AllBuilder {
    let meet = rendezvous(&format!("memory://{name}"), rank, world, PATIENCE).expect("rendezvous");
    All2All::builder(rank, world).capacity_bytes(1 << 20).timeout(PATIENCE).rendezvous(meet)
}

pub fn threads<T: Send>(world: usize, body: impl Fn(usize) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let body = &body;
        let spawn = |rank| {
            let thread = std::thread::Builder::new().name(format!("rank {rank}"));
            thread.spawn_scoped(scope, move || body(rank)).unwrap()
        };
        let threads: Vec<_> = (0..world).map(spawn).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    })
}

/// A tensor as a whole, over all ranks.
#[derive(Clone, Debug)]
pub struct Whole {
    pub batch: u64,
    /// Tokens of every rank.
    pub tokens: Vec<u64>,
    pub heads: u64,
    pub dim: u64,
    pub dtype: Dtype,
    /// Heads of every rank.
    pub ranges: Vec<Range<u64>>,
    /// Keeps tensors of one call, and calls, apart.
    pub seed: u64,
}

/// As equal as possible, the larger shares first.
pub fn even(heads: u64, world: usize) -> Vec<Range<u64>> {
    let world = world as u64;
    let mut at = 0;
    (0..world)
        .map(|rank| {
            let share = heads / world + u64::from(rank < heads % world);
            at += share;
            at - share..at
        })
        .collect()
}

impl Whole {
    pub fn new(batch: u64, tokens: &[u64], heads: u64, dim: u64, dtype: Dtype) -> Whole {
        let ranges = even(heads, tokens.len());
        Whole { batch, tokens: tokens.to_vec(), heads, dim, dtype, ranges, seed: 1 }
    }

    pub fn seeded(&self, seed: u64) -> Whole {
        Whole { seed, ..self.clone() }
    }

    pub fn total(&self) -> u64 {
        self.tokens.iter().sum()
    }

    fn first_token(&self, rank: usize) -> u64 {
        self.tokens[..rank].iter().sum()
    }

    /// One element, from its coordinates in the whole.
    pub fn element(&self, batch: u64, token: u64, head: u64, dim: u64) -> [u8; 8] {
        let mut x = self.seed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        for word in [batch, token, head, dim] {
            x = (x ^ word).wrapping_add(0x9E37_79B9_7F4A_7C15);
            x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            x ^= x >> 31;
        }
        x.to_le_bytes()
    }

    /// Tokens and heads of the whole that a rank holds before a call.
    pub fn before(&self, op: ExchangeOp, rank: usize) -> (Range<u64>, Range<u64>) {
        let mine = self.first_token(rank)..self.first_token(rank) + self.tokens[rank];
        let all = 0..self.total();
        match op {
            ExchangeOp::SendRecvHeads | ExchangeOp::AllGatherTokens => (mine, 0..self.heads),
            ExchangeOp::GatherHeads => (all, self.ranges[rank].clone()),
            // Every rank has the tokens of rank 0.
            ExchangeOp::AllGatherHeads => (0..self.tokens[0], self.ranges[rank].clone()),
        }
    }

    /// The same after it.
    pub fn after(&self, op: ExchangeOp, rank: usize) -> (Range<u64>, Range<u64>) {
        let mine = self.first_token(rank)..self.first_token(rank) + self.tokens[rank];
        let all = 0..self.total();
        match op {
            ExchangeOp::SendRecvHeads => (all, self.ranges[rank].clone()),
            ExchangeOp::GatherHeads => (mine, 0..self.heads),
            ExchangeOp::AllGatherTokens => (all, 0..self.heads),
            ExchangeOp::AllGatherHeads => (0..self.tokens[0], 0..self.heads),
        }
    }

    /// The input of a rank, contiguous in BNHD.
    pub fn input(&self, op: ExchangeOp, rank: usize) -> Input {
        self.strided(op, rank, &Strides::default())
    }

    /// The input of a rank, wherever `how` puts it.
    pub fn strided(&self, op: ExchangeOp, rank: usize, how: &Strides) -> Input {
        let (tokens, heads) = self.before(op, rank);
        let shape = [self.batch, tokens.end - tokens.start, heads.end - heads.start, self.dim];
        let es = self.dtype.bytes();
        let row = self.dim * es + how.gap * es;
        // Innermost axis last in `order`.
        let mut strides = [0_i64; 3];
        let mut step = row;
        for &axis in how.order.iter().rev() {
            strides[axis] = step as i64;
            step = step * shape[axis].max(1) + how.gap * es;
        }
        let mut start = GUARD + how.skew;
        for axis in 0..3 {
            if how.backwards[axis] && shape[axis] > 0 {
                start += (shape[axis] - 1) * strides[axis] as u64;
                strides[axis] = -strides[axis];
            }
        }
        let len = GUARD + how.skew + step + GUARD;
        let mut image = vec![POISON; len as usize];
        let row_bytes = (self.dim * es) as usize;
        for b in 0..shape[0] {
            for n in 0..shape[1] {
                for h in 0..shape[2] {
                    let at =
                        start as i64 + b as i64 * strides[0] + n as i64 * strides[1] + h as i64 * strides[2];
                    let into = &mut image[at as usize..at as usize + row_bytes];
                    self.row(b, tokens.start + n, heads.start + h, into);
                }
            }
        }
        let region = memory(len);
        region.write(0, &image).unwrap();
        let array =
            ExchangeArray { region: Region::Host(region), offset: start, shape, strides, dtype: self.dtype };
        Input { array, image }
    }

    fn row(&self, batch: u64, token: u64, head: u64, into: &mut [u8]) {
        let es = self.dtype.bytes() as usize;
        for (dim, into) in into.chunks_exact_mut(es).enumerate() {
            into.copy_from_slice(&self.element(batch, token, head, dim as u64)[..es]);
        }
    }

    /// What a rank must get, contiguous in `layout`.
    pub fn expected(&self, op: ExchangeOp, rank: usize, layout: HeadLayout) -> Vec<u8> {
        let (tokens, heads) = self.after(op, rank);
        let row = (self.dim * self.dtype.bytes()) as usize;
        let mut bytes = Vec::new();
        let mut push = |batch, token, head| {
            let at = bytes.len();
            bytes.resize(at + row, 0);
            self.row(batch, token, head, &mut bytes[at..]);
        };
        for batch in 0..self.batch {
            match layout {
                HeadLayout::Bnhd => {
                    for token in tokens.clone() {
                        heads.clone().for_each(|head| push(batch, token, head));
                    }
                }
                HeadLayout::Bhnd => {
                    for head in heads.clone() {
                        tokens.clone().for_each(|token| push(batch, token, head));
                    }
                }
            }
        }
        bytes
    }

    /// Looks at every byte of a result.
    pub fn check(&self, op: ExchangeOp, rank: usize, layout: HeadLayout, result: &ExchangeResult) {
        let (tokens, heads) = self.after(op, rank);
        assert_eq!(
            result.shape(),
            [self.batch, tokens.end - tokens.start, heads.end - heads.start, self.dim],
            "shape on rank {rank}"
        );
        assert_eq!((result.dtype(), result.layout()), (self.dtype, layout));
        let (found, expected) = (bytes(result), self.expected(op, rank, layout));
        assert_eq!(found.len(), expected.len());
        if let Some(at) = found.iter().zip(&expected).position(|(found, expected)| found != expected) {
            panic!(
                "{op} on rank {rank}: byte {at} of {} is {:#x}, not {:#x}",
                found.len(),
                found[at],
                expected[at]
            );
        }
    }

    /// Options that say everything which is not the default.
    pub fn options(&self, op: ExchangeOp, layout: HeadLayout) -> CallOptions {
        options_of(std::slice::from_ref(self), op, layout)
    }
}

/// Options of a call of several tensors.
pub fn options_of(wholes: &[Whole], op: ExchangeOp, layout: HeadLayout) -> CallOptions {
    let mut options = CallOptions { layout, ..CallOptions::default() };
    if op != ExchangeOp::AllGatherHeads {
        options.rank_tokens = Some(wholes.iter().map(|whole| whole.tokens.clone()).collect());
    }
    if op != ExchangeOp::AllGatherTokens {
        options.head_splits = Some(wholes.iter().map(|whole| whole.ranges.clone()).collect());
        options.num_heads = Some(wholes.iter().map(|whole| whole.heads).collect());
    }
    options
}

/// Where an input lies.
#[derive(Clone, Debug)]
pub struct Strides {
    /// Axes from the outermost: 0 batch, 1 tokens, 2 heads.
    pub order: [usize; 3],
    /// Elements between rows, and after every axis.
    pub gap: u64,
    pub backwards: [bool; 3],
    /// Bytes off alignment.
    pub skew: u64,
}

impl Default for Strides {
    fn default() -> Self {
        Strides { order: [0, 1, 2], gap: 0, backwards: [false; 3], skew: 0 }
    }
}

/// An input, and every byte of the memory it lies in.
pub struct Input {
    pub array: ExchangeArray,
    image: Vec<u8>,
}

impl Input {
    /// Nothing was written where only reading was asked for.
    pub fn check_untouched(&self) {
        let mut now = vec![0; self.image.len()];
        self.array.region.host().unwrap().read(0, &mut now).unwrap();
        assert!(now == self.image, "an input was written to");
    }
}

pub fn memory(len: u64) -> HostRegion {
    let options = HostOptions { huge_pages: HugePages::Off, ..HostOptions::default() };
    let region = HostRegion::of_buffer(Arc::new(HostBuffer::new(len.max(1) as usize, options).unwrap()));
    region.fill(0, region.len(), POISON).unwrap();
    region
}

/// All bytes of a result that is contiguous.
pub fn bytes(result: &ExchangeResult) -> Vec<u8> {
    let count = result.shape().iter().product::<u64>() * result.dtype().bytes();
    let mut bytes = vec![0; count as usize];
    result.region().host().unwrap().read(result.offset(), &mut bytes).unwrap();
    bytes
}

/// One call of one tensor, checked.
pub fn call(comm: &All2All, whole: &Whole, op: ExchangeOp) -> kvferry::Result<ExchangeResult> {
    let input = whole.input(op, comm.rank());
    let options = whole.options(op, HeadLayout::Bnhd);
    let landing = kvferry::all2all::Landing::Pool;
    let result = comm.exchange(op, std::slice::from_ref(&input.array), &options, landing)?.remove(0);
    whole.check(op, comm.rank(), HeadLayout::Bnhd, &result);
    input.check_untouched();
    Ok(result)
}
