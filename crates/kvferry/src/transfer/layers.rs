//! A transfer in layers: one job per layer, and a handle that ends with the last of them.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use super::completion::{
    Completion, Ended, Outcome, Pending, TransferCompleteNotification, TransferFailure, TransferResult,
};
use super::lock;

/// The handles of the layers, lowest first.
pub(super) struct Layers {
    first: u64,
    parts: Vec<TransferCompleteNotification>,
}

impl Layers {
    pub(super) fn parts(&self) -> &[TransferCompleteNotification] {
        &self.parts
    }

    pub(super) fn get(&self, layer: u64) -> Option<&TransferCompleteNotification> {
        let index = usize::try_from(layer.checked_sub(self.first)?).ok()?;
        self.parts.get(index)
    }
}

/// What the parts have reported so far.
struct Gather {
    completion: Arc<Completion>,
    left: AtomicUsize,
    sum: Mutex<Outcome>,
    submitted: Instant,
}

impl Gather {
    fn add(&self, outcome: &Outcome) {
        {
            let mut sum = lock(&self.sum);
            match (&mut *sum, outcome) {
                (Ok(sum), Ok(part)) => sum.bytes += part.bytes,
                (Ok(_), Err(failure)) => *sum = Err(failure.clone()),
                (Err(_), Ok(_)) => {}
                (Err(sum), Err(part)) => {
                    sum.failed_blocks.extend(&part.failed_blocks);
                    sum.failed_blocks.sort_unstable();
                    sum.failed_blocks.dedup();
                }
            }
        }
        if self.left.fetch_sub(1, Ordering::AcqRel) == 1 {
            let mut sum = lock(&self.sum).clone();
            if let Ok(result) = &mut sum {
                result.seconds = self.submitted.elapsed().as_secs_f64();
            }
            self.completion.finish(sum, || {});
        }
    }
}

/// One handle over the handles of layers `first`, `first + 1`, … `blank` is the result of a transfer of no bytes.
pub(super) fn gather(
    first: u64,
    parts: Vec<TransferCompleteNotification>,
    blank: TransferResult,
    submitted: Instant,
    tag: Option<(u64, Ended)>,
) -> TransferCompleteNotification {
    let completion = Completion::new(tag);
    let gather = Arc::new(Gather {
        completion: completion.clone(),
        left: AtomicUsize::new(parts.len()),
        sum: Mutex::new(Ok::<TransferResult, TransferFailure>(blank)),
        submitted,
    });
    for part in &parts {
        let (gather, told) = (gather.clone(), part.clone());
        part.on_complete_first(move |outcome| {
            // Whole and part fail alike: whoever looks at the whole has been told.
            told.observed();
            gather.add(outcome);
        });
    }
    TransferCompleteNotification::new(completion, Pending::Layers(Arc::new(Layers { first, parts })))
}
