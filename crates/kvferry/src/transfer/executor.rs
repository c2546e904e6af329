//! The front door of the physical-layout CUDA transfer executor, as its users know it.

use std::ops::Range;
use std::sync::Arc;

use kvferry_cuda::StreamHandle;
use kvferry_layout::BlockId;

use super::completion::TransferCompleteNotification;
use super::context::TransferContext;
use super::options::TransferOptions;
use super::strategy::TransferStrategy;
use crate::error::{Error, Result};
use crate::physical::PhysicalLayout;

/// Copies blocks to, from or between GPUs along a CUDA strategy, choosing path and engine.
///
/// As [`TransferContext::transfer`], with the conventions of NVIDIA's executor (kvbm-physical): `layer_range` `None` is
/// all layers; without a stream the work runs on a stream of the context and the notification ends with it; **with a
/// stream nothing is reported: the notification has ended already and the caller synchronizes.** Layouts and ids are
/// guarded until the work is done all the same. An empty list succeeds and launches nothing.
///
/// ```no_run
/// use kvferry::{BlockId, MemoryKind, PhysicalLayout, TransferContext, TransferStrategy, execute_cuda_transfer};
/// # fn layouts() -> (kvferry::Layout, kvferry::Layout) { unimplemented!() }
/// let (cache, pool) = layouts();
/// let ctx = TransferContext::builder().device(0).build()?;
/// let cache = PhysicalLayout::allocate(cache, MemoryKind::Device(0))?;
/// let pool = PhysicalLayout::allocate(pool, MemoryKind::Pinned)?;
/// let (from, to) = ([BlockId(3), BlockId(5)], [BlockId(0), BlockId(1)]);
/// execute_cuda_transfer(&ctx, &cache, &pool, &from, &to, None, TransferStrategy::CudaAsyncD2H, None)?.wait(None)?;
/// # Ok::<(), kvferry::Error>(())
/// ```
///
/// # Errors
/// A strategy that is not a CUDA one or contradicts the memory; layer counts, outer dimensions or shapes that differ,
/// in this order, before any id is looked at; then as [`TransferContext::transfer`].
#[expect(clippy::too_many_arguments, reason = "the argument list of the executor it stands in for")]
pub fn execute_cuda_transfer(
    ctx: &TransferContext,
    src: &Arc<PhysicalLayout>,
    dst: &Arc<PhysicalLayout>,
    src_block_ids: &[BlockId],
    dst_block_ids: &[BlockId],
    layer_range: Option<Range<u64>>,
    strategy: TransferStrategy,
    stream: Option<StreamHandle>,
) -> Result<TransferCompleteNotification> {
    if strategy == TransferStrategy::Memcpy {
        return Err(Error::Unsupported {
            what: "strategy memcpy in the CUDA executor".to_owned(),
            why: "it copies to, from or between GPUs: use TransferContext::transfer".to_owned(),
        });
    }
    let options = TransferOptions {
        layers: layer_range,
        strategy: Some(strategy),
        stream,
        ..TransferOptions::default()
    };
    let route = ctx.route(src, dst, &options)?;
    if src_block_ids.is_empty() && dst_block_ids.is_empty() {
        return Ok(TransferCompleteNotification::completed(route.expected(0)));
    }
    let job = route.submit(src_block_ids, dst_block_ids)?;
    if stream.is_none() {
        return Ok(job);
    }
    Ok(TransferCompleteNotification::completed(route.expected(src_block_ids.len())))
}
