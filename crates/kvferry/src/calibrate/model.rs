//! How long each engine takes, by direction and run length: the constants of the choice.

use serde::{Deserialize, Serialize};

use kvferry_cuda::DeviceInfo;

use crate::transfer::{Engine, TransferStrategy};

/// Version of the saved form.
pub const MODEL_VERSION: u32 = 2;

/// Bytes of a slot of the device ring in a context with its default limits.
pub(crate) const STAGE_SLOT: u64 = 23 << 20;

/// Share of the copy engine's rate that is left when it works group by group.
const BETWEEN_GROUPS: f64 = 0.99;

/// Speed of one engine in one direction.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Curve {
    /// Microseconds from submission to completion that do not depend on the bytes.
    pub overhead_us: f64,
    /// (run length in bytes, payload GB/s of many runs of that length), run lengths rising. At least one.
    pub points: Vec<(u64, f64)>,
}

impl Curve {
    fn of(overhead_us: f64, points: &[(u64, f64)]) -> Curve {
        Curve { overhead_us, points: points.to_vec() }
    }

    /// Payload bytes per second of runs of `run` bytes: between measured lengths along the logarithms, outside them the
    /// nearest (shorter runs in proportion to their length).
    pub fn rate(&self, run: u64) -> f64 {
        let run = run.max(1);
        let at = self.points.partition_point(|&(length, _)| length < run);
        let giga = match (at.checked_sub(1).map(|below| self.points[below]), self.points.get(at)) {
            (None, Some(&(length, rate))) => rate * run as f64 / length as f64,
            (Some((_, rate)), None) => rate,
            (Some((below, slow)), Some(&(above, fast))) => {
                let share = (run as f64 / below as f64).ln() / (above as f64 / below as f64).ln();
                slow * (fast / slow).powf(share)
            }
            (None, None) => f64::MIN_POSITIVE,
        };
        giga * 1e9
    }

    /// Seconds for `bytes` bytes in runs of `run` bytes.
    pub fn seconds(&self, bytes: u64, run: u64) -> f64 {
        self.overhead_us * 1e-6 + bytes as f64 / self.rate(run)
    }
}

/// One direction.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Direction {
    /// The strided copy kernel.
    pub kernel: Curve,
    /// The driver's batch copy.
    pub batch: Curve,
    /// Overhead of the staged engine in microseconds, beyond its copies and the kernel of its last group. Host
    /// directions only; 0 elsewhere.
    pub staged_overhead_us: f64,
    /// CTAs with which the kernel's rates hold.
    pub ctas: u32,
}

/// What is known of a GPU's engines. Saved by calibration under the GPU's UUID and driver; [`CostModel::h200`] else.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CostModel {
    /// [`MODEL_VERSION`].
    pub version: u32,
    /// Where the numbers come from: "shipped defaults (H200)" or "calibrated" with a date.
    pub source: String,
    /// Pinned host memory to device.
    pub h2d: Direction,
    /// Device to pinned host memory.
    pub d2h: Direction,
    /// Within a device; payload counted once.
    pub d2d: Direction,
    /// Between devices.
    pub p2p: Direction,
}

impl CostModel {
    /// Constants measured on one H200 (PCIe 5 ×16, NVLink, driver 580); reports/gpu holds the runs.
    pub fn h200() -> CostModel {
        const K: u64 = 1 << 10;
        const M: u64 = 1 << 20;
        CostModel {
            version: MODEL_VERSION,
            source: "shipped defaults (H200)".to_owned(),
            h2d: Direction {
                kernel: Curve::of(19.0, &[(64, 40.0), (128, 50.0), (2 * K, 51.0), (4 * M, 51.1)]),
                batch: Curve::of(
                    15.0,
                    &[
                        (4 * K, 4.6),
                        (16 * K, 11.8),
                        (32 * K, 30.5),
                        (64 * K, 46.5),
                        (128 * K, 51.0),
                        (512 * K, 54.5),
                        (2 * M, 54.9),
                        (16 * M, 55.2),
                    ],
                ),
                staged_overhead_us: 34.0,
                ctas: 4,
            },
            d2h: Direction {
                kernel: Curve::of(19.0, &[(16, 48.0), (128, 52.0), (4 * M, 52.3)]),
                batch: Curve::of(
                    15.0,
                    &[
                        (4 * K, 5.0),
                        (16 * K, 20.0),
                        (32 * K, 30.0),
                        (64 * K, 43.0),
                        (128 * K, 49.0),
                        (512 * K, 54.2),
                        (2 * M, 54.8),
                        (16 * M, 55.0),
                    ],
                ),
                staged_overhead_us: 30.0,
                ctas: 4,
            },
            d2d: Direction {
                kernel: Curve::of(
                    17.0,
                    &[
                        (16, 1250.0),
                        (64, 1500.0),
                        (256, 1700.0),
                        (2 * K, 1750.0),
                        (64 * K, 1800.0),
                        (M, 1850.0),
                    ],
                ),
                batch: Curve::of(
                    13.0,
                    &[(4 * K, 1.2), (16 * K, 4.5), (64 * K, 17.0), (512 * K, 148.0), (2 * M, 540.0)],
                ),
                staged_overhead_us: 0.0,
                ctas: 528,
            },
            p2p: Direction {
                kernel: Curve::of(17.0, &[(128, 300.0), (4 * K, 360.0), (64 * K, 369.0)]),
                batch: Curve::of(12.0, &[(4 * K, 1.5), (64 * K, 25.0), (M, 280.0), (16 * M, 390.0)]),
                staged_overhead_us: 0.0,
                ctas: 16,
            },
        }
    }

    /// The constants for a GPU: those of its calibration, if there is one, else the defaults.
    pub fn of_gpu(info: &DeviceInfo) -> CostModel {
        super::store::load(info).unwrap_or_else(CostModel::h200)
    }

    /// The numbers of a direction; `None` for host to host.
    pub fn direction(&self, strategy: TransferStrategy) -> Option<&Direction> {
        match strategy {
            TransferStrategy::CudaAsyncH2D => Some(&self.h2d),
            TransferStrategy::CudaAsyncD2H => Some(&self.d2h),
            TransferStrategy::CudaAsyncD2D => Some(&self.d2d),
            TransferStrategy::CudaAsyncP2P => Some(&self.p2p),
            TransferStrategy::Memcpy => None,
        }
    }

    /// Seconds that an engine is expected to take.
    pub(crate) fn predict(&self, engine: Engine, strategy: TransferStrategy, work: &Work) -> Option<f64> {
        let direction = self.direction(strategy)?;
        match engine {
            Engine::Kernel => Some(direction.kernel.seconds(work.bytes, work.run)),
            Engine::Batch => Some(direction.batch.seconds(work.bytes, work.run)),
            Engine::Staged => {
                // All but the last group's kernel hides behind the copies, which pause between groups.
                let copies = work.bytes as f64 / (direction.batch.rate(work.hop_run) * BETWEEN_GROUPS);
                let tail = work.bytes.min(work.group) as f64 / self.d2d.kernel.rate(work.run);
                Some(direction.staged_overhead_us * 1e-6 + copies + tail)
            }
            _ => None,
        }
    }
}

/// A transfer as the model sees it, in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Work {
    /// Payload.
    pub(crate) bytes: u64,
    /// Length of a run, joined blocks counted in.
    pub(crate) run: u64,
    /// Length of a run between the host side and a stage.
    pub(crate) hop_run: u64,
    /// Most bytes of a staged group.
    pub(crate) group: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_met_at_points_and_lie_between_them() {
        let curve = Curve::of(10.0, &[(1000, 1.0), (4000, 4.0), (8000, 4.0)]);
        for (run, giga) in [(1000, 1.0), (4000, 4.0), (6000, 4.0), (1 << 30, 4.0), (500, 0.5), (2000, 2.0)] {
            assert!((curve.rate(run) / 1e9 - giga).abs() < 1e-9, "{run}: {}", curve.rate(run));
        }
        assert!((curve.seconds(4_000_000, 4000) - 1.01e-3).abs() < 1e-9);
        assert!(curve.seconds(0, 0) > 0.0);
    }

    #[test]
    fn defaults_are_sane() {
        let model = CostModel::h200();
        for strategy in TransferStrategy::ALL {
            let Some(direction) = model.direction(strategy) else { continue };
            for curve in [&direction.kernel, &direction.batch] {
                assert!(curve.points.is_sorted_by(|a, b| a.0 < b.0) && !curve.points.is_empty());
                assert!(curve.points.iter().all(|&(_, rate)| rate > 0.0) && curve.overhead_us > 0.0);
            }
        }
    }
}
