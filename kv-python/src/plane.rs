//! Planes of a cache on a CUDA device, as tensors that share their memory.
use dlpark::ffi::{DLDevice, DLManagedTensor, DLManagedTensorVersioned};
use dlpark::python::producer::{DlpackExporter, ExportRequest, export_dlpack};
use dlpark::{DlpackFlags, Managed};
use kv::DType;
use kv::backend::{AnyBackend, AnyBuffer, Plane, PlaneView};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::card::check_not_captured;
use crate::memory::{Consumer, Kept, Placed, Stream};
use crate::report::Failure;
use crate::te::InferenceParams;
use crate::tensor::Rows;

/// K or V of one layer of a cache on a CUDA device: `[pages, page_size, num_heads_kv, head_dim]`.
///
/// `torch.from_dlpack` and everything else that calls `__dlpack__` makes a tensor over the same
/// memory, which lives as long as the last of them. It shows what the cache has written last, and
/// is only to be read.
#[pyclass(frozen, module = "kvblock._kvblock", weakref)]
#[derive(Debug)]
pub(crate) struct CachePlane {
    params: Py<InferenceParams>,
    memory: Kept,
    placed: Placed,
}

impl CachePlane {
    pub(crate) fn new(params: Py<InferenceParams>, (memory, placed): (Kept, Placed)) -> Self {
        Self { params, memory, placed }
    }
}

/// Finds the memory of a plane on the CUDA device `ordinal`, and where its rows are in it.
///
/// # Errors
/// A `ValueError` for a plane on another device, or in several buffers.
pub(crate) fn find(
    view: &PlaneView<'_, AnyBuffer>,
    dtype: DType,
    ordinal: u32,
) -> Result<(Kept, Placed), Failure> {
    let refused = |why| Failure::from(PyValueError::new_err(why));
    let memory = view.segment(0).and_then(Kept::of);
    let memory = memory.ok_or_else(|| refused("the plane is not in memory of a CUDA device"))?;
    if view.num_segments() != 1 {
        return Err(refused("the plane is in several buffers, which are no tensor"));
    }
    let layout = view.layout();
    let ordinal = i32::try_from(ordinal).map_err(|_| refused("no tensor is on such a device"))?;
    let size = u64::try_from(dtype.size()).ok().filter(|size| *size > 0);
    let size = size.ok_or_else(|| refused("the values of the plane have no size"))?;
    let shape = [layout.num_blocks(), layout.block_size(), layout.num_kv_heads()];
    let [blocks, tokens, heads] = shape.map(u64::from);
    let bytes = [layout.block_bytes(), layout.token_stride(), layout.head_stride(), size];
    let shape = [blocks, tokens, heads, layout.head_dim().into()];
    Ok((memory, Placed { ordinal, dtype, shape, strides: bytes.map(|bytes| bytes / size) }))
}

/// Refuses tensors over the memory of a layer in a call that writes one or the other: a caller has
/// such ones from [`CachePlane`].
///
/// # Errors
/// A `ValueError` that names the tensor.
pub(crate) fn check_outside<'a, 'b: 'a>(
    params: &kv_compat::InferenceParams<AnyBackend>,
    layer: usize,
    tensors: impl IntoIterator<Item = (&'static str, &'a Rows<'b>)> + Clone,
) -> Result<(), Failure> {
    for plane in [Plane::Key, Plane::Value] {
        let view = params.manager().plane(layer, plane);
        let memory = view.and_then(|view| Kept::of(view.segment(0)?)?.range());
        let Some(range) = memory else { continue };
        for (name, rows) in tensors.clone() {
            if rows.overlaps_range(range) {
                let message = format!("{name} shares memory with the cache");
                return Err(PyValueError::new_err(message).into());
            }
        }
    }
    Ok(())
}

#[pymethods]
impl CachePlane {
    /// The extents.
    #[getter]
    fn shape(&self) -> (u64, u64, u64, u64) {
        self.placed.shape.into()
    }

    fn __dlpack_device__(&self) -> (u32, i32) {
        self.device().into()
    }

    /// Returns the memory in a capsule of `DLPack`. `stream` waits for what the cache has
    /// submitted: an integer as the protocol has it, -1 for a caller that orders its work itself.
    #[pyo3(signature = (*, stream = None, max_version = None, dl_device = None, copy = None))]
    fn __dlpack__(
        &self,
        py: Python<'_>,
        stream: Option<Bound<'_, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(u32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Py<PyAny>> {
        let request = ExportRequest::parse(stream.as_ref(), max_version, dl_device, copy)?;
        export_dlpack(self, py, request)
    }

    fn __repr__(&self) -> String {
        let Placed { ordinal, dtype, shape, .. } = self.placed;
        format!("CachePlane({shape:?}, {dtype}, cuda:{ordinal})")
    }
}

impl DlpackExporter for CachePlane {
    fn device(&self) -> DLDevice {
        DLDevice::cuda(self.placed.ordinal)
    }

    fn flags(&self) -> DlpackFlags {
        DlpackFlags::empty()
    }

    fn prepare_export(&self, py: Python<'_>, request: &ExportRequest<'_>) -> PyResult<()> {
        let reader = match Stream::of_consumer(request.cuda_stream()?) {
            Consumer::Orders => return Ok(()),
            Consumer::On(stream) => Some(stream),
            Consumer::Unnamed => None,
        };
        check_not_captured(py)?;
        self.params.get().hand_over(py, reader)
    }

    fn export_legacy(&self, _: Python<'_>) -> PyResult<Managed<DLManagedTensor>> {
        self.memory.export(&self.placed)
    }

    fn export_versioned(&self, _: Python<'_>) -> PyResult<Managed<DLManagedTensorVersioned>> {
        self.memory.export(&self.placed)
    }
}
