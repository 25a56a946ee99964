//! Constants of a cache's layers, checked once, and the encoding key that they determine.
use xxhash_rust::xxh3::Xxh3Default;

use crate::calibration::{Calibration, CalibrationError, PlaneConstants};
use crate::geometry::{BlockOrder, PlaneLayout};
use crate::ids::LayerId;
use crate::ids::Plane;
use crate::spec::CacheSpec;

/// A calibration that fits a cache, and the key of the encoding.
#[derive(Debug)]
pub(super) struct Constants {
    calibration: Option<Calibration>,
    key: u128,
}

impl Constants {
    /// Checks every layer of `spec` before anything is allocated.
    pub(super) fn new(
        spec: &CacheSpec,
        calibration: Option<Calibration>,
    ) -> Result<Self, CalibrationError> {
        let mut hash = Xxh3Default::new();
        let mut constants = Self { calibration, key: 0 };
        // With layers on demand, the calibration decides their number.
        let on_demand = spec.layers_on_demand();
        if let Some(calibration) = constants.calibration.as_ref().filter(|_| !on_demand) {
            calibration.check_layers(usize::from(spec.num_layers()))?;
        }
        for group in spec.groups() {
            for layout in group.layouts() {
                hash_layout(&mut hash, layout);
            }
            let known = constants.calibration.as_ref().map_or(0, |c| c.layers().len());
            // A calibration of more layers than there are ids is cut.
            let known: Vec<_> =
                (0..u16::try_from(known).unwrap_or(u16::MAX)).map(LayerId).collect();
            let layers = if on_demand { &known } else { group.layers() };
            for layer in layers {
                hash.update(&layer.0.to_le_bytes());
                for plane in constants.layer(*layer, group.layouts())?.iter().flatten() {
                    hash.update(bytemuck::cast_slice(plane.values()));
                }
            }
        }
        constants.key = hash.digest128();
        Ok(constants)
    }

    /// Returns the constants of K and V of one layer.
    pub(super) fn layer(
        &self,
        layer: LayerId,
        [k, v]: &[PlaneLayout; 2],
    ) -> Result<[Option<PlaneConstants>; 2], CalibrationError> {
        let given = self.calibration.as_ref().and_then(|all| all.layer(layer));
        Ok([
            PlaneConstants::new(layer, Plane::Key, k, given.map(|given| &given.k))?,
            PlaneConstants::new(layer, Plane::Value, v, given.map(|given| &given.v))?,
        ])
    }

    pub(super) fn key(&self) -> u128 {
        self.key
    }
}

/// Hashes the fields of a layout that the bytes of a block depend on.
fn hash_layout(hash: &mut Xxh3Default, layout: &PlaneLayout) {
    let order = match layout.order() {
        BlockOrder::Nhd => 0,
        BlockOrder::Hnd => 1,
    };
    let numbers = [
        layout.block_size(),
        layout.num_kv_heads(),
        layout.head_dim(),
        order,
        u32::from(layout.transforms()),
        layout.slot_map().full_precision_prefix(),
        layout.slot_map().wide_slots(),
        u32::from(layout.slot_map().has_tail()),
        u32::from(layout.has_block_means()),
    ];
    for n in numbers {
        hash.update(&n.to_le_bytes());
    }
    // The length separates neighbouring fields.
    let name = layout.format().to_string();
    hash.update(&crate::num::to_u64(name.len()).to_le_bytes());
    hash.update(name.as_bytes());
}
