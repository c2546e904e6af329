//! C++ and Rust agree on every struct they share.

use std::mem::offset_of;

use kvferry_kernels::VectorizedCopyParams;

use crate::ffi;

#[test]
fn vectorized_copy_params() {
    const NAME: &std::ffi::CStr = c"VectorizedCopyParams";
    assert_eq!(ffi::layout(NAME, c"sizeof"), Some(size_of::<VectorizedCopyParams>()));
    assert_eq!(ffi::layout(NAME, c"alignof"), Some(align_of::<VectorizedCopyParams>()));
    let fields = [
        (c"src_table", offset_of!(VectorizedCopyParams, src_table)),
        (c"dst_table", offset_of!(VectorizedCopyParams, dst_table)),
        (c"pairs", offset_of!(VectorizedCopyParams, pairs)),
        (c"bytes", offset_of!(VectorizedCopyParams, bytes)),
        (c"chunk_bytes", offset_of!(VectorizedCopyParams, chunk_bytes)),
        (c"chunks_per_pair", offset_of!(VectorizedCopyParams, chunks_per_pair)),
        (c"team_shift", offset_of!(VectorizedCopyParams, team_shift)),
        (c"reserved", offset_of!(VectorizedCopyParams, reserved)),
    ];
    for (field, offset) in fields {
        assert_eq!(ffi::layout(NAME, field), Some(offset), "{field:?}");
    }
    assert_eq!(ffi::layout(NAME, c"no_such_field"), None);
}

#[test]
fn harness_structs() {
    let sizes = [c"Launch", c"Region", c"Report"].map(|name| ffi::layout(name, c"sizeof").unwrap());
    assert_eq!(sizes, ffi::raw_sizes());
}
