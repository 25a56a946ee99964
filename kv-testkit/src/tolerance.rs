//! Tolerances, which are derived and never typed in.
//!
//! A result passes if its error is at most twice the error of the plain computation in the same
//! input precision, plus one ulp of the output format. The plain computation's error is the largest
//! over all orders of its loops and over the whole tensor, relative to the magnitude that a
//! first-order analysis gives each element, so that no lucky element decides. It counts as at least
//! half of one rounding of these terms, so a result may always be off by one.
use kv_core::DType;

use crate::oracle::{round, ulp};

/// Half the relative error of one rounding to f32.
const PLAIN_ERROR_MIN: f64 = 1.0 / (1_u64 << 25) as f64;

/// Expected values of a tensor and their tolerance.
#[derive(Debug, Clone, Copy)]
pub struct Reference<'a> {
    /// The oracle's values.
    pub exact: &'a [f64],
    /// The plain computation's values in every order, before rounding to `dtype`.
    pub plain: [&'a [f64]; 3],
    /// The magnitude that rounding errors are proportional to, by element.
    pub magnitude: &'a [f64],
    /// Element type of the output.
    pub dtype: DType,
    /// Lower bound of the relative error: that of the plain computation on more inputs of the same
    /// distribution, for tensors too small to show it.
    pub floor: f64,
}

impl Reference<'_> {
    /// Returns the largest error of the plain computation relative to the magnitude, at least half
    /// of one rounding to f32.
    pub fn plain_error(&self) -> f64 {
        let error = |i: usize, plain: f64| {
            let error = (round(self.dtype, plain) - self.exact[i]).abs();
            // Infinity minus itself is NaN, which counts as no error. A plain value that overflowed
            // says nothing about the other elements, and an infinite limit would accept anything.
            if error > 0.0 && error.is_finite() { error / self.magnitude[i] } else { 0.0 }
        };
        let values = self.plain.iter().flat_map(|plain| plain.iter().enumerate());
        values.map(|(i, plain)| error(i, *plain)).fold(self.floor.max(PLAIN_ERROR_MIN), f64::max)
    }

    /// Checks a tensor.
    ///
    /// # Errors
    /// A message with the first element that is out of tolerance.
    pub fn check(&self, what: &str, got: &[f64]) -> Result<(), String> {
        if got.len() != self.exact.len() {
            return Err(format!("{what}: {} values, expected {}", got.len(), self.exact.len()));
        }
        let plain_error = self.plain_error();
        for (i, (&got, &exact)) in got.iter().zip(self.exact).enumerate() {
            let limit = 2.0 * plain_error * self.magnitude[i] + ulp(self.dtype, exact);
            // A value beyond the output format's range must equal its rounding.
            let near = got == exact
                || got == round(self.dtype, exact)
                || (exact.is_finite() && (got - exact).abs() <= limit);
            if !near {
                return Err(format!(
                    "{what}: element {i} of {} is {got:e}, expected {exact:e} within {limit:e} \
                     (plain computation: {:e})",
                    self.exact.len(),
                    self.plain[0][i]
                ));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_overflow_of_the_plain_computation_excuses_nothing() {
        let reference = Reference {
            exact: &[1e6, 1.0],
            plain: [&[1e6, 1.0]; 3],
            magnitude: &[1e6, 1.0],
            dtype: DType::F16,
            floor: 0.0,
        };
        assert!(reference.check("out", &[f64::INFINITY, 1.0]).is_ok());
        assert!(reference.check("out", &[f64::INFINITY, 2.0]).is_err());
        assert!(reference.check("out", &[-5.0, 1.0]).is_err());
        assert!(reference.check("out", &[f64::INFINITY, f64::NAN]).is_err());
    }

    #[test]
    fn allows_one_rounding_of_the_terms_where_the_plain_computation_was_lucky() {
        let exact = &[1e-3, 1.0];
        let reference = |magnitude| Reference {
            exact,
            plain: [exact; 3],
            magnitude,
            dtype: DType::F32,
            floor: 0.0,
        };
        let off = [1e-3 + 2_f64.powi(-24), 1.0];
        assert!(reference(&[1.0, 1.0]).check("x", &off).is_ok());
        assert!(reference(&[0.5, 1.0]).check("x", &off).is_err());
    }

    #[test]
    fn allows_twice_the_plain_error_and_one_ulp() {
        let plain = [1.0 + 4.0 * f64::from(f32::EPSILON), f64::NEG_INFINITY];
        let reference = Reference {
            exact: &[1.0, f64::NEG_INFINITY],
            plain: [&[1.0, f64::NEG_INFINITY], &plain, &[1.0, f64::NEG_INFINITY]],
            magnitude: &[1.0, 1.0],
            dtype: DType::F32,
            floor: 0.0,
        };
        let off = |ulps: f64| [1.0 + ulps * f64::from(f32::EPSILON), f64::NEG_INFINITY];
        assert!(reference.check("x", &off(9.0)).is_ok());
        assert!(reference.check("x", &off(9.5)).is_err());
        assert!(reference.check("x", &[f64::NAN, f64::NEG_INFINITY]).is_err());
        assert!(reference.check("x", &[1.0, 0.0]).is_err());
    }
}
