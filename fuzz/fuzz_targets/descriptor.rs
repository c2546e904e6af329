//! JSON descriptors from anywhere: refused, or read into a layout that holds together.
#![no_main]

use kvferry_fuzz::{check_any, limit_allocations};
use kvferry_layout::{Layout, LayoutError, MAX_DESCRIPTOR_BYTES};
use libfuzzer_sys::fuzz_target;
use serde_json::Value;

fuzz_target!(
    init: limit_allocations(1 << 20),
    |bytes: &[u8]| {
        let Ok(text) = std::str::from_utf8(bytes) else { return };
        match Layout::from_json(text) {
            Ok(layout) => accepted(text, &layout),
            Err(error) => {
                assert!(!error.to_string().is_empty());
                // A mutation rarely hits sizes and what they come to at once: correct the claims and ask again.
                let Some(text) = corrected(text, &error) else { return };
                match Layout::from_json(&text) {
                    Ok(layout) => accepted(&text, &layout),
                    Err(error) => panic!("{text}\nis still refused: {error}"),
                }
            }
        }
    }
);

fn accepted(text: &str, layout: &Layout) {
    assert!(text.len() <= MAX_DESCRIPTOR_BYTES);
    check_any(layout, &[]);
}

/// `text` with the regions that the error says its sizes make.
fn corrected(text: &str, error: &LayoutError) -> Option<String> {
    let LayoutError::Descriptor { reason } = error else { return None };
    let (regions, bytes) = reason.split_once("its sizes make ")?.1.split_once(" of ")?;
    let (regions, bytes): (u64, u64) = (regions.parse().ok()?, bytes.parse().ok()?);
    let mut json: Value = serde_json::from_str(text).ok()?;
    let object = json.as_object_mut()?;
    object.insert("num_regions".to_owned(), regions.into());
    object.insert("region_bytes".to_owned(), bytes.into());
    let text = json.to_string();
    (text.len() <= MAX_DESCRIPTOR_BYTES).then_some(text)
}
