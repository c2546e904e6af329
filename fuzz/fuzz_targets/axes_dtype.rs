//! Words that users type: axis lists, element types, orders.
#![no_main]

use kvferry_fuzz::limit_allocations;
use kvferry_layout::{Axis, BlockDim, Dtype, KvOrder};
use libfuzzer_sys::fuzz_target;

fuzz_target!(
    init: limit_allocations(1 << 20),
    |text: &str| {
        match Axis::parse_list(text) {
            Ok(axes) => {
                assert!(axes.len() <= 6);
                assert!((1..axes.len()).all(|at| !axes[..at].contains(&axes[at])));
                let names: Vec<&str> = axes.iter().map(|axis| axis.name()).collect();
                for separator in [" ", ",", ", ", " ,, "] {
                    assert_eq!(Axis::parse_list(&names.join(separator)), Ok(axes.clone()));
                }
                let words = text.split([' ', ',']).filter(|word| !word.is_empty());
                assert_eq!(words.collect::<Vec<_>>(), names);
            }
            Err(error) => assert!(!error.to_string().is_empty()),
        }
        match Axis::parse(text) {
            Ok(axis) => assert_eq!(axis.to_string(), text),
            Err(error) => assert!(!error.to_string().is_empty()),
        }
        match text.parse::<Dtype>() {
            Ok(dtype) => {
                assert_eq!(text.strip_prefix("torch.").unwrap_or(text), dtype.name());
                assert_eq!(dtype.bytes() * 8, u64::from(dtype.bits()));
            }
            Err(error) => assert!(!error.to_string().is_empty()),
        }
        match text.parse::<KvOrder>() {
            Ok(order) => assert_eq!(order.to_string(), text),
            Err(error) => assert!(!error.to_string().is_empty()),
        }
        match text.parse::<BlockDim>() {
            Ok(dim) => assert_eq!(dim.to_string(), text),
            Err(error) => assert!(!error.to_string().is_empty()),
        }
    }
);
