//! To come.
use kv_core::DeviceError;
use kv_core::plan::{GatherArgs, GatherPlan};

use crate::buffer::WgpuBuffer;
use crate::device::unsupported;
use crate::pipelines::Kernel;
use crate::queue::WgpuQueue;

#[cfg(test)]
pub(crate) fn kernels() -> Vec<Kernel> {
    Vec::new()
}

pub(crate) fn gather(
    _queue: &mut WgpuQueue,
    _plan: &GatherPlan<'_>,
    _args: GatherArgs<'_, WgpuBuffer>,
) -> Result<(), DeviceError> {
    Err(unsupported("gather", "not there yet"))
}
