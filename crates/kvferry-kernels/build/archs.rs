//! Which GPU architectures a fatbin is built for.
//!
//! `KVFERRY_CUDA_ARCHS` is a list separated by commas, semicolons or spaces. `90` or `sm_90` asks for machine code,
//! `ptx_90` or `compute_90` for PTX, which newer GPUs translate when it is loaded. A suffix (`90a`, `100f`) is kept.

use anyhow::{Result, bail};

/// Machine code for the GPUs in use, PTX for those that follow.
pub(crate) const DEFAULT: &[&str] = &["sm_80", "sm_90", "sm_100", "sm_120", "compute_80", "compute_120"];

/// What nvcc 13.0 knows, from sm_80 up: older GPUs lack what the kernels use.
const KNOWN: &[u32] = &[80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121];

/// One target of a fatbin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Arch {
    /// `sm_90` for machine code, `compute_90` for PTX.
    pub(crate) code: String,
    /// `compute_90`, the virtual architecture it is compiled through.
    pub(crate) virtual_arch: String,
}

impl Arch {
    /// The nvcc option that asks for this target.
    pub(crate) fn gencode(&self) -> String {
        format!("-gencode=arch={},code={}", self.virtual_arch, self.code)
    }

    fn parse(item: &str) -> Result<Self> {
        let (ptx, number) = match item.split_once('_') {
            None => (false, item),
            Some(("sm", number)) => (false, number),
            Some(("ptx" | "compute", number)) => (true, number),
            Some(_) => {
                bail!("{item:?} is not an architecture: write 90 or sm_90 for machine code, ptx_90 for PTX")
            }
        };
        let digits = number.trim_end_matches(['a', 'f']);
        let suffix = &number[digits.len()..];
        let Ok(value) = digits.parse::<u32>() else {
            bail!("{item:?} is not an architecture: write 90 or sm_90 for machine code, ptx_90 for PTX");
        };
        if !KNOWN.contains(&value) {
            bail!("{item:?}: nvcc 13.0 and kvferry have these architectures in common: {KNOWN:?}");
        }
        match suffix {
            "" => {}
            "a" if value >= 90 => {}
            "f" if value >= 100 => {}
            _ => bail!("{item:?}: there is no variant {suffix:?} of architecture {value}"),
        }
        let virtual_arch = format!("compute_{value}{suffix}");
        let code = if ptx { virtual_arch.clone() } else { format!("sm_{value}{suffix}") };
        Ok(Self { code, virtual_arch })
    }
}

/// The targets asked for by the value of `KVFERRY_CUDA_ARCHS`, in order and without repetition.
pub(crate) fn requested(value: Option<&str>) -> Result<Vec<Arch>> {
    let Some(value) = value else {
        return DEFAULT.iter().map(|item| Arch::parse(item)).collect();
    };
    let mut archs = Vec::new();
    for item in value.split([',', ';', ' ']).filter(|item| !item.is_empty()) {
        let arch = Arch::parse(item).map_err(|error| error.context("KVFERRY_CUDA_ARCHS"))?;
        if !archs.contains(&arch) {
            archs.push(arch);
        }
    }
    if archs.is_empty() {
        bail!("KVFERRY_CUDA_ARCHS is set but names no architecture; unset it for the default {DEFAULT:?}");
    }
    Ok(archs)
}
