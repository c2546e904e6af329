//! Compiles `cuda/*.cu` into fatbins and writes the table that embeds them.
//!
//! `KVFERRY_CUDA`: `auto` (default; without nvcc the table is empty), `require` (no nvcc is an error) or `off`.
//! `KVFERRY_CUDA_ARCHS`: see `build/archs.rs`. Everything is written to `OUT_DIR`, and the table anew on every run.

#[path = "build/archs.rs"]
mod archs;
#[path = "build/compile.rs"]
mod compile;
#[cfg(feature = "host-build")]
#[path = "build/host.rs"]
mod host;
#[path = "build/nvcc.rs"]
mod nvcc;
#[path = "build/table.rs"]
mod table;
#[path = "build/watched.rs"]
mod watched;

use std::env;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};

fn main() -> Result<()> {
    let out = PathBuf::from(env::var_os("OUT_DIR").context("OUT_DIR is not set: run by cargo only")?);
    let package = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").context("CARGO_MANIFEST_DIR is not set")?);
    // A symlink in the repository, a real folder in a source distribution.
    let cuda = package.join("cuda");
    let sources = compile::sources(&cuda)?;

    let mode = watched::text("KVFERRY_CUDA")?.unwrap_or_else(|| "auto".to_owned());
    let archs = archs::requested(watched::text("KVFERRY_CUDA_ARCHS")?.as_deref())?;
    let nvcc = match mode.as_str() {
        "off" => None,
        "auto" => match nvcc::find() {
            Ok(nvcc) => Some(nvcc),
            Err(missing) => {
                println!("cargo::warning=kvferry is built without CUDA kernels: {missing}");
                None
            }
        },
        "require" => {
            Some(nvcc::find().map_err(|missing| anyhow::anyhow!("KVFERRY_CUDA=require, but {missing}"))?)
        }
        other => bail!("KVFERRY_CUDA={other:?} is not one of auto, require, off"),
    };

    let fatbins = match &nvcc {
        Some(nvcc) => compile::fatbins(nvcc, &cuda, &sources, &archs, &out)?,
        None => Vec::new(),
    };
    let built = nvcc.as_ref().map(|_| archs.as_slice()).unwrap_or_default();
    table::write(&out, &mode, built, &fatbins)?;

    #[cfg(feature = "host-build")]
    host::build(&cuda)?;
    Ok(())
}
