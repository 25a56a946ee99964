//! The constants of one plane in the form for backends: one list of `f32`.
use kv_format::{KvFormat, Scaling};

use crate::calibration::PlaneCalibration;
use crate::calibration::check::At;
use crate::error::CalibrationError;
use crate::geometry::{PlaneLayout, constants_len};
use crate::ids::{LayerId, Plane};
use crate::num::to_usize;

/// Constants of one plane, folded so that a backend multiplies and adds without checks for absent
/// ones.
///
/// The list, with `H` kv heads of `d` channels; device memory holds it as it is:
///
/// | values | content |
/// |---|---|
/// | `H` | `scale` of each head: a value is `code * scale` |
/// | `H` | `1 / scale` |
/// | `H * d` | `mean` |
/// | `H * d` | `into`: `sign / balance` |
/// | `H * d` | `back`: `sign * balance` |
#[derive(Debug, Clone, PartialEq)]
pub struct PlaneConstants {
    heads: usize,
    head_dim: usize,
    values: Vec<f32>,
}

/// Constants of one kv head.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct HeadConstants<'a> {
    /// Given scale; 1 if rows have their own.
    pub scale: f32,
    /// Its reciprocal.
    pub inv_scale: f32,
    /// Subtracted first.
    pub mean: &'a [f32],
    /// Multiplies a row before the rotation.
    pub into: &'a [f32],
    /// Multiplies a row after the rotation back, and a query before its rotation.
    pub back: &'a [f32],
}

/// Returns the sign of channel `index` before the rotation: bit `index % 64` of the `index / 64`-th
/// output of `SplitMix64` (Steele et al. 2014) seeded with 0; a set bit is -1.
pub fn sign(index: u32) -> f32 {
    const STEP: u64 = 0x9E37_79B9_7F4A_7C15;
    let word = u64::from(index.div_euclid(64));
    let mut z = word.wrapping_add(1).wrapping_mul(STEP);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^= z >> 31;
    if z >> index.rem_euclid(64) & 1 == 1 { -1.0 } else { 1.0 }
}

impl PlaneConstants {
    /// Checks and folds the constants of one plane; `None` if the plane needs none.
    ///
    /// # Errors
    /// [`CalibrationError`]: a list of the wrong shape, an impossible number, a missing scale.
    pub fn new(
        layer: LayerId,
        plane: Plane,
        layout: &PlaneLayout,
        given: Option<&PlaneCalibration>,
    ) -> Result<Option<Self>, CalibrationError> {
        let at = At { layer, plane };
        let absent = PlaneCalibration::default();
        let given = given.unwrap_or(&absent);
        given.check(layer, plane, layout)?;
        let scales = scales(at, layout, given)?;
        if scales.is_none() && !layout.transforms() {
            return Ok(None);
        }
        let heads = to_usize(layout.num_kv_heads());
        let head_dim = to_usize(layout.head_dim());
        let channels = heads * head_dim;
        let scales = scales.unwrap_or_else(|| vec![1.0; heads]);
        let mut values = Vec::with_capacity(Self::len_of(heads, head_dim));
        values.extend(&scales);
        values.extend(scales.iter().map(|scale| scale.recip()));
        let used = |list: &[f32], absent: f32| match list {
            list if layout.transforms() && !list.is_empty() => list.to_vec(),
            _ => vec![absent; channels],
        };
        let signs = (0..layout.head_dim())
            .cycle()
            .map(|index| if layout.transforms() { sign(index) } else { 1.0 });
        // Block means replace the calibrated mean.
        let mean: &[f32] = if layout.has_block_means() { &[] } else { &given.mean };
        values.extend(used(mean, 0.0));
        let balance = used(&given.balance, 1.0);
        values.extend(balance.iter().zip(signs.clone()).map(|(balance, sign)| sign / balance));
        values.extend(balance.iter().zip(signs).map(|(balance, sign)| sign * balance));
        Ok(Some(Self { heads, head_dim, values }))
    }

    /// Returns the number of values for this many heads and channels.
    pub const fn len_of(heads: usize, head_dim: usize) -> usize {
        constants_len(heads, head_dim)
    }

    /// Returns the list.
    pub fn values(&self) -> &[f32] {
        &self.values
    }
    /// Returns the constants of one head, `None` past the last.
    pub fn head(&self, head: usize) -> Option<HeadConstants<'_>> {
        HeadConstants::of(&self.values, self.heads, self.head_dim, head)
    }
}

impl<'a> HeadConstants<'a> {
    /// Returns the constants of head `head` in a list of `heads` heads of `head_dim` channels, as
    /// [`PlaneConstants`] lays it out; `None` past the last head or the list's end.
    pub fn of(values: &'a [f32], heads: usize, head_dim: usize, head: usize) -> Option<Self> {
        let (scales, rest) = values.split_at_checked(heads)?;
        let (inverses, rest) = rest.split_at_checked(heads)?;
        let channels = heads.checked_mul(head_dim)?;
        let begin = head.checked_mul(head_dim)?;
        let list = |index: usize| {
            let from = channels.checked_mul(index)?.checked_add(begin)?;
            rest.get(from..from.checked_add(head_dim)?)
        };
        Some(Self {
            scale: *scales.get(head)?,
            inv_scale: *inverses.get(head)?,
            mean: list(0)?,
            into: list(1)?,
            back: list(2)?,
        })
    }
}

/// Returns the given scale of every head; `None` if the format's rows have their own.
fn scales(
    at: At,
    layout: &PlaneLayout,
    given: &PlaneCalibration,
) -> Result<Option<Vec<f32>>, CalibrationError> {
    let format = layout.format();
    let Some(scaling) = format.given_scales() else {
        return Ok(None);
    };
    let heads = to_usize(layout.num_kv_heads());
    if !given.scales.is_empty() {
        let expected = if scaling == Scaling::Tensor { 1 } else { heads };
        at.shape("scales", expected, given.scales.len())?;
        return Ok(Some(given.scales.iter().copied().cycle().take(heads).collect()));
    }
    let amax = if layout.transforms() { &given.amax_transformed } else { &given.amax };
    if amax.is_empty() {
        let At { layer, plane } = at;
        return Err(CalibrationError::MissingScale { layer, plane, format });
    }
    let whole = amax.iter().copied().fold(0.0, f32::max);
    let scale = |amax: f32| {
        let scale = amax / largest(format);
        // A head that was zero throughout the calibration needs no scale.
        if scale.recip().is_finite() { scale } else { 1.0 }
    };
    Ok(Some(match scaling {
        Scaling::Head => amax.iter().map(|amax| scale(*amax)).collect(),
        _ => vec![scale(whole); heads],
    }))
}

/// Returns the magnitude that becomes 1 times the scale. For floating-point codes it is half of the
/// largest value: that costs little precision and keeps later tokens that exceed the calibration's
/// from saturating. For integers it is the largest value, because half would cost a bit.
fn largest(format: KvFormat) -> f32 {
    match format {
        KvFormat::Fp8E4m3(_) => 448.0 / 2.0,
        KvFormat::Fp8E5m2(_) => 57344.0 / 2.0,
        KvFormat::Int8(_) => 127.0,
        // The largest E2M1 times the largest E4M3.
        KvFormat::Nvfp4 => 6.0 * 448.0 / 2.0,
        _ => 1.0,
    }
}
