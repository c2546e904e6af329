//! Runs nvcc.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::archs::Arch;
use crate::watched;

/// One compiled source.
pub(crate) struct Fatbin {
    /// File stem of the source, the name of the module.
    pub(crate) module: String,
    /// Where the fatbin lies.
    pub(crate) path: PathBuf,
}

/// The `.cu` files, sorted; watched from here on, as is the folder for new ones.
pub(crate) fn sources(cuda: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    let listing =
        fs::read_dir(cuda).with_context(|| format!("the kernel sources {} are missing", cuda.display()))?;
    for entry in listing {
        let name =
            entry?.file_name().into_string().map_err(|name| anyhow::anyhow!("odd file name {name:?}"))?;
        if name.ends_with(".cu") {
            names.push(name);
        }
    }
    names.sort();
    // Naming files replaces cargo's own scan of the package, so the build script is named as well.
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=build");
    for name in &names {
        println!("cargo::rerun-if-changed={}", cuda.join(name).display());
    }
    Ok(names)
}

/// Compiles every source for all `archs`.
pub(crate) fn fatbins(
    nvcc: &Path,
    cuda: &Path,
    sources: &[String],
    archs: &[Arch],
    out: &Path,
) -> Result<Vec<Fatbin>> {
    println!("cargo::rerun-if-changed={}", nvcc.display());
    // nvcc's own variable for the host compiler.
    watched::path("NVCC_CCBIN");
    sources.iter().map(|source| fatbin(nvcc, cuda, source, archs, out)).collect()
}

fn fatbin(nvcc: &Path, cuda: &Path, source: &str, archs: &[Arch], out: &Path) -> Result<Fatbin> {
    let module = source.trim_end_matches(".cu").to_owned();
    let path = out.join(format!("{module}.fatbin"));
    let depfile = out.join(format!("{module}.d"));
    // Relative names and no line information: the bytes do not depend on where the tree lies.
    let output = Command::new(nvcc)
        .current_dir(cuda)
        .env_remove("NVCC_APPEND_FLAGS")
        .env_remove("NVCC_PREPEND_FLAGS")
        .args(["-std=c++17", "-O3", "-Iinclude", "-fatbin", "--compress-mode=size", "-Werror=all-warnings"])
        .arg(format!("--threads={}", env::var("NUM_JOBS").unwrap_or_else(|_| "1".to_owned())))
        .args(archs.iter().map(Arch::gencode))
        .arg("-MD")
        .arg("-MF")
        .arg(&depfile)
        .arg("-o")
        .arg(&path)
        .arg(source)
        .output()
        .with_context(|| format!("cannot run {}", nvcc.display()))?;
    if !output.status.success() {
        bail!(
            "{} failed on {source} ({}):\n{}{}",
            nvcc.display(),
            output.status,
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
    }
    for header in headers(&depfile)? {
        println!("cargo::rerun-if-changed={}", cuda.join(header).display());
    }
    Ok(Fatbin { module, path })
}

/// The relative names in a depfile: our own headers. The toolkit's and the system's are absolute and change only with
/// the compiler, which is watched itself.
fn headers(depfile: &Path) -> Result<Vec<String>> {
    let text = fs::read_to_string(depfile).with_context(|| format!("nvcc wrote no {}", depfile.display()))?;
    let (_, names) =
        text.split_once(" : ").or_else(|| text.split_once(": ")).context("a depfile without a colon")?;
    let headers: Vec<_> = names
        .split_whitespace()
        .filter(|name| *name != "\\" && !name.starts_with('/'))
        .map(str::to_owned)
        .collect();
    if headers.is_empty() {
        bail!("{} names none of our headers", depfile.display());
    }
    Ok(headers)
}
