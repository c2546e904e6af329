//! The embedded fatbins and how they were built.

use crate::Module;

/// `include_bytes!` promises an alignment of 1; the driver reads the header as integers.
#[repr(C, align(16))]
struct Aligned<T: ?Sized>(T);

include!(concat!(env!("OUT_DIR"), "/table.rs"));

/// How this crate was built; part of every bug report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BuildInfo {
    /// What `KVFERRY_CUDA` asked for: `auto`, `require` or `off`.
    pub cuda_mode: &'static str,
    /// The CUDA toolkit that compiled the kernels, such as `13.0`; `None` when there are none.
    pub toolkit: Option<&'static str>,
    /// Targets in the fatbins: `sm_90` is machine code, `compute_80` PTX. Empty when there are none.
    pub archs: &'static [&'static str],
    /// The cargo profile: `debug` or `release`.
    pub profile: &'static str,
    /// Bytes of all fatbins together.
    pub fatbin_bytes: usize,
}

/// How this crate was built.
#[must_use]
pub fn build_info() -> BuildInfo {
    BuildInfo {
        cuda_mode: CUDA_MODE,
        toolkit: TOOLKIT,
        archs: ARCHS,
        profile: PROFILE,
        fatbin_bytes: FATBINS.iter().map(|(_, bytes)| bytes.0.len()).sum(),
    }
}

/// Whether kernels were compiled into this build. Says nothing about the GPU or the driver.
#[must_use]
pub fn available() -> bool {
    !FATBINS.is_empty()
}

/// The fatbin of a module, 16-byte aligned, or `None` when this build has no kernels.
#[must_use]
pub fn fatbin(module: Module) -> Option<&'static [u8]> {
    FATBINS.iter().find(|(name, _)| *name == module.name()).map(|(_, bytes)| &bytes.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// First word of every fatbin.
    const MAGIC: [u8; 4] = [0x50, 0xed, 0x55, 0xba];

    #[test]
    fn every_module_has_a_fatbin_or_none_has() {
        assert_eq!(FATBINS.len(), if available() { Module::ALL.len() } else { 0 });
        for module in Module::ALL {
            assert_eq!(fatbin(*module).is_some(), available(), "{module:?}");
        }
    }

    #[test]
    fn fatbins_are_aligned_and_whole() {
        for module in Module::ALL {
            if let Some(bytes) = fatbin(*module) {
                assert_eq!(bytes.as_ptr().addr() % 16, 0);
                assert_eq!(bytes[..4], MAGIC);
            }
        }
    }

    #[test]
    fn build_info_agrees_with_the_table() {
        let info = build_info();
        assert_eq!(info.toolkit.is_some(), available());
        assert_eq!(!info.archs.is_empty(), available());
        assert_eq!(info.fatbin_bytes > 0, available());
        assert!(["auto", "require", "off"].contains(&info.cuda_mode));
        assert!(!(available() && info.cuda_mode == "off"));
    }
}
