//! Graphs of what this library put on a stream.

use std::fmt;
use std::sync::Arc;

use cudarc::driver::sys::CUstreamCaptureMode_enum as Mode;

use super::{Gpu, Stream};
use crate::capture::RelaxedCapture;
use crate::context::ContextGuard;
use crate::error::Result;
use crate::raw::{self, CUgraph, CUgraphExec};

/// Work captured from a stream, to be launched any number of times. What it uses is kept by the driver's graph, see
/// [`Flight::capture`](crate::Flight::capture).
pub struct Graph {
    graph: CUgraph,
    exec: CUgraphExec,
    gpu: Arc<Gpu>,
}

// SAFETY: graphs may be used from any thread; launches of one are serialised by the driver, and destroying needs `&mut`.
unsafe impl Send for Graph {}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Graph({:?})", self.gpu)
    }
}

impl Graph {
    /// Captures what `work` puts on `stream` in the mode that spoils most, and makes it executable.
    ///
    /// # Errors
    /// The driver's refusal, for instance of a capture that was spoiled meanwhile, or the error of `work`; the capture has
    /// ended then, too.
    pub fn capture<E: From<crate::CudaError>>(
        cx: &ContextGuard<'_>,
        stream: &Stream,
        work: impl FnOnce() -> std::result::Result<(), E>,
    ) -> std::result::Result<Graph, E> {
        let gpu = Arc::clone(stream.gpu());
        let handle = gpu.usable(cx, stream.handle())?;
        // SAFETY: the stream exists and its context is current.
        unsafe { raw::cuStreamBeginCapture_v2(handle, Mode::CU_STREAM_CAPTURE_MODE_GLOBAL as u32) }?;
        let worked = work();
        let mut graph = std::ptr::null_mut();
        // SAFETY: the capture was begun above, by this thread; `graph` is a live pointer.
        let ended = unsafe { raw::cuStreamEndCapture(handle, &mut graph) };
        // Destroys what there is, on any way out.
        let mut made = Graph { graph, exec: std::ptr::null_mut(), gpu };
        worked?;
        ended?;
        let _relaxed = RelaxedCapture::enter()?;
        // SAFETY: the graph is whole; `exec` is a live pointer; no flags.
        unsafe { raw::cuGraphInstantiateWithFlags(&mut made.exec, graph, 0) }?;
        Ok(made)
    }

    /// Puts one run of the graph on `stream`.
    ///
    /// # Errors
    /// A guard or stream of another device, or the driver's refusal.
    pub fn launch(&self, cx: &ContextGuard<'_>, stream: &Stream) -> Result<()> {
        let handle = self.gpu.usable(cx, stream.handle())?;
        // SAFETY: both exist: the executable while `self` does, the stream by `usable`. What its nodes use is kept by the
        // graph's user objects.
        unsafe { raw::cuGraphLaunch(self.exec, handle) }
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        let outcome = self.gpu.enter().and_then(|_current| {
            let _relaxed = RelaxedCapture::enter()?;
            if !self.exec.is_null() {
                // SAFETY: instantiated by us, destroyed once; runs on their way end first.
                unsafe { raw::cuGraphExecDestroy(self.exec) }?;
            }
            if !self.graph.is_null() {
                // SAFETY: captured by us, destroyed once.
                unsafe { raw::cuGraphDestroy(self.graph) }?;
            }
            Ok::<(), crate::CudaError>(())
        });
        if let Err(error) = outcome {
            error.log_on_drop("destroying a graph");
        }
    }
}
