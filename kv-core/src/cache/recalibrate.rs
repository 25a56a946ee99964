//! Constants exchanged while sequences live: calibration from the first blocks of the first one.
use crate::backend::{Backend, Queue};
use crate::cache::constants::Constants;
use crate::cache::{KvCache, slot_map};
use crate::calibration::Calibration;
use crate::element::DType;
use crate::error::{CacheError, PlanError};
use crate::geometry::QkvFormat;
use crate::num::to_u64;
use crate::plan::{BatchEntry, GatherArgs, GatherPlan, GatherRange, WriteArgs};
use crate::storage::Plane;
use crate::tensor::{TensorView, TensorViewMut};

/// The K and V of one sequence in one layer, decoded to `f32`, `thd`, in memory of the device.
#[derive(Debug)]
struct Decoded<Buf> {
    group: usize,
    index: usize,
    row: u32,
    len: u32,
    rows: [Buf; 2],
}

impl<B: Backend> KvCache<B> {
    /// Exchanges the scales and the transform's constants, and encodes every cached row anew.
    ///
    /// This is how a cache calibrates itself: it is made without constants, the first few hundred
    /// tokens of the first sequence are observed on their way in, and from here on the constants
    /// stay. Rows that were codes are rounded a second time; those in 16 bits are not. Afterwards
    /// [`Self::encoding_key`] is another one, nothing cached before can be reused, and the live
    /// sequences offer nothing more.
    ///
    /// Takes memory of the device for all live rows in `f32` while it runs.
    ///
    /// # Errors
    /// - [`CacheError::Calibration`]; [`PlanError::State`] while a step is open, for layers on
    ///   demand, or when a sequence with a tail was cut inside codes; the device's own while rows
    ///   are read. Nothing changed.
    /// - The device's own while rows are written: live sequences must be released then.
    pub fn recalibrate(&mut self, calibration: Calibration) -> Result<(), CacheError> {
        const OPERATION: &str = "recalibrate";
        let refuse = |problem| Err(PlanError::State { operation: OPERATION, problem }.into());
        if self.is_step_open() {
            return refuse("a step is open");
        }
        if self.spec.layers_on_demand() {
            return refuse("layers come on demand: give the calibration when the cache is made");
        }
        let constants = Constants::new(&self.spec, Some(calibration))?;
        for (row, state) in self.sequences.iter() {
            for group in &self.groups {
                let (map, coded) = (slot_map(group), group.tables.coded(row));
                if map.has_tail() && map.coded_after(0, state.len) != coded {
                    return refuse("a sequence was cut inside codes");
                }
            }
        }
        let decoded = self.decode_all()?;
        for (spec, group) in self.spec.groups().iter().zip(&self.groups) {
            for (layer, index) in spec.layers().iter().zip(0..) {
                let constants = constants.layer(*layer, group.storage.layouts())?;
                let constants = constants.each_ref().map(Option::as_ref);
                group.storage.upload_constants(&mut self.queue, index, constants)?;
            }
        }
        for rows in &decoded {
            self.encode(rows)?;
        }
        self.queue.flush()?;
        self.constants = constants;
        self.restart_reuse();
        Ok(())
    }

    fn decode_all(&mut self) -> Result<Vec<Decoded<B::Buffer>>, CacheError> {
        let mut all = Vec::new();
        let live = self.sequences.iter().filter(|(_, state)| state.len > 0);
        for (row, len) in live.map(|(row, state)| (row, state.len)) {
            for (number, group) in self.groups.iter().enumerate() {
                let layers = self.spec.groups().get(number).map_or(0, |spec| spec.layers().len());
                for index in 0..layers {
                    let ranges = [GatherRange { row, begin: 0, len }];
                    let decode = |plane| {
                        let view = group.storage.plane(index, plane);
                        let view = view.ok_or(PlanError::State {
                            operation: "recalibrate",
                            problem: "a layer has no memory",
                        })?;
                        let layout = *view.layout();
                        let dims = [len, layout.num_kv_heads(), layout.head_dim()];
                        let values = dims.iter().fold(1_u64, |n, d| n.saturating_mul((*d).into()));
                        let bytes = values.saturating_mul(to_u64(DType::F32.size()));
                        let buffer = self.backend.alloc(bytes)?;
                        let out = TensorViewMut::device(DType::F32, &buffer, 0, &dims);
                        let plan = GatherPlan::new(&layout, &group.tables, &ranges)?;
                        let args = GatherArgs::new(&plan, view, out, QkvFormat::Thd)?;
                        self.queue.gather(&plan, args)?;
                        Ok::<_, CacheError>(buffer)
                    };
                    let rows = [Plane::Key, Plane::Value].map(decode);
                    let [k, v] = rows;
                    all.push(Decoded { group: number, index, row, len, rows: [k?, v?] });
                }
            }
        }
        Ok(all)
    }

    fn encode(&mut self, decoded: &Decoded<B::Buffer>) -> Result<(), CacheError> {
        let Decoded { group, index, row, len, rows: [k, v] } = decoded;
        let Some(group) = self.groups.get(*group) else {
            return Ok(());
        };
        let planes = group.storage.plane(*index, Plane::Key);
        let Some((k_plane, v_plane)) = planes.zip(group.storage.plane(*index, Plane::Value)) else {
            return Ok(());
        };
        let entry = BatchEntry { row: *row, cached: 0, new_tokens: *len, queries: 0 };
        let determinism = self.spec.determinism();
        let [layout, _] = group.storage.layouts();
        let (plan, _) = self.scratch.plan(layout, &group.tables, &[entry], 1, determinism)?;
        let dims = |plane: &crate::storage::PlaneView<'_, B::Buffer>| {
            [*len, plane.layout().num_kv_heads(), plane.layout().head_dim()]
        };
        let k = TensorView::device(DType::F32, k, 0, &dims(&k_plane));
        let v = TensorView::device(DType::F32, v, 0, &dims(&v_plane));
        let args = WriteArgs::new(&plan, k, v, QkvFormat::Thd, k_plane, v_plane)?;
        Ok(self.queue.write_kv(&plan, args)?)
    }
}
