//! A group's block tables on the device, row for row as the cache has them.
use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use kv_core::block::BlockTables;
use kv_core::{DeviceError, DeviceErrorKind};

use super::StepLimits;
use crate::buffer::CudaBuffer;
use crate::gpu::Gpu;
use crate::num::{to_u32, to_u64, to_usize};
use crate::params::Address;
use crate::scratch::Scratch;

/// One entry that is not as it should be: `tables[at] = block`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Change {
    pub(super) at: u32,
    pub(super) block: u32,
}

const _: () = assert!(size_of::<Change>() == 8, "two words each, as kernels have it");

/// What was sent of one row.
#[derive(Debug, Clone, Copy, Default)]
struct Sent {
    /// One more than the row's revision; 0 for a row of which nothing was sent.
    revision: u64,
    len: usize,
}

/// A copy of a group's block tables, `width` entries a row.
#[derive(Debug)]
pub(super) struct DeviceTables {
    memory: Scratch,
    address: Address,
    width: u32,
    rows: Vec<Sent>,
}

impl DeviceTables {
    pub(super) fn new(gpu: &Arc<dyn Gpu>) -> Self {
        Self { memory: Scratch::new(gpu), address: 0, width: 0, rows: Vec::new() }
    }

    pub(super) fn memory(&self) -> Option<&CudaBuffer> {
        self.memory.memory()
    }
    pub(super) fn address(&self) -> Address {
        self.address
    }
    pub(super) fn width(&self) -> u32 {
        self.width
    }

    /// Makes room for `rows` of the tables, and all others; what is there is lost when there was
    /// not enough. With limits there is room for `limits.1` blocks a row from the first step on,
    /// because the tables of the cache widen when a row first needs it.
    pub(super) fn fit(
        &mut self,
        batch: impl Iterator<Item = u32>,
        tables: &BlockTables,
        limits: Option<(StepLimits, u32)>,
    ) -> Result<(), DeviceError> {
        let rows = tables.num_rows();
        let longest = batch.map(|row| tables.row_len(row)).max().unwrap_or(0);
        if rows <= self.rows.len() && longest <= self.width {
            return Ok(());
        }
        let width = to_u32(tables.stride()).max(limits.map_or(0, |(_, width)| width));
        let room = match limits {
            None => rows.next_power_of_two(),
            Some((limits, _)) if rows <= to_usize(limits.cached_sequences) && self.width == 0 => {
                to_usize(limits.cached_sequences)
            }
            Some((limits, _)) => {
                let why = format!(
                    "{rows} sequences of {longest} blocks, and the limits of steps allow {} of {}",
                    limits.cached_sequences, self.width
                );
                return Err(
                    DeviceError::new(DeviceErrorKind::OutOfRange, "begin step").with_detail(why)
                );
            }
        };
        let entries = to_u64(room).saturating_mul(width.into());
        if u32::try_from(entries).is_err() {
            let why = format!("{entries} entries of block tables");
            return Err(
                DeviceError::new(DeviceErrorKind::Unsupported, "begin step").with_detail(why)
            );
        }
        (self.width, self.address) = (0, 0);
        self.rows.clear();
        self.address = self.memory.reserve(entries.max(1).saturating_mul(4))?;
        self.width = width;
        self.rows.resize(room, Sent::default());
        Ok(())
    }

    /// Lists what has to be sent so that `rows` are as in `tables`; taken for sent from then on.
    pub(super) fn changes(
        &mut self,
        rows: impl Iterator<Item = u32>,
        tables: &BlockTables,
        changes: &mut Vec<Change>,
    ) {
        changes.clear();
        for row in rows {
            let Some(sent) = self.rows.get_mut(to_usize(row)) else {
                continue;
            };
            let blocks = tables.row(row);
            let revision = tables.revision(row).saturating_add(1);
            let from = if sent.revision == revision { sent.len.min(blocks.len()) } else { 0 };
            *sent = Sent { revision, len: blocks.len() };
            let begin = row.saturating_mul(self.width).saturating_add(to_u32(from));
            // A slice, because every step comes by here with rows of thousands of blocks.
            let news = blocks.get(from..).unwrap_or_default();
            changes.extend(
                news.iter().zip(0_u32..).map(|(block, index)| Change {
                    at: begin.saturating_add(index),
                    block: block.0,
                }),
            );
        }
    }

    /// Takes nothing for sent.
    pub(super) fn forget(&mut self) {
        self.rows.fill(Sent::default());
    }
}
