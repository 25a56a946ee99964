//! Replacement of constants while sequences are live: calibration from the first blocks of the
//! first sequence.
//!
//! Owns the exchange and its undo. Bytes that an exchange overwrites are first read back to the
//! host. After a device failure they are restored, at once or before anything else uses the rows.
use kv_format::DType;

use crate::backend::{Backend, Fence, Queue, Readback};
use crate::block::BlockTables;
use crate::cache::KvCache;
use crate::cache::constants::Constants;
use crate::cache::state::{Kept, Run, tokens};
use crate::calibration::{Calibration, PlaneConstants};
use crate::error::{CacheError, DeviceError, PlanError, StateProblem};
use crate::geometry::{Axes, PlaneLayout};
use crate::ids::BlockId;
use crate::ids::Plane;
use crate::invariant::Invariant;
use crate::num::to_u64;
use crate::plan::{GatherArgs, GatherPlan, PlanBuffers, WriteArgs};
use crate::storage::{KvStorage, PlaneView};
use crate::tensor::{TensorView, TensorViewMut};

/// Bytes of decoded rows of one plane that an exchange holds at a time, unless a block has more.
const DECODED_BYTES: u64 = 1 << 25;

/// Bytes that are read back, or restored, at a time, unless a block has more.
const SAVED_BYTES: u64 = 1 << 26;

const PLANES: [Plane; 2] = [Plane::Key, Plane::Value];

/// Old bytes of device memory.
#[derive(Debug)]
pub(super) struct Saved<Buf> {
    buffer: Buf,
    offset: u64,
    bytes: Vec<u8>,
}

/// A group of layers, its new constants, and the rows to encode with them.
#[derive(Debug)]
struct Exchange<Buf> {
    group: usize,
    kept: Kept,
    /// New constants of K and V, layer by layer.
    constants: Vec<[Option<Buf>; 2]>,
    /// Memory for decoded rows of K and V.
    decoded: Option<[Buf; 2]>,
}

impl<B: Backend> KvCache<B> {
    /// Replaces the scales and the transform's constants, and re-encodes every cached row that a
    /// live sequence can still read.
    ///
    /// This is how a cache calibrates itself: it is created without constants, the first few
    /// hundred tokens of the first sequence are observed, and after this call the constants stay.
    /// Rows that were quantised are rounded a second time. In groups with a sliding window, only
    /// blocks that a sequence still holds are re-encoded; a block that several sequences share is
    /// encoded once. Afterwards [`encoding_key`] is different, nothing cached before can be reused,
    /// and live sequences offer nothing more.
    ///
    /// The exchange applies whole or not at all. While it runs, the old bytes of every affected
    /// block are kept in host memory, and some rows lie in `f32` in device memory. If the device
    /// fails, the old bytes are restored. If that fails too, they stay in host memory, and every
    /// later call that begins a step or reads rows restores them first, or returns the device's
    /// error: no call sees partly exchanged rows.
    ///
    /// # Errors
    /// [`CacheError::Calibration`]; [`PlanError::State`] while a step is open, for layers on
    /// demand, while blocks are held for readers of their bytes ([`Self::hold_block`]), or if a
    /// sequence with a tail was truncated inside quantised tokens; the device's errors, among them
    /// `Unsupported` if a thread may not wait. Nothing changed.
    ///
    /// [`encoding_key`]: crate::scheduling::CacheState::encoding_key
    pub fn recalibrate(&mut self, calibration: Calibration) -> Result<(), CacheError> {
        self.recover();
        let constants = self.check_exchange(calibration)?;
        self.wait_for_all_reads()?;
        self.wipe()?;
        let exchanges = self.prepare_exchange(&constants)?;
        let saved = self.save(&exchanges)?;
        if let Err(failed) = self.exchange(&exchanges, &constants) {
            self.unrestored = saved;
            // Blocks that cannot be restored now are restored before rows are used again.
            let _ = self.restore();
            return Err(failed);
        }
        self.state.change_encoding(constants.key());
        self.constants = constants;
        Ok(())
    }

    /// Refuses impossible exchanges; changes nothing.
    fn check_exchange(&self, calibration: Calibration) -> Result<Constants, CacheError> {
        const OPERATION: &str = "recalibrate";
        let refuse = |problem| Err(PlanError::State { operation: OPERATION, problem }.into());
        self.state.check_closed(OPERATION)?;
        if self.state.spec().layers_on_demand() {
            return refuse(StateProblem::LayersOnDemand);
        }
        let blocks = self.state.num_holds();
        if blocks > 0 {
            return refuse(StateProblem::BlocksHeld { blocks });
        }
        let constants = Constants::new(self.state.spec(), Some(calibration))?;
        if let Some(sequence) = self.state.cut_in_codes() {
            return refuse(StateProblem::CutInCodes { sequence });
        }
        Ok(constants)
    }

    /// Allocates the memory of an exchange and uploads the new constants beside the old ones.
    fn prepare_exchange(
        &mut self,
        constants: &Constants,
    ) -> Result<Vec<Exchange<B::Buffer>>, CacheError> {
        let mut exchanges = Vec::new();
        for (number, spec) in self.state.spec().groups().iter().enumerate() {
            let layouts = *spec.layouts();
            if !layouts.iter().any(PlaneLayout::has_constants) {
                // Its bytes do not depend on constants.
                continue;
            }
            let [k, v] = layouts;
            let row_bytes = decoded_bytes(&k, 1).max(decoded_bytes(&v, 1));
            let most = DECODED_BYTES.checked_div(row_bytes).unwrap_or(1);
            let most = u32::try_from(most).invariant("a few megabytes hold fewer than 2^32 rows");
            let kept = self.state.kept_rows(number, most);
            let most = kept.batches.iter().map(|runs| tokens(runs)).max();
            let decoded = most.map(|most| {
                let [k, v] = layouts.map(|layout| self.backend.alloc(decoded_bytes(&layout, most)));
                Ok::<_, DeviceError>([k?, v?])
            });
            let mut uploaded = Vec::new();
            for layer in spec.layers() {
                let [k, v] = constants.layer(*layer, &layouts)?;
                let mut upload = |values: Option<PlaneConstants>| {
                    let Some(values) = values else {
                        return Ok(None);
                    };
                    let bytes: &[u8] = bytemuck::cast_slice(values.values());
                    let buffer = self.backend.alloc(to_u64(bytes.len()))?;
                    self.queue.upload(&buffer, 0, bytes)?;
                    Ok::<_, DeviceError>(Some(buffer))
                };
                uploaded.push([upload(k)?, upload(v)?]);
            }
            let (constants, decoded) = (uploaded, decoded.transpose()?);
            exchanges.push(Exchange { group: number, kept, constants, decoded });
        }
        Ok(exchanges)
    }

    /// Reads back everything that an exchange overwrites.
    fn save(
        &mut self,
        exchanges: &[Exchange<B::Buffer>],
    ) -> Result<Vec<Saved<B::Buffer>>, CacheError> {
        let mut saved = Vec::new();
        let mut pending = Vec::new();
        for exchange in exchanges {
            let storage = self.storages.get(exchange.group).invariant(super::STORAGE);
            let spec = self.state.spec().groups().get(exchange.group).invariant(super::STORAGE);
            for (index, layer) in spec.layers().iter().enumerate() {
                let old = self.constants.layer(*layer, spec.layouts())?;
                for (plane, old) in PLANES.into_iter().zip(old) {
                    let view = plane_of(storage, index, plane);
                    if let Some((buffer, old)) = view.constants().zip(old) {
                        let bytes = bytemuck::cast_slice(old.values()).to_vec();
                        saved.push(Saved { buffer: buffer.clone(), offset: 0, bytes });
                    }
                    for (segment, offset, bytes) in ranges(view.layout(), &exchange.kept.blocks) {
                        let buffer = view.segment(segment);
                        let buffer = buffer.invariant("a block lies in a segment");
                        let readback = self.queue.download(buffer, offset, bytes)?;
                        pending.push((buffer.clone(), offset, readback));
                    }
                }
            }
        }
        self.queue.flush()?;
        for (buffer, offset, readback) in pending {
            saved.push(Saved { buffer, offset, bytes: readback.wait()? });
        }
        Ok(saved)
    }

    /// Encodes rows with the new constants, installs these, and waits until the device is done.
    fn exchange(
        &mut self,
        exchanges: &[Exchange<B::Buffer>],
        constants: &Constants,
    ) -> Result<(), CacheError> {
        let determinism = self.state.spec().determinism();
        for exchange in exchanges {
            let storage = self.storages.get(exchange.group).invariant(super::STORAGE);
            let spec = self.state.spec().groups().get(exchange.group).invariant(super::STORAGE);
            for batch in &exchange.kept.batches {
                let entries: Vec<_> = batch.iter().map(Run::entry).collect();
                let layout = storage.layouts().first();
                let tables = self.state.tables(exchange.group);
                self.scratch.plan(layout, tables, &entries, 1, determinism)?;
                let work = (&mut self.queue, &self.scratch);
                encode_batch((storage, tables), exchange, batch, work)?;
            }
            for (index, layer) in spec.layers().iter().enumerate() {
                let new = constants.layer(*layer, spec.layouts())?;
                let new = new.each_ref().map(Option::as_ref);
                storage.upload_constants(&mut self.queue, index, new)?;
            }
        }
        Ok(self.finish()?)
    }

    /// Restores the bytes that a failed exchange has overwritten, if there was one.
    pub(super) fn restore(&mut self) -> Result<(), DeviceError> {
        if self.unrestored.is_empty() {
            return Ok(());
        }
        for saved in &self.unrestored {
            self.queue.upload(&saved.buffer, saved.offset, &saved.bytes)?;
        }
        self.finish()?;
        self.unrestored.clear();
        Ok(())
    }

    /// Waits until all recorded work is done, if the thread may wait.
    fn finish(&mut self) -> Result<(), DeviceError> {
        let fence = self.queue.submit()?;
        if self.backend.capabilities().blocking_wait {
            fence.wait()?;
        }
        Ok(())
    }
}

/// Decodes the rows of a batch in every layer, and encodes them with the new constants.
fn encode_batch<Q: Queue>(
    (storage, tables): (&KvStorage<Q::Buffer>, &BlockTables),
    exchange: &Exchange<Q::Buffer>,
    batch: &[Run],
    (queue, plans): (&mut Q, &PlanBuffers),
) -> Result<(), CacheError> {
    let Some(decoded) = &exchange.decoded else {
        return Ok(());
    };
    let layout = storage.layouts().first();
    let write = plans.write_plan(layout, tables);
    let ranges: Vec<_> = batch.iter().map(Run::range).collect();
    let rows = storage.layouts().rows().invariant("only rows have constants");
    let dims = rows.map(|layout| [tokens(batch), layout.num_kv_heads(), layout.head_dim()]);
    for (index, constants) in exchange.constants.iter().enumerate() {
        let mut views = Vec::with_capacity(PLANES.len());
        for (((plane, decoded), dims), new) in
            PLANES.into_iter().zip(decoded).zip(&dims).zip(constants)
        {
            let view = plane_of(storage, index, plane);
            let out = TensorViewMut::device(DType::F32, decoded, 0, dims);
            let plan = GatherPlan::new(view.layout(), tables, &ranges)?;
            queue.gather(&plan, GatherArgs::new(&plan, view, out, Axes::Thd)?)?;
            views.push(new.as_ref().map_or(view, |new| view.with_constants(new)));
        }
        let [k_rows, v_rows] = decoded;
        let [k_dims, v_dims] = &dims;
        let k = TensorView::device(DType::F32, k_rows, 0, k_dims);
        let v = TensorView::device(DType::F32, v_rows, 0, v_dims);
        let &[k_plane, v_plane] = views.as_slice() else {
            unreachable!("a view of K and one of V");
        };
        let args = WriteArgs::new(&write, k, v, Axes::Thd, k_plane, v_plane)?;
        queue.write_kv(&write, args)?;
    }
    Ok(())
}

/// Returns one plane of a layer. It has memory: layers on demand are refused.
fn plane_of<Buf: 'static>(
    storage: &KvStorage<Buf>,
    index: usize,
    plane: Plane,
) -> PlaneView<'_, Buf> {
    let view = storage.plane(index, plane);
    view.invariant("constants are not exchanged where layers may have no memory")
}

/// Returns the bytes of rows of `tokens` tokens in `f32`; `u64::MAX`, which no device has, if more.
fn decoded_bytes(layout: &PlaneLayout, tokens: u32) -> u64 {
    let row = [layout.num_kv_heads(), layout.head_dim()].map(u64::from);
    let values = row.into_iter().fold(u64::from(tokens), u64::saturating_mul);
    values.saturating_mul(to_u64(DType::F32.size()))
}

/// Returns the segment, offset and length of blocks in ascending order; neighbours are joined.
fn ranges(layout: &PlaneLayout, blocks: &[BlockId]) -> Vec<(usize, u64, u64)> {
    let mut ranges: Vec<(usize, u64, u64)> = Vec::new();
    for block in blocks {
        let ((segment, offset), size) = (layout.locate(block.0), layout.block_bytes());
        match ranges.last_mut() {
            Some((in_segment, begin, bytes))
                if *in_segment == segment
                    && *begin + *bytes == offset
                    && *bytes + size <= SAVED_BYTES =>
            {
                *bytes += size;
            }
            _ => ranges.push((segment, offset, size)),
        }
    }
    ranges
}
