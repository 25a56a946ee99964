//! Rows of an output that no entry owns.
use kv_core::DeviceError;

use crate::params::{PadParams, Tensor};
use crate::pipelines::Kernel;
use crate::recording::{Recorder, Slot};

/// The rows that belong to the entries of a batch.
#[derive(Debug, Clone)]
pub(crate) struct Owned {
    /// First row and number of rows of each entry.
    pub(crate) lists: Slot,
    /// Word of the lists at which they begin.
    pub(crate) entries: u32,
    /// Entries.
    pub(crate) count: u32,
    /// Rows of all.
    pub(crate) total: u32,
}

fn kernel() -> Kernel {
    Kernel::new("pad.wgsl")
}

#[cfg(test)]
pub(crate) fn kernels() -> Vec<Kernel> {
    vec![kernel()]
}

/// Sets every row of `out` behind those of the entries to `value`.
pub(crate) fn pad_rows(
    recorder: &mut Recorder,
    (out, slot): (Tensor, Slot),
    owned: Owned,
    value: f32,
) -> Result<(), DeviceError> {
    let rows = u64::from(out.batch).saturating_mul(out.tokens.into());
    // No entry has more rows than there is room for, so as many as there are means that none is
    // free.
    if u64::from(owned.total) >= rows {
        return Ok(());
    }
    let Owned { lists, entries, count: num_entries, total } = owned;
    let params = PadParams { out, num_entries, total, value, entries };
    let groups = recorder.groups(rows)?;
    recorder.dispatch(&kernel(), &params, &[lists, slot], groups)
}
