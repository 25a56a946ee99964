//! `Calibrator`: the constants that stored formats take from rows of a model.
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::{fs, io};

use kv::quant::Calibration;
use kv::quant::calibrate;
use kv::quant::file::{self, Metadata};
use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;

use crate::tensor::Floats;

/// Observes K, V and Q of some tokens, layer by layer, and computes the constants of stored
/// formats: the mean and balance of `l3` to `l6`, and the scales of `fp8-e4m3`, `int8-head`, ..
///
/// A few hundred tokens of ordinary text suffice. The first `skip_first` positions of a sequence do
/// not count, 4 unless given: they are outliers, which a full-precision prefix of a cache keeps.
#[pyclass(frozen, module = "kvblock", weakref)]
#[derive(Debug)]
pub(crate) struct Calibrator {
    calibrator: Mutex<calibrate::Calibrator>,
}

impl Calibrator {
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut calibrate::Calibrator) -> T + Send,
    ) -> T {
        py.detach(|| call(&mut self.calibrator.lock().unwrap_or_else(PoisonError::into_inner)))
    }
}

#[pymethods]
impl Calibrator {
    #[new]
    #[pyo3(signature = (*, layers, kv_heads, head_dim, head_dim_v = None, skip_first = None))]
    fn new(
        layers: u16,
        kv_heads: u32,
        head_dim: u32,
        head_dim_v: Option<u32>,
        skip_first: Option<u32>,
    ) -> PyResult<Self> {
        let dims = [head_dim, head_dim_v.unwrap_or(head_dim)];
        let calibrator =
            calibrate::Calibrator::new(layers, kv_heads, dims).map_err(|error| refused(&error))?;
        let calibrator = match skip_first {
            Some(tokens) => calibrator.skip_first(tokens),
            None => calibrator,
        };
        Ok(Self { calibrator: Mutex::new(calibrator) })
    }

    /// Observes consecutive tokens of one sequence in one layer, as attention gets them: after
    /// rotary embeddings. All are float32, `[tokens, heads, head_dim]`; `first_position` is the
    /// position of the first token.
    #[pyo3(signature = (layer, q, k, v, *, first_position = 0))]
    fn observe(
        &self,
        py: Python<'_>,
        layer: u16,
        q: Bound<'_, PyAny>,
        k: Bound<'_, PyAny>,
        v: Bound<'_, PyAny>,
        first_position: u32,
    ) -> PyResult<()> {
        let axes = "[tokens, heads, head_dim]";
        let (q, k, v) =
            (Floats::of(&q, "q", axes)?, Floats::of(&k, "k", axes)?, Floats::of(&v, "v", axes)?);
        let [_, q_heads, _] = q.dims();
        let (q, k, v) = (q.rows()?, k.rows()?, v.rows()?);
        let observed = self.with(py, |calibrator| {
            let (q, k, v) = (q.values(), k.values(), v.values());
            calibrator.observe(layer, first_position, &k, &v, &q, q_heads)
        });
        observed.map_err(|error| refused(&error))
    }

    /// The number of counted tokens of the layer that has fewest.
    #[getter]
    fn tokens(&self, py: Python<'_>) -> u32 {
        self.with(py, |calibrator| calibrator.num_tokens())
    }

    /// Writes the constants to a safetensors file, for `Cache(calibration=path)`. `model` names the
    /// weights.
    #[pyo3(signature = (path, *, model = ""))]
    fn write(&self, py: Python<'_>, path: PathBuf, model: &str) -> PyResult<()> {
        let bytes = self.with(py, |calibrator| {
            let calibration = calibrator.finish().map_err(|error| refused(&error))?;
            let metadata = Metadata::of(calibrator, model);
            file::write(&calibration, &metadata).map_err(|error| refused(&error))
        })?;
        py.detach(|| fs::write(&path, bytes)).map_err(|error| failed(&error, &path))
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        format!("Calibrator({} tokens)", self.tokens(py))
    }
}

/// Reads the constants of a file.
///
/// # Errors
/// An `OSError`, and a `ValueError` for a file that is none.
pub(crate) fn read(path: &Path) -> PyResult<Calibration> {
    let bytes = fs::read(path).map_err(|error| failed(&error, path))?;
    let (calibration, _) = file::read(&bytes).map_err(|error| {
        PyValueError::new_err(format!("calibration {}: {error}", path.display()))
    })?;
    Ok(calibration)
}

/// Makes the `OSError` of a file, with its name.
fn failed(error: &io::Error, path: &Path) -> PyErr {
    PyOSError::new_err((error.raw_os_error(), error.to_string(), path.to_owned()))
}

fn refused(error: &dyn std::fmt::Display) -> PyErr {
    PyValueError::new_err(error.to_string())
}
