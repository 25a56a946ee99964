//! Quality of decoded rows.
//!
//! Sums in f64 over all rows that are added. The error of rows alone misorders methods with
//! different transforms; attention depends on inner products with queries, so both are measured.

/// Squared error of decoded rows.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct RowError {
    signal: f64,
    noise: f64,
}

impl RowError {
    /// Adds a row and its decoded form; values past the shorter of the two are ignored.
    pub fn add(&mut self, original: &[f32], decoded: &[f32]) {
        for (original, decoded) in original.iter().zip(decoded) {
            let (x, y) = (f64::from(*original), f64::from(*decoded));
            self.signal += x * x;
            self.noise += (x - y) * (x - y);
        }
    }
    /// Returns `sum |x - x'|^2 / sum |x|^2`; NaN while only zeros were added.
    pub fn relative_mse(&self) -> f64 {
        self.noise / self.signal
    }
    /// Returns the ratio of signal to quantisation noise, in dB.
    pub fn sqnr_db(&self) -> f64 {
        -10.0 * self.relative_mse().log10()
    }
}

/// Error of inner products `<q, k'>` with decoded rows.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct ProductError {
    signal: f64,
    shift: f64,
    noise: f64,
    products: f64,
}

impl ProductError {
    /// Adds a query, a row and the row's decoded form.
    pub fn add(&mut self, query: &[f32], original: &[f32], decoded: &[f32]) {
        let (mut exact, mut error, mut q2, mut k2) = (0.0, 0.0, 0.0, 0.0);
        for ((query, original), decoded) in query.iter().zip(original).zip(decoded) {
            let (q, k, y) = (f64::from(*query), f64::from(*original), f64::from(*decoded));
            exact += q * k;
            error += q * (y - k);
            q2 += q * q;
            k2 += k * k;
        }
        let norms = q2 * k2;
        if norms > 0.0 {
            self.signal += exact * exact / norms;
            self.shift += exact * error / norms;
            self.noise += error * error / norms;
            self.products += 1.0;
        }
    }
    /// Returns the slope of `<q, k'>` over `<q, k>`, minus 1: 0 if products are neither stretched
    /// nor shrunk.
    pub fn bias(&self) -> f64 {
        self.shift / self.signal
    }
    /// Returns the mean of `<q, k' - k>^2 / (|q|^2 |k|^2)`. For errors without a preferred
    /// direction it is the relative squared error of a row divided by `head_dim`.
    pub fn relative_variance(&self) -> f64 {
        self.noise / self.products
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_rows_are_sums_of_squares() {
        let mut error = RowError::default();
        assert!(error.relative_mse().is_nan());
        error.add(&[3.0, 4.0], &[3.0, 3.0]);
        error.add(&[0.0, -5.0], &[0.0, -5.0]);
        assert_eq!(error.relative_mse().to_bits(), f64::to_bits(1.0 / 50.0));
        assert!((error.sqnr_db() - 16.9897).abs() < 1e-4);
    }

    #[test]
    fn a_shrunk_row_is_bias_and_an_orthogonal_error_is_not() {
        let mut shrunk = ProductError::default();
        shrunk.add(&[1.0, 2.0], &[3.0, 4.0], &[1.5, 2.0]);
        shrunk.add(&[0.0, 0.0], &[3.0, 4.0], &[1.5, 2.0]);
        assert!((shrunk.bias() + 0.5).abs() < 1e-12);
        let mut turned = ProductError::default();
        turned.add(&[1.0, 0.0], &[1.0, 0.0], &[1.0, 0.5]);
        turned.add(&[0.0, 1.0], &[1.0, 0.0], &[1.0, 0.5]);
        assert!(turned.bias().abs() < 1e-12);
        assert!((turned.relative_variance() - 0.125).abs() < 1e-12);
    }
}
