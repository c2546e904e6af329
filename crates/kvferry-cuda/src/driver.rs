//! The driver of this process: is there one, how new is it, how many devices.

use std::fmt;
use std::sync::OnceLock;

use crate::error::{CudaError, NO_DEVICE, Result};
use crate::raw;

/// The CUDA version a driver supports, such as 13.0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DriverVersion(i32);

/// Oldest driver API that loads the compiled kernels: CUDA 13.0, which came with driver 580.
pub const KERNELS_NEED: DriverVersion = DriverVersion::new(13, 0);

impl DriverVersion {
    /// Version `major.minor`.
    pub const fn new(major: i32, minor: i32) -> DriverVersion {
        DriverVersion(major * 1000 + minor * 10)
    }

    /// Major version.
    pub fn major(self) -> i32 {
        self.0 / 1000
    }

    /// Minor version.
    pub fn minor(self) -> i32 {
        self.0 % 1000 / 10
    }
}

impl fmt::Display for DriverVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major(), self.minor())
    }
}

/// The initialised CUDA driver.
#[derive(Debug)]
pub struct Driver {
    version: DriverVersion,
    device_count: u32,
}

impl Driver {
    /// Loads libcuda and initialises it (`cuInit`) on the first call; later calls give the same outcome at once.
    ///
    /// # Errors
    /// [`CudaError::DriverNotFound`] without a driver, [`CudaError::NoDevice`] without a visible device,
    /// [`CudaError::Driver`] if initialisation fails. An old driver is not an error here, see
    /// [`require_kernels`](Self::require_kernels).
    pub fn get() -> Result<&'static Driver> {
        static DRIVER: OnceLock<Result<Driver>> = OnceLock::new();
        DRIVER.get_or_init(Driver::initialise).as_ref().map_err(Clone::clone)
    }

    fn initialise() -> Result<Driver> {
        // SAFETY: may be called any number of times from any thread; flags must be 0.
        let outcome = unsafe { raw::cuInit(0) };
        outcome.map_err(|error| match error.code() {
            Some(NO_DEVICE) => CudaError::NoDevice,
            _ => error,
        })?;
        let mut version = 0;
        // SAFETY: `version` is a live integer.
        unsafe { raw::cuDriverGetVersion(&mut version) }?;
        let mut count = 0;
        // SAFETY: `count` is a live integer.
        unsafe { raw::cuDeviceGetCount(&mut count) }?;
        let device_count = u32::try_from(count).unwrap_or(0);
        if device_count == 0 {
            return Err(CudaError::NoDevice);
        }
        tracing::debug!(version, device_count, "CUDA driver initialised");
        Ok(Driver { version: DriverVersion(version), device_count })
    }

    /// CUDA version the driver supports.
    pub fn driver_version(&self) -> DriverVersion {
        self.version
    }

    /// Number of devices this process may see, at least 1. Their ordinals are 0 to this number less one.
    pub fn device_count(&self) -> u32 {
        self.device_count
    }

    /// Ok if the driver can load the compiled kernels. Memory and copies work without.
    ///
    /// # Errors
    /// [`CudaError::DriverTooOld`] below [`KERNELS_NEED`].
    pub fn require_kernels(&self) -> Result<()> {
        if self.version < KERNELS_NEED {
            return Err(CudaError::DriverTooOld { found: self.version, needed: KERNELS_NEED });
        }
        Ok(())
    }

    /// The driver's handle of a device.
    pub(crate) fn device(&self, ordinal: u32) -> Result<raw::CUdevice> {
        let invalid = CudaError::InvalidDevice { ordinal, count: self.device_count };
        if ordinal >= self.device_count {
            return Err(invalid);
        }
        let index = i32::try_from(ordinal).map_err(|_| invalid)?;
        let mut device = 0;
        // SAFETY: `device` is a live integer; the driver checks the ordinal.
        unsafe { raw::cuDeviceGet(&mut device, index) }?;
        Ok(device)
    }

    /// The number of the device with this handle. Handles are compared, never computed with.
    pub(crate) fn ordinal(&self, device: raw::CUdevice) -> Option<u32> {
        (0..self.device_count).find(|&ordinal| self.device(ordinal).is_ok_and(|found| found == device))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_read_as_nvidia_writes_them() {
        assert_eq!(DriverVersion(12080).to_string(), "12.8");
        assert_eq!(DriverVersion(13000).to_string(), "13.0");
        assert_eq!(DriverVersion::new(12, 9), DriverVersion(12090));
    }

    #[test]
    fn old_drivers_are_refused_for_kernels_only() {
        let old = Driver { version: DriverVersion::new(12, 9), device_count: 1 };
        let error = old.require_kernels().unwrap_err();
        assert_eq!(error, CudaError::DriverTooOld { found: DriverVersion(12090), needed: KERNELS_NEED });
        assert!(error.to_string().contains("12.9") && error.to_string().contains("13.0"), "{error}");
        let new = Driver { version: DriverVersion::new(13, 1), device_count: 1 };
        assert_eq!(new.require_kernels(), Ok(()));
        let error = new.device(1).unwrap_err();
        assert_eq!(error, CudaError::InvalidDevice { ordinal: 1, count: 1 });
    }
}
