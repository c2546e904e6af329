//! JSON descriptors: they round-trip, and hostile ones are refused without harm.
#![allow(clippy::unwrap_used, reason = "a test may fail loudly")]
#![cfg(feature = "serde")]

use kvferry_layout::{
    Axis, BlockDim, Dtype, KvOrder, Layout, LayoutConfig, LayoutError, LayoutKind, PerAxis,
};
use proptest::prelude::*;

fn kinds() -> Vec<LayoutKind> {
    let mut out = Vec::new();
    for order in KvOrder::ALL {
        out.push(LayoutKind::FullyContiguous { order });
        out.push(LayoutKind::BlockPool { order });
        if order != KvOrder::Universal {
            out.push(LayoutKind::LayerSeparate { block_dim: BlockDim::BlockFirst, order });
            out.push(LayoutKind::LayerSeparate { block_dim: BlockDim::OuterFirst, order });
            out.push(LayoutKind::SplitKv { order });
        }
    }
    out
}

fn config() -> impl Strategy<Value = LayoutConfig> {
    let sizes = (1u64..9, 1u64..9, 1u64..3, 1u64..9, 1u64..9, 1u64..99);
    (sizes, 0usize..Dtype::ALL.len(), 0u32..10, 0u64..9, 0u64..9).prop_map(
        |(s, dtype, align, first, more)| {
            LayoutConfig::builder()
                .num_blocks(s.0)
                .num_layers(s.1)
                .outer_dim(s.2)
                .page_size(s.3)
                .num_heads(s.4)
                .head_dim(s.5)
                .dtype(Dtype::ALL[dtype])
                .alignment(1 << align)
                .first_head(first)
                .total_heads(first + s.4 + more)
                .build()
                .unwrap()
        },
    )
}

fn strided() -> Layout {
    let config = LayoutConfig::builder()
        .num_blocks(5)
        .num_layers(3)
        .page_size(4)
        .num_heads(2)
        .head_dim(8)
        .dtype(Dtype::BFloat16)
        .build()
        .unwrap();
    let order = [Axis::Layer, Axis::Outer, Axis::Block, Axis::Page, Axis::Head, Axis::Dim];
    let mut strides = PerAxis::splat(0);
    for (axis, stride) in
        [(Axis::Outer, 1000), (Axis::Block, 160), (Axis::Page, 36), (Axis::Head, 18), (Axis::Dim, 2)]
    {
        strides[axis] = stride;
    }
    Layout::strided(config, order, strides, &[Axis::Layer]).unwrap()
}

proptest! {
    #[test]
    fn layouts_round_trip_and_digests_tell_them_apart(a in config(), b in config(), k in 0usize..12, split: bool) {
        let kind = kinds()[k];
        let mut layout = Layout::of_kind(a, kind).unwrap();
        if split && a.page_size().is_multiple_of(2) {
            layout = layout.with_page_size(a.page_size() / 2).unwrap();
        }
        let text = layout.to_json().unwrap();
        let back = Layout::from_json(&text).unwrap();
        prop_assert_eq!(&back, &layout);
        prop_assert_eq!(back.digest().unwrap(), layout.digest().unwrap());
        let other = Layout::of_kind(b, kind).unwrap();
        prop_assert_eq!(other.digest().unwrap() == layout.digest().unwrap(), other == layout);
    }

    #[test]
    fn damaged_descriptors_never_panic(at in any::<prop::sample::Index>(), with in any::<u8>(), cut in any::<prop::sample::Index>(), which: bool) {
        let text = if which { strided() } else { strided().with_page_size(2).unwrap() }.to_json().unwrap();
        let mut bytes = text.clone().into_bytes();
        let index = at.index(bytes.len());
        bytes[index] = with;
        bytes.truncate(1 + cut.index(2 * bytes.len()).min(bytes.len() - 1));
        let _ = Layout::from_json(&String::from_utf8_lossy(&bytes));
    }

    #[test]
    fn hostile_numbers_are_refused_or_consistent(field in 0usize..10, value in prop_oneof![any::<u64>(), Just(0), Just(u64::MAX), Just(1 << 63), 1u64..1 << 20]) {
        let text = Layout::of_kind(*strided().config(), kinds()[0]).unwrap().to_json().unwrap();
        let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
        let config = json["config"].as_object_mut().unwrap();
        let name = config.keys().filter(|key| *key != "dtype").nth(field % 9).unwrap().clone();
        let before = config[&name].as_u64();
        config[&name] = value.into();
        if let Ok(layout) = Layout::from_json(&json.to_string()) {
            // Only a change that leaves every claim about regions true is accepted.
            prop_assert!(before == Some(value) || ["alignment", "first_head", "total_heads"].contains(&name.as_str()));
            prop_assert_eq!(Layout::from_json(&layout.to_json().unwrap()).unwrap(), layout);
        }
    }
}

#[test]
fn strided_layouts_round_trip() {
    for layout in [strided(), strided().with_page_size(2).unwrap()] {
        let text = layout.to_json().unwrap();
        assert_eq!(Layout::from_json(&text).unwrap(), layout, "{text}");
    }
}

#[test]
fn each_lie_is_named() {
    let good: serde_json::Value = serde_json::from_str(&strided().to_json().unwrap()).unwrap();
    let reason = |edit: &dyn Fn(&mut serde_json::Value)| {
        let mut json = good.clone();
        edit(&mut json);
        match Layout::from_json(&json.to_string()).unwrap_err() {
            LayoutError::Descriptor { reason } => reason,
            other => other.to_string(),
        }
    };
    for (edit, words) in [
        (
            &(|j: &mut serde_json::Value| j["version"] = 2.into()) as &dyn Fn(&mut _),
            "version 2 is not readable",
        ),
        (&|j: &mut serde_json::Value| j["surprise"] = 1.into(), "unknown field `surprise`"),
        (&|j: &mut serde_json::Value| j["kind"] = "weird".into(), "unknown kind \"weird\""),
        (&|j: &mut serde_json::Value| j["order"] = "NHD".into(), "order has no meaning"),
        (&|j: &mut serde_json::Value| j["num_regions"] = 4.into(), "claims 4 regions"),
        (&|j: &mut serde_json::Value| j["region_bytes"] = 1.into(), "regions of 1 bytes"),
        (
            &|j: &mut serde_json::Value| j["strided"]["axes"] = serde_json::json!(["block"]),
            "all six axes, got 1",
        ),
        (&|j: &mut serde_json::Value| j["strided"]["strides"]["dim"] = 1.into(), "overlap"),
        (&|j: &mut serde_json::Value| j["strided"]["strides"]["dim"] = (-1).into(), "invalid value"),
        (
            &|j: &mut serde_json::Value| j["strided"]["region_axes"] = serde_json::json!(["layer", "layer"]),
            "twice",
        ),
        (&|j: &mut serde_json::Value| j["config"]["dtype"] = "float4".into(), "unknown dtype"),
        (&|j: &mut serde_json::Value| j["page_size"] = 3.into(), "not a multiple"),
    ] {
        let found = reason(edit);
        assert!(found.contains(words), "{found:?} should say {words:?}");
    }
    let long = format!("{}{}", " ".repeat(20_000), good);
    assert!(Layout::from_json(&long).unwrap_err().to_string().contains("at most 16384"));
}

/// Found by fuzzing: region axes with one stride between them (all but one of extent 1) came back in another order,
/// and the layout read was not the layout written.
#[test]
fn region_axes_of_extent_one_round_trip() {
    let order = [Axis::Outer, Axis::Layer, Axis::Block, Axis::Page, Axis::Head, Axis::Dim];
    let lists: [&[Axis]; 4] = [
        &[Axis::Outer, Axis::Layer],
        &[Axis::Layer, Axis::Outer],
        &[Axis::Outer, Axis::Block, Axis::Layer],
        &[Axis::Block, Axis::Outer, Axis::Layer],
    ];
    for (list, blocks) in lists.into_iter().flat_map(|list| [(list, 1), (list, 3)]) {
        let config = LayoutConfig::builder()
            .num_blocks(blocks)
            .num_layers(1)
            .page_size(2)
            .num_heads(1)
            .head_dim(4)
            .dtype(Dtype::UInt8)
            .build()
            .unwrap();
        let mut strides = PerAxis::splat(0);
        for (axis, stride) in [(Axis::Block, 8), (Axis::Page, 4), (Axis::Head, 4), (Axis::Dim, 1)] {
            strides[axis] = if list.contains(&axis) { 0 } else { stride };
        }
        let layout = Layout::strided(config, order, strides, list).unwrap();
        for layout in [layout.clone(), layout.with_page_size(1).unwrap()] {
            let text = layout.to_json().unwrap();
            assert_eq!(Layout::from_json(&text).unwrap(), layout, "{text}");
        }
    }
}
