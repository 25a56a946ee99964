//! Bytes of Python tensors. The only module with unsafe code.
//!
//! A tensor says where its bytes are, and only its framework can know whether that is true. Every
//! address here comes from torch's own `Tensor`, or from a descriptor of `DLPack`.
#![allow(unsafe_code, reason = "Python lends memory as addresses; docs/unsafe.md has the rules")]
use std::marker::PhantomData;
use std::{ptr, slice};

use dlpark::python::consumer::ImportedDlpack;
use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;

use crate::tensor::torch;

/// Host memory of a Python object, for as long as the object is borrowed.
///
/// Other Python threads may write the same memory meanwhile, as they may under every extension that
/// lets the interpreter go. The bytes are then any bytes.
#[derive(Debug)]
pub(crate) struct Lent<'a> {
    /// Established by the constructors: `len` bytes from here are the owner's, or `len` is 0.
    begin: *mut u8,
    len: usize,
    owner: PhantomData<&'a ()>,
}

// SAFETY: plain bytes without affinity to a thread; the borrow keeps their owner.
unsafe impl Send for Lent<'_> {}
// SAFETY: a shared borrow only reads; `bytes_mut` needs an exclusive one.
unsafe impl Sync for Lent<'_> {}

impl<'a> Lent<'a> {
    /// Borrows `len` bytes from the first element of a tensor of torch.
    ///
    /// # Errors
    /// A `TypeError` for an object that is no `torch.Tensor`; those of `data_ptr`, for tensors
    /// without storage.
    pub(crate) fn of_torch(tensor: &'a Bound<'_, PyAny>, len: usize) -> PyResult<Self> {
        let py = tensor.py();
        if !torch(py)?.is_some_and(|torch| torch.is_tensor(tensor)) {
            return Err(PyTypeError::new_err("a torch.Tensor is expected"));
        }
        let address: usize = tensor.call_method0(intern!(py, "data_ptr"))?.extract()?;
        Ok(Self { begin: ptr::with_exposed_provenance_mut(address), len, owner: PhantomData })
    }

    /// Borrows `len` bytes from the first element of an imported tensor.
    ///
    /// # Errors
    /// A `TypeError` for a descriptor that contradicts itself.
    pub(crate) fn of_dlpack(tensor: &'a ImportedDlpack, len: usize) -> PyResult<Self> {
        let described =
            tensor.validate().map_err(|error| PyTypeError::new_err(error.to_string()))?;
        // SAFETY: the import has validated the descriptor, whose owner `tensor` keeps; DLPack
        // promises that the offset is inside the allocation.
        let begin = unsafe { described.offset_bytes_ptr() };
        let begin = begin.map_err(|error| PyTypeError::new_err(error.to_string()))?;
        Ok(Self { begin: begin.cast_mut(), len, owner: PhantomData })
    }

    /// Returns the bytes.
    pub(crate) fn bytes(&self) -> &[u8] {
        if self.len == 0 {
            return &[];
        }
        // SAFETY: the constructors established the range; a `u8` has no alignment.
        unsafe { slice::from_raw_parts(self.begin, self.len) }
    }

    /// Returns the bytes of an output, which `Tensor::output` has found writable and apart from the
    /// inputs.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        if self.len == 0 {
            return &mut [];
        }
        // SAFETY: the constructors established the range; a `u8` has no alignment.
        unsafe { slice::from_raw_parts_mut(self.begin, self.len) }
    }

    /// Returns whether two pieces of memory have a byte in common.
    pub(crate) fn overlaps(&self, other: &Lent<'_>) -> bool {
        let end = |begin: *mut u8, len: usize| begin.addr().saturating_add(len);
        let is_any = self.len > 0 && other.len > 0;
        is_any
            && self.begin.addr() < end(other.begin, other.len)
            && other.begin.addr() < end(self.begin, self.len)
    }
}
