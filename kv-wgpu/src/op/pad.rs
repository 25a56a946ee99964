//! Padding: rows of an output that belong to no entry.
use kv_core::error::DeviceError;

use crate::params::{PadParams, Tensor};
use crate::pipelines::Kernel;
use crate::recording::{Recorder, Slot};

/// Rows that belong to the entries of a batch.
#[derive(Debug, Clone)]
pub(crate) struct Owned {
    /// List with the first row and the number of rows of each entry.
    pub(crate) lists: Slot,
    /// Word of the list at which they begin.
    pub(crate) entries: u32,
    /// Number of entries.
    pub(crate) count: u32,
    /// Rows of all entries together.
    pub(crate) total: u32,
}

fn kernel() -> Kernel {
    Kernel::new("pad.wgsl")
}

#[cfg(test)]
pub(crate) fn kernels() -> Vec<Kernel> {
    vec![kernel()]
}

/// Sets every row of `out` that belongs to no entry to `value`.
pub(crate) fn pad_rows(
    recorder: &mut Recorder,
    (out, slot): (Tensor, Slot),
    owned: Owned,
    value: f32,
) -> Result<(), DeviceError> {
    let rows = u64::from(out.batch) * u64::from(out.tokens);
    // No entry has more rows than fit, so an equal total means that no row is left over.
    if u64::from(owned.total) >= rows {
        return Ok(());
    }
    let Owned { lists, entries, count: num_entries, total } = owned;
    let params = PadParams { out, num_entries, total, value, entries };
    let groups = recorder.groups(rows)?;
    recorder.dispatch(&kernel(), &params, &[lists, slot], groups)
}
