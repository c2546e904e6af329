//! What was built.

pub use kvferry_kernels::BuildInfo;

/// Architectures, toolkit and profile of this build.
pub fn build_info() -> BuildInfo {
    kvferry_kernels::build_info()
}
