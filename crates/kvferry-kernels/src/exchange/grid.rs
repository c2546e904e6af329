//! How a call is divided among CTAs.

use super::MAX_RANKS;

/// Smaller CTAs gain nothing.
const MIN_BLOCK: u32 = 128;
/// Words that a thread has on their way.
pub(super) const IN_FLIGHT: u64 = 4;
/// Bytes of a word where everything is aligned.
const WORD: u64 = 16;
/// Small calls are spread over about this many CTAs before CTAs grow.
const FEW_LANES: u64 = 16;
/// From how many bytes of a rank on, the most threads of a CTA and the lanes of all targets. Measured with two H200s in CUDA
/// graphs: more lanes gain nothing (1 MB: 8.0 us with 32 and with 128; 34 MB: 57 with 16 and with 128) or lose (134 MB: 202
/// with 32, 218 with 64), and leave fewer multiprocessors to others. 512 threads start sooner; 1,024 fill the wire with 16.
const SIZES: [(u64, u32, u64); 3] = [(0, 512, 32), (24 << 20, 1024, 16), (96 << 20, 1024, 32)];

/// What a launch may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExchangeLimits {
    /// Multiprocessors of the GPU, at least 1.
    pub sm_count: u32,
    /// Most CTAs, as the user asked; `None`: as many as pay.
    pub num_sms: Option<u32>,
    /// Most threads per CTA that the loaded kernel allows.
    pub max_block: u32,
}

/// Lanes per target and the shape of the grid.
///
/// A lane is a CTA's worth of one target's bytes. There may be more lanes than CTAs: CTA b then runs lanes b, b + G, ...
/// Each target that gets bytes has a lane at least.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExchangeGrid {
    /// Threads per CTA, at least one per rank.
    pub block: u32,
    /// Most CTAs of a launch.
    pub max_ctas: u32,
    /// Lanes per target; 0 for those that get nothing.
    pub lanes: [u32; MAX_RANKS],
}

impl ExchangeGrid {
    /// For a call in which this rank copies `bytes[t]` bytes to rank t, itself included. Ranks beyond [`MAX_RANKS`] are
    /// not looked at.
    #[must_use]
    pub fn choose(bytes: &[u64], limits: &ExchangeLimits) -> Self {
        let bytes = bytes.get(..MAX_RANKS).unwrap_or(bytes);
        let total = bytes.iter().fold(0_u64, |sum, bytes| sum.saturating_add(*bytes));
        let most = u64::from(limits.num_sms.unwrap_or(limits.sm_count).min(limits.sm_count).max(1));

        let (_, widest, most_lanes) =
            SIZES.into_iter().rev().find(|&(from, ..)| total >= from).unwrap_or(SIZES[0]);
        let widest = widest.min(limits.max_block.max(1));

        // One round of loads per CTA, while that makes few CTAs; one load per thread, if one CTA per target will do.
        let largest = bytes.iter().max().copied().unwrap_or(0).div_ceil(WORD);
        let threads = if largest <= u64::from(widest) {
            largest
        } else {
            total.div_ceil(WORD * IN_FLIGHT * FEW_LANES.min(most))
        };
        let block = power_of_two(threads, MIN_BLOCK, widest);
        let block = block.max(bytes.len() as u32);

        let chunk = u64::from(block) * IN_FLIGHT * WORD;
        let wanted = total.div_ceil(chunk).min(most_lanes).min(most);
        let mut lanes = [0; MAX_RANKS];
        for (lanes, &bytes) in lanes.iter_mut().zip(bytes) {
            if bytes > 0 {
                let share = u128::from(wanted) * u128::from(bytes) + u128::from(total / 2);
                let share = (share / u128::from(total)) as u64;
                *lanes = share.min(bytes.div_ceil(chunk)).max(1) as u32;
            }
        }
        Self { block, max_ctas: most as u32, lanes }
    }

    /// Words that a CTA copies in one round.
    pub(super) const fn chunk_words(&self) -> u64 {
        self.block as u64 * IN_FLIGHT
    }
}

/// The smallest power of two that is at least `wanted`, between a power of two and any bound above.
fn power_of_two(wanted: u64, least: u32, most: u32) -> u32 {
    match u32::try_from(wanted) {
        Ok(wanted) if wanted < most => wanted.next_power_of_two().max(least).min(most),
        _ => most,
    }
}
