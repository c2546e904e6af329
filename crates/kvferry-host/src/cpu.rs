//! What this process may run on: CPUs, memory nodes, CPU features.

use std::path::Path;

/// CPUs this process may use at once: its affinity, and its cgroup's quota. At least 1.
pub fn usable_cpus() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// Memory nodes that are online, at least 1 (a kernel without NUMA support has no list).
pub fn numa_nodes() -> usize {
    numa_nodes_at(Path::new("/sys/devices/system/node/online"))
}

fn numa_nodes_at(list: &Path) -> usize {
    std::fs::read_to_string(list).ok().and_then(|text| count_list(&text)).unwrap_or(1).max(1)
}

/// Counts the members of a kernel list such as `0-3,8,10-11`. None if it is not one.
fn count_list(text: &str) -> Option<usize> {
    let mut count = 0_usize;
    for part in text.trim().split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let first: usize = first.trim().parse().ok()?;
        let last: usize = last.trim().parse().ok()?;
        count = count.checked_add(last.checked_sub(first)?.checked_add(1)?)?;
    }
    Some(count)
}

/// Names of the CPU features that matter to copies and that this CPU and kernel have:
/// `sse2`, `avx2`, `avx512f`, `ermsb` (fast `rep movsb`). Empty on other architectures.
pub fn features() -> Vec<&'static str> {
    #[cfg(target_arch = "x86_64")]
    let known = [
        ("sse2", std::arch::is_x86_feature_detected!("sse2")),
        ("avx2", std::arch::is_x86_feature_detected!("avx2")),
        ("avx512f", std::arch::is_x86_feature_detected!("avx512f")),
        ("ermsb", std::arch::is_x86_feature_detected!("ermsb")),
    ];
    #[cfg(not(target_arch = "x86_64"))]
    let known: [(&'static str, bool); 0] = [];
    known.into_iter().filter(|(_, present)| *present).map(|(name, _)| name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_lists_are_counted() {
        assert_eq!(count_list("0\n"), Some(1));
        assert_eq!(count_list("0-1\n"), Some(2));
        assert_eq!(count_list("0-3,8,10-11"), Some(7));
        assert_eq!(count_list(""), Some(0));
        assert_eq!(count_list("3-1"), None);
        assert_eq!(count_list("none"), None);
        assert_eq!(count_list("0-18446744073709551615"), None);
    }

    #[test]
    fn this_machine_has_at_least_one_of_each() {
        assert!(usable_cpus() >= 1);
        assert!(numa_nodes() >= 1);
        assert_eq!(numa_nodes_at(Path::new("/nonexistent/online")), 1);
        if cfg!(target_arch = "x86_64") {
            assert!(features().contains(&"sse2"));
        }
    }
}
