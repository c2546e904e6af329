//! What may cross threads, and what is plain data.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a failing helper fails its test")]

use std::fmt::Debug;

use kvferry::all2all::{
    All2All, All2AllBuilder, CallOptions, ExchangeArray, ExchangeFailure, ExchangeResult, ExchangeStats,
    Output,
};
use kvferry::{
    Candidate, Choice, Error, HostMode, MemoryKind, PhysicalLayout, Region, Route,
    TransferCompleteNotification, TransferContext, TransferContextBuilder, TransferFailure, TransferOptions,
    TransferPlan, TransferResult,
};

fn shared<T: Send + Sync + 'static>() {}
fn unpin<T: Unpin>() {}
fn value<T: Clone + Debug + Send + Sync + 'static>() {}
fn error<T: std::error::Error + Send + Sync + 'static>() {}

#[test]
fn everything_crosses_threads() {
    shared::<TransferContext>();
    shared::<PhysicalLayout>();
    value::<TransferCompleteNotification>();
    value::<TransferContextBuilder>();
    value::<TransferOptions>();
    value::<TransferPlan>();
    value::<TransferResult>();
    value::<TransferFailure>();
    value::<Region>();
    value::<MemoryKind>();
    value::<Choice>();
    value::<Candidate>();
    value::<HostMode>();
    shared::<Route>();
    value::<All2All>();
    value::<All2AllBuilder>();
    value::<CallOptions>();
    value::<ExchangeArray>();
    value::<ExchangeResult>();
    value::<ExchangeStats>();
    value::<Output>();
    error::<ExchangeFailure>();
    error::<Error>();
    error::<TransferFailure>();
    unpin::<TransferCompleteNotification>();
    unpin::<TransferContext>();
}
