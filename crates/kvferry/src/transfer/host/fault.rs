//! Faults for unit tests: no honest input makes a validated copy fail, and what happens then must be tested all the same.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a failing helper fails its test")]

use std::sync::Mutex;

use super::split::Task;
use super::task::Work;
use crate::error::{Error, Result};
use crate::physical::PhysicalLayout;
use crate::transfer::lock;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// Tasks that write this destination block fail.
    Error(u32),
    /// They panic.
    Panic(u32),
}

static FAULTS: Mutex<Vec<(u64, Fault)>> = Mutex::new(Vec::new());

/// Makes copies into `dst` fail; for good, as layout ids are never reused.
pub(crate) fn set(dst: &PhysicalLayout, fault: Fault) {
    lock(&FAULTS).push((dst.id(), fault));
}

pub(crate) fn strike(work: &Work, task: Task) -> Result<()> {
    let faults: Vec<Fault> =
        lock(&FAULTS).iter().filter(|(id, _)| *id == work.dst.id()).map(|(_, fault)| *fault).collect();
    let blocks = work.blocks_of(task);
    for fault in faults {
        match fault {
            Fault::Error(block) if blocks.contains(&block) => {
                return Err(Error::Unsupported {
                    what: "this copy".to_owned(),
                    why: "it is a test".to_owned(),
                });
            }
            Fault::Panic(block) if blocks.contains(&block) => panic!("a test's panic"),
            _ => {}
        }
    }
    Ok(())
}
