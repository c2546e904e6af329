//! What wrapping foreign arrays refuses, with exact fields.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a failing helper fails its test")]

use kvferry_layout::{Axis, Dtype, ForeignArray, Layout, LayoutConfig, LayoutError, LayoutKind};

const AXES: [Axis; 4] = [Axis::Block, Axis::Page, Axis::Head, Axis::Dim];

fn array(name: &str, shape: &[u64], strides: &[i64]) -> ForeignArray {
    ForeignArray { name: name.into(), shape: shape.to_vec(), strides: strides.to_vec() }
}

fn kv(name: &str) -> ForeignArray {
    array(name, &[4, 3, 2, 5], &[60, 20, 10, 2])
}

fn wrap(arrays: &[ForeignArray], axes: &[Axis], split: bool) -> Result<Layout, LayoutError> {
    Layout::from_arrays(arrays, axes, split, Dtype::Float16, None)
}

#[test]
fn names_and_dimensions() {
    let error = LayoutError::RegionCount { kind: "Strided", expected: 1, got: 0 };
    assert_eq!(wrap(&[], &AXES, false), Err(error));
    let three = [kv("a"), kv("b"), kv("c")];
    let error = LayoutError::NotDivisible { what: "arrays of (K, V) pairs", value: 3, by: 2 };
    assert_eq!(wrap(&three, &AXES, true), Err(error));
    for axis in [Axis::Block, Axis::Dim] {
        let axes: Vec<Axis> = AXES.into_iter().filter(|&other| other != axis).collect();
        let error = LayoutError::AxisMissing { axis, why: "every array has blocks and rows" };
        assert_eq!(wrap(&[kv("a")], &axes, false), Err(error));
    }
    let with = |axis| [AXES.to_vec(), vec![axis]].concat();
    let error = LayoutError::Exclusive { left: "a list of arrays (one per layer)", right: "the axis layer" };
    assert_eq!(wrap(&three, &with(Axis::Layer), false), Err(error));
    let error = LayoutError::Exclusive { left: "(K, V) pairs", right: "the axis outer" };
    assert_eq!(wrap(&three[..2], &with(Axis::Outer), true), Err(error));
    // Found here: this was a panic.
    let error = LayoutError::AxisTwice { axis: Axis::Block };
    assert_eq!(wrap(&[kv("a")], &with(Axis::Block), false), Err(error));

    let rank = |what: &str, got| Err(LayoutError::Rank { what: what.into(), got, expected: 4 });
    assert_eq!(wrap(&[array("a", &[4, 3, 2], &[6, 2, 1])], &AXES, false), rank("a", 3));
    assert_eq!(wrap(&[array("a", &[4, 3, 2, 1], &[6, 2, 1])], &AXES, false), rank("a", 3));
    assert_eq!(wrap(&[kv("a"), array("b", &[4, 3, 2, 5, 1], &[0; 5])], &AXES, false), rank("b", 5));
    assert_eq!(wrap(&[kv("a"), array("b", &[4, 3, 2, 5], &[0; 3])], &AXES, false), rank("b", 3));
}

#[test]
fn arrays_that_differ() {
    let error = LayoutError::ExtentMismatch {
        what: "k1 differs from k0".into(),
        axis: Axis::Page,
        got: 7,
        expected: 3,
    };
    assert_eq!(wrap(&[kv("k0"), array("k1", &[4, 7, 2, 5], &[60, 20, 10, 2])], &AXES, false), Err(error));
    let error = LayoutError::StrideMismatch {
        what: "k1 differs from k0".into(),
        axis: Axis::Block,
        got: 64,
        expected: 60,
    };
    assert_eq!(wrap(&[kv("k0"), array("k1", &[4, 3, 2, 5], &[64, 20, 10, 2])], &AXES, false), Err(error));
    // Strides of an axis of extent 1 may differ, and be anything.
    let one = |name, stride| array(name, &[4, 1, 2, 5], &[20, stride, 10, 2]);
    assert!(wrap(&[one("a", 7), one("b", -3)], &AXES, false).is_ok());
    assert!(wrap(&[one("a", -3), one("b", i64::MAX)], &AXES, false).is_ok(), "found here: was refused");
    assert!(wrap(&[one("a", i64::MIN)], &AXES, false).is_ok());
}

#[test]
fn strides_that_cannot_be() {
    let error = LayoutError::NegativeStride { what: "a".into(), axis: Axis::Page, stride: -20 };
    assert_eq!(wrap(&[array("a", &[4, 3, 2, 5], &[60, -20, 10, 2])], &AXES, false), Err(error));
    let overlap = |axis, stride, span| Err(LayoutError::AxesOverlap { axis, stride, span });
    let broadcast = array("a", &[4, 3, 2, 5], &[60, 20, 0, 2]);
    assert_eq!(wrap(&[broadcast], &AXES, false), overlap(Axis::Head, 0, 2));
    let sliding = array("a", &[4, 3, 2, 5], &[60, 18, 10, 2]);
    assert_eq!(wrap(&[sliding], &AXES, false), overlap(Axis::Page, 18, 20));
    let error = LayoutError::Overflow { what: "span of a region" };
    assert_eq!(wrap(&[array("a", &[4, 3, 2, 5], &[i64::MAX, 20, 10, 2])], &AXES, false), Err(error));
    let error = LayoutError::Size { field: "page_size", value: 0, min: 1, max: i64::MAX as u64 };
    assert_eq!(wrap(&[array("a", &[4, 0, 2, 5], &[60, 20, 10, 2])], &AXES, false), Err(error));
}

#[test]
fn a_configuration_that_disagrees() {
    let config = LayoutConfig::builder().num_blocks(4).num_layers(2).outer_dim(1).page_size(3).num_heads(2);
    let config = config.head_dim(5).dtype(Dtype::Float16).alignment(512);
    let expect = |config: LayoutConfig| {
        Layout::from_arrays(&[kv("k0"), kv("k1")], &AXES, false, Dtype::Float16, Some(&config))
    };
    let layout = expect(config.build().unwrap()).unwrap();
    assert_eq!((layout.kind(), layout.num_regions()), (LayoutKind::Strided, 2));
    assert_eq!(layout.config().alignment(), 1, "foreign memory promises none");
    let mismatch = |axis, got, expected| {
        Err(LayoutError::ExtentMismatch { what: "k0 against the configuration".into(), axis, got, expected })
    };
    assert_eq!(expect(config.num_blocks(5).build().unwrap()), mismatch(Axis::Block, 4, 5));
    assert_eq!(expect(config.num_layers(3).build().unwrap()), mismatch(Axis::Layer, 2, 3));
    assert_eq!(expect(config.outer_dim(2).build().unwrap()), mismatch(Axis::Outer, 1, 2));
    assert_eq!(expect(config.num_heads(1).build().unwrap()), mismatch(Axis::Head, 2, 1));
    assert_eq!(expect(config.head_dim(4).build().unwrap()), mismatch(Axis::Dim, 5, 4));
    let (got, expected) = (Dtype::Float16, Dtype::BFloat16);
    let error = LayoutError::DtypeMismatch { what: "k0".into(), got, expected };
    assert_eq!(expect(config.dtype(expected).build().unwrap()), Err(error));
}
