//! Random bytes from the system.

use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};

/// `N` unpredictable bytes.
///
/// # Errors
/// The system has no random source (a sandbox that forbids `getrandom`).
pub fn random_bytes<const N: usize>() -> std::io::Result<[u8; N]> {
    let mut bytes = [0; N];
    let mut filled = 0;
    while filled < N {
        match getrandom(&mut bytes[filled..], GetRandomFlags::empty()) {
            Ok(got) => filled += got,
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(bytes)
}
