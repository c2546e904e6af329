//! Every call that is refused, and what the refusal says.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a failing helper fails its test")]

use std::ops::Range;

use kvferry_layout::{Contract, Dtype, ExchangeError, ExchangeOp, ExchangeRequest, HeadLayout, TensorInput};

use ExchangeOp::{AllGatherHeads, AllGatherTokens, GatherHeads, SendRecvHeads};

const MAX: u64 = u64::MAX;

fn input(shape: [u64; 4]) -> TensorInput {
    TensorInput::contiguous(shape, HeadLayout::Bnhd, Dtype::BFloat16).unwrap()
}

/// A legal call of rank 1 of 2 with two tensors, which every test breaks in one way.
struct Case {
    op: ExchangeOp,
    world: usize,
    rank: usize,
    tensors: Vec<TensorInput>,
    rank_tokens: Option<Vec<Vec<u64>>>,
    num_heads: Option<Vec<u64>>,
    query_heads: Option<u64>,
    head_splits: Option<Vec<Vec<Range<u64>>>>,
}

fn case(op: ExchangeOp) -> Case {
    let heads = if matches!(op, GatherHeads | AllGatherHeads) { [4, 2] } else { [8, 4] };
    Case {
        op,
        world: 2,
        rank: 1,
        tensors: heads.map(|heads| input([2, 6, heads, 16])).to_vec(),
        rank_tokens: None,
        num_heads: None,
        query_heads: None,
        head_splits: None,
    }
}

impl Case {
    fn contract(&self) -> Result<Contract, ExchangeError> {
        Contract::new(&ExchangeRequest {
            rank_tokens: self.rank_tokens.as_deref(),
            num_heads: self.num_heads.as_deref(),
            query_heads: self.query_heads,
            head_splits: self.head_splits.as_deref(),
            ..ExchangeRequest::new(self.op, self.world, self.rank, &self.tensors)
        })
    }
}

/// The refusal of a call that is legal before `change`.
fn refusal(op: ExchangeOp, change: impl FnOnce(&mut Case)) -> ExchangeError {
    let mut case = case(op);
    case.contract().unwrap();
    change(&mut case);
    case.contract().unwrap_err()
}

/// The refusal of a call with these heads in its inputs.
fn heads(op: ExchangeOp, world: usize, rank: usize, heads: &[u64]) -> Result<Contract, ExchangeError> {
    let tensors = heads.iter().map(|&heads| input([1, 4, heads, 8])).collect();
    Case { world, rank, tensors, ..case(op) }.contract()
}

#[test]
fn worlds_and_ranks_out_of_range() {
    for op in ExchangeOp::ALL {
        assert_eq!(refusal(op, |c| c.world = 0), ExchangeError::World { value: 0, limit: 64 });
        assert_eq!(refusal(op, |c| c.world = 65), ExchangeError::World { value: 65, limit: 64 });
        let error = ExchangeError::World { value: usize::MAX, limit: 64 };
        assert_eq!(refusal(op, |c| c.world = usize::MAX), error);
        assert_eq!(refusal(op, |c| c.rank = 2), ExchangeError::Rank { value: 2, limit: 2 });
        let error = ExchangeError::Rank { value: usize::MAX, limit: 2 };
        assert_eq!(refusal(op, |c| c.rank = usize::MAX), error);
    }
}

#[test]
fn too_many_tensors_or_none() {
    for op in ExchangeOp::ALL {
        assert_eq!(refusal(op, |c| c.tensors.clear()), ExchangeError::TensorCount { value: 0, limit: 16 });
        let error = ExchangeError::TensorCount { value: 17, limit: 16 };
        assert_eq!(refusal(op, |c| c.tensors = vec![c.tensors[0]; 17]), error);
        let mut most = case(op);
        most.tensors = vec![most.tensors[0]; 16];
        assert_eq!(most.contract().unwrap().num_tensors(), 16);
    }
}

#[test]
fn empty_axes() {
    for op in ExchangeOp::ALL {
        for (axis, name) in [(0, "batch"), (2, "heads"), (3, "dim")] {
            let error = ExchangeError::EmptyAxis { tensor: 1, axis: name };
            assert_eq!(refusal(op, |c| c.tensors[1].shape[axis] = 0), error, "{op}");
        }
        // Tokens may be none.
        let mut none = case(op);
        none.tensors[1].shape[1] = 0;
        assert_eq!(none.contract().unwrap().total_tokens(1), 0);
    }
}

#[test]
fn lists_of_the_wrong_length() {
    for op in ExchangeOp::ALL {
        let count = |option, value| ExchangeError::ListCount { option, value, limit: 2 };
        let length = |option, index, value| ExchangeError::ListLength { option, index, value, limit: 2 };
        let tokens = |lists: &[&[u64]]| {
            let lists = lists.iter().map(|list| list.to_vec()).collect();
            refusal(op, |c| c.rank_tokens = Some(lists))
        };
        assert_eq!(tokens(&[]), count("rank_tokens", 0));
        assert_eq!(tokens(&[&[6, 6], &[6, 6], &[6, 6]]), count("rank_tokens", 3));
        assert_eq!(tokens(&[&[6]]), length("rank_tokens", 0, 1));
        assert_eq!(tokens(&[&[6, 6], &[6, 6, 6]]), length("rank_tokens", 1, 3));
        assert_eq!(refusal(op, |c| c.num_heads = Some(vec![8])), count("num_heads", 1));
        assert_eq!(refusal(op, |c| c.num_heads = Some(vec![8, 4, 4])), count("num_heads", 3));
        if op != AllGatherTokens {
            let splits = |lists: Vec<Vec<Range<u64>>>| refusal(op, |c| c.head_splits = Some(lists));
            assert_eq!(splits(vec![]), count("head_splits", 0));
            assert_eq!(splits(vec![vec![0..4, 4..8]]), count("head_splits", 1));
            assert_eq!(splits(vec![vec![0..4, 4..8], vec![]]), length("head_splits", 1, 0));
            let three = vec![vec![0..4, 4..8, 8..8], vec![0..2, 2..4]];
            assert_eq!(splits(three), length("head_splits", 0, 3));
        }
    }
}

#[test]
fn tokens_that_are_not_those_of_this_rank() {
    for op in [SendRecvHeads, AllGatherTokens] {
        let error = ExchangeError::Tokens { tensor: 0, rank: 1, value: 6, expected: 7 };
        assert_eq!(refusal(op, |c| c.rank_tokens = Some(vec![vec![6, 7]])), error);
        let error = ExchangeError::Tokens { tensor: 1, rank: 1, value: 6, expected: 0 };
        assert_eq!(refusal(op, |c| c.rank_tokens = Some(vec![vec![9, 6], vec![6, 0]])), error);
        // The tokens of others are theirs to say.
        let mut other = case(op);
        other.rank_tokens = Some(vec![vec![1, 6]]);
        assert_eq!(other.contract().unwrap().total_tokens(0), 7);
    }
}

#[test]
fn tokens_that_do_not_sum_to_what_is_gathered() {
    let error = ExchangeError::TotalTokens { tensor: 0, value: 6, expected: 7 };
    assert_eq!(refusal(GatherHeads, |c| c.rank_tokens = Some(vec![vec![3, 4]])), error);
    let error = ExchangeError::TotalTokens { tensor: 1, value: 6, expected: 5 };
    assert_eq!(refusal(GatherHeads, |c| c.rank_tokens = Some(vec![vec![6, 0], vec![5, 0]])), error);
    let error = ExchangeError::UnevenTokens { tensor: 1, value: 7, world: 2 };
    assert_eq!(refusal(GatherHeads, |c| c.tensors[1] = input([1, 7, 2, 4])), error);
}

#[test]
fn allgather_of_heads_has_the_same_tokens_everywhere() {
    let error = ExchangeError::Tokens { tensor: 0, rank: 0, value: 6, expected: 5 };
    assert_eq!(refusal(AllGatherHeads, |c| c.rank_tokens = Some(vec![vec![5, 6]])), error);
    let mut same = case(AllGatherHeads);
    same.rank_tokens = Some(vec![vec![6, 6]]);
    assert_eq!(same.contract(), case(AllGatherHeads).contract());
}

#[test]
fn heads_that_are_not_those_of_this_rank() {
    for op in [GatherHeads, AllGatherHeads] {
        // 7 heads over 2 ranks: 4 and 3.
        let error = ExchangeError::Heads { tensor: 0, rank: 1, value: 4, expected: 3 };
        assert_eq!(refusal(op, |c| c.num_heads = Some(vec![7, 7])), error);
        let error = ExchangeError::Heads { tensor: 1, rank: 1, value: 2, expected: 1 };
        let splits = vec![vec![0..4, 4..8], vec![0..3, 3..4]];
        assert_eq!(refusal(op, |c| c.head_splits = Some(splits)), error);
    }
    for op in [SendRecvHeads, AllGatherTokens] {
        let error = ExchangeError::NumHeads { tensor: 1, value: 4, expected: 5 };
        assert_eq!(refusal(op, |c| c.num_heads = Some(vec![8, 5])), error);
    }
}

#[test]
fn splits_that_are_no_part_of_the_heads_or_leave_some_out() {
    let split = |first: Vec<Range<u64>>, second: Vec<Range<u64>>| {
        refusal(SendRecvHeads, |c| c.head_splits = Some(vec![first, second]))
    };
    let part = |tensor, rank, start, end, limit| ExchangeError::Split { tensor, rank, start, end, limit };
    assert_eq!(split(vec![0..4, 4..9], vec![0..2, 2..4]), part(0, 1, 4, 9, 8));
    #[expect(clippy::reversed_empty_ranges, reason = "that is what must be refused")]
    let reversed = split(vec![0..8, 0..0], vec![0..4, 3..2]);
    assert_eq!(reversed, part(1, 1, 3, 2, 4));
    assert_eq!(split(vec![0..8, MAX..MAX], vec![0..4, 4..4]), part(0, 1, MAX, MAX, 8));
    let gap = |tensor, head, limit| ExchangeError::SplitGap { tensor, head, limit };
    assert_eq!(split(vec![0..4, 5..8], vec![0..4, 4..4]), gap(0, 4, 8));
    assert_eq!(split(vec![0..4, 4..8], vec![1..4, 1..3]), gap(1, 0, 4));
    assert_eq!(split(vec![0..4, 4..8], vec![2..3, 0..2]), gap(1, 3, 4));
    // Totals given apart from splits must be covered too.
    let error = refusal(GatherHeads, |c| {
        c.num_heads = Some(vec![9, 4]);
        c.head_splits = Some(vec![vec![0..4, 4..8], vec![0..2, 2..4]]);
    });
    assert_eq!(error, gap(0, 8, 9));
}

#[test]
fn zero_heads_on_a_rank_are_legal_when_splits_say_so() {
    let splits = [vec![0..8, 8..8]];
    for (op, own) in [(SendRecvHeads, 8), (GatherHeads, 0), (AllGatherHeads, 0)] {
        let tensors = vec![input([1, 6, own, 16])];
        let case = Case { tensors, head_splits: Some(splits.to_vec()), ..case(op) };
        let contract = case.contract().unwrap();
        assert_eq!((contract.num_heads(0), contract.head_range(0, 1)), (8, 8..8), "{op}");
    }
    assert_eq!(heads(GatherHeads, 2, 0, &[0]), Err(ExchangeError::EmptyAxis { tensor: 0, axis: "heads" }));
}

#[test]
fn options_that_do_not_apply() {
    let unused = |option| ExchangeError::UnusedOption { option, op: AllGatherTokens };
    assert_eq!(refusal(AllGatherTokens, |c| c.query_heads = Some(8)), unused("query_heads"));
    let splits = vec![vec![0..4, 4..8], vec![0..2, 2..4]];
    assert_eq!(refusal(AllGatherTokens, |c| c.head_splits = Some(splits.clone())), unused("head_splits"));
    for op in [SendRecvHeads, GatherHeads, AllGatherHeads] {
        let error = refusal(op, |c| {
            c.query_heads = Some(8);
            c.head_splits = Some(splits.clone());
        });
        assert_eq!(error, ExchangeError::Exclusive { left: "query_heads", right: "head_splits" });
    }
}

#[test]
fn ranks_that_bring_equal_heads_need_no_groups() {
    // 6 and 10 heads in all: what each rank has is known, so nothing has to be grouped.
    for op in [GatherHeads, AllGatherHeads] {
        let contract = heads(op, 2, 1, &[3, 5]).unwrap();
        assert_eq!((contract.head_range(0, 1), contract.head_range(1, 1)), (3..6, 5..10), "{op}");
        // Totals alone say less.
        let case = Case {
            tensors: [3, 5].map(|heads| input([1, 4, heads, 8])).to_vec(),
            num_heads: Some(vec![6, 10]),
            ..case(op)
        };
        let error = ExchangeError::NotGrouped { tensor: 0, heads: 6, query_heads: 10 };
        assert_eq!(case.contract(), Err(error), "{op}");
    }
}

#[test]
fn query_heads_that_do_not_group_a_tensor() {
    let error = ExchangeError::QueryHeads { tensor: 0, value: 7, limit: 8 };
    assert_eq!(refusal(SendRecvHeads, |c| c.query_heads = Some(7)), error);
    let error = ExchangeError::QueryHeads { tensor: 0, value: 0, limit: 8 };
    assert_eq!(refusal(SendRecvHeads, |c| c.query_heads = Some(0)), error);
    // 8 query heads and 3 of something else.
    let error = ExchangeError::NotGrouped { tensor: 1, heads: 3, query_heads: 8 };
    assert_eq!(heads(SendRecvHeads, 2, 0, &[8, 3]), Err(error));
    // Unless splits say who gets what.
    let case = Case {
        tensors: [8, 3].map(|heads| input([1, 4, heads, 8])).to_vec(),
        head_splits: Some(vec![vec![0..4, 4..8], vec![0..2, 1..3]]),
        ..case(SendRecvHeads)
    };
    assert_eq!(case.contract().unwrap().head_range(1, 1), 1..3);
}

#[test]
fn groups_that_straddle_two_ranks() {
    // 4 KV heads: two groups of 7 query heads for each rank. 7 of them: three groups of 4 and a half.
    assert!(heads(SendRecvHeads, 2, 0, &[28, 4, 4]).is_ok());
    for rank in 0..2 {
        let error = ExchangeError::GroupCut { tensor: 1, rank: 0, start: 0, end: 14, group: 4 };
        assert_eq!(heads(SendRecvHeads, 2, rank, &[28, 7, 7]), Err(error), "the same on every rank");
    }
    let error = heads(SendRecvHeads, 2, 0, &[28, 7]).unwrap_err().to_string();
    assert!(
        error.contains("tensor 1") && error.contains("0..14") && error.contains("give head_splits"),
        "{error}"
    );
}

#[test]
fn fewer_heads_than_ranks() {
    // 4 KV heads alone on 8 ranks: two ranks share each.
    let contract = heads(SendRecvHeads, 8, 5, &[4]).unwrap();
    assert_eq!(contract.head_range(0, 5), 2..3);
    let error = ExchangeError::FewHeads { tensor: 0, heads: 3, world: 8 };
    assert_eq!(heads(SendRecvHeads, 8, 5, &[3]), Err(error));
    let error = heads(SendRecvHeads, 8, 5, &[3]).unwrap_err().to_string();
    assert!(error.contains("query_heads or head_splits"), "{error}");
    // 30 heads over 4 ranks lose none.
    let contract = heads(SendRecvHeads, 4, 0, &[30]).unwrap();
    let counts: Vec<u64> = (0..4).map(|rank| contract.result_shape(rank, 0)[2]).collect();
    assert_eq!(counts, [8, 8, 7, 7]);
}

#[test]
fn sizes_beyond_63_bits() {
    let overflow = |tensor, what| ExchangeError::Overflow { tensor, what };
    let shaped = |shape| TensorInput { shape, strides: [0; 3], dtype: Dtype::Float64 };
    let shapes =
        [[1 << 60, 6, 4, 1], [1, 1 << 60, 4, 1], [1, 6, 1 << 58, 1], [1, 6, 4, 1 << 60], [1, 0, 1 << 58, 16]];
    for op in ExchangeOp::ALL {
        for shape in shapes {
            let error = refusal(op, |c| c.tensors = vec![shaped(shape)]);
            assert_eq!(error, overflow(0, "tensor"), "{op} {shape:?}");
        }
    }
    // Tokens of all ranks together.
    let error = refusal(SendRecvHeads, |c| c.rank_tokens = Some(vec![vec![MAX, 6]]));
    assert_eq!(error, overflow(0, "number of tokens"));
    let error = refusal(SendRecvHeads, |c| c.rank_tokens = Some(vec![vec![i64::MAX as u64, 6]]));
    assert_eq!(error, overflow(0, "number of tokens"));
    let error = refusal(SendRecvHeads, |c| c.rank_tokens = Some(vec![vec![1 << 60, 6]]));
    assert_eq!(error, overflow(0, "tensor"));
    let error = refusal(GatherHeads, |c| c.rank_tokens = Some(vec![vec![6, 0], vec![MAX, MAX]]));
    assert_eq!(error, overflow(1, "number of tokens"));
    // Heads of all ranks together.
    let error = refusal(GatherHeads, |c| c.tensors = vec![shaped([1, 6, MAX / 2, 1])]);
    assert_eq!(error, overflow(0, "number of heads"));
    // Each fits, both together do not.
    let half = shaped([1, 1 << 30, 1 << 28, 1]);
    let error = refusal(AllGatherTokens, |c| c.tensors = vec![half, half]);
    assert_eq!(error, overflow(1, "result"));
    // The sum would fit, but for the alignment between them.
    let bytes = |dim| TensorInput { shape: [1, 1, 1, dim], strides: [0; 3], dtype: Dtype::Int8 };
    let case = |first| Case {
        world: 1,
        rank: 0,
        tensors: vec![bytes(first), bytes((1 << 62) - 100)],
        ..case(SendRecvHeads)
    };
    assert_eq!(case((1 << 62) + 1).contract(), Err(overflow(1, "result")));
    assert_eq!(case(1 << 62).contract().unwrap().largest_result(), (1 << 63) - 100);
}

#[test]
fn strides_beyond_63_bits() {
    let overflow = |tensor| ExchangeError::Overflow { tensor, what: "span of the input" };
    for (axis, stride) in [(0, i64::MAX), (1, i64::MAX / 4), (2, i64::MIN), (2, -(1 << 62))] {
        let error = refusal(SendRecvHeads, |c| c.tensors[1].strides[axis] = stride);
        assert_eq!(error, overflow(1), "axis {axis}");
    }
    // Where nothing steps, strides are nothing.
    let mut one = case(SendRecvHeads);
    one.tensors = vec![TensorInput { strides: [i64::MIN, 64, 32], ..input([1, 6, 2, 16]) }];
    one.contract().unwrap();
    one.tensors = vec![TensorInput { strides: [i64::MIN; 3], ..input([3, 0, 2, 16]) }];
    one.contract().unwrap();
}

#[test]
fn contiguous_inputs_are_checked_too() {
    let huge = TensorInput::contiguous([1 << 20, 1 << 20, 1 << 20, 8], HeadLayout::Bhnd, Dtype::Int8);
    assert_eq!(huge, Err(ExchangeError::Overflow { tensor: 0, what: "tensor" }));
    let small = TensorInput::contiguous([2, 3, 4, 5], HeadLayout::Bhnd, Dtype::Int32).unwrap();
    assert_eq!(small.strides, [240, 20, 60]);
    let small = TensorInput::contiguous([2, 3, 4, 5], HeadLayout::Bnhd, Dtype::Int32).unwrap();
    assert_eq!(small.strides, [240, 80, 20]);
}

#[test]
fn overlapping_inputs_are_legal() {
    let mut case = case(SendRecvHeads);
    for input in &mut case.tensors {
        input.strides = [0, 2, -2];
    }
    let contract = case.contract().unwrap();
    let pieces = contract.pieces(1, 0, &[[0, 2, -2]; 2]);
    assert_eq!(pieces.iter().map(kvferry_layout::Piece::bytes).sum::<u64>(), contract.sent_bytes(1, 0));
}

#[test]
fn names_and_codes() {
    assert_eq!(ExchangeOp::ALL.map(|op| op.code()), [1, 2, 3, 4]);
    assert_eq!(
        ExchangeOp::ALL.map(|op| op.to_string()),
        ["send_recv_heads", "gather_heads", "allgather_tokens", "allgather_heads"]
    );
    for op in ExchangeOp::ALL {
        assert_eq!(ExchangeOp::from_code(op.code()), Some(op));
    }
    assert_eq!((ExchangeOp::from_code(0), ExchangeOp::from_code(5)), (None, None));
    for layout in [HeadLayout::Bnhd, HeadLayout::Bhnd] {
        assert_eq!(layout.to_string().parse(), Ok(layout));
    }
    let error = "bnhd".parse::<HeadLayout>().unwrap_err();
    assert_eq!(error, ExchangeError::UnknownLayout { name: "bnhd".to_owned() });
}

/// Messages say what, where and how much.
#[test]
fn messages_name_the_values() {
    let error = refusal(SendRecvHeads, |c| c.rank_tokens = Some(vec![vec![6, 7]]));
    assert_eq!(error.to_string(), "tensor 0 has 6 tokens, but rank_tokens of rank 1 is 7");
    let error = refusal(SendRecvHeads, |c| c.world = 65);
    assert_eq!(error.to_string(), "world size must be between 1 and 64, got 65");
    let error = refusal(SendRecvHeads, |c| c.num_heads = Some(vec![8]));
    assert_eq!(error.to_string(), "num_heads has 1 entries for 2 tensors");
}
