//! Reads the bytes of cached rows from a device.
use kv_core::backend::{Backend, Plane};
use kv_core::{GroupId, SequenceId};

use crate::case::CaseError;
use crate::device::fetch;
use crate::fixture::CacheFixture;

/// Returns the rows of one plane, by sequence and token: the bytes of all heads, one after another.
pub(super) fn stored(
    fixture: &mut CacheFixture,
    layer: usize,
    plane: Plane,
    ids: &[SequenceId],
) -> Result<Vec<Vec<Vec<u8>>>, CaseError> {
    // There is one group, so a layer's number is its index.
    let group = GroupId(0);
    let storage = fixture.cache.storage(group).ok_or("a group without storage")?;
    let view = storage.plane(layer, plane).ok_or("a layer without planes")?;
    let layout = *view.layout();
    let mut segments = Vec::new();
    for index in 0..layout.num_segments() {
        let buffer = view.segment(index as usize).ok_or("a segment without a buffer")?;
        segments.push((buffer.clone(), layout.segment_bytes(index)));
    }
    let capabilities = fixture.backend.capabilities().clone();
    let mut all = Vec::new();
    for (buffer, bytes) in segments {
        all.push(fetch(&capabilities, fixture.cache.queue_mut(), &buffer, (0, bytes))?);
    }
    let sequence = |id: &SequenceId| {
        let (len, coded) = (fixture.model.len(*id).unwrap_or(0), fixture.model.coded(*id, layer));
        let table = fixture.cache.state().block_table(*id, group).unwrap_or_default();
        let row = |position: u32| {
            let found = layout.slot_map().place_in(position, coded);
            let (segment, begin) = layout.locate(table[found.index as usize].0);
            let size = if found.is_wide { layout.wide_row_bytes() } else { layout.row_bytes() };
            let head = |head: u32| {
                let at = (begin + layout.row_begin(found, head)) as usize;
                all[segment][at..at + size as usize].to_vec()
            };
            (0..layout.num_kv_heads()).flat_map(head).collect()
        };
        (0..len).map(row).collect()
    };
    Ok(ids.iter().map(sequence).collect())
}
