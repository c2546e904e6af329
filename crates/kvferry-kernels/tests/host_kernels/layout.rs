//! C++ and Rust agree on every struct they share.

use std::ffi::CStr;
use std::mem::offset_of;

use kvferry_kernels::{
    Divisor, EXCHANGE_PARAM_BYTES_LARGE, EXCHANGE_PARAM_BYTES_SMALL, ExchangeArriveParams, ExchangeHeader,
    ExchangeItemParams, ExchangeLoopParams, ExchangePeerParams, ExchangeProbeParams, ExchangeProbePeer,
    HostPage, INLINE_WORDS_LARGE, INLINE_WORDS_SMALL, LocalState, MAX_EXCHANGE_PEERS_SMALL, MAX_RANKS,
    PARAM_BYTES_LARGE, PARAM_BYTES_SMALL, ProbeReport, Record, StridedHeader, StridedLoopParams,
    StridedReport, StridedSideParams, VectorizedCopyParams,
};

use crate::{ffi, world};

fn agree(name: &CStr, size: usize, align: usize, fields: &[(&CStr, usize)]) {
    assert_eq!(ffi::layout(name, c"sizeof"), Some(size), "{name:?}");
    assert_eq!(ffi::layout(name, c"alignof"), Some(align), "{name:?}");
    for (field, offset) in fields {
        assert_eq!(ffi::layout(name, field), Some(*offset), "{name:?} {field:?}");
    }
    assert_eq!(ffi::layout(name, c"no_such_field"), None);
}

/// `agree!(c"Name" Type: (c"cpp_field", rust_field) ...)`.
macro_rules! agree {
    ($name:literal $type:ty: $($cpp:literal $rust:ident)*) => {
        agree($name, size_of::<$type>(), align_of::<$type>(), &[$(($cpp, offset_of!($type, $rust))),*])
    };
}

#[test]
fn vectorized_copy_params() {
    agree!(c"VectorizedCopyParams" VectorizedCopyParams:
        c"src_table" src_table c"dst_table" dst_table c"pairs" pairs c"bytes" bytes c"chunk_bytes" chunk_bytes
        c"chunks_per_pair" chunks_per_pair c"team_shift" team_shift c"reserved" reserved);
}

#[test]
fn strided_copy_params() {
    // Its fields are private in Rust; the C++ asserts the same order.
    agree!(c"Divisor" Divisor:);
    agree!(c"StridedLoopParams" StridedLoopParams:
        c"src_stride" src_stride c"dst_stride" dst_stride c"src_region" src_region c"dst_region" dst_region
        c"steps" steps);
    agree!(c"StridedSideParams" StridedSideParams:
        c"bases" bases c"start" start c"block_stride" block_stride c"part_stride" part_stride c"ids" ids
        c"id_bytes" id_bytes c"blocks" blocks c"start_region" start_region c"block_region" block_region
        c"bases_at" bases_at c"reserved" reserved c"parts" parts);
    agree!(c"StridedHeader" StridedHeader:
        c"src" src c"dst" dst c"pair_table" pair_table c"report" report c"run_bytes" run_bytes
        c"chunk_bytes" chunk_bytes c"items" items c"loops" loops c"ids_kind" ids_kind c"ids_at" ids_at
        c"lane_shift" lane_shift c"reserved" reserved c"per_pair" per_pair c"inner" inner c"loop" loop_);
    agree!(c"StridedReport" StridedReport:
        c"state" state c"side" side c"index" index c"value" value c"limit" limit);
    let tail = size_of::<StridedHeader>();
    agree(c"StridedSmall", PARAM_BYTES_SMALL, 8, &[(c"header", 0), (c"tail", tail)]);
    agree(c"StridedLarge", PARAM_BYTES_LARGE, 8, &[(c"header", 0), (c"tail", tail)]);
    assert_eq!(tail + 8 * INLINE_WORDS_SMALL, PARAM_BYTES_SMALL);
    assert_eq!(tail + 8 * INLINE_WORDS_LARGE, PARAM_BYTES_LARGE);
}

#[test]
fn exchange_words() {
    agree!(c"ExchangeState" LocalState:
        c"epoch" epoch c"ticket" ticket c"poison" poison c"reserved" reserved c"expected" expected c"sent" sent
        c"staging" staging);
    agree!(c"ExchangeHostPage" HostPage:
        c"abort" abort c"timeout_ns" timeout_ns c"reserved" reserved c"record" record);
    agree!(c"ExchangeRecord" Record:
        c"state" state c"kind" kind c"peer" peer c"epoch" epoch c"op" op c"seen" seen c"expected" expected
        c"value" value);
}

#[test]
fn exchange_params() {
    agree!(c"ExchangeHeader" ExchangeHeader:
        c"state" state c"host_page" host_page c"place" place c"result_bytes" result_bytes c"hash" hash
        c"verdict" verdict c"op" op c"rank" rank c"world" world c"flags" flags c"lanes" lanes
        c"reserved" reserved);
    agree!(c"ExchangePeer" ExchangePeerParams:
        c"control" control c"pool" pool c"pool_bytes" pool_bytes c"reach" reach c"arrivals" arrivals
        c"lanes" lanes c"first_lane" first_lane c"first_item" first_item c"items" items c"chunks" chunks);
    agree!(c"ExchangeLoop" ExchangeLoopParams:
        c"src_stride" src_stride c"dst_stride" dst_stride c"count" count);
    agree!(c"ExchangeItem" ExchangeItemParams:
        c"src" src c"dst_offset" dst_offset c"words" words c"first_chunk" first_chunk c"word_shift" word_shift
        c"loops" loops c"run" run c"loop" loop_);
    let peers = size_of::<ExchangeHeader>();
    let items = |count: usize| peers + count * size_of::<ExchangePeerParams>();
    let small = [(c"header", 0), (c"peer", peers), (c"item", items(MAX_EXCHANGE_PEERS_SMALL))];
    agree(c"ExchangeSmall", EXCHANGE_PARAM_BYTES_SMALL, 8, &small);
    let large = [(c"header", 0), (c"peer", peers), (c"item", items(MAX_RANKS))];
    agree(c"ExchangeLarge", EXCHANGE_PARAM_BYTES_LARGE, 8, &large);
    agree!(c"ExchangeArriveParams" ExchangeArriveParams:
        c"state" state c"world" world c"reserved" reserved c"targets" targets);
    agree!(c"ExchangeProbeParams" ExchangeProbeParams:
        c"report" report c"nonce" nonce c"timeout_ns" timeout_ns c"rank" rank c"world" world c"peer" peers);
    agree!(c"ExchangeProbePeer" ExchangeProbePeer: c"control" control c"pool" pool);
    agree!(c"ExchangeProbeReport" ProbeReport: c"state" state c"value" value);
}

#[test]
fn harness_structs() {
    let sizes = [c"Launch", c"Region", c"Report"].map(|name| ffi::layout(name, c"sizeof").unwrap());
    assert_eq!(sizes, ffi::raw_sizes());
    let sizes = [c"WorldOp", c"WorldRank", c"WorldRun"].map(|name| ffi::layout(name, c"sizeof").unwrap());
    assert_eq!(sizes, world::raw_sizes());
}
