//! To come.
use kv_core::DeviceError;
use kv_core::plan::{AttendArgs, AttentionPlan};

use crate::buffer::WgpuBuffer;
use crate::device::unsupported;
use crate::pipelines::Kernel;
use crate::queue::WgpuQueue;

#[cfg(test)]
pub(crate) fn kernels() -> Vec<Kernel> {
    Vec::new()
}

pub(crate) fn attend(
    _queue: &mut WgpuQueue,
    _plan: &AttentionPlan<'_>,
    _args: AttendArgs<'_, WgpuBuffer>,
) -> Result<(), DeviceError> {
    Err(unsupported("attend", "not there yet"))
}
