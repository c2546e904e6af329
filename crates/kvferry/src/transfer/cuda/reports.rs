//! Where kernels tell of ids out of range: a few pieces of pinned memory per GPU, lent to one job at a time.

use std::sync::{Arc, Mutex};

use kvferry_cuda::{BadIdReport, Gpu};

use crate::error::Result;
use crate::transfer::lock;

/// Reports made with the context: pinning may wait for the device, which a submission must not.
const READY: usize = 8;

/// The reports of a GPU.
#[derive(Debug)]
pub(crate) struct Reports {
    gpu: Arc<Gpu>,
    free: Mutex<Vec<Arc<BadIdReport>>>,
}

/// A report of one job, given back on drop.
#[derive(Debug)]
pub(crate) struct ReportLease {
    home: Arc<Reports>,
    report: Arc<BadIdReport>,
}

impl Reports {
    pub(super) fn new(gpu: &Arc<Gpu>) -> Result<Arc<Reports>> {
        let free = (0..READY).map(|_| BadIdReport::new(gpu)).collect::<std::result::Result<_, _>>()?;
        Ok(Arc::new(Reports { gpu: gpu.clone(), free: Mutex::new(free) }))
    }

    /// A report; pinned anew only if so many jobs with ids on the device have never been in flight before.
    pub(super) fn lend(self: &Arc<Self>) -> Result<ReportLease> {
        let ready = lock(&self.free).pop();
        let report = match ready {
            Some(report) => report,
            None => BadIdReport::new(&self.gpu)?,
        };
        Ok(ReportLease { home: self.clone(), report })
    }
}

impl ReportLease {
    pub(super) const fn report(&self) -> &Arc<BadIdReport> {
        &self.report
    }
}

impl Drop for ReportLease {
    fn drop(&mut self) {
        // A job that was never looked at leaves nothing for the next one.
        self.report.take();
        lock(&self.home.free).push(self.report.clone());
    }
}
