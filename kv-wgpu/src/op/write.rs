//! To come.
use kv_core::DeviceError;
use kv_core::plan::{WriteArgs, WritePlan};

use crate::buffer::WgpuBuffer;
use crate::device::unsupported;
use crate::pipelines::Kernel;
use crate::queue::WgpuQueue;

#[cfg(test)]
pub(crate) fn kernels() -> Vec<Kernel> {
    Vec::new()
}

pub(crate) fn write_kv(
    _queue: &mut WgpuQueue,
    _plan: &WritePlan<'_>,
    _args: &WriteArgs<'_, WgpuBuffer>,
) -> Result<(), DeviceError> {
    Err(unsupported("write_kv", "not there yet"))
}
