//! Tensors with one entry after another whose values lie together: recurrent states of a batch.
use kv::backend::{AnyBuffer, AxisOrder, Strided};
use kv::{TensorView, TensorViewMut};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::card::Home;
use crate::tensor::{Described, Memory, Rows, Tensor, refused};

/// The axes of a tensor of states: that of entries, and one to three of a part.
const RANKS: std::ops::RangeInclusive<usize> = 2..=4;

/// A tensor of states whose values can be used in place.
pub(crate) struct Entries<'a, 'py> {
    tensor: Tensor<'a, 'py>,
    dims: Vec<u32>,
}

/// [`Entries`] without the interpreter: what a step takes.
#[derive(Debug)]
pub(crate) struct EntryRows<'a> {
    rows: Rows<'a>,
    dims: &'a [u32],
}

impl<'a, 'py> Entries<'a, 'py> {
    /// Reads an input. One whose values lie apart is copied first, as rows are.
    ///
    /// # Errors
    /// Those of [`Tensor::input`]; a `ValueError` for another number of axes than 2 to 4.
    pub(crate) fn input(object: &Bound<'py, PyAny>, name: &str, home: &'a Home) -> PyResult<Self> {
        let described = Described::of(object, name, home)?;
        let dims = dims_of(&described, name)?;
        if described.is_dense() && described.is_aligned() {
            return Self::placed(described, dims, name);
        }
        let Some(copy) = described.dense(object, AxisOrder::Thd)? else {
            return Err(if described.is_dense() {
                described.misaligned(name)
            } else {
                apart(name, &described.strides)
            });
        };
        Self::placed(Described::of(&copy, name, home)?, dims, name)
    }

    /// Reads an output, which is written in place.
    ///
    /// # Errors
    /// Those of [`Self::input`]; a `ValueError` for one that cannot be written in place.
    pub(crate) fn output(object: &Bound<'py, PyAny>, name: &str, home: &'a Home) -> PyResult<Self> {
        let described = Described::of(object, name, home)?;
        let dims = dims_of(&described, name)?;
        if described.is_read_only {
            return Err(PyValueError::new_err(format!("{name} is read-only")));
        }
        if !described.is_dense() {
            return Err(apart(name, &described.strides));
        }
        if !described.is_aligned() {
            return Err(described.misaligned(name));
        }
        Self::placed(described, dims, name)
    }

    fn placed(described: Described<'a, 'py>, dims: Vec<u32>, name: &str) -> PyResult<Self> {
        // All values as one row for each entry: their places in it are the cache's matter.
        let entries = described.shape.first().copied().unwrap_or_default();
        let mut inner = described.shape.iter().skip(1);
        let values = inner.try_fold(1_u64, |all, extent| all.checked_mul(*extent));
        let stride = values.and_then(|values| i64::try_from(values).ok());
        let too_large = || PyValueError::new_err(format!("{name} is too large"));
        let (values, stride) = values.zip(stride).ok_or_else(too_large)?;
        let placed = Strided::new(AxisOrder::Thd, &[entries, 1, values], &[stride, stride, 1]);
        Ok(Self { tensor: described.placed(placed.map_err(refused(name))?), dims })
    }

    /// Returns the tensor, to order its call with the work of others.
    pub(crate) fn tensor(&self) -> &Tensor<'a, 'py> {
        &self.tensor
    }

    /// Borrows the memory, for a call without the interpreter.
    pub(crate) fn rows(&self) -> PyResult<EntryRows<'_>> {
        Ok(EntryRows { rows: self.tensor.rows()?, dims: &self.dims })
    }
}

impl EntryRows<'_> {
    pub(crate) fn view(&self) -> TensorView<'_, AnyBuffer> {
        let dtype = self.rows.dtype;
        match &self.rows.memory {
            Memory::Host(memory) => TensorView::host_bytes(dtype, memory.bytes(), self.dims),
            Memory::Card(memory) => TensorView::device(dtype, memory.buffer(), 0, self.dims),
        }
    }

    pub(crate) fn view_mut(&mut self) -> TensorViewMut<'_, AnyBuffer> {
        let dtype = self.rows.dtype;
        match &mut self.rows.memory {
            Memory::Host(memory) => TensorViewMut::host_bytes(dtype, memory.bytes_mut(), self.dims),
            Memory::Card(memory) => TensorViewMut::device(dtype, memory.buffer(), 0, self.dims),
        }
    }
}

impl Described<'_, '_> {
    /// Returns whether all values lie one after another, in the order of the axes.
    fn is_dense(&self) -> bool {
        let mut dense = Some(1_i64);
        for (extent, stride) in self.shape.iter().zip(&self.strides).rev() {
            // The stride of an axis with one entry is never used.
            if *extent > 1 && Some(*stride) != dense && !self.shape.contains(&0) {
                return false;
            }
            let extent = i64::try_from(*extent).ok();
            dense = dense.zip(extent).and_then(|(dense, extent)| dense.checked_mul(extent));
        }
        true
    }
}

/// Returns the extents of a tensor of states.
fn dims_of(described: &Described<'_, '_>, name: &str) -> PyResult<Vec<u32>> {
    let shape = &described.shape;
    let dims = shape.iter().map(|extent| u32::try_from(*extent).ok()).collect::<Option<Vec<_>>>();
    dims.filter(|dims| RANKS.contains(&dims.len())).ok_or_else(|| {
        let expected = "[entries, ..] with 2 to 4 axes is expected";
        PyValueError::new_err(format!("{name} has shape {shape:?}, {expected}"))
    })
}

fn apart(name: &str, strides: &[i64]) -> PyErr {
    PyValueError::new_err(format!(
        "{name} has strides {strides:?}: the values of a state lie together, as in a new tensor"
    ))
}
