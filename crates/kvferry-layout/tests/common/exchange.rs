//! Random exchange calls, all ranks in one memory, and what they must do element by element.
//!
//! Nothing here calls the code under test but [`Call::contract`] and [`run`].

use std::ops::Range;

use kvferry_layout::{Contract, Dtype, ExchangeError, ExchangeOp, ExchangeRequest, HeadLayout, TensorInput};
use proptest::prelude::*;

use super::Dice;

/// A tensor over all ranks: what a test means, spelled out rank by rank.
#[derive(Clone, Debug)]
pub struct Whole {
    pub batch: u64,
    pub dim: u64,
    pub heads: u64,
    pub dtype: Dtype,
    /// Tokens of every rank.
    pub tokens: Vec<u64>,
    /// First head and number of heads of every rank.
    pub share: Vec<(u64, u64)>,
}

impl Whole {
    pub fn total(&self) -> u64 {
        self.tokens.iter().sum()
    }

    pub fn split(&self) -> Vec<Range<u64>> {
        self.share.iter().map(|&(first, count)| first..first + count).collect()
    }
}

/// A call over all ranks.
#[derive(Clone, Debug)]
pub struct Call {
    pub op: ExchangeOp,
    pub layout: HeadLayout,
    pub tensors: Vec<Whole>,
    /// Strides of the inputs: `[rank][tensor]`.
    pub strides: Vec<Vec<[i64; 3]>>,
    pub rank_tokens: Option<Vec<Vec<u64>>>,
    pub num_heads: Option<Vec<u64>>,
    pub query_heads: Option<u64>,
    pub head_splits: Option<Vec<Vec<Range<u64>>>>,
}

/// Which element of which rank's input: rank, tensor, and coordinates B, N, H.
pub type Source = (usize, usize, [u64; 3]);

impl Call {
    pub fn world(&self) -> usize {
        self.tensors[0].tokens.len()
    }

    pub fn input_shape(&self, rank: usize, tensor: usize) -> [u64; 4] {
        let whole = &self.tensors[tensor];
        let (tokens, heads) = match self.op {
            ExchangeOp::SendRecvHeads | ExchangeOp::AllGatherTokens => (whole.tokens[rank], whole.heads),
            ExchangeOp::GatherHeads => (whole.total(), whole.share[rank].1),
            ExchangeOp::AllGatherHeads => (whole.tokens[0], whole.share[rank].1),
        };
        [whole.batch, tokens, heads, whole.dim]
    }

    pub fn result_shape(&self, rank: usize, tensor: usize) -> [u64; 4] {
        let whole = &self.tensors[tensor];
        let (tokens, heads) = match self.op {
            ExchangeOp::SendRecvHeads => (whole.total(), whole.share[rank].1),
            ExchangeOp::GatherHeads => (whole.tokens[rank], whole.heads),
            ExchangeOp::AllGatherTokens => (whole.total(), whole.heads),
            ExchangeOp::AllGatherHeads => (whole.tokens[0], whole.heads),
        };
        [whole.batch, tokens, heads, whole.dim]
    }

    pub fn inputs(&self, rank: usize) -> Vec<TensorInput> {
        let input = |tensor| TensorInput {
            shape: self.input_shape(rank, tensor),
            strides: self.strides[rank][tensor],
            dtype: self.tensors[tensor].dtype,
        };
        (0..self.tensors.len()).map(input).collect()
    }

    /// The contract as `rank` makes it, from its own inputs.
    pub fn contract(&self, rank: usize) -> Result<Contract, ExchangeError> {
        let inputs = self.inputs(rank);
        Contract::new(&ExchangeRequest {
            layout: self.layout,
            rank_tokens: self.rank_tokens.as_deref(),
            num_heads: self.num_heads.as_deref(),
            query_heads: self.query_heads,
            head_splits: self.head_splits.as_deref(),
            ..ExchangeRequest::new(self.op, self.world(), rank, &inputs)
        })
    }

    /// Where an element of a result comes from.
    pub fn source(&self, rank: usize, tensor: usize, [b, n, h]: [u64; 3]) -> Source {
        let whole = &self.tensors[tensor];
        let token_owner = || {
            let (mut owner, mut local) = (0, n);
            while local >= whole.tokens[owner] {
                local -= whole.tokens[owner];
                owner += 1;
            }
            (owner, local)
        };
        let head_owner = || {
            let has = |&(first, count): &(u64, u64)| h >= first && h - first < count;
            let owner = whole.share.iter().position(has).expect("somebody has the head");
            (owner, h - whole.share[owner].0)
        };
        match self.op {
            ExchangeOp::SendRecvHeads => {
                let (owner, local) = token_owner();
                (owner, tensor, [b, local, whole.share[rank].0 + h])
            }
            ExchangeOp::AllGatherTokens => {
                let (owner, local) = token_owner();
                (owner, tensor, [b, local, h])
            }
            ExchangeOp::GatherHeads => {
                let before: u64 = whole.tokens[..rank].iter().sum();
                let (owner, local) = head_owner();
                (owner, tensor, [b, before + n, local])
            }
            ExchangeOp::AllGatherHeads => {
                let (owner, local) = head_owner();
                (owner, tensor, [b, n, local])
            }
        }
    }

    /// Byte offsets of an input's element, from its first.
    pub fn input_offset(&self, (rank, tensor, at): Source) -> i64 {
        at.iter().zip(self.strides[rank][tensor]).map(|(&i, stride)| i as i64 * stride).sum()
    }

    /// Every element row (over D) of a rank's result, by tensor: its coordinates and its byte offset.
    pub fn result_rows(&self, rank: usize) -> Vec<(usize, [u64; 3], usize)> {
        let mut rows = Vec::new();
        let mut at: usize = 0;
        for (tensor, whole) in self.tensors.iter().enumerate() {
            at = at.next_multiple_of(256);
            let [batch, tokens, heads, _] = self.result_shape(rank, tensor);
            let row = (whole.dim * whole.dtype.bytes()) as usize;
            for b in 0..batch {
                let bnhd = || (0..tokens).flat_map(|n| (0..heads).map(move |h| (n, h))).collect::<Vec<_>>();
                let bhnd = || (0..heads).flat_map(|h| (0..tokens).map(move |n| (n, h))).collect::<Vec<_>>();
                for (n, h) in if self.layout == HeadLayout::Bnhd { bnhd() } else { bhnd() } {
                    rows.push((tensor, [b, n, h], at));
                    at += row;
                }
            }
        }
        rows
    }

    /// Bytes of a row (over D) of a tensor.
    pub fn row(&self, tensor: usize) -> usize {
        (self.tensors[tensor].dim * self.tensors[tensor].dtype.bytes()) as usize
    }
}

/// Bytes after every result that nothing may touch.
pub const GUARD: usize = 64;

/// Carries out all pieces of all pairs of ranks: the results of every rank, byte by byte, `None` where nothing was
/// written. A byte written twice fails. `read` gives the byte at an offset of an input of a rank.
pub fn run<T: Copy>(
    contract: &Contract,
    strides: &[Vec<[i64; 3]>],
    read: impl Fn(usize, usize, i64) -> T,
) -> Vec<Vec<Option<T>>> {
    let world = contract.world();
    let mut results: Vec<Vec<Option<T>>> =
        (0..world).map(|rank| vec![None; contract.result_bytes(rank) as usize + GUARD]).collect();
    for (rank, strides) in strides.iter().enumerate() {
        for (peer, result) in results.iter_mut().enumerate() {
            let mut sent = 0;
            for piece in contract.pieces(rank, peer, strides) {
                assert!(piece.loops.len() <= 3, "{piece:?}");
                let mut starts = vec![(piece.src_offset, piece.dst_offset)];
                for step in &piece.loops {
                    let over = |(src, dst)| {
                        (0..step.count)
                            .map(move |i| (src + i as i64 * step.src_stride, dst + i * step.dst_stride))
                    };
                    starts = starts.into_iter().flat_map(over).collect();
                }
                assert_eq!(starts.len() as u64 * piece.run_bytes, piece.bytes());
                for (src, dst) in starts {
                    for i in 0..piece.run_bytes {
                        let cell = &mut result[(dst + i) as usize];
                        assert!(cell.is_none(), "byte {} of rank {peer} is written twice", dst + i);
                        *cell = Some(read(rank, piece.tensor, src + i as i64));
                    }
                }
                sent += piece.bytes();
            }
            assert_eq!(sent, contract.sent_bytes(rank, peer), "{rank} -> {peer}");
        }
    }
    results
}

/// A default split by its definition: how many heads each rank gets, dealt one at a time in rank order.
pub fn dealt(heads: u64, world: u64) -> Vec<(u64, u64)> {
    if heads < world {
        return (0..world).map(|rank| (rank * heads / world, 1)).collect();
    }
    let mut counts = vec![0; world as usize];
    (0..heads).for_each(|i| counts[(i % world) as usize] += 1);
    let mut first = 0;
    let place = |count: u64| {
        first += count;
        (first - count, count)
    };
    counts.into_iter().map(place).collect()
}

/// The KV heads that query heads belong to.
pub fn grouped(queries: &[(u64, u64)], group: u64) -> Vec<(u64, u64)> {
    let under = |&(first, count): &(u64, u64)| {
        let mut kv: Vec<u64> = (first..first + count).map(|query| query / group).collect();
        kv.dedup();
        (kv[0], kv.len() as u64)
    };
    queries.iter().map(under).collect()
}

/// How one axis order, padding and the like turn a shape into strides.
pub fn strides(dice: &mut Dice, shape: [u64; 4], es: u64, layout: HeadLayout) -> [i64; 3] {
    let row = shape[3] * es;
    let mut order = match layout {
        HeadLayout::Bnhd => [2, 1, 0],
        HeadLayout::Bhnd => [1, 2, 0],
    };
    let kind = dice.below(6);
    if kind >= 2 {
        dice.shuffle(&mut order);
    }
    let mut strides = [0; 3];
    // Sliced rows begin where the elements beside them let them: at any element.
    let mut step = row + if kind >= 3 { es * dice.below(3) } else { 0 };
    for axis in order {
        strides[axis] = step as i64;
        step *= shape[axis].max(1);
        if kind >= 3 && dice.below(2) == 0 {
            step += es * dice.below(5);
        }
    }
    match kind {
        // Backwards along an axis.
        4 => strides[dice.below(3) as usize] *= -1,
        // One element for all of an axis, and windows that overlap.
        5 => strides[dice.below(3) as usize] = dice.below(2) as i64 * es as i64,
        _ => {}
    }
    strides
}

fn splits(dice: &mut Dice, heads: u64, world: u64) -> Vec<(u64, u64)> {
    let mut cuts: Vec<u64> = (1..world).map(|_| dice.below(heads + 1)).collect();
    cuts.extend([0, heads]);
    cuts.sort_unstable();
    let mut shares: Vec<(u64, u64)> = cuts.windows(2).map(|cut| (cut[0], cut[1] - cut[0])).collect();
    // Some overlap, and ranks need not be in order.
    for share in &mut shares {
        if dice.below(4) == 0 {
            let end = share.0 + share.1;
            share.0 -= dice.below(share.0 + 1);
            share.1 = end + dice.below(heads - end + 1) - share.0;
        }
    }
    if dice.below(2) == 0 {
        dice.shuffle(&mut shares);
    }
    shares
}

/// Random heads of `count` tensors: their numbers, shares, and the options that lead there.
struct Heads {
    totals: Vec<u64>,
    shares: Vec<Vec<(u64, u64)>>,
    query_heads: Option<u64>,
    explicit: bool,
}

fn heads(dice: &mut Dice, world: u64, count: usize) -> Heads {
    match dice.below(4) {
        // Anything goes when splits are given.
        0 => {
            let totals: Vec<u64> = (0..count).map(|_| 1 + dice.below(world + 4)).collect();
            let shares = totals.iter().map(|&total| splits(dice, total, world)).collect();
            Heads { totals, shares, query_heads: None, explicit: true }
        }
        // Groups: each rank has `each` query heads, which are whole groups or a part of one.
        1 | 2 => {
            let each = 1 + dice.below(4);
            let queries = each * world;
            let fits = |&group: &u64| {
                queries.is_multiple_of(group) && (each.is_multiple_of(group) || group.is_multiple_of(each))
            };
            let groups: Vec<u64> = (1..=queries).filter(fits).collect();
            // The first tensor has the query heads, unless these are given.
            let alone = dice.below(2) == 0;
            let pick = |index: usize, dice: &mut Dice| {
                if index == 0 && !alone { 1 } else { groups[dice.below(groups.len() as u64) as usize] }
            };
            let picked: Vec<u64> = (0..count).map(|index| pick(index, dice)).collect();
            let of = dealt(queries, world);
            Heads {
                totals: picked.iter().map(|group| queries / group).collect(),
                shares: picked.iter().map(|&group| grouped(&of, group)).collect(),
                query_heads: alone.then_some(queries),
                explicit: false,
            }
        }
        // As equal as possible, or fewer heads than ranks.
        _ => {
            let fewer: Vec<u64> = (1..world).filter(|&heads| world.is_multiple_of(heads)).collect();
            let total = if !fewer.is_empty() && dice.below(2) == 0 {
                fewer[dice.below(fewer.len() as u64) as usize]
            } else {
                world + dice.below(world + 3)
            };
            let shares = vec![dealt(total, world); count];
            Heads { totals: vec![total; count], shares, query_heads: None, explicit: false }
        }
    }
}

const DTYPES: [Dtype; 6] =
    [Dtype::Float8E4M3Fn, Dtype::UInt8, Dtype::BFloat16, Dtype::Float16, Dtype::Float32, Dtype::Int64];

/// A legal call of `op` over `world` ranks.
pub fn random_call(op: ExchangeOp, layout: HeadLayout, world: usize, count: usize, seed: u64) -> Call {
    let mut dice = Dice(seed);
    let dice = &mut dice;
    let Heads { totals, shares, query_heads, explicit } = heads(dice, world as u64, count);
    let equal_tokens = op == ExchangeOp::AllGatherHeads || dice.below(4) == 0;
    let shared_list = equal_tokens || dice.below(2) == 0;
    let mut tokens: Vec<Vec<u64>> = (0..count)
        .map(|_| {
            let most = 1 + dice.below(4);
            let first = dice.below(most);
            (0..world).map(|_| if equal_tokens { first } else { dice.below(most) }).collect()
        })
        .collect();
    if shared_list {
        tokens = vec![tokens[0].clone(); count];
    }
    let tensors: Vec<Whole> = (0..count)
        .map(|index| Whole {
            batch: 1 + dice.below(2),
            dim: 1 + dice.below(4),
            heads: totals[index],
            dtype: DTYPES[dice.below(DTYPES.len() as u64) as usize],
            tokens: tokens[index].clone(),
            share: shares[index].clone(),
        })
        .collect();
    let joins = matches!(op, ExchangeOp::GatherHeads | ExchangeOp::AllGatherHeads);
    // Equal own heads need no total.
    let plain = tensors.iter().all(|whole| {
        whole.share.iter().all(|share| share.1 == whole.share[0].1)
            && whole.share[0].1 * world as u64 == whole.heads
    });
    let say_heads = joins && !explicit && (query_heads.is_some() || !plain);
    let say_tokens = !equal_tokens;
    let splits = op != ExchangeOp::AllGatherTokens;
    let mut call = Call {
        op,
        layout,
        rank_tokens: (say_tokens || dice.below(2) == 0)
            .then(|| if shared_list && dice.below(2) == 0 { vec![tokens[0].clone()] } else { tokens }),
        num_heads: (say_heads || dice.below(2) == 0).then_some(totals),
        query_heads: query_heads.filter(|_| splits),
        head_splits: (splits && explicit).then(|| tensors.iter().map(Whole::split).collect()),
        strides: Vec::new(),
        tensors,
    };
    call.strides = (0..world)
        .map(|rank| {
            (0..count)
                .map(|tensor| {
                    strides(dice, call.input_shape(rank, tensor), call.tensors[tensor].dtype.bytes(), layout)
                })
                .collect()
        })
        .collect();
    call
}

/// Any operation in any layout.
pub fn op_and_layout() -> impl Strategy<Value = (ExchangeOp, HeadLayout)> {
    let op = prop::sample::select(&ExchangeOp::ALL[..]);
    (op, prop::sample::select(vec![HeadLayout::Bnhd, HeadLayout::Bhnd]))
}
