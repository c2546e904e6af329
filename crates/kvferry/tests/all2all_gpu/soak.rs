//! Many calls back to back, the ranks out of step: results held and dropped at random, on streams at random.

use kvferry::Dtype;
use kvferry::all2all::{CallOptions, ExchangeEngine, ExchangeResult, Landing};
use kvferry::cuda::Stream;
use kvferry::layout::exchange::{ExchangeOp, HeadLayout};

use ExchangeOp::{AllGatherTokens, GatherHeads, SendRecvHeads};

use crate::exchange::{Strides, Whole};
use crate::gpus::{Rank, bytes};
use crate::processes::in_processes;

/// The same numbers on every rank, or not.
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
        (self.0 >> 33) % limit
    }
}

struct Held {
    whole: Whole,
    op: ExchangeOp,
    layout: HeadLayout,
    result: ExchangeResult,
}

impl Held {
    fn check(self, at: &Rank) {
        at.gpu.synchronize().unwrap();
        let expected = self.whole.expected(self.op, at.rank, self.layout);
        assert!(bytes(&self.result) == expected, "{} of {:?}", self.op, self.whole);
    }
}

fn calls(at: &Rank, count: u64) {
    let mut common = Dice(7);
    let mut own = Dice(1000 + at.rank as u64);
    let streams: Vec<_> = (0..3).map(|_| Stream::new(&at.gpu).unwrap()).collect();
    let mut held: Vec<Held> = Vec::new();
    let shape = |whole: &Whole, op| {
        let (tokens, heads) = whole.after(op, at.rank);
        [whole.batch, tokens.end - tokens.start, heads.end - heads.start, whole.dim]
    };
    for seed in 0..count {
        let tokens: Vec<u64> = (0..at.comm.world()).map(|_| common.below(6)).collect();
        let whole = Whole::new(
            1 + common.below(2),
            &tokens,
            1 + common.below(6),
            1 + common.below(24),
            Dtype::Float16,
        );
        let whole = whole.seeded(seed);
        let op = [SendRecvHeads, GatherHeads, AllGatherTokens][common.below(3) as usize];
        let layout = [HeadLayout::Bnhd, HeadLayout::Bhnd][common.below(2) as usize];
        // What is collective is so on all ranks: outputs, and who may hold on to them.
        let into_output = common.below(16) == 0;
        if into_output {
            held.drain(..).for_each(|held| held.check(at));
        }
        let mut options: CallOptions = whole.options(op, layout);
        options.stream = Some(streams[own.below(3) as usize].handle());
        options.num_sms = [None, Some(1), Some(3)][own.below(3) as usize];
        if into_output {
            options.out = Some(at.comm.empty_output(&[(shape(&whole, op), whole.dtype)], layout).unwrap());
            options.engine = [ExchangeEngine::Copy, ExchangeEngine::Push][own.below(2) as usize];
        }
        let input = at.input(&whole, op, &Strides::default());
        if own.below(20) == 0 {
            std::thread::sleep(std::time::Duration::from_micros(own.below(3000)));
        }
        let result = at.comm.exchange(op, &[input], &options, Landing::Pool).unwrap().remove(0);
        held.push(Held { whole, op, layout, result });
        // Three of four buffers at most, so that there is always one.
        while held.len() > own.below(4) as usize {
            let index = own.below(held.len() as u64) as usize;
            let one = held.swap_remove(index);
            // Some are looked at, the others dropped with whatever is still going on.
            if own.below(3) > 0 {
                one.check(at);
            }
        }
    }
    held.into_iter().for_each(|held| held.check(at));
    at.comm.check().unwrap();
    let stats = at.comm.stats();
    assert_eq!((stats.calls, stats.buffers_free), (count, 4));
}

#[test]
fn three_hundred_skewed_calls() {
    in_processes("soak::three_hundred_skewed_calls", 2, &[], |process| {
        calls(&process.connect(), 300);
    });
}

#[test]
#[ignore = "takes a minute: make soak"]
fn ten_thousand_skewed_calls() {
    in_processes("soak::ten_thousand_skewed_calls", 2, &[("KVFERRY_FAKE_JITTER_US", "100")], |process| {
        calls(&process.connect(), 10_000);
    });
}
