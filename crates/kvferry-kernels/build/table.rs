//! Writes the Rust source that embeds the fatbins, included by `src/fatbin.rs`.

use std::env;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use crate::archs::Arch;
use crate::compile::Fatbin;
use crate::nvcc;

/// Writes `table.rs`. With no fatbins the table is empty and names no toolkit.
pub(crate) fn write(out: &Path, mode: &str, archs: &[Arch], fatbins: &[Fatbin]) -> Result<()> {
    let toolkit = (!fatbins.is_empty()).then_some(nvcc::RELEASE);
    let names: Vec<_> = archs.iter().map(|arch| arch.code.as_str()).collect();
    let profile = env::var("PROFILE").context("PROFILE is not set")?;
    let mut text = String::new();
    writeln!(text, "const CUDA_MODE: &str = {mode:?};")?;
    writeln!(text, "const TOOLKIT: Option<&str> = {toolkit:?};")?;
    writeln!(text, "const ARCHS: &[&str] = &{names:?};")?;
    writeln!(text, "const PROFILE: &str = {profile:?};")?;
    writeln!(text, "static FATBINS: &[(&str, &Aligned<[u8]>)] = &[")?;
    for fatbin in fatbins {
        writeln!(text, "    ({:?}, &Aligned(*include_bytes!({:?}))),", fatbin.module, fatbin.path)?;
    }
    writeln!(text, "];")?;
    fs::write(out.join("table.rs"), text).context("cannot write the fatbin table")
}
