//! `Step`: one forward pass over some sequences.
use std::sync::atomic::{AtomicBool, Ordering};

use kv::backend::{AnyBackend, AxisOrder, Plane};
use kv::{AttentionOptions, Axes};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple, PyType};

use crate::cache::Cache;
use crate::card::{Home, Order};
use crate::report::Failure;
use crate::tensor::{self, Entries, Tensor};

/// A step of a cache, from `Cache.step` on.
///
/// Every layer writes the keys and values of the step's tokens and attends their queries over
/// everything that their sequences have. `with` commits the step at its end.
#[pyclass(frozen, module = "kvblock", weakref)]
#[derive(Debug)]
pub(crate) struct Step {
    cache: Py<Cache>,
    number: u64,
    /// Positions of the tokens, as `int32`.
    positions: Vec<u8>,
    /// Number of inputs.
    entries: usize,
    /// Whether this object is to roll the step back when it is dropped: not once it has ended, and
    /// never the step of an engine.
    must_end: AtomicBool,
}

impl Drop for Step {
    fn drop(&mut self) {
        if self.must_end.load(Ordering::Relaxed) {
            self.cache.get().abandon(self.number);
        }
    }
}

/// Refuses to go on with a step that has ended.
pub(crate) const ENDED: &str =
    "the step has ended: it was committed, rolled back, or another one has begun";

impl Step {
    /// Makes the step of a number, which it rolls back when it is dropped.
    pub(crate) fn new(cache: Py<Cache>, number: u64, positions: Vec<u8>, entries: usize) -> Self {
        Self { cache, number, positions, entries, must_end: AtomicBool::new(true) }
    }

    /// Makes the step that an engine has begun, and ends.
    pub(crate) fn of_engine(
        cache: Py<Cache>,
        number: u64,
        positions: Vec<u8>,
        entries: usize,
    ) -> Self {
        Self { cache, number, positions, entries, must_end: AtomicBool::new(false) }
    }

    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// Runs a call with the open step, without the interpreter.
    fn run<T: Send>(
        &self,
        py: Python<'_>,
        order: &Order<'_>,
        call: impl FnOnce(&mut kv::Step<'_, AnyBackend>) -> Result<T, Failure> + Send,
    ) -> PyResult<T> {
        self.cache
            .get()
            .locked(py, |guarded| guarded.with_step(self.number, |step| order.run(step, call)))
    }

    /// Returns the shape of a part of a layer's state, one for each input.
    fn shape_of_state(&self, py: Python<'_>, layer: u16, part: usize) -> PyResult<Vec<usize>> {
        let part = self.cache.get().locked(py, |guarded| {
            guarded.with_step(self.number, |step| {
                let spec = step.cache().state().spec();
                let group = spec.locate_state(layer.into()).map(|(group, _)| group);
                let states = group.and_then(|group| spec.states().get(group));
                let part = states.and_then(|states| states.parts().get(part));
                // The call that takes a tensor of this shape refuses a part that is none.
                Ok(part.map_or_else(|| vec![1], |part| part.shape().as_slice().to_vec()))
            })
        })?;
        let part = part.into_iter().map(|extent| usize::try_from(extent).unwrap_or(usize::MAX));
        Ok(std::iter::once(self.entries).chain(part).collect())
    }

    /// Writes a part of a layer's state behind some or all of the new tokens.
    fn write_states(
        &self,
        py: Python<'_>,
        (layer, part, tokens): (u16, usize, Option<u32>),
        state: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let home = self.cache.get().home();
        let state = Entries::input(state, "state", home)?;
        let streams = Order::of(py, home, &[state.tensor()])?;
        let rows = state.rows()?;
        self.run(py, &streams, |step| {
            let done = match tokens {
                Some(tokens) => step.write_state_after(layer, part, tokens, rows.view()),
                None => step.write_state(layer, part, rows.view()),
            };
            Ok(done?)
        })
    }

    /// Ends the step by a call that takes it.
    fn end(
        &self,
        py: Python<'_>,
        call: impl FnOnce(kv::Step<'_, AnyBackend>) -> Result<(), Failure> + Send,
    ) -> PyResult<()> {
        self.cache.get().locked(py, |guarded| guarded.end_step(self.number, call))?;
        self.must_end.store(false, Ordering::Relaxed);
        Ok(())
    }
}

/// Returns numbers as bytes, which [`numbers`] shows to Python.
pub(crate) fn words(numbers: &[u32]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_ne_bytes()).collect()
}

/// Returns a `memoryview` of `int32` over numbers below 2^31.
pub(crate) fn numbers<'py>(py: Python<'py>, words: &[u8]) -> PyResult<Bound<'py, PyAny>> {
    let bytes = PyBytes::new(py, words);
    let view = py.import("builtins")?.call_method1("memoryview", (bytes,))?;
    view.call_method1("cast", ("i",))
}

#[pymethods]
impl Step {
    /// The positions of the step's tokens in their sequences, a `memoryview` of `int32`, which
    /// `numpy.asarray` and `torch.tensor` take. Rotary embeddings need them.
    #[getter]
    fn positions<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        numbers(py, &self.positions)
    }

    /// Writes the keys and values of one layer, and attends its queries. Returns `out`, a new
    /// tensor like `q` on its device unless one is given, which a `q` on CUDA needs that is not of
    /// torch.
    ///
    /// `[tokens, heads, head_dim]` has the tokens of all sequences one after another. `axes` names
    /// the order of tensors with 4 axes, with one entry for each input: `"bshd"`, `"sbhd"`,
    /// `"bhsd"`. Without `k` and `v`, the layer attends to what `write` has written. `scale` is
    /// `1 / sqrt(head_dim)` unless it is given; the window is the layer's.
    #[pyo3(signature = (
        layer, q, k = None, v = None, out = None, *, scale = None, softcap = None, sinks = None,
        causal = true, axes = None
    ))]
    #[expect(clippy::too_many_arguments, reason = "Python names them")]
    fn attend<'py>(
        &self,
        py: Python<'py>,
        layer: u16,
        q: Bound<'py, PyAny>,
        k: Option<Bound<'py, PyAny>>,
        v: Option<Bound<'py, PyAny>>,
        out: Option<Bound<'py, PyAny>>,
        scale: Option<f32>,
        softcap: Option<f32>,
        sinks: Option<Vec<f32>>,
        causal: bool,
        axes: Option<&str>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let order = tensor::order(axes, tensor::rank(&q)?)?;
        let cache = self.cache.get();
        let home = cache.home();
        let queries = Tensor::input(&q, order, "q", home)?;
        let out = match out {
            Some(out) => out,
            None => tensor::empty_like(&q, &queries, order, cache.width_of_v())?,
        };
        let written = Tensor::output(&out, order, "out", home)?;
        let new = match (&k, &v) {
            (Some(k), Some(v)) => Some(tensors(k, v, order, home)?),
            (None, None) => None,
            _ => return Err(PyValueError::new_err("k and v come together")),
        };
        let all: Vec<_> = [&queries, &written].into_iter().chain(new.iter().flatten()).collect();
        let streams = Order::of(py, home, &all)?;
        let (q, mut out_rows) = (queries.rows()?, written.rows()?);
        let new = match &new {
            Some([k, v]) => Some([k.rows()?, v.rows()?]),
            None => None,
        };
        let inputs = std::iter::once(&q).chain(new.iter().flatten());
        tensor::check_apart(&out_rows, "out", inputs, "q, k or v")?;
        let asked = Asked {
            scale: scale.unwrap_or_else(|| cache.default_scale()),
            softcap,
            sinks: sinks.as_deref(),
            is_causal: causal,
            window: cache.window_left(layer).map(|left| (left, cache.sink_tokens())),
        };
        let options = asked.options(order.axes());
        self.run(py, &streams, |step| {
            if let Some([k, v]) = &new {
                step.write(layer, k.view(), v.view(), order.axes())?;
            }
            Ok(step.attend(layer, q.view(), out_rows.view_mut(), &options)?)
        })?;
        Ok(out)
    }

    /// Writes the keys and values of one layer.
    #[pyo3(signature = (layer, k, v, *, axes = None))]
    fn write(
        &self,
        py: Python<'_>,
        layer: u16,
        k: Bound<'_, PyAny>,
        v: Bound<'_, PyAny>,
        axes: Option<&str>,
    ) -> PyResult<()> {
        let order = tensor::order(axes, tensor::rank(&k)?)?;
        let home = self.cache.get().home();
        let [k, v] = tensors(&k, &v, order, home)?;
        let streams = Order::of(py, home, &[&k, &v])?;
        let (k, v) = (k.rows()?, v.rows()?);
        self.run(py, &streams, |step| Ok(step.write(layer, k.view(), v.view(), order.axes())?))
    }

    /// Returns all rows of one layer, the step's own included: `[inputs, tokens, kv_heads,
    /// head_dim]`, zero past the end of a sequence. `plane` is `"k"` or `"v"`.
    fn gather<'py>(
        &self,
        py: Python<'py>,
        layer: u16,
        plane: &str,
        out: Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let plane = match plane {
            "k" => Plane::Key,
            "v" => Plane::Value,
            other => {
                let message = format!("plane={other:?}: \"k\" or \"v\" is expected");
                return Err(PyValueError::new_err(message));
            }
        };
        let home = self.cache.get().home();
        let tensor = Tensor::output(&out, AxisOrder::Bshd, "out", home)?;
        let streams = Order::of(py, home, &[&tensor])?;
        let mut rows = tensor.rows()?;
        self.run(py, &streams, |step| {
            Ok(step.gather(layer, plane, rows.view_mut(), Axes::Bshd)?)
        })?;
        Ok(out)
    }

    /// Returns a part of a layer's recurrent state as it was before this step, `[inputs, ..]`:
    /// zeros for a sequence that begins. `out` is a tensor of that shape, a new one of numpy in f32
    /// unless given.
    #[pyo3(signature = (layer, part, out = None))]
    fn read_state<'py>(
        &self,
        py: Python<'py>,
        layer: u16,
        part: usize,
        out: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let out = if let Some(out) = out {
            out
        } else {
            let shape = PyTuple::new(py, self.shape_of_state(py, layer, part)?)?;
            py.import("numpy")?.call_method1("zeros", (shape, "float32"))?
        };
        let home = self.cache.get().home();
        let written = Entries::output(&out, "out", home)?;
        let streams = Order::of(py, home, &[written.tensor()])?;
        let mut rows = written.rows()?;
        self.run(py, &streams, |step| Ok(step.read_state(layer, part, rows.view_mut())?))?;
        Ok(out)
    }

    /// Writes a part of a layer's recurrent state behind all new tokens of each input, `[inputs,
    /// ..]`. A step commits once every part of every layer with a state is written.
    fn write_state(
        &self,
        py: Python<'_>,
        layer: u16,
        part: usize,
        state: Bound<'_, PyAny>,
    ) -> PyResult<()> {
        self.write_states(py, (layer, part, None), &state)
    }

    /// Writes a part of a layer's recurrent state behind the first `tokens` new tokens of each
    /// input, for drafts of which `commit` may keep only these.
    fn write_state_after(
        &self,
        py: Python<'_>,
        layer: u16,
        part: usize,
        tokens: u32,
        state: Bound<'_, PyAny>,
    ) -> PyResult<()> {
        self.write_states(py, (layer, part, Some(tokens)), &state)
    }

    /// Ends the step: its tokens are cached. `accepted` are the tokens of each input that stay,
    /// where drafts were computed.
    #[pyo3(signature = (accepted = None))]
    fn commit(&self, py: Python<'_>, accepted: Option<Vec<u32>>) -> PyResult<()> {
        self.end(py, |step| match &accepted {
            Some(accepted) => Ok(step.commit_accepted(accepted)?),
            None => Ok(step.commit()?),
        })
    }

    /// Ends the step as if it had not begun.
    fn roll_back(&self, py: Python<'_>) -> PyResult<()> {
        self.end(py, |step| {
            step.roll_back();
            Ok(())
        })
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    /// Commits, or rolls back if an exception has ended the block.
    fn __exit__(
        &self,
        py: Python<'_>,
        kind: Option<Bound<'_, PyType>>,
        _error: Option<Bound<'_, PyAny>>,
        _trace: Option<Bound<'_, PyAny>>,
    ) -> PyResult<bool> {
        let must_end = self.must_end.load(Ordering::Relaxed);
        match (must_end, kind) {
            (false, _) => {}
            (true, Some(_)) => self.cache.get().abandon_from(py, self.number),
            (true, None) => {
                if let Err(error) = self.commit(py, None) {
                    self.cache.get().abandon_from(py, self.number);
                    return Err(error);
                }
            }
        }
        Ok(false)
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        let tokens = self.positions.len() / size_of::<u32>();
        let number = Some(self.number);
        let is_open = self.cache.get().locked(py, |guarded| Ok(guarded.open == number));
        let state = if is_open.unwrap_or(false) { "open" } else { "ended" };
        format!("Step({tokens} tokens, {state})")
    }
}

/// What a call of `attend` asks for beside its tensors.
#[derive(Debug)]
pub(crate) struct Asked<'a> {
    pub(crate) scale: f32,
    pub(crate) softcap: Option<f32>,
    pub(crate) sinks: Option<&'a [f32]>,
    pub(crate) is_causal: bool,
    /// Tokens before a token's own, and tokens at the beginning that stay visible.
    pub(crate) window: Option<(u32, u32)>,
}

impl<'a> Asked<'a> {
    pub(crate) fn options(&self, axes: Axes) -> AttentionOptions<'a> {
        let of = if self.is_causal { AttentionOptions::causal } else { AttentionOptions::full };
        let mut options = of(self.scale).with_axes(axes);
        if let Some((left, sink_tokens)) = self.window {
            options = options.with_window_left(left).with_sink_tokens(sink_tokens);
        }
        if let Some(softcap) = self.softcap {
            options = options.with_soft_cap(softcap);
        }
        if let Some(sinks) = self.sinks {
            options = options.with_sink_logits(sinks);
        }
        options
    }
}

/// Reads keys and values.
fn tensors<'a, 'py>(
    k: &Bound<'py, PyAny>,
    v: &Bound<'py, PyAny>,
    order: AxisOrder,
    home: &'a Home,
) -> PyResult<[Tensor<'a, 'py>; 2]> {
    Ok([Tensor::input(k, order, "k", home)?, Tensor::input(v, order, "v", home)?])
}
