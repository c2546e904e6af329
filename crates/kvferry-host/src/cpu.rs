//! What this process may run on: CPUs and their features.

/// CPUs this process may use at once: its affinity, and its cgroup's quota. At least 1.
pub fn usable_cpus() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
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

/// Whether the calling thread is the process's first, which is where Python runs signal handlers.
pub fn is_main_thread() -> bool {
    rustix::thread::gettid() == rustix::process::getpid()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_threads_are_not_the_main_one() {
        assert!(!std::thread::spawn(is_main_thread).join().unwrap());
    }

    #[test]
    fn this_machine_has_a_cpu() {
        assert!(usable_cpus() >= 1);
        if cfg!(target_arch = "x86_64") {
            assert!(features().contains(&"sse2"));
        }
    }
}
