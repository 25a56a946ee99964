//! Tensors of Python: torch by address, everything else by `DLPack`.
use dlpark::DlpackFlags;
#[cfg(feature = "cuda")]
use dlpark::ffi::DLDataType;
use dlpark::ffi::{DLDataTypeCode, DLDeviceType};
use dlpark::python::consumer::{DlpackStream, ImportRequest, ImportedDlpack};
use kv::backend::{AnyBuffer, AxisOrder, Strided, StridedError, TensorData, TensorDataMut};
use kv::{DType, TensorView, TensorViewMut};
#[cfg(feature = "cuda")]
use pyo3::exceptions::PyBufferError;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::card::{Card, HOST, Home};
use crate::memory::{Lent, LentOnCard, address_of_dlpack, address_of_torch};
use crate::torch::{Torch, torch};

mod entries;

pub(crate) use entries::Entries;

/// Alignment of rows on a CUDA device, which kernels read 16 bytes at a time.
const ALIGN: usize = 16;

/// Who has lent a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lender {
    Torch,
    Dlpack,
}

/// The owner of a tensor's memory.
enum Source<'py> {
    Torch(Bound<'py, PyAny>),
    Dlpack(ImportedDlpack),
}

/// A tensor whose values can be used in place, in host memory or on the device of the cache.
pub(crate) struct Tensor<'a, 'py> {
    source: Source<'py>,
    dtype: DType,
    placed: Strided,
    card: Option<&'a Card>,
}

/// A tensor without the interpreter: what a step takes.
#[derive(Debug)]
pub(crate) struct Rows<'a> {
    memory: Memory<'a>,
    dtype: DType,
    pub(crate) placed: Strided,
}

/// The place of a tensor's bytes.
#[derive(Debug)]
enum Memory<'a> {
    Host(Lent<'a>),
    Card(LentOnCard<'a>),
}

/// The shape, the strides, the type and the place of a tensor, as its framework says them.
struct Described<'a, 'py> {
    source: Source<'py>,
    dtype: DType,
    shape: Vec<u64>,
    strides: Vec<i64>,
    is_read_only: bool,
    address: usize,
    /// The device of the cache, for a tensor there.
    card: Option<&'a Card>,
}

impl<'a, 'py> Tensor<'a, 'py> {
    /// Reads an input. One that cannot be used where it lies is copied first: in host memory one
    /// whose rows do not lie together, on the device of the cache one of torch.
    ///
    /// # Errors
    /// A `TypeError` for an object that is no tensor of f32, f16 or bf16 in host memory or on a
    /// CUDA device, or that records gradients; a `ValueError` for another number of axes, another
    /// device than the cache's, and rows on it that cannot be copied here.
    pub(crate) fn input(
        object: &Bound<'py, PyAny>,
        order: AxisOrder,
        name: &str,
        home: &'a Home,
    ) -> PyResult<Self> {
        let described = Described::of(object, name, home)?;
        match described.place(order) {
            Ok(placed) if described.is_aligned() => Ok(described.placed(placed)),
            Err(StridedError::Rank { .. } | StridedError::TooLarge) => {
                Err(described.misplaced(order, name))
            }
            unusable => {
                let why = unusable.err();
                let Some(copy) = described.dense(object, order)? else {
                    return Err(match why {
                        Some(error) => refused(name)(error),
                        None => described.misaligned(name),
                    });
                };
                let described = Described::of(&copy, name, home)?;
                let placed = described.place(order);
                placed.map(|placed| described.placed(placed)).map_err(refused(name))
            }
        }
    }

    /// Reads an output, which is written in place.
    ///
    /// # Errors
    /// Those of [`Self::input`]; a `ValueError` for one that cannot be written in place.
    pub(crate) fn output(
        object: &Bound<'py, PyAny>,
        order: AxisOrder,
        name: &str,
        home: &'a Home,
    ) -> PyResult<Self> {
        let described = Described::of(object, name, home)?;
        if described.is_read_only {
            return Err(PyValueError::new_err(format!("{name} is read-only")));
        }
        match described.place(order) {
            Ok(placed) if described.is_aligned() => Ok(described.placed(placed)),
            Ok(_) => Err(described.misaligned(name)),
            Err(StridedError::Rank { .. }) => Err(described.misplaced(order, name)),
            Err(error) => Err(refused(name)(error)),
        }
    }

    /// Returns who has lent memory of the cache's device, `None` for a tensor in host memory.
    pub(crate) fn lender(&self) -> Option<Lender> {
        self.card.map(|_| match self.source {
            Source::Torch(_) => Lender::Torch,
            Source::Dlpack(_) => Lender::Dlpack,
        })
    }

    /// Borrows the memory, for a call without the interpreter.
    pub(crate) fn rows(&self) -> PyResult<Rows<'_>> {
        let len = self.bytes()?;
        let memory = match (&self.source, self.card) {
            (_, None) => Memory::Host(self.lent()?),
            (Source::Torch(tensor), Some(card)) => {
                Memory::Card(LentOnCard::of_torch(card, tensor, len)?)
            }
            (Source::Dlpack(tensor), Some(card)) => {
                Memory::Card(LentOnCard::of_dlpack(card, tensor, len)?)
            }
        };
        Ok(Rows { memory, dtype: self.dtype, placed: self.placed })
    }

    /// Borrows the memory of a tensor on the host.
    fn lent(&self) -> PyResult<Lent<'_>> {
        match &self.source {
            Source::Torch(tensor) => Lent::of_torch(tensor, self.bytes()?),
            Source::Dlpack(tensor) => Lent::of_dlpack(tensor, self.bytes()?),
        }
    }

    fn bytes(&self) -> PyResult<usize> {
        let len = usize::try_from(self.placed.len()).ok();
        let len = len.and_then(|len| len.checked_mul(self.dtype.size()));
        len.ok_or_else(|| PyValueError::new_err("the tensor is too large"))
    }
}

impl Rows<'_> {
    pub(crate) fn view(&self) -> TensorView<'_, AnyBuffer> {
        let data = match &self.memory {
            Memory::Host(memory) => TensorData::Host(memory.bytes()),
            Memory::Card(memory) => TensorData::Device { buffer: memory.buffer(), offset: 0 },
        };
        TensorView::strided(self.dtype, data, &self.placed)
    }

    pub(crate) fn view_mut(&mut self) -> TensorViewMut<'_, AnyBuffer> {
        let data = match &mut self.memory {
            Memory::Host(memory) => TensorDataMut::Host(memory.bytes_mut()),
            Memory::Card(memory) => TensorDataMut::Device { buffer: memory.buffer(), offset: 0 },
        };
        TensorViewMut::strided(self.dtype, data, &self.placed)
    }

    /// Returns whether two tensors have a byte in common.
    pub(crate) fn overlaps(&self, other: &Rows<'_>) -> bool {
        self.overlaps_range(other.memory.range())
    }

    /// Returns whether a byte of the tensor is in a range, an address and a length. Addresses of
    /// host memory and of all CUDA devices are different ones.
    pub(crate) fn overlaps_range(&self, (other, other_len): (usize, usize)) -> bool {
        let (begin, len) = self.memory.range();
        let is_any = len > 0 && other_len > 0;
        is_any && begin < other.saturating_add(other_len) && other < begin.saturating_add(len)
    }
}

/// A tensor of float32 in host memory whose first axis is rows, to be copied.
pub(crate) struct Floats<'py> {
    tensor: Tensor<'static, 'py>,
    rows: usize,
    /// Number of values of a row, and from one row to the next.
    width: usize,
    stride: usize,
}

/// [`Floats`] without the interpreter.
#[derive(Debug)]
pub(crate) struct FloatRows<'a> {
    memory: Lent<'a>,
    rows: usize,
    width: usize,
    stride: usize,
}

impl<'py> Floats<'py> {
    /// Reads a tensor of two or three axes, as `axes` names them.
    ///
    /// # Errors
    /// Those of [`Tensor::input`]; a `TypeError` for another type than float32; a `ValueError` for
    /// another number of axes, and for rows whose values do not lie together.
    pub(crate) fn of(object: &Bound<'py, PyAny>, name: &str, axes: &str) -> PyResult<Self> {
        let described = Described::of(object, name, &HOST)?;
        if described.dtype != DType::F32 {
            let given = object.getattr("dtype")?;
            let message = format!("{name} has type {given}: float32 is expected");
            return Err(PyTypeError::new_err(message));
        }
        let misplaced = || {
            let shape = &described.shape;
            PyValueError::new_err(format!("{name} has shape {shape:?}, {axes} is expected"))
        };
        let expected = axes.split(',').count();
        let (shape, strides) = match (described.shape.as_slice(), described.strides.as_slice()) {
            // A row is one head of one token.
            (&[rows, values], &[stride, inner]) if expected == 2 => {
                let of_head = i64::try_from(values).map_err(|_| misplaced())?;
                ([rows, 1, values], [stride, of_head, inner])
            }
            (&[rows, heads, dim], &[stride, of_head, inner]) if expected == 3 => {
                ([rows, heads, dim], [stride, of_head, inner])
            }
            _ => return Err(misplaced()),
        };
        let placed = Strided::new(AxisOrder::Thd, &shape, &strides).map_err(refused(name))?;
        let [rows, heads, dim] = shape;
        let size = |extent: Option<u64>| extent.and_then(|extent| usize::try_from(extent).ok());
        let (rows, width) = (size(Some(rows)), size(heads.checked_mul(dim)));
        let (rows, width) = rows.zip(width).ok_or_else(misplaced)?;
        // Of one row, which no stride moves, it may be negative.
        let stride = usize::try_from(strides[0]).unwrap_or(0);
        Ok(Self { tensor: described.placed(placed), rows, width, stride })
    }

    /// Returns the extents; a tensor of two axes has one in between, of 1.
    pub(crate) fn dims(&self) -> [u32; 3] {
        let dims = self.tensor.placed.dims();
        std::array::from_fn(|axis| dims.as_slice().get(axis).copied().unwrap_or(1))
    }

    /// Borrows the memory, for a call without the interpreter.
    pub(crate) fn rows(&self) -> PyResult<FloatRows<'_>> {
        let Self { rows, width, stride, .. } = *self;
        Ok(FloatRows { memory: self.tensor.lent()?, rows, width, stride })
    }
}

impl FloatRows<'_> {
    /// Copies all values, row after row.
    pub(crate) fn values(&self) -> Vec<f32> {
        let Self { memory, rows, width, stride } = self;
        let (bytes, size) = (memory.bytes(), size_of::<f32>());
        let mut values = Vec::with_capacity(rows * width);
        for row in 0..*rows {
            let (of_row, _) = bytes[row * stride * size..][..width * size].as_chunks();
            values.extend(of_row.iter().map(|bytes| f32::from_ne_bytes(*bytes)));
        }
        values
    }
}

impl Memory<'_> {
    fn range(&self) -> (usize, usize) {
        match self {
            Self::Host(memory) => memory.range(),
            Self::Card(memory) => memory.range(),
        }
    }
}

impl<'a, 'py> Described<'a, 'py> {
    fn of(object: &Bound<'py, PyAny>, name: &str, home: &'a Home) -> PyResult<Self> {
        match torch(object.py())? {
            Some(torch) if torch.is_tensor(object) => Self::of_torch(torch, object, name, home),
            _ => Self::of_dlpack(object, name, home),
        }
    }

    fn of_torch(
        torch: &Torch,
        object: &Bound<'py, PyAny>,
        name: &str,
        home: &'a Home,
    ) -> PyResult<Self> {
        let py = object.py();
        let is = |attribute: &Bound<'py, pyo3::types::PyString>| {
            object.getattr(attribute)?.extract::<bool>()
        };
        let card = if is(intern!(py, "is_cpu"))? {
            None
        } else {
            let device = object.getattr(intern!(py, "device"))?;
            if !is(intern!(py, "is_cuda"))? {
                return Err(wrong_place(name, &format!("on {device}")));
            }
            let ordinal = device.getattr(intern!(py, "index"))?.extract()?;
            Some(card_of(name, ordinal, home)?)
        };
        if is(intern!(py, "requires_grad"))? {
            return Err(PyTypeError::new_err(format!(
                "{name} records gradients, which a cache does not: run under torch.no_grad(), or \
                 detach() it"
            )));
        }
        let given = object.getattr(intern!(py, "dtype"))?;
        let Some(dtype) = torch.dtype(&given) else {
            return Err(wrong_type(name, &given.to_string()));
        };
        let shape = object.getattr(intern!(py, "shape"))?.extract()?;
        let strides = object.call_method0(intern!(py, "stride"))?.extract()?;
        // Host memory of any address is used.
        let address = if card.is_some() { address_of_torch(object)? } else { 0 };
        let source = Source::Torch(object.clone());
        Ok(Self { source, dtype, shape, strides, is_read_only: false, address, card })
    }

    fn of_dlpack(object: &Bound<'py, PyAny>, name: &str, home: &'a Home) -> PyResult<Self> {
        if !object.hasattr(intern!(object.py(), "__dlpack__"))? {
            let given = object.get_type().name()?;
            return Err(PyTypeError::new_err(format!(
                "{name} is a {given}: a tensor of torch, or one that has __dlpack__, is expected"
            )));
        }
        let request = ImportRequest::new(object.as_borrowed())?;
        // An object of the first DLPack does not say its device beforehand: it is in host memory.
        let device = request.device().ok();
        let card = match device.map(|device| (device.device_type, device.device_id)) {
            Some((DLDeviceType::CUDA, ordinal)) => {
                Some(card_of(name, u32::try_from(ordinal).unwrap_or(u32::MAX), home)?)
            }
            None | Some((DLDeviceType::CPU | DLDeviceType::CUDAHOST, _)) => None,
            Some((DLDeviceType(other), _)) => {
                return Err(wrong_place(name, &format!("on a device of type {other} of DLPack")));
            }
        };
        // The producer makes this stream wait for its own.
        let stream = card.map(Card::stream);
        let stream = stream.as_ref().map(|stream| -> &dyn DlpackStream { stream });
        let tensor = request.import(stream, None)?;
        let contradicts =
            |error: dlpark::tensor::Error| PyTypeError::new_err(format!("{name}: {error}"));
        let described = tensor.validate().map_err(contradicts)?;
        let is_host =
            matches!(described.device().device_type, DLDeviceType::CPU | DLDeviceType::CUDAHOST);
        if is_host == card.is_some() {
            return Err(wrong_place(name, "not where its __dlpack_device__ says"));
        }
        let given = described.dtype();
        let dtype = match (given.code, given.bits, given.lanes) {
            (DLDataTypeCode::FLOAT, 32, 1) => DType::F32,
            (DLDataTypeCode::FLOAT, 16, 1) => DType::F16,
            (DLDataTypeCode::BFLOAT, 16, 1) => DType::Bf16,
            _ => return Err(wrong_type(name, &object.getattr("dtype")?.to_string())),
        };
        let shape = described.shape().iter().map(|extent| u64::try_from(*extent).unwrap_or(0));
        let shape = shape.collect();
        let strides = described.strides_or_compact().map_err(contradicts)?.into_owned();
        let is_read_only = tensor.flags().contains(DlpackFlags::READ_ONLY);
        let address = address_of_dlpack(&tensor)?;
        let source = Source::Dlpack(tensor);
        Ok(Self { source, dtype, shape, strides, is_read_only, address, card })
    }

    /// Returns whether kernels can read the rows.
    fn is_aligned(&self) -> bool {
        self.card.is_none() || self.address.is_multiple_of(ALIGN)
    }

    fn misaligned(&self, name: &str) -> PyErr {
        PyValueError::new_err(format!(
            "{name} begins at {:#x}: on a CUDA device, a multiple of {ALIGN} is expected",
            self.address
        ))
    }

    fn place(&self, order: AxisOrder) -> Result<Strided, StridedError> {
        Strided::new(order, &self.shape, &self.strides)
    }

    fn placed(self, placed: Strided) -> Tensor<'a, 'py> {
        Tensor { source: self.source, dtype: self.dtype, placed, card: self.card }
    }

    /// Makes a copy whose rows lie together: with tokens before heads in memory, whatever the order
    /// of the axes is. `None` for memory of a device that is not torch's: nothing here copies it.
    fn dense(
        &self,
        object: &Bound<'py, PyAny>,
        order: AxisOrder,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let py = object.py();
        let is_swapped = order == AxisOrder::Bhsd;
        if let Source::Torch(tensor) = &self.source {
            let copy = |tensor: &Bound<'py, PyAny>| {
                torch(py)?.map_or_else(|| Ok(tensor.clone()), |torch| torch.dense(tensor))
            };
            if !is_swapped {
                return copy(tensor).map(Some);
            }
            let tokens_first = tensor.call_method1(intern!(py, "transpose"), (1, 2))?;
            return copy(&tokens_first)?.call_method1(intern!(py, "transpose"), (1, 2)).map(Some);
        }
        if self.card.is_some() {
            return Ok(None);
        }
        let numpy = py.import("numpy")?;
        let array = numpy.call_method1("from_dlpack", (object,))?;
        if !is_swapped {
            return numpy.call_method1("ascontiguousarray", (array,)).map(Some);
        }
        let tokens_first = array.call_method1("swapaxes", (1, 2))?;
        let copy = numpy.call_method1("ascontiguousarray", (tokens_first,))?;
        copy.call_method1("swapaxes", (1, 2)).map(Some)
    }

    fn misplaced(&self, order: AxisOrder, name: &str) -> PyErr {
        let axes = match order {
            AxisOrder::Thd => "[tokens, heads, head_dim]",
            AxisOrder::Bshd => "[batch, tokens, heads, head_dim]",
            AxisOrder::Sbhd => "[tokens, batch, heads, head_dim]",
            AxisOrder::Bhsd => "[batch, heads, tokens, head_dim]",
        };
        PyValueError::new_err(format!("{name} has shape {:?}, {axes} is expected", self.shape))
    }
}

/// Returns the name that `DLPack` has for a type of values.
///
/// # Errors
/// A `BufferError` for a type that no row has.
#[cfg(feature = "cuda")]
pub(crate) fn dtype_of(dtype: DType) -> PyResult<DLDataType> {
    match dtype {
        DType::F32 => Ok(DLDataType::F32),
        DType::F16 => Ok(DLDataType::F16),
        DType::Bf16 => Ok(DLDataType::BF16),
        other => Err(PyBufferError::new_err(format!("{other} is no type of rows"))),
    }
}

fn refused(name: &str) -> impl Fn(StridedError) -> PyErr {
    move |error| PyValueError::new_err(format!("{name}: {error}"))
}

/// Returns the device of a cache for a tensor on CUDA.
///
/// # Errors
/// A `ValueError` for another device.
fn card_of<'a>(name: &str, ordinal: u32, home: &'a Home) -> PyResult<&'a Card> {
    match home.card() {
        Some(card) if card.ordinal() == ordinal => Ok(card),
        _ => {
            Err(PyValueError::new_err(format!("{name} is on cuda:{ordinal}, the cache on {home}")))
        }
    }
}

fn wrong_place(name: &str, place: &str) -> PyErr {
    PyTypeError::new_err(format!(
        "{name} is {place}: a tensor in host memory, or on the CUDA device of the cache, is \
         expected"
    ))
}

fn wrong_type(name: &str, given: &str) -> PyErr {
    PyTypeError::new_err(format!(
        "{name} has type {given}: float32, float16 or bfloat16 is expected"
    ))
}

/// Returns the order of axes by its name. Without a name, a tensor that has not 4 axes is packed.
pub(crate) fn order(axes: Option<&str>, rank: usize) -> PyResult<AxisOrder> {
    let names = "\"thd\", \"bshd\", \"sbhd\" or \"bhsd\"";
    match axes {
        Some("thd") => Ok(AxisOrder::Thd),
        Some("bshd") => Ok(AxisOrder::Bshd),
        Some("sbhd") => Ok(AxisOrder::Sbhd),
        Some("bhsd") => Ok(AxisOrder::Bhsd),
        Some(other) => Err(PyValueError::new_err(format!("axes={other:?}: {names} is expected"))),
        None if rank == 4 => {
            Err(PyValueError::new_err(format!("axes= is needed for tensors of 4 axes: {names}")))
        }
        None => Ok(AxisOrder::Thd),
    }
}

/// Refuses an output that shares memory with other tensors of its call.
pub(crate) fn check_apart<'a, 'b: 'a>(
    out: &Rows<'_>,
    name: &str,
    others: impl IntoIterator<Item = &'a Rows<'b>>,
    names: &str,
) -> PyResult<()> {
    if others.into_iter().any(|other| other.overlaps(out)) {
        return Err(PyValueError::new_err(format!("{name} shares memory with {names}")));
    }
    Ok(())
}

/// Returns `1 / sqrt(head_dim)`.
pub(crate) fn default_scale(head_dim: u32) -> f32 {
    kv::num::to_f32(f64::from(head_dim).sqrt().recip())
}

/// Returns the number of axes of a tensor.
pub(crate) fn rank(tensor: &Bound<'_, PyAny>) -> PyResult<usize> {
    tensor.getattr(intern!(tensor.py(), "shape"))?.len()
}

/// Allocates an output like the queries, with another size of its last axis: dense with tokens
/// before heads, whatever the order of its axes.
///
/// # Errors
/// A `TypeError` for queries on a device that are no tensor of torch.
pub(crate) fn empty_like<'py>(
    like: &Bound<'py, PyAny>,
    read: &Tensor<'_, 'py>,
    order: AxisOrder,
    last: u32,
) -> PyResult<Bound<'py, PyAny>> {
    let py = like.py();
    if read.lender() == Some(Lender::Dlpack) {
        let message = "out= is expected: q is on a device and no tensor of torch";
        return Err(PyTypeError::new_err(message));
    }
    let mut shape: Vec<u64> = like.getattr(intern!(py, "shape"))?.extract()?;
    if let Some(width) = shape.last_mut() {
        *width = last.into();
    }
    if order == AxisOrder::Bhsd && shape.len() == 4 {
        shape.swap(1, 2);
    }
    let shape = PyTuple::new(py, shape)?;
    let is_torch = torch(py)?.is_some_and(|torch| torch.is_tensor(like));
    let out = if is_torch {
        like.call_method1(intern!(py, "new_empty"), (shape,))?
    } else {
        let numpy = py.import("numpy")?;
        let (keywords, dtype) = (PyDict::new(py), like.getattr(intern!(py, "dtype"))?);
        keywords.set_item("dtype", dtype)?;
        numpy.call_method("empty", (shape,), Some(&keywords))?
    };
    match (order, is_torch) {
        (AxisOrder::Bhsd, true) => out.call_method1(intern!(py, "transpose"), (1, 2)),
        (AxisOrder::Bhsd, false) => out.call_method1("swapaxes", (1, 2)),
        _ => Ok(out),
    }
}
