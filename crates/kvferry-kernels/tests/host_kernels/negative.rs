//! Copies that are broken on purpose must be caught, each for its own reason.

use std::env;
use std::process::Command;

use crate::copy_case::{CopyCase, Memory, Shape};
use crate::ffi::{self, Fault, Order, Report};

const SHAPE: Shape = Shape { grid: 1, block: 32, chunk_bytes: 1 << 20, team_shift: 0, order: Order::Forward };

fn report(body: &std::ffi::CStr, case: &CopyCase) -> Report {
    Memory::new(case).run(case, body, SHAPE)
}

#[test]
fn the_broken_bodies_pass_where_their_fault_cannot_show() {
    let case = CopyCase::in_order(64, vec![(0, 0), (0, 0)]);
    for body in [c"copy_misaligned", c"copy_cta_alignment", c"copy_overrun", c"copy_peek", c"copy_gap"] {
        assert_eq!(case.check(body, SHAPE), Ok(()), "{body:?}");
    }
}

#[test]
fn a_misaligned_access() {
    let case = CopyCase::in_order(64, vec![(4, 4)]);
    let found = report(c"copy_misaligned", &case);
    assert!(found.count(Fault::Misaligned) > 0, "{found:?}");
    assert!(case.check(c"copy_misaligned", SHAPE).is_err());
}

#[test]
fn an_alignment_decided_once_per_cta() {
    let found = report(c"copy_cta_alignment", &CopyCase::in_order(64, vec![(0, 0), (0, 1)]));
    assert!(found.count(Fault::Misaligned) > 0, "{found:?}");
}

#[test]
fn a_byte_stored_twice() {
    let found = report(c"copy_double_store", &CopyCase::in_order(64, vec![(0, 0)]));
    assert_eq!(found.count(Fault::DoubleStore), 1, "{found:?}");
}

#[test]
fn a_store_beyond_the_end() {
    let found = report(c"copy_overrun", &CopyCase::in_order(17, vec![(0, 0)]));
    assert!(found.count(Fault::StoreOutside) > 0, "{found:?}");
}

#[test]
fn a_load_beyond_the_end() {
    let found = report(c"copy_peek", &CopyCase::in_order(17, vec![(0, 0)]));
    assert!(found.count(Fault::LoadOutside) > 0, "{found:?}");
    assert_eq!(found.count(Fault::StoreOutside), 0, "{found:?}");
}

#[test]
fn a_byte_never_stored() {
    let case = CopyCase::in_order(17, vec![(0, 0)]);
    assert!(report(c"copy_gap", &case).is_clean());
    let wrong = case.check(c"copy_gap", SHAPE).unwrap_err();
    assert!(wrong.starts_with("destination at 32"), "{wrong}");
}

/// The sanitizer sees what the monitor would have stopped. Run in a child, which it must end.
#[test]
fn the_sanitizer_is_awake() {
    const CHILD: &str = "KVFERRY_SANITIZER_CHILD";
    assert_eq!(
        ffi::sanitized(),
        env::var_os("KVFERRY_SANITIZE").is_some_and(|value| value == "1"),
        "KVFERRY_SANITIZE and the build disagree: use scripts/sanitize.sh"
    );
    if !ffi::sanitized() {
        return;
    }
    let bodies = [c"copy_overrun", c"copy_peek"];
    if let Some(index) = env::var_os(CHILD) {
        let body = bodies[index.to_str().unwrap().parse::<usize>().unwrap()];
        let case = CopyCase::in_order(20, vec![(0, 0), (0, 0)]);
        // SAFETY: the gap behind the run is forbidden to sanitized code, which ends this process at the access.
        unsafe { Memory::new(&case).run_unchecked(&case, body, SHAPE) };
        return;
    }
    for index in 0..bodies.len() {
        let child = Command::new(env::current_exe().unwrap())
            .args(["--exact", "negative::the_sanitizer_is_awake", "--nocapture"])
            .env(CHILD, index.to_string())
            .output()
            .unwrap();
        let stderr = String::from_utf8_lossy(&child.stderr);
        assert!(!child.status.success() && stderr.contains("use-after-poison"), "{index}: {stderr}");
    }
}
