//! Calibrations on disk: one JSON file per GPU and driver.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use kvferry_cuda::{DeviceInfo, Driver};
use serde::{Deserialize, Serialize};

use super::model::{CostModel, Curve, MODEL_VERSION};
use crate::error::{Error, Result};
use crate::transfer::TransferStrategy;

/// How far a measured constant may lie from the shipped one before it is taken for an accident.
const FAR: f64 = 2.0;

/// A calibration as it is saved.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Saved {
    /// The GPU's UUID.
    pub uuid: String,
    /// Its name.
    pub gpu: String,
    /// The driver.
    pub driver: String,
    /// When it was measured, in seconds since 1970.
    pub unix_seconds: u64,
    /// CPUs the process could use then: a host with other work on it, or a smaller slice of it, measures otherwise.
    pub cpus: usize,
    /// The constants.
    pub model: CostModel,
}

/// `KVFERRY_CACHE_DIR`, else the user's cache folder.
fn folder() -> Option<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    set("KVFERRY_CACHE_DIR")
        .or_else(|| set("XDG_CACHE_HOME").map(|cache| cache.join("kvferry")))
        .or_else(|| set("HOME").map(|home| home.join(".cache").join("kvferry")))
}

/// The kernel driver's version such as "580.159.04", or the API's where that cannot be read.
fn driver() -> String {
    let text = fs::read_to_string("/proc/driver/nvidia/version").unwrap_or_default();
    let number = |word: &&str| word.contains('.') && word.chars().all(|c| c.is_ascii_digit() || c == '.');
    match text.split_whitespace().find(number) {
        Some(version) => version.to_owned(),
        None => {
            Driver::get().map_or_else(|_| "none".to_owned(), |driver| driver.driver_version().to_string())
        }
    }
}

fn file(folder: &Path, info: &DeviceInfo) -> PathBuf {
    folder.join(format!("cost-{}-{}.json", info.uuid, driver()))
}

fn read(path: &Path, info: &DeviceInfo) -> Option<Saved> {
    let text = fs::read_to_string(path).ok()?;
    match serde_json::from_str::<Saved>(&text) {
        Ok(saved)
            if saved.uuid == info.uuid && saved.model.version == MODEL_VERSION && sane(&saved.model) =>
        {
            Some(saved)
        }
        Ok(_) => {
            tracing::warn!(path = %path.display(), "the saved calibration is of another GPU or version, or not sane");
            None
        }
        Err(error) => {
            tracing::warn!(path = %path.display(), %error, "cannot read the saved calibration");
            None
        }
    }
}

/// The constants saved for a GPU.
pub(super) fn load(info: &DeviceInfo) -> Option<CostModel> {
    Some(read(&file(&folder()?, info), info)?.model)
}

/// The calibration saved for a GPU under this driver, if there is one.
pub fn load_calibration(info: &DeviceInfo) -> Option<Saved> {
    read(&file(&folder()?, info), info)
}

/// Saves a calibration: under a lock, by renaming a whole file into place. Contexts made later use it.
///
/// # Errors
/// Constants that are no numbers; constants further than a factor of two from the shipped ones, unless `force` (eight
/// processes calibrating at once, or a busy host, would otherwise mislead every later run); no folder, or one that
/// cannot be written.
pub fn save_calibration(info: &DeviceInfo, model: &CostModel, force: bool) -> Result<PathBuf> {
    let refuse = |why: String| Error::Unsupported { what: "saving this calibration".to_owned(), why };
    if !sane(model) {
        return Err(refuse("its constants are not all positive numbers at rising run lengths".to_owned()));
    }
    if let Some(odd) = far_off(model).filter(|_| !force) {
        return Err(refuse(format!("{odd}; force it if that is right for this machine")));
    }
    let folder = folder().ok_or_else(|| refuse("neither KVFERRY_CACHE_DIR nor HOME is set".to_owned()))?;
    let path = file(&folder, info);
    let at = UNIX_EPOCH;
    let saved = Saved {
        uuid: info.uuid.clone(),
        gpu: info.name.clone(),
        driver: driver(),
        unix_seconds: SystemTime::now().duration_since(at).map_or(0, |since| since.as_secs()),
        cpus: kvferry_host::cpu::usable_cpus(),
        model: model.clone(),
    };
    let text = serde_json::to_string_pretty(&saved).map_err(|error| refuse(error.to_string()))?;
    write(&folder, &path, &text).map_err(|error| refuse(format!("{}: {error}", path.display())))?;
    Ok(path)
}

fn write(folder: &Path, path: &Path, text: &str) -> std::io::Result<()> {
    fs::create_dir_all(folder)?;
    let lock = OpenOptions::new().create(true).truncate(false).write(true).open(folder.join("lock"))?;
    lock.lock()?;
    let draft = path.with_extension(format!("{}.tmp", std::process::id()));
    let written = File::create(&draft).and_then(|mut file| {
        file.write_all(text.as_bytes())?;
        file.sync_all()
    });
    let placed = written.and_then(|()| fs::rename(&draft, path));
    if placed.is_err() {
        // What is left of the draft says nothing.
        let _ = fs::remove_file(&draft);
    }
    placed
}

fn curves(model: &CostModel) -> impl Iterator<Item = (TransferStrategy, &'static str, &Curve)> {
    TransferStrategy::ALL
        .into_iter()
        .filter_map(|strategy| Some((strategy, model.direction(strategy)?)))
        .flat_map(|(strategy, direction)| {
            [(strategy, "kernel", &direction.kernel), (strategy, "batch", &direction.batch)]
        })
}

fn sane(model: &CostModel) -> bool {
    let good = |value: f64| value.is_finite() && value > 0.0;
    curves(model).all(|(_, _, curve)| {
        good(curve.overhead_us)
            && !curve.points.is_empty()
            && curve.points.is_sorted_by(|a, b| a.0 < b.0)
            && curve.points.iter().all(|&(run, rate)| run > 0 && good(rate))
    }) && [&model.h2d, &model.d2h, &model.d2d, &model.p2p]
        .into_iter()
        .all(|direction| direction.ctas > 0 && direction.staged_overhead_us.is_finite())
}

/// The first constant that is further off the shipped ones than is likely.
fn far_off(model: &CostModel) -> Option<String> {
    let usual = CostModel::h200();
    for ((strategy, engine, measured), (_, _, shipped)) in curves(model).zip(curves(&usual)) {
        let (run, _) = *measured.points.last()?;
        let (found, expected) = (measured.rate(run) / 1e9, shipped.rate(run) / 1e9);
        if !(expected / FAR..=expected * FAR).contains(&found) {
            return Some(format!(
                "{strategy} by {engine} at runs of {run} bytes measured {found:.1} GB/s, the shipped constants say {expected:.1}"
            ));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu() -> DeviceInfo {
        DeviceInfo {
            ordinal: 0,
            name: "a test's GPU".to_owned(),
            uuid: "GPU-00000000-0000-0000-0000-000000000001".to_owned(),
            compute_capability: (9, 0),
            sm_count: 132,
            total_memory: 1,
            pci_bus_id: String::new(),
        }
    }

    #[test]
    fn odd_constants_are_refused_unless_forced_and_insane_ones_always() {
        let mut model = CostModel::h200();
        assert!(far_off(&model).is_none() && sane(&model));
        for point in &mut model.h2d.kernel.points {
            point.1 /= 3.0;
        }
        let error = save_calibration(&gpu(), &model, false).unwrap_err().to_string();
        assert!(error.contains("h2d by kernel"), "{error}");
        model.d2h.batch.points[0].1 = f64::NAN;
        assert!(save_calibration(&gpu(), &model, true).is_err());
    }

    #[test]
    fn what_was_written_is_read_and_foreign_files_are_not() {
        let folder = std::env::temp_dir().join(format!("kvferry-store-{}", std::process::id()));
        let path = folder.join("cost.json");
        let saved = Saved {
            uuid: gpu().uuid,
            gpu: gpu().name,
            driver: driver(),
            unix_seconds: 1,
            cpus: 2,
            model: CostModel::h200(),
        };
        write(&folder, &path, &serde_json::to_string(&saved).unwrap()).unwrap();
        assert_eq!(read(&path, &gpu()), Some(saved));
        let other = DeviceInfo { uuid: "GPU-other".to_owned(), ..gpu() };
        assert_eq!(read(&path, &other), None);
        write(&folder, &path, "{\"uuid\": 3}").unwrap();
        assert_eq!(read(&path, &gpu()), None);
        fs::remove_dir_all(&folder).unwrap();
    }
}
