//! Tensors with one entry after another whose values lie together, such as recurrent states.
use kv_format::DType;

use super::{Dims, Meta, TensorData, TensorDataMut, TensorView, TensorViewMut};
use crate::error::{Expected, PlanError};
use crate::invariant::Invariant;
use crate::num::{to_offset, to_u64};

const CHECKED: &str = "a checked tensor has the bytes of all entries";

/// The required shape of such a tensor: `[b at least, ..]`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct EntryShape {
    entries: u32,
    shape: Dims,
    values: u32,
    row: u32,
}

impl EntryShape {
    /// Requires `entries` entries of `values` values in this shape; conversions take them as rows
    /// of `row` values, which divides `values`.
    pub(crate) fn new(entries: u32, shape: Dims, values: u32, row: u32) -> Self {
        Self { entries, shape, values, row }
    }

    /// Refuses a tensor of another shape or type, one whose entries are not dense, and one with
    /// fewer bytes in host memory than its entries have.
    fn check(
        &self,
        tensor: &'static str,
        meta: Meta,
        host_bytes: Option<usize>,
    ) -> Result<(), PlanError> {
        let Meta { dtype, dims: got, outer_strides: strides } = meta;
        if !dtype.is_float() {
            let expected = "f32, f16 or bf16";
            return Err(PlanError::ElementType { tensor, expected, got: dtype });
        }
        let own = self.shape.as_slice();
        let fits = match got.exact() {
            Some([entries, shape @ ..]) => *entries >= self.entries && shape == own,
            _ => false,
        };
        if !fits {
            let mut dims = vec![self.entries];
            dims.extend(own);
            let axes = "[b at least, ..]";
            let expected = Expected { axes, dims: Dims::new(&dims) };
            return Err(PlanError::Shape { tensor, expected, got });
        }
        let dense: u64 = own.iter().skip(1).map(|extent| u64::from(*extent)).product();
        match strides {
            Some(strides) if strides != [u64::from(self.values), dense] => {
                return Err(PlanError::NotDense { tensor, strides });
            }
            _ => {}
        }
        let (bytes, _) = self.bytes(dtype, 0);
        let needed = bytes * u64::from(self.entries);
        match host_bytes.map(to_u64) {
            Some(got) if got < needed => Err(PlanError::TensorBytes { tensor, needed, got }),
            _ => Ok(()),
        }
    }

    /// Returns the bytes of an entry, and where they begin.
    fn bytes(&self, dtype: DType, entry: usize) -> (u64, u64) {
        let bytes = u64::from(self.values) * to_u64(dtype.size());
        (bytes, bytes * to_u64(entry))
    }

    fn meta(&self, dtype: DType) -> Meta {
        Meta::dense(dtype, &[self.values / self.row, 1, self.row])
    }
}

impl<Buf> TensorView<'_, Buf> {
    /// Refuses a tensor that has not this shape.
    pub(crate) fn check_entries(&self, shape: &EntryShape) -> Result<(), PlanError> {
        let host_bytes = match self.data {
            TensorData::Host(all) => Some(all.len()),
            TensorData::Device { .. } => None,
        };
        shape.check("state", self.meta, host_bytes)
    }
    /// Returns one entry of a tensor that was checked, as rows.
    pub(crate) fn entry(&self, shape: &EntryShape, entry: usize) -> Self {
        let (bytes, begin) = shape.bytes(self.dtype(), entry);
        let data = match self.data {
            TensorData::Host(all) => {
                let part = all.get(to_offset(begin)..to_offset(begin + bytes));
                TensorData::Host(part.invariant(CHECKED))
            }
            TensorData::Device { buffer, offset } => {
                // The caller's offset may be any.
                TensorData::Device { buffer, offset: offset.saturating_add(begin) }
            }
        };
        Self { data, meta: shape.meta(self.dtype()) }
    }
}

impl<Buf> TensorViewMut<'_, Buf> {
    /// Refuses a tensor that has not this shape.
    pub(crate) fn check_entries(&self, shape: &EntryShape) -> Result<(), PlanError> {
        let host_bytes = match &self.data {
            TensorDataMut::Host(all) => Some(all.len()),
            TensorDataMut::Device { .. } => None,
        };
        shape.check("out", self.meta, host_bytes)
    }
    /// Returns one entry of a tensor that was checked, as rows.
    pub(crate) fn entry(&mut self, shape: &EntryShape, entry: usize) -> TensorViewMut<'_, Buf> {
        let dtype = self.dtype();
        let (bytes, begin) = shape.bytes(dtype, entry);
        let data = match &mut self.data {
            TensorDataMut::Host(all) => {
                let part = all.get_mut(to_offset(begin)..to_offset(begin + bytes));
                TensorDataMut::Host(part.invariant(CHECKED))
            }
            TensorDataMut::Device { buffer, offset } => {
                // The caller's offset may be any.
                TensorDataMut::Device { buffer: *buffer, offset: offset.saturating_add(begin) }
            }
        };
        TensorViewMut { data, meta: shape.meta(dtype) }
    }
}
