//! To come.
use kv_core::DeviceError;
use kv_core::plan::{CopyArgs, CopyPlan};

use crate::buffer::WgpuBuffer;
use crate::device::unsupported;
use crate::pipelines::Kernel;
use crate::queue::WgpuQueue;

#[cfg(test)]
pub(crate) fn kernels() -> Vec<Kernel> {
    Vec::new()
}

pub(crate) fn copy_blocks(
    _queue: &mut WgpuQueue,
    _plan: &CopyPlan<'_>,
    _args: &CopyArgs<'_, WgpuBuffer>,
) -> Result<(), DeviceError> {
    Err(unsupported("copy_blocks", "not there yet"))
}
