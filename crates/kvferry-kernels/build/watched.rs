//! Environment variables, each watched from the moment it is read: one that was not looked at changes nothing.

use std::env;
use std::ffi::OsString;

use anyhow::{Result, anyhow};

/// The value of a variable; an empty one counts as unset.
pub(crate) fn path(name: &str) -> Option<OsString> {
    println!("cargo::rerun-if-env-changed={name}");
    env::var_os(name).filter(|value| !value.is_empty())
}

/// The value of a variable that must be text; an empty one is passed on, for the reader to refuse.
pub(crate) fn text(name: &str) -> Result<Option<String>> {
    println!("cargo::rerun-if-env-changed={name}");
    let value = env::var_os(name).map(OsString::into_string).transpose();
    value.map_err(|value| anyhow!("{name}={value:?} is not UTF-8"))
}
