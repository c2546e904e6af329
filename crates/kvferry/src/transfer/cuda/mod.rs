//! GPU transfers: what a context keeps per GPU, three engines that put work on streams, one through pageable memory, and
//! the jobs and threads that tell of the end.

mod bounce;
mod device;
mod engines;
mod expect;
mod job;
mod lanes;
mod lower;
mod reports;
mod stage;
mod submit;

pub(crate) use bounce::{Bounce, BouncePair};
pub(crate) use device::{Cuda, CudaDevice, Limits};
pub(crate) use job::CudaJob;
pub(crate) use lower::Lowered;
pub(crate) use submit::{CudaSubmission, DeviceIdPair, marker, owner_of, refused};
