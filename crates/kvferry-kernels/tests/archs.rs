//! The grammar of `KVFERRY_CUDA_ARCHS`, tested on the build script's own source.
#![allow(clippy::unwrap_used, reason = "helpers of tests are not seen as tests")]

#[path = "../build/archs.rs"]
mod archs;

use archs::{DEFAULT, requested};

fn codes(value: &str) -> Vec<String> {
    requested(Some(value)).unwrap().into_iter().map(|arch| arch.code).collect()
}

#[test]
fn the_default_is_machine_code_and_ptx() {
    let codes: Vec<_> = requested(None).unwrap().into_iter().map(|arch| arch.code).collect();
    assert_eq!(codes, DEFAULT);
}

#[test]
fn every_spelling() {
    assert_eq!(codes("80,90"), ["sm_80", "sm_90"]);
    assert_eq!(codes("sm_90;ptx_90"), ["sm_90", "compute_90"]);
    assert_eq!(codes(" 90a compute_120, 100f "), ["sm_90a", "compute_120", "sm_100f"]);
    assert_eq!(codes("90,sm_90,90"), ["sm_90"]);
}

#[test]
fn gencode_names_both_architectures() {
    let archs = requested(Some("90,ptx_80")).unwrap();
    assert_eq!(archs[0].gencode(), "-gencode=arch=compute_90,code=sm_90");
    assert_eq!(archs[1].gencode(), "-gencode=arch=compute_80,code=compute_80");
}

#[test]
fn mistakes_are_errors() {
    for value in ["", " , ", "native", "sm_", "75", "sm_99", "80a", "90f", "90+ptx", "gfx_90", "90af"] {
        assert!(requested(Some(value)).is_err(), "{value:?}");
    }
}
