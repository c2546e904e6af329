//! Random transfers: two layouts of one model, a part of it, and ids.

use std::ops::Range;
use std::sync::Arc;

use kvferry_layout::{BlockId, CopyPlan, PairPlan, PairRequest, Transform};
use proptest::prelude::*;

use super::{Dice, Dims, Form, Made, alignment, dims, form, ids};

/// One transfer that must succeed.
#[derive(Clone, Debug)]
pub struct Case {
    pub src: Made,
    pub dst: Made,
    pub src_ids: Vec<BlockId>,
    pub dst_ids: Vec<BlockId>,
    pub request: PairRequest,
    /// Layers and global heads that the request comes to.
    pub layers: Range<u64>,
    pub heads: Range<u64>,
    /// Both forms regular, page sizes equal and never split.
    pub regular: bool,
}

impl Case {
    pub fn plan(&self) -> CopyPlan {
        let pair = PairPlan::new(&self.src.layout, &self.dst.layout, &self.request).expect("pair");
        CopyPlan::new(Arc::new(pair), &self.src_ids, &self.dst_ids).expect("plan")
    }
}

#[derive(Clone, Copy, Debug)]
struct Choices {
    dims: Dims,
    /// Pages of the coarser side are this much larger.
    ratio: u64,
    coarse_src: bool,
    /// Both sides are made with larger blocks and re-addressed.
    split: [u64; 2],
    dst_blocks: u64,
    align: [u64; 2],
    seed: u64,
}

pub fn case(limit: u64) -> impl Strategy<Value = Case> {
    let choices = (
        dims(limit),
        prop_oneof![2 => Just(1u64), 1 => 2u64..=3],
        any::<bool>(),
        [prop_oneof![4 => Just(1u64), 1 => 2u64..=3], prop_oneof![4 => Just(1u64), 1 => 2u64..=3]],
        1..=limit,
        // Mostly none, so that blocks can join.
        [prop_oneof![Just(1u64), alignment()], prop_oneof![Just(1u64), alignment()]],
        any::<u64>(),
    )
        .prop_map(|(dims, ratio, coarse_src, split, dst_blocks, align, seed)| Choices {
            dims,
            ratio,
            coarse_src,
            split,
            dst_blocks,
            align,
            seed,
        });
    (choices, form(), form()).prop_map(|(choices, src, dst)| build(choices, &src, &dst))
}

fn build(choices: Choices, src_form: &Form, dst_form: &Form) -> Case {
    let Choices { dims, ratio, coarse_src, split, dst_blocks, align, seed } = choices;
    let mut dice = Dice(seed);
    let shards = shards(&mut dice, dims.heads);
    let make = |side: usize, form: &Form, blocks: u64, coarse: bool| {
        let page = dims.page * if coarse { ratio } else { 1 };
        let config = Dims { blocks, page: page * split[side], ..dims }
            .config(align[side])
            .to_builder()
            .total_heads(dims.heads)
            .first_head(shards[side].start)
            .num_heads(shards[side].end - shards[side].start)
            .build()
            .expect("shard");
        let made = Made::new(config, form);
        if split[side] > 1 { made.with_page_size(page) } else { made }
    };
    let src = make(0, src_form, dims.blocks, coarse_src);
    let dst = make(1, dst_form, dst_blocks, !coarse_src);
    let common = shards[0].start.max(shards[1].start)..shards[0].end.min(shards[1].end);
    let (heads, asked_heads) = part(&mut dice, common);
    let (layers, asked_layers) = part(&mut dice, 0..dims.layers);
    let (src_ids, dst_ids) =
        id_lists(&mut dice, src.oracle.num_blocks(), dst.oracle.num_blocks(), ratio, coarse_src);
    Case {
        src,
        dst,
        src_ids,
        dst_ids,
        request: PairRequest { layers: asked_layers, heads: asked_heads, transform: Transform::Auto },
        layers,
        heads,
        regular: ratio == 1 && split == [1, 1] && src_form.regular() && dst_form.regular(),
    }
}

/// Heads held by either side: tensor-parallel shares of any two degrees, or any ranges, with a head in common.
fn shards(dice: &mut Dice, heads: u64) -> [Range<u64>; 2] {
    let common = dice.below(heads);
    let even = dice.below(2) == 0;
    [0, 1].map(|_| {
        if even {
            let degrees: Vec<u64> = (1..=heads).filter(|&world| heads.is_multiple_of(world)).collect();
            let share = heads / degrees[dice.below(degrees.len() as u64) as usize];
            let rank = common / share;
            rank * share..(rank + 1) * share
        } else {
            dice.below(common + 1)..common + 1 + dice.below(heads - common)
        }
    })
}

/// All of `whole`, asked for or by default, or a part of it.
fn part(dice: &mut Dice, whole: Range<u64>) -> (Range<u64>, Option<Range<u64>>) {
    match dice.below(3) {
        0 => (whole.clone(), None),
        1 => {
            let inside = dice.range(whole.end - whole.start);
            let part = whole.start + inside.start..whole.start + inside.end;
            (part.clone(), Some(part))
        }
        // Asking for all that is common is not the default when one side holds more.
        _ => (whole.clone(), Some(whole)),
    }
}

fn id_lists(
    dice: &mut Dice,
    src_blocks: u64,
    dst_blocks: u64,
    ratio: u64,
    coarse_src: bool,
) -> (Vec<BlockId>, Vec<BlockId>) {
    let (src_each, dst_each) = if coarse_src { (1, ratio) } else { (ratio, 1) };
    let groups = dice.below(dst_blocks / dst_each + 1);
    // Destinations are distinct; sources repeat where they are fewer.
    let dst = chosen(dice, dst_blocks, groups * dst_each);
    let src = if dice.below(3) == 0 {
        (0..groups * src_each).map(|_| dice.below(src_blocks)).collect()
    } else {
        let mut list = Vec::new();
        while (list.len() as u64) < groups * src_each {
            let count = src_blocks.min(groups * src_each - list.len() as u64);
            list.extend(chosen(dice, src_blocks, count));
        }
        list
    };
    (ids(src), ids(dst))
}

/// `count` distinct numbers below `limit`: consecutive, falling, rising with gaps, or in any order.
fn chosen(dice: &mut Dice, limit: u64, count: u64) -> Vec<u64> {
    let first = dice.below(limit - count + 1);
    let run = first..first + count;
    match dice.below(4) {
        0 => run.collect(),
        1 => run.rev().collect(),
        mode => {
            let mut all: Vec<u64> = (0..limit).collect();
            dice.shuffle(&mut all);
            all.truncate(count as usize);
            if mode == 2 {
                all.sort_unstable();
            }
            all
        }
    }
}
