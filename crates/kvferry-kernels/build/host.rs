//! Builds the kernel bodies for the CPU and links them into the integration tests of this package only.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::watched;

/// Compiles `cuda/host/*.cpp`, under the sanitizers when `KVFERRY_SANITIZE=1` (see `scripts/sanitize.sh`, which also
/// makes rustc link their runtimes).
pub(crate) fn build(cuda: &Path) -> Result<()> {
    let folder = cuda.join("host");
    let mut sources = Vec::new();
    for entry in fs::read_dir(&folder).with_context(|| format!("{} is missing", folder.display()))? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "cpp") {
            sources.push(path);
        }
    }
    sources.sort();
    println!("cargo::rerun-if-changed={}", folder.display());
    println!("cargo::rerun-if-changed={}", cuda.join("include").display());

    let mut compiler = cc::Build::new();
    compiler
        .cpp(true)
        .std("c++17")
        .include(cuda.join("include"))
        .files(&sources)
        .warnings_into_errors(true)
        .extra_warnings(true)
        .opt_level(1)
        .debug(true)
        // Linked by the argument below, not into every crate that depends on this one.
        .cargo_metadata(false);
    if watched::path("KVFERRY_SANITIZE").is_some_and(|value| value == "1") {
        compiler
            .flag("-fsanitize=address,undefined")
            .flag("-fno-sanitize-recover=all")
            .flag("-fno-omit-frame-pointer");
    }
    compiler
        .try_compile("kvferry_host_kernels")
        .context("the host build of the kernels needs a C++17 compiler")?;
    let out = PathBuf::from(env::var_os("OUT_DIR").context("OUT_DIR is not set")?);
    println!("cargo::rustc-link-arg-tests={}", out.join("libkvferry_host_kernels.a").display());
    println!("cargo::rustc-link-arg-tests=-lstdc++");
    Ok(())
}
