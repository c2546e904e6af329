//! What the unit tests of this crate share.

use crate::driver::Driver;

/// The driver, or None after saying why the test skips. With `KVFERRY_REQUIRE_GPU=1` a skip is a failure.
pub(crate) fn gpu() -> Option<&'static Driver> {
    match Driver::get() {
        Ok(driver) => Some(driver),
        Err(error) if std::env::var_os("KVFERRY_REQUIRE_GPU").is_some_and(|v| v == "1") => {
            panic!("KVFERRY_REQUIRE_GPU=1 and there is no GPU: {error}")
        }
        Err(error) => {
            eprintln!("skipped: {error}");
            None
        }
    }
}
