//! C++ and Rust agree on every struct they share.

use std::ffi::CStr;
use std::mem::offset_of;

use kvferry_kernels::{
    Divisor, INLINE_WORDS_LARGE, INLINE_WORDS_SMALL, PARAM_BYTES_LARGE, PARAM_BYTES_SMALL, StridedHeader,
    StridedLoopParams, StridedReport, StridedSideParams, VectorizedCopyParams,
};

use crate::ffi;

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
fn harness_structs() {
    let sizes = [c"Launch", c"Region", c"Report"].map(|name| ffi::layout(name, c"sizeof").unwrap());
    assert_eq!(sizes, ffi::raw_sizes());
}
