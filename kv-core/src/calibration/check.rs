//! Checks that a calibration fits a cache.
use crate::calibration::{Calibration, PlaneCalibration};
use crate::error::CalibrationError;
use crate::geometry::PlaneLayout;
use crate::ids::{LayerId, Plane};
use crate::num::to_usize;

/// The place of a number, for errors.
#[derive(Debug, Clone, Copy)]
pub(super) struct At {
    pub(super) layer: LayerId,
    pub(super) plane: Plane,
}

impl At {
    pub(super) fn shape(
        self,
        what: &'static str,
        expected: usize,
        got: usize,
    ) -> Result<(), CalibrationError> {
        if got == expected {
            return Ok(());
        }
        let Self { layer, plane } = self;
        Err(CalibrationError::Shape { layer, plane, what, expected, got })
    }

    pub(super) fn values(
        self,
        what: &'static str,
        must: &'static str,
        values: &[f32],
        good: fn(f32) -> bool,
    ) -> Result<(), CalibrationError> {
        let Self { layer, plane } = self;
        match values.iter().enumerate().find(|(_, value)| !good(**value)) {
            None => Ok(()),
            Some((index, &value)) => {
                Err(CalibrationError::Value { layer, plane, what, index, value, must })
            }
        }
    }
}

/// Returns whether one may divide by a number.
fn divides(x: f32) -> bool {
    x.is_finite() && x > 0.0 && x.recip().is_finite()
}

impl Calibration {
    /// Refuses a calibration for another number of layers.
    pub(crate) fn check_layers(&self, expected: usize) -> Result<(), CalibrationError> {
        let got = self.layers().len();
        if got == expected { Ok(()) } else { Err(CalibrationError::Layers { expected, got }) }
    }
}

impl PlaneCalibration {
    /// Checks every list against the plane of a layer, used or not. Allocates nothing.
    ///
    /// # Errors
    /// [`CalibrationError`]: a list of the wrong shape or an impossible number.
    pub fn check(
        &self,
        layer: LayerId,
        plane: Plane,
        layout: &PlaneLayout,
    ) -> Result<(), CalibrationError> {
        let at = At { layer, plane };
        let heads = to_usize(layout.num_kv_heads());
        let channels = heads * to_usize(layout.head_dim());
        if !self.scales.is_empty() && self.scales.len() != 1 {
            at.shape("scales", heads, self.scales.len())?;
        }
        at.values("scales", "finite and above 0", &self.scales, divides)?;
        let magnitude = |x: f32| x.is_finite() && x >= 0.0;
        for (what, list) in [("amax", &self.amax), ("amax_transformed", &self.amax_transformed)] {
            if !list.is_empty() {
                at.shape(what, heads, list.len())?;
            }
            at.values(what, "finite and not negative", list, magnitude)?;
        }
        for (what, list) in [("mean", &self.mean), ("balance", &self.balance)] {
            if list.is_empty() {
                continue;
            }
            if at.plane == Plane::Value {
                return Err(CalibrationError::NotForValues { layer: at.layer, what });
            }
            at.shape(what, channels, list.len())?;
        }
        at.values("mean", "finite", &self.mean, f32::is_finite)?;
        at.values("balance", "finite and above 0", &self.balance, divides)
    }
}
