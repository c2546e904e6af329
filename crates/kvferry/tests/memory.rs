//! How a layout's memory is allocated: options are followed or refused, never dropped.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a failing helper fails its test")]

mod common;

use std::sync::Arc;

use common::{FC, config, made};
use kvferry::host::{HostMemoryError, memory_nodes};
use kvferry::{Error, HostOptions, HugePages, MemoryKind, NumaPolicy, PhysicalLayout};

fn allocate(kind: MemoryKind, options: HostOptions) -> kvferry::Result<Arc<PhysicalLayout>> {
    PhysicalLayout::allocate_with(made(config(4, 2, 4, 2, 8), FC).layout, kind, &options)
}

#[test]
fn options_are_kept_and_the_memory_works() {
    let nodes =
        memory_nodes().inspect_err(|error| println!("no NUMA calls here: {error}")).unwrap_or_default();
    let mut policies = vec![NumaPolicy::Default];
    policies.extend(nodes.iter().map(|&node| NumaPolicy::Bind(node)));
    policies.extend(nodes.first().map(|_| NumaPolicy::Interleave));
    for numa in policies {
        let options = HostOptions { huge_pages: HugePages::Off, numa, first_touch_threads: usize::MAX };
        let layout = allocate(MemoryKind::System, options).unwrap();
        assert_eq!(layout.host_options(), Some(&options));
        assert_eq!(layout.with_page_size(2).unwrap().host_options(), Some(&options));
        layout.fill_pattern(3, None).unwrap();
        layout.verify_pattern(3, None, None, None).unwrap();
    }
}

#[test]
fn the_short_form_has_the_defaults_and_lent_memory_none() {
    let layout =
        PhysicalLayout::allocate(made(config(4, 2, 4, 2, 8), FC).layout, MemoryKind::System).unwrap();
    assert_eq!(layout.host_options(), Some(&HostOptions::default()));
    let lent = common::Bound::new(made(config(4, 2, 4, 2, 8), FC), 0);
    assert_eq!(lent.layout.host_options(), None);
}

#[test]
fn unknown_nodes_are_refused() {
    let options = HostOptions { numa: NumaPolicy::Bind(4096), ..HostOptions::default() };
    match (allocate(MemoryKind::System, options), memory_nodes()) {
        (Err(Error::HostMemory(HostMemoryError::UnknownNode { node: 4096, nodes })), Ok(known)) => {
            assert_eq!(nodes, known);
        }
        (Err(Error::HostMemory(HostMemoryError::Numa { errno, .. })), Err(known)) => {
            assert_eq!(Some(errno), known.raw_os_error());
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn memory_that_the_driver_places_takes_no_options() {
    let usual = HostOptions::default();
    for (name, options) in [
        ("huge_pages", HostOptions { huge_pages: HugePages::Off, ..usual }),
        ("numa", HostOptions { numa: NumaPolicy::Interleave, ..usual }),
        ("first_touch_threads", HostOptions { first_touch_threads: 1, ..usual }),
    ] {
        for kind in [MemoryKind::Pinned, MemoryKind::Device(0)] {
            let error = allocate(kind, options).unwrap_err();
            assert!(matches!(error, Error::InvalidOption { option, .. } if option == name), "{error}");
            assert!(error.to_string().contains(&kind.to_string()), "{error}");
        }
    }
}
