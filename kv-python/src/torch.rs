//! torch, where the program has imported it.
use kv::DType;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyDict;

use crate::memory::Stream;

/// The names of torch that tensors are compared with.
#[derive(Debug)]
pub(crate) struct Torch {
    tensor: Py<PyAny>,
    types: [(Py<PyAny>, DType); 3],
    contiguous_format: Py<PyAny>,
    cuda: Py<PyAny>,
}

impl Torch {
    pub(crate) fn is_tensor(&self, object: &Bound<'_, PyAny>) -> bool {
        object.is_instance(self.tensor.bind(object.py())).unwrap_or(false)
    }

    /// Returns the type of values, `None` for one that no cache takes.
    pub(crate) fn dtype(&self, given: &Bound<'_, PyAny>) -> Option<DType> {
        self.types.iter().find(|(known, _)| known.is(given)).map(|(_, dtype)| *dtype)
    }

    /// Makes a copy of a tensor whose values lie together.
    pub(crate) fn dense<'py>(&self, tensor: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        // `contiguous()` does not copy values that lie together and are not aligned.
        let py = tensor.py();
        let keywords = PyDict::new(py);
        keywords.set_item(intern!(py, "memory_format"), self.contiguous_format.bind(py))?;
        tensor.call_method(intern!(py, "clone"), (), Some(&keywords))
    }

    /// Returns whether torch uses CUDA in this process.
    pub(crate) fn uses_cuda(&self, py: Python<'_>) -> PyResult<bool> {
        self.cuda.bind(py).call_method0(intern!(py, "is_initialized"))?.extract()
    }

    /// Returns whether the calling thread captures work for a graph.
    pub(crate) fn is_capturing(&self, py: Python<'_>) -> PyResult<bool> {
        self.cuda.bind(py).call_method0(intern!(py, "is_current_stream_capturing"))?.extract()
    }

    /// Returns the stream of a device on which the calling thread works.
    pub(crate) fn current_stream(&self, py: Python<'_>, ordinal: u32) -> PyResult<Stream> {
        Stream::of(&self.cuda.bind(py).call_method1(intern!(py, "current_stream"), (ordinal,))?)
    }
}

/// Returns the stream on which the caller works most likely: torch's, or the one that every program
/// starts on.
pub(crate) fn likely_stream(py: Python<'_>, ordinal: u32) -> PyResult<Stream> {
    match torch(py)? {
        Some(torch) if torch.uses_cuda(py)? => torch.current_stream(py, ordinal),
        _ => Ok(Stream::LEGACY),
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
    let Ok(cuda) = module.getattr("cuda") else { return Ok(None) };
    let Ok(contiguous_format) = module.getattr("contiguous_format") else { return Ok(None) };
    let of = |name: &str, dtype| Ok::<_, PyErr>((module.getattr(name)?.unbind(), dtype));
    let types =
        [of("float32", DType::F32)?, of("float16", DType::F16)?, of("bfloat16", DType::Bf16)?];
    Ok(Some(TORCH.get_or_init(py, || Torch {
        tensor: tensor.unbind(),
        types,
        contiguous_format: contiguous_format.unbind(),
        cuda: cuda.unbind(),
    })))
}
