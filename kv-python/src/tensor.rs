//! Tensors of Python: torch by address, everything else by `DLPack`.
use dlpark::DlpackFlags;
use dlpark::ffi::{DLDataTypeCode, DLDeviceType};
use dlpark::python::consumer::{ImportedDlpack, from_dlpack};
use kv::backend::{AnyBuffer, AxisOrder, Strided, StridedError, TensorData, TensorDataMut};
use kv::{DType, TensorView, TensorViewMut};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyTuple};

use crate::memory::Lent;

/// The names of torch that tensors are compared with.
#[derive(Debug)]
pub(crate) struct Torch {
    tensor: Py<PyAny>,
    types: [(Py<PyAny>, DType); 3],
}

impl Torch {
    pub(crate) fn is_tensor(&self, object: &Bound<'_, PyAny>) -> bool {
        object.is_instance(self.tensor.bind(object.py())).unwrap_or(false)
    }
}

/// Returns torch if the program has imported it: nothing here imports it.
pub(crate) fn torch(py: Python<'_>) -> PyResult<Option<&'static Torch>> {
    static TORCH: PyOnceLock<Torch> = PyOnceLock::new();
    if let Some(torch) = TORCH.get(py) {
        return Ok(Some(torch));
    }
    let modules = py.import(intern!(py, "sys"))?.getattr(intern!(py, "modules"))?;
    let Some(module) = modules.cast::<PyDict>()?.get_item("torch")? else { return Ok(None) };
    // A module that is still being imported by another thread.
    let Ok(tensor) = module.getattr("Tensor") else { return Ok(None) };
    let of = |name: &str, dtype| Ok::<_, PyErr>((module.getattr(name)?.unbind(), dtype));
    let types =
        [of("float32", DType::F32)?, of("float16", DType::F16)?, of("bfloat16", DType::Bf16)?];
    Ok(Some(TORCH.get_or_init(py, || Torch { tensor: tensor.unbind(), types })))
}

/// The owner of a tensor's memory.
enum Source<'py> {
    Torch(Bound<'py, PyAny>),
    Dlpack(ImportedDlpack),
}

/// A tensor in host memory whose values can be used in place.
pub(crate) struct Tensor<'py> {
    source: Source<'py>,
    dtype: DType,
    placed: Strided,
}

/// A tensor without the interpreter: what a step takes.
#[derive(Debug)]
pub(crate) struct Rows<'a> {
    memory: Lent<'a>,
    dtype: DType,
    pub(crate) placed: Strided,
}

/// The shape, the strides and the type of a tensor, as its framework says them.
struct Described<'py> {
    source: Source<'py>,
    dtype: DType,
    shape: Vec<u64>,
    strides: Vec<i64>,
    is_read_only: bool,
}

impl<'py> Tensor<'py> {
    /// Reads an input. One whose rows do not lie together is copied first.
    ///
    /// # Errors
    /// A `TypeError` for an object that is no tensor of f32, f16 or bf16 in host memory, or that
    /// records gradients; a `ValueError` for another number of axes.
    pub(crate) fn input(
        object: &Bound<'py, PyAny>,
        order: AxisOrder,
        name: &str,
    ) -> PyResult<Self> {
        let described = Described::of(object, name)?;
        match described.place(order) {
            Ok(placed) => Ok(described.placed(placed)),
            Err(StridedError::Rank { .. } | StridedError::TooLarge) => {
                Err(described.misplaced(order, name))
            }
            Err(_) => {
                let copy = described.dense(object, order)?;
                let described = Described::of(&copy, name)?;
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
    ) -> PyResult<Self> {
        let described = Described::of(object, name)?;
        if described.is_read_only {
            return Err(PyValueError::new_err(format!("{name} is read-only")));
        }
        match described.place(order) {
            Ok(placed) => Ok(described.placed(placed)),
            Err(StridedError::Rank { .. }) => Err(described.misplaced(order, name)),
            Err(error) => Err(refused(name)(error)),
        }
    }

    /// Borrows the memory, for a call without the interpreter.
    pub(crate) fn rows(&self) -> PyResult<Rows<'_>> {
        let len = usize::try_from(self.placed.len()).ok();
        let len = len.and_then(|len| len.checked_mul(self.dtype.size()));
        let len = len.ok_or_else(|| PyValueError::new_err("the tensor is too large"))?;
        let memory = match &self.source {
            Source::Torch(tensor) => Lent::of_torch(tensor, len)?,
            Source::Dlpack(tensor) => Lent::of_dlpack(tensor, len)?,
        };
        Ok(Rows { memory, dtype: self.dtype, placed: self.placed })
    }
}

impl Rows<'_> {
    pub(crate) fn view(&self) -> TensorView<'_, AnyBuffer> {
        TensorView::strided(self.dtype, TensorData::Host(self.memory.bytes()), &self.placed)
    }

    pub(crate) fn view_mut(&mut self) -> TensorViewMut<'_, AnyBuffer> {
        let Self { memory, dtype, placed } = self;
        TensorViewMut::strided(*dtype, TensorDataMut::Host(memory.bytes_mut()), placed)
    }

    pub(crate) fn overlaps(&self, other: &Rows<'_>) -> bool {
        self.memory.overlaps(&other.memory)
    }
}

/// A tensor of float32 whose first axis is rows, to be copied.
pub(crate) struct Floats<'py> {
    tensor: Tensor<'py>,
    rows: usize,
    /// Number of values of a row, and from one row to the next.
    width: usize,
    stride: usize,
}

/// [`Floats`] without the interpreter.
#[derive(Debug)]
pub(crate) struct FloatRows<'a> {
    values: Rows<'a>,
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
        let described = Described::of(object, name)?;
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
        Ok(FloatRows { values: self.tensor.rows()?, rows, width, stride })
    }
}

impl FloatRows<'_> {
    /// Copies all values, row after row.
    pub(crate) fn values(&self) -> Vec<f32> {
        let Self { values, rows, width, stride } = self;
        let (bytes, size) = (values.memory.bytes(), size_of::<f32>());
        let mut values = Vec::with_capacity(rows * width);
        for row in 0..*rows {
            let (of_row, _) = bytes[row * stride * size..][..width * size].as_chunks();
            values.extend(of_row.iter().map(|bytes| f32::from_ne_bytes(*bytes)));
        }
        values
    }
}

impl<'py> Described<'py> {
    fn of(object: &Bound<'py, PyAny>, name: &str) -> PyResult<Self> {
        match torch(object.py())? {
            Some(torch) if torch.is_tensor(object) => Self::of_torch(torch, object, name),
            _ => Self::of_dlpack(object, name),
        }
    }

    fn of_torch(torch: &Torch, object: &Bound<'py, PyAny>, name: &str) -> PyResult<Self> {
        let py = object.py();
        let is = |attribute: &Bound<'py, pyo3::types::PyString>| {
            object.getattr(attribute)?.extract::<bool>()
        };
        if !is(intern!(py, "is_cpu"))? {
            let device = object.getattr("device")?;
            return Err(PyTypeError::new_err(format!(
                "{name} is on {device}: a tensor in host memory is expected"
            )));
        }
        if is(intern!(py, "requires_grad"))? {
            return Err(PyTypeError::new_err(format!(
                "{name} records gradients, which a cache does not: run under torch.no_grad(), or \
                 detach() it"
            )));
        }
        let given = object.getattr(intern!(py, "dtype"))?;
        let known = torch.types.iter().find(|(known, _)| known.is(&given));
        let Some((_, dtype)) = known else { return Err(wrong_type(name, &given.to_string())) };
        let shape = object.getattr(intern!(py, "shape"))?.extract()?;
        let strides = object.call_method0(intern!(py, "stride"))?.extract()?;
        let source = Source::Torch(object.clone());
        Ok(Self { source, dtype: *dtype, shape, strides, is_read_only: false })
    }

    fn of_dlpack(object: &Bound<'py, PyAny>, name: &str) -> PyResult<Self> {
        if !object.hasattr(intern!(object.py(), "__dlpack__"))? {
            let given = object.get_type().name()?;
            return Err(PyTypeError::new_err(format!(
                "{name} is a {given}: a tensor of torch, or one that has __dlpack__, is expected"
            )));
        }
        let tensor = from_dlpack(object.as_borrowed(), None, None)?;
        let contradicts =
            |error: dlpark::tensor::Error| PyTypeError::new_err(format!("{name}: {error}"));
        let described = tensor.validate().map_err(contradicts)?;
        let device = described.device().device_type;
        if device != DLDeviceType::CPU && device != DLDeviceType::CUDAHOST {
            return Err(PyTypeError::new_err(format!(
                "{name} is not in host memory: a tensor in host memory is expected"
            )));
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
        Ok(Self { source: Source::Dlpack(tensor), dtype, shape, strides, is_read_only })
    }

    fn place(&self, order: AxisOrder) -> Result<Strided, StridedError> {
        Strided::new(order, &self.shape, &self.strides)
    }

    fn placed(self, placed: Strided) -> Tensor<'py> {
        Tensor { source: self.source, dtype: self.dtype, placed }
    }

    /// Makes a copy whose rows lie together: with tokens before heads in memory, whatever the order
    /// of the axes is.
    fn dense(&self, object: &Bound<'py, PyAny>, order: AxisOrder) -> PyResult<Bound<'py, PyAny>> {
        let py = object.py();
        let is_swapped = order == AxisOrder::Bhsd;
        if let Source::Torch(tensor) = &self.source {
            if !is_swapped {
                return tensor.call_method0(intern!(py, "contiguous"));
            }
            let tokens_first = tensor.call_method1(intern!(py, "transpose"), (1, 2))?;
            let copy = tokens_first.call_method0(intern!(py, "contiguous"))?;
            return copy.call_method1(intern!(py, "transpose"), (1, 2));
        }
        let numpy = py.import("numpy")?;
        let array = numpy.call_method1("from_dlpack", (object,))?;
        if !is_swapped {
            return numpy.call_method1("ascontiguousarray", (array,));
        }
        let tokens_first = array.call_method1("swapaxes", (1, 2))?;
        let copy = numpy.call_method1("ascontiguousarray", (tokens_first,))?;
        copy.call_method1("swapaxes", (1, 2))
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

fn refused(name: &str) -> impl Fn(StridedError) -> PyErr {
    move |error| PyValueError::new_err(format!("{name}: {error}"))
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

/// Returns the number of axes of a tensor.
pub(crate) fn rank(tensor: &Bound<'_, PyAny>) -> PyResult<usize> {
    tensor.getattr(intern!(tensor.py(), "shape"))?.len()
}

/// Allocates an output like an input, with another size of its last axis: dense with tokens before
/// heads, whatever the order of its axes.
pub(crate) fn empty_like<'py>(
    like: &Bound<'py, PyAny>,
    order: AxisOrder,
    last: u32,
) -> PyResult<Bound<'py, PyAny>> {
    let py = like.py();
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
