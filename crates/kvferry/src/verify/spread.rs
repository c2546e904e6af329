//! Independent units of work on scoped threads.

use std::ops::Range;
use std::thread::{Builder, scope};

use kvferry_host::cpu::usable_cpus;

use crate::error::Result;
use crate::memory::MemoryKind;

/// A thread is worth starting for this much memory.
const BYTES_PER_THREAD: u64 = 2 << 20;

/// Cuts `0..units` into even stretches, one per thread, and calls `work` on each; results come in order. The calling
/// thread takes the first stretch, so little work starts no thread; where the system refuses one, it takes that too.
/// Device memory is for one thread: its copies take turns in the driver, and what one unit reads and writes back may
/// hold bytes of another.
///
/// # Errors
/// The first error in the order of the stretches.
pub(super) fn spread<T: Send>(
    memory: MemoryKind,
    units: u64,
    bytes: u64,
    work: impl Fn(Range<u64>) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let cpus = if memory.is_host() { usable_cpus() as u64 } else { 1 };
    let threads = cpus.min(units).min(bytes / BYTES_PER_THREAD).max(1);
    let cut = |index: u64| (u128::from(units) * u128::from(index) / u128::from(threads)) as u64;
    let stretch = |index: u64| cut(index)..cut(index + 1);
    let work = &work;
    scope(|scope| {
        let helpers: Vec<_> = (1..threads)
            .map(|index| {
                let range = stretch(index);
                let started =
                    Builder::new().name("kvferry-verify".to_owned()).spawn_scoped(scope, move || work(range));
                (index, started)
            })
            .collect();
        let mut results = vec![work(stretch(0))];
        for (index, helper) in helpers {
            results.push(match helper {
                Ok(helper) => helper.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
                Err(_) => work(stretch(index)),
            });
        }
        results.into_iter().collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stretches_cover_all_units_in_order() {
        for (units, bytes) in [(0, 0), (1, u64::MAX), (7, 3 * BYTES_PER_THREAD), (1000, u64::MAX), (5, 10)] {
            for (memory, most) in [(MemoryKind::System, usable_cpus().max(1)), (MemoryKind::Device(0), 1)] {
                let parts = spread(memory, units, bytes, |range| Ok(range.collect::<Vec<u64>>())).unwrap();
                assert!(parts.len() <= most);
                assert_eq!(parts.concat(), (0..units).collect::<Vec<_>>());
            }
        }
    }
}
