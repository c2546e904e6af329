//! The devices of this machine.

use std::ffi::{CStr, c_char};
use std::fmt::Write;

use cudarc::driver::sys::CUdevice_attribute_enum as Attribute;

use crate::driver::Driver;
use crate::error::Result;
use crate::raw::{self, CUdevice};

/// What a device is. Read once; nothing here changes while a process runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// The driver's number of the device in this process (after `CUDA_VISIBLE_DEVICES`).
    pub ordinal: u32,
    /// Name, such as "NVIDIA H200".
    pub name: String,
    /// Identity across processes and reboots, as nvidia-smi prints it: `GPU-` and five groups of hexadecimal digits.
    /// For a slice of a partitioned GPU these are the digits of the slice.
    pub uuid: String,
    /// Compute capability, such as (9, 0).
    pub compute_capability: (u32, u32),
    /// Streaming multiprocessors.
    pub sm_count: u32,
    /// Bytes of memory on the device.
    pub total_memory: usize,
    /// PCI address, such as "0000:1b:00.0" in lower case.
    pub pci_bus_id: String,
}

/// All devices that this process may see, by ordinal. Creates no context.
///
/// # Errors
/// Those of [`Driver::get`], and any failing device query.
pub fn devices() -> Result<Vec<DeviceInfo>> {
    let driver = Driver::get()?;
    (0..driver.device_count()).map(|ordinal| DeviceInfo::read(driver, ordinal)).collect()
}

impl DeviceInfo {
    /// The facts about one device.
    ///
    /// # Errors
    /// Those of [`Driver::get`], [`CudaError::InvalidDevice`](crate::CudaError::InvalidDevice), and any failing query.
    pub fn get(ordinal: u32) -> Result<DeviceInfo> {
        DeviceInfo::read(Driver::get()?, ordinal)
    }

    fn read(driver: &Driver, ordinal: u32) -> Result<DeviceInfo> {
        let device = driver.device(ordinal)?;
        let name = read_text(|text, len| {
            // SAFETY: `text` has room for `len` bytes, which the driver ends with a null.
            unsafe { raw::cuDeviceGetName(text, len, device) }
        })?;
        let pci_bus_id = read_text(|text, len| {
            // SAFETY: `text` has room for `len` bytes, which the driver ends with a null.
            unsafe { raw::cuDeviceGetPCIBusId(text, len, device) }
        })?;
        let mut uuid = [0; 16];
        // SAFETY: the driver writes 16 bytes, which `uuid` has.
        unsafe { raw::cuDeviceGetUuid_v2(&mut uuid, device) }?;
        let mut total_memory = 0;
        // SAFETY: `total_memory` is a live size_t.
        unsafe { raw::cuDeviceTotalMem_v2(&mut total_memory, device) }?;
        Ok(DeviceInfo {
            ordinal,
            name,
            uuid: uuid_text(&uuid),
            compute_capability: (
                attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            sm_count: attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            total_memory,
            pci_bus_id: pci_bus_id.to_ascii_lowercase(),
        })
    }
}

/// A device attribute that is never negative.
pub(crate) fn attribute(device: CUdevice, which: Attribute) -> Result<u32> {
    let mut value = 0;
    // SAFETY: `value` is a live integer; the driver checks the attribute.
    unsafe { raw::cuDeviceGetAttribute(&mut value, which as u32, device) }?;
    Ok(u32::try_from(value).unwrap_or(0))
}

/// A text that the driver writes into a buffer it is told the length of.
fn read_text(read: impl Fn(*mut c_char, i32) -> Result<()>) -> Result<String> {
    const LEN: usize = 256;
    let mut text = [0_u8; LEN];
    read(text.as_mut_ptr().cast(), LEN as i32)?;
    let text = CStr::from_bytes_until_nul(&text).unwrap_or_default();
    Ok(text.to_string_lossy().into_owned())
}

fn uuid_text(uuid: &[u8; 16]) -> String {
    let mut text = String::from("GPU");
    for (index, byte) in uuid.iter().enumerate() {
        if matches!(index, 0 | 4 | 6 | 8 | 10) {
            text.push('-');
        }
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuids_are_grouped() {
        let uuid = std::array::from_fn(|i| i as u8 * 17);
        assert_eq!(uuid_text(&uuid), "GPU-00112233-4455-6677-8899-aabbccddeeff");
    }

    #[test]
    fn texts_end_at_their_null() {
        let text = read_text(|to, _| {
            // SAFETY: the buffer has room for four bytes.
            unsafe { to.cast::<[u8; 4]>().write(*b"ab\0c") };
            Ok(())
        });
        assert_eq!(text.unwrap(), "ab");
    }
}
