//! Whether a copy writes around the caches.

use std::path::Path;
use std::sync::OnceLock;

use kvferry_host::CopyHint;

/// Transfers from here on stream, whatever the size of the cache. Measured with `examples/host_bandwidth.rs` on a
/// processor with 300 MiB of last-level cache, a part of it ours: streaming and ordinary stores are equal up to 16 MiB;
/// at 32 MiB streaming is 1.2 to 1.6 times as fast for runs of 256 bytes to 512 KiB, at 512 MiB 1.3 to 2 times.
const LARGE: u64 = 32 << 20;

/// Shortest run that gains; shorter ones lose (a third at 64 bytes).
const SHORTEST_RUN: u64 = 256;

/// Streaming stores do not read the destination first and leave the cache to others. They pay when the destination would
/// not stay in the last-level cache anyway: for transfers larger than it, or than [`LARGE`], of which a shared cache
/// rarely keeps a single transfer.
///
/// There is no longest run: the C library streams by itself only above three quarters of its share of the cache, and
/// tasks cut runs far below that.
pub(crate) fn hint(bytes: u64, run_bytes: u64, last_level: u64) -> CopyHint {
    if bytes > last_level.min(LARGE) && run_bytes >= SHORTEST_RUN {
        CopyHint::NonTemporal
    } else {
        CopyHint::Temporal
    }
}

/// Bytes of this machine's last-level cache; [`LARGE`] where the system does not tell.
pub(crate) fn last_level_cache() -> u64 {
    static BYTES: OnceLock<u64> = OnceLock::new();
    *BYTES.get_or_init(|| largest_cache(Path::new("/sys/devices/system/cpu/cpu0/cache")).unwrap_or(LARGE))
}

fn largest_cache(dir: &Path) -> Option<u64> {
    let entries = std::fs::read_dir(dir).ok()?;
    let size = |entry: std::fs::DirEntry| parse(&std::fs::read_to_string(entry.path().join("size")).ok()?);
    entries.flatten().filter_map(size).max()
}

/// A size as the kernel writes it, such as `2048K`.
fn parse(text: &str) -> Option<u64> {
    let text = text.trim();
    let (digits, shift) = match text.strip_suffix(['K', 'M', 'G']) {
        Some(digits) => (
            digits,
            if text.ends_with('K') {
                10
            } else if text.ends_with('M') {
                20
            } else {
                30
            },
        ),
        None => (text, 0),
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift).filter(|&bytes| bytes > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_transfers_of_runs_that_gain_stream() {
        let (big, small) = (300 << 20, 8 << 20);
        for (bytes, run, cache, expected) in [
            (LARGE + 1, 4096, big, CopyHint::NonTemporal),
            (LARGE, 4096, big, CopyHint::Temporal),
            (LARGE + 1, 256, big, CopyHint::NonTemporal),
            (LARGE + 1, 255, big, CopyHint::Temporal),
            (1 << 40, 1 << 30, big, CopyHint::NonTemporal),
            (small + 1, 4096, small, CopyHint::NonTemporal),
            (small, 4096, small, CopyHint::Temporal),
            (0, 0, 0, CopyHint::Temporal),
        ] {
            assert_eq!(hint(bytes, run, cache), expected, "{bytes} bytes in runs of {run}, cache {cache}");
        }
    }

    #[test]
    fn sizes_are_read_as_the_kernel_writes_them() {
        assert_eq!(parse("48K\n"), Some(48 << 10));
        assert_eq!(parse("307200K"), Some(300 << 20));
        assert_eq!(parse("2M"), Some(2 << 20));
        assert_eq!(parse("512"), Some(512));
        for text in ["", "K", "-1K", "0K", "many", "18446744073709551615K"] {
            assert_eq!(parse(text), None, "{text:?}");
        }
        assert_eq!(largest_cache(Path::new("/nonexistent")), None);
        assert!(last_level_cache() > 0);
    }
}
