//! The constants by which engines are chosen: shipped, measured on this machine, saved and found again.

mod measure;
mod model;
mod store;

pub use measure::{CalibrateOptions, calibrate};
pub use model::{CostModel, Curve, Direction, MODEL_VERSION};
pub(crate) use model::{STAGE_SLOT, Work};
pub use store::{Saved, load_calibration, save_calibration};
