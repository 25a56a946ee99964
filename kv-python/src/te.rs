//! The calls of TransformerEngine, for `kvblock.te`: [`kv_compat::InferenceParams`] behind a lock.
use kv::backend::{AnyBackend, AxisOrder, Plane};
use kv::error::{LayerProblem, PlanError, SpecError};
use kv::{Axes, CacheError, DType};
use kv_compat::{BlockManager, CacheManagerConfig, FormatArg};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyByteArray;

use crate::card::{Home, Order, hand_over, stream_of_caller};
use crate::memory::Stream;
use crate::plane::{self, CachePlane};
use crate::report::Failure;
use crate::settings::{connect, device_of};
use crate::shared::Shared;
use crate::step::Asked;
use crate::tensor::{self, Tensor};

/// The checked arguments of TransformerEngine's `InferenceParams`.
///
/// `dtype` is `"f32"`, `"f16"` or `"bf16"`.
#[pyclass(frozen, module = "kvblock._kvblock")]
#[derive(Debug)]
pub(crate) struct InferenceConfig {
    arguments: kv_compat::InferenceConfig,
    checked: CacheManagerConfig,
    #[pyo3(get)]
    max_ctx_len: Option<u32>,
}

#[pymethods]
impl InferenceConfig {
    #[new]
    #[pyo3(signature = (
        max_batch_size, max_sequence_length, num_heads_kv = None, head_dim_k = None, dtype = None,
        head_dim_v = None, is_paged = false, total_num_pages = None, page_size = None,
        max_ctx_len = None, qkv_format = "bshd",
    ))]
    #[expect(clippy::too_many_arguments, reason = "Python names them")]
    fn new(
        max_batch_size: u32,
        max_sequence_length: u32,
        num_heads_kv: Option<u32>,
        head_dim_k: Option<u32>,
        dtype: Option<&str>,
        head_dim_v: Option<u32>,
        is_paged: bool,
        total_num_pages: Option<u32>,
        page_size: Option<u32>,
        max_ctx_len: Option<u32>,
        qkv_format: &str,
    ) -> PyResult<Self> {
        type Config = kv_compat::InferenceConfig;
        fn set<T>(of: Config, value: Option<T>, set: fn(Config, T) -> Config) -> Config {
            match value {
                Some(value) => set(of, value),
                None => of,
            }
        }
        let dtype: Option<DType> = dtype
            .map(|name| name.parse().map_err(|error| PyValueError::new_err(format!("{error}"))))
            .transpose()?;
        let mut config = Config::new(max_batch_size, max_sequence_length).is_paged(is_paged);
        config = set(config, num_heads_kv, Config::num_heads_kv);
        config = set(config, head_dim_k, Config::head_dim_k);
        config = set(config, dtype, Config::dtype);
        config = set(config, head_dim_v, Config::head_dim_v);
        config = set(config, total_num_pages, Config::total_num_pages);
        config = set(config, page_size, Config::page_size);
        config = set(config, max_ctx_len, Config::max_ctx_len);
        let arguments = config.qkv_format(qkv_format);
        let checked = arguments.clone().manager_config().map_err(Failure::from)?;
        check_tokens(&checked).map_err(Failure::from)?;
        Ok(Self { arguments, checked, max_ctx_len })
    }

    #[getter]
    fn max_batch_size(&self) -> u32 {
        self.checked.max_batch_size
    }

    #[getter]
    fn max_sequence_length(&self) -> u32 {
        self.checked.max_seqlen
    }

    #[getter]
    fn num_heads_kv(&self) -> u32 {
        self.checked.num_heads
    }

    #[getter]
    fn head_dim_k(&self) -> u32 {
        self.checked.head_dim_k
    }

    #[getter]
    fn head_dim_v(&self) -> u32 {
        self.checked.head_dim_v
    }

    #[getter]
    fn is_paged(&self) -> bool {
        self.checked.pages.is_some()
    }

    #[getter]
    fn total_num_pages(&self) -> Option<u32> {
        self.checked.pages.map(|pages| pages.total_num_pages)
    }

    #[getter]
    fn page_size(&self) -> Option<u32> {
        self.checked.pages.map(|pages| pages.page_size)
    }

    /// Entries of one row of the page table: pages of the longest sequence, 1 when not paged.
    #[getter]
    fn max_pages_per_seq(&self) -> u32 {
        self.checked.max_pages_per_sequence()
    }

    fn __repr__(&self) -> String {
        format!("InferenceConfig({:?})", self.checked)
    }
}

/// Refuses more tokens in a batch than the `int32` of its prefix sums counts.
fn check_tokens(config: &CacheManagerConfig) -> Result<(), CacheError> {
    let product = |a: u32, b: u32| u64::from(a) * u64::from(b);
    let longest = product(config.max_batch_size, config.max_seqlen);
    let held =
        config.pages.map_or(longest, |pages| product(pages.total_num_pages, pages.page_size));
    let (got, max) = (longest.min(held), u64::from(i32::MAX.unsigned_abs()));
    if got > max {
        return Err(SpecError::TooLarge { field: "tokens of a batch", got, max }.into());
    }
    Ok(())
}

/// A cache that TransformerEngine's calls drive. Sequences are numbers, layers too.
#[pyclass(frozen, module = "kvblock._kvblock", weakref)]
#[derive(Debug)]
pub(crate) struct InferenceParams {
    params: Shared<kv_compat::InferenceParams<AnyBackend>>,
    head_dim_v: u32,
    scale: f32,
    home: Home,
    /// The owner of the caller's stream: dropped after the queue that is on it.
    _keep: Option<Py<PyAny>>,
}

impl InferenceParams {
    /// Makes a stream wait for the work that the cache has submitted, or waits for it.
    pub(crate) fn hand_over(&self, py: Python<'_>, reader: Option<Stream>) -> PyResult<()> {
        let Some(card) = self.home.card() else { return Ok(()) };
        self.params.locked(py, |params| hand_over(card, params, reader))
    }
}

#[pymethods]
impl InferenceParams {
    #[new]
    #[pyo3(signature = (config, *, device = "cpu", threads = None, stream = None))]
    fn new(
        py: Python<'_>,
        config: &InferenceConfig,
        device: &str,
        threads: Option<usize>,
        stream: Option<Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let place = device_of(device)?;
        let of_caller = stream_of_caller(py, &place, stream.as_ref())?;
        let (params, home) = py.detach(|| {
            let backend = connect(&place, threads)?;
            let (home, queue) = Home::open(place, &backend, of_caller).map_err(kv::Error::from)?;
            let arguments = config.arguments.clone();
            let params =
                kv_compat::InferenceParams::with_manager(backend, arguments, |of, config| {
                    Ok(Box::new(BlockManager::with_queue(of, queue, config)?))
                })?;
            Ok::<_, Failure>((params, home))
        })?;
        let CacheManagerConfig { head_dim_k, head_dim_v, .. } = config.checked;
        Ok(Self {
            params: Shared::new(params),
            head_dim_v,
            scale: tensor::default_scale(head_dim_k),
            home,
            _keep: stream.map(Bound::unbind),
        })
    }

    /// The handle of the stream on which a cache on a CUDA device works, `None` for other devices.
    /// The legacy default stream is 0.
    #[getter]
    fn stream(&self) -> Option<usize> {
        self.home.card().map(|card| card.stream().handle())
    }

    /// Gives a layer its memory, zeroed; `False`, and nothing changes, when it has some already.
    fn allocate_memory(&self, py: Python<'_>, layer: usize) -> PyResult<bool> {
        self.params.locked(py, |params| Ok(params.allocate_memory(layer)?))
    }

    /// Ends the step before and prepares the next, entry by entry `(sequence, new tokens)`.
    fn pre_step(&self, py: Python<'_>, step: Vec<(u64, u32)>) -> PyResult<()> {
        self.params.locked(py, |params| Ok(params.pre_step(&step)?))
    }

    /// Takes the prepared step back, if there is one.
    fn roll_back(&self, py: Python<'_>) -> PyResult<()> {
        self.params.locked(py, |params| {
            params.roll_back();
            Ok(())
        })
    }

    /// Forgets every sequence; layers keep their memory.
    fn reset(&self, py: Python<'_>) -> PyResult<()> {
        self.params.locked(py, |params| Ok(params.reset()?))
    }

    /// Returns the batch, `(sequence, tokens before the step, tokens after it)` by row.
    fn sequences(&self, py: Python<'_>) -> PyResult<Vec<(u64, u32, u32)>> {
        self.params.locked(py, |params| {
            let rows = params.sequences().iter();
            Ok(rows.map(|row| (row.id.0, row.pre_step_len, row.len)).collect())
        })
    }

    /// Returns the pages of every row as `int32`, `[max_batch_size, max_pages_per_seq]`: 0 past a
    /// row's pages and past the batch.
    fn page_table<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyByteArray>> {
        let pages: Vec<u8> = self.params.locked(py, |params| {
            let table = params.page_table().iter();
            Ok(table.flat_map(|page| page.to_ne_bytes()).collect())
        })?;
        Ok(PyByteArray::new(py, &pages))
    }

    /// Returns the pages of a sequence in token order; none for an unknown one.
    fn pages(&self, py: Python<'_>, sequence: u64) -> PyResult<Vec<u32>> {
        self.params
            .locked(py, |params| Ok(params.page_list(sequence).iter().map(|page| page.0).collect()))
    }

    /// Returns the number of pages that no sequence holds; free slots when not paged.
    fn num_free_pages(&self, py: Python<'_>) -> PyResult<u32> {
        self.params.locked(py, |params| Ok(params.num_free_pages()))
    }

    /// Writes the keys and values of the step's tokens into one layer.
    fn step(
        &self,
        py: Python<'_>,
        layer: usize,
        new_k: Bound<'_, PyAny>,
        new_v: Bound<'_, PyAny>,
        qkv_format: &str,
    ) -> PyResult<()> {
        let (order, home) = (order(qkv_format)?, &self.home);
        let [k, v] =
            [Tensor::input(&new_k, order, "k", home)?, Tensor::input(&new_v, order, "v", home)?];
        let streams = Order::of_shared(py, home, &[&k, &v])?;
        let (k, v) = (k.rows()?, v.rows()?);
        self.params.locked(py, |params| {
            plane::check_outside(params, layer, [("k", &k), ("v", &v)])?;
            streams.run(params, |params| {
                params.step(layer, k.view(), v.view(), order.axes())?;
                Ok(())
            })
        })
    }

    /// Returns K and V of a layer of a cache on a CUDA device, `[pages, page_size, num_heads_kv,
    /// head_dim]`: the memory itself. When not paged, each sequence has a page of its longest
    /// length.
    fn planes(slf: &Bound<'_, Self>, layer: usize) -> PyResult<(CachePlane, CachePlane)> {
        let this = slf.get();
        let Some(card) = this.home.card() else {
            let message = format!("the planes of a cache on {} are no tensors", this.home);
            return Err(PyValueError::new_err(message));
        };
        let [k, v] = this.params.locked(slf.py(), |params| {
            let dtype = params.config().dtype;
            let found = |plane| {
                let problem = LayerProblem::Unallocated;
                let missing = PlanError::LayerNumber { number: layer, problem };
                let view = params.manager().plane(layer, plane);
                let view = view.ok_or_else(|| CacheError::from(missing))?;
                plane::find(&view, dtype, card.ordinal())
            };
            Ok([found(Plane::Key)?, found(Plane::Value)?])
        })?;
        let plane = |found| CachePlane::new(slf.clone().unbind(), found);
        Ok((plane(k), plane(v)))
    }

    /// Reads all rows of one layer, the step's own included, into `[batch, tokens, num_heads_kv,
    /// head_dim]`; zero past a length.
    fn gather(
        &self,
        py: Python<'_>,
        layer: usize,
        k: Bound<'_, PyAny>,
        v: Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let (order, home) = (AxisOrder::Bshd, &self.home);
        let [k, v] = [Tensor::output(&k, order, "k", home)?, Tensor::output(&v, order, "v", home)?];
        let streams = Order::of(py, home, &[&k, &v])?;
        let (mut k, mut v) = (k.rows()?, v.rows()?);
        tensor::check_apart(&k, "k", [&v], "v")?;
        self.params.locked(py, |params| {
            plane::check_outside(params, layer, [("k", &k), ("v", &v)])?;
            streams.run(params, |params| {
                let rows = (k.view_mut(), v.view_mut());
                Ok(params.convert_paged_to_nonpaged(layer, rows.0, rows.1)?)
            })
        })
    }

    /// Attends the step's queries over the rows of one layer, the step's own included. Returns
    /// `out`, a new tensor like `q` on its device unless one is given, which a `q` on CUDA needs
    /// that is not of torch.
    #[pyo3(signature = (
        layer, q, out = None, *, qkv_format, scale = None, softcap = None, sinks = None,
        window = None, causal = true
    ))]
    #[expect(clippy::too_many_arguments, reason = "Python names them")]
    fn attend<'py>(
        &self,
        py: Python<'py>,
        layer: usize,
        q: Bound<'py, PyAny>,
        out: Option<Bound<'py, PyAny>>,
        qkv_format: &str,
        scale: Option<f32>,
        softcap: Option<f32>,
        sinks: Option<Vec<f32>>,
        window: Option<u32>,
        causal: bool,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (order, home) = (order(qkv_format)?, &self.home);
        let queries = Tensor::input(&q, order, "q", home)?;
        let out = match out {
            Some(out) => out,
            None => tensor::empty_like(&q, &queries, order, self.head_dim_v)?,
        };
        let written = Tensor::output(&out, order, "out", home)?;
        let streams = Order::of(py, home, &[&queries, &written])?;
        let (q, mut rows) = (queries.rows()?, written.rows()?);
        tensor::check_apart(&rows, "out", [&q], "q")?;
        let asked = Asked {
            scale: scale.unwrap_or(self.scale),
            softcap,
            sinks: sinks.as_deref(),
            is_causal: causal,
            window: window.map(|left| (left, 0)),
        };
        let options = asked.options(order.axes());
        self.params.locked(py, |params| {
            plane::check_outside(params, layer, [("out", &rows)])?;
            streams.run(params, |params| {
                Ok(params.attend(layer, q.view(), rows.view_mut(), &options)?)
            })
        })?;
        Ok(out)
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        self.params.locked(py, |params| Ok(format!("InferenceParams({params})")))
    }
}

/// Returns the order of axes that a name of TransformerEngine stands for.
fn order(qkv_format: &str) -> PyResult<AxisOrder> {
    let axes = FormatArg::Name(qkv_format).resolve().map_err(PlanError::from);
    match axes.map_err(|error| Failure::from(CacheError::from(error)))? {
        Axes::Sbhd => Ok(AxisOrder::Sbhd),
        Axes::Thd => Ok(AxisOrder::Thd),
        _ => Ok(AxisOrder::Bshd),
    }
}
