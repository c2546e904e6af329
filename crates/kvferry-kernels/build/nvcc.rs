//! Finds an nvcc 13.0. Older ones lack architectures and options; newer ones emit PTX that driver 580 refuses.
//! `scripts/find_nvcc.py` searches the same places in the same order.

use std::env;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::watched;

/// The toolkit release the kernels are built with.
pub(crate) const RELEASE: &str = "13.0";

/// Nothing suitable was found; says what was looked at and why it was refused.
#[derive(Debug)]
pub(crate) struct Missing(Vec<String>);

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "no nvcc {RELEASE} was found. Looked at: {}. `pip install 'nvidia-cuda-nvcc==13.0.*' \
             'nvidia-cuda-crt==13.0.*' 'nvidia-cuda-runtime==13.0.*' 'nvidia-cuda-cccl==13.0.*' \
             'nvidia-nvvm==13.0.*'` into the building Python provides one",
            self.0.join("; ")
        )
    }
}

/// The first acceptable nvcc of: `NVCC`, the `nvidia` wheels of the building Python, `CUDA_HOME`, `PATH`.
pub(crate) fn find() -> Result<PathBuf, Missing> {
    let mut refused = Vec::new();
    match watched::path("NVCC") {
        Some(path) => {
            if let Some(nvcc) = accept("NVCC", Path::new(&path), &mut refused) {
                return Ok(nvcc);
            }
        }
        None => refused.push("NVCC (not set)".to_owned()),
    }
    if let Some(nvcc) = from_python(&mut refused) {
        return Ok(nvcc);
    }
    match watched::path("CUDA_HOME") {
        Some(home) => {
            if let Some(nvcc) = accept("CUDA_HOME", &Path::new(&home).join("bin/nvcc"), &mut refused) {
                return Ok(nvcc);
            }
        }
        None => refused.push("CUDA_HOME (not set)".to_owned()),
    }
    let path = watched::path("PATH").unwrap_or_default();
    match env::split_paths(&path).map(|dir| dir.join("nvcc")).find(|nvcc| nvcc.is_file()) {
        Some(nvcc) => accept("PATH", &nvcc, &mut refused).ok_or(Missing(refused)),
        None => {
            refused.push("PATH (no nvcc)".to_owned());
            Err(Missing(refused))
        }
    }
}

/// The Python that builds the wheel (maturin names it), or the one a plain `cargo build` would meet.
fn building_python() -> PathBuf {
    let named = ["PYO3_PYTHON", "PYTHON_SYS_EXECUTABLE"].into_iter().find_map(watched::path);
    // Decides what is importable.
    watched::path("PYTHONPATH");
    named.map_or_else(
        || {
            watched::path("PATH");
            PathBuf::from("python3")
        },
        PathBuf::from,
    )
}

fn from_python(refused: &mut Vec<String>) -> Option<PathBuf> {
    const SCRIPT: &str = "from importlib.util import find_spec
spec = find_spec('nvidia')
print(*(spec.submodule_search_locations or ()) if spec else (), sep='\\n')";
    let python = building_python();
    let shown = python.display();
    let output = match Command::new(&python).args(["-c", SCRIPT]).output() {
        Ok(output) if output.status.success() => output.stdout,
        Ok(_) => {
            refused.push(format!("{shown} (cannot run find_spec)"));
            return None;
        }
        Err(error) => {
            refused.push(format!("{shown} ({error})"));
            return None;
        }
    };
    let mut seen = false;
    for folder in String::from_utf8_lossy(&output).lines().filter(|line| !line.is_empty()) {
        let nvcc = Path::new(folder).join("cu13/bin/nvcc");
        if nvcc.is_file() {
            seen = true;
            if let Some(nvcc) = accept(&format!("wheels of {shown}"), &nvcc, refused) {
                return Some(nvcc);
            }
        }
    }
    if !seen {
        refused.push(format!("wheels of {shown} (no nvidia/cu13/bin/nvcc)"));
    }
    None
}

fn accept(origin: &str, nvcc: &Path, refused: &mut Vec<String>) -> Option<PathBuf> {
    let reason = match release(nvcc) {
        Ok(found) if found == RELEASE => return Some(nvcc.to_owned()),
        Ok(found) => format!("is release {found}"),
        Err(error) => error,
    };
    refused.push(format!("{origin} ({} {reason})", nvcc.display()));
    None
}

/// The release an nvcc reports, such as `13.0`.
fn release(nvcc: &Path) -> Result<String, String> {
    let output =
        Command::new(nvcc).arg("--version").output().map_err(|error| format!("does not run: {error}"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let after = text.split_once("release ").map(|(_, rest)| rest);
    match after.and_then(|rest| rest.split([',', ' ', '\n']).next()) {
        Some(release) if output.status.success() => Ok(release.to_owned()),
        _ => Err("does not report a release".to_owned()),
    }
}
