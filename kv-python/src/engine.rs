//! `Engine`: continuous batches over a cache, for a model that Python runs.
use kv::engine::{BeamOptions, Chosen, Event, Limits, Logits, Output, Request, Sampler};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyDict, PyList};

use crate::cache::{Cache, hint_of};
use crate::report::{self, Failure};
use crate::step::{ENDED, Step, numbers, words};
use crate::tensor::Floats;

/// Runs requests over a cache, in continuous batches.
///
/// The engine takes the cache over: it decides which tokens each step has, starts and ends the
/// sequences, reuses prompts, and preempts the youngest request when blocks run out. The cache's
/// own calls that read still work; those that change sequences raise `StateError`.
///
/// `context` is the most tokens of a sequence. A step has at most `max_batch` sequences and
/// `max_step_tokens` tokens. `stop` are the tokens that end a text. `vocab` is the number of logits
/// of a row, if it is to be checked. `draft_tokens` are proposed for each sequence and step from
/// its own text. A request without room may be overtaken by `max_overtakes` younger ones.
///
/// All calls may come from any thread.
#[pyclass(frozen, module = "kvblock", weakref)]
#[derive(Debug)]
pub(crate) struct Engine {
    cache: Py<Cache>,
}

/// The tokens of one step of an engine, one sequence after another.
#[pyclass(frozen, module = "kvblock", weakref)]
#[derive(Debug)]
pub(crate) struct Batch {
    /// The step, which every layer writes and attends with.
    #[pyo3(get)]
    step: Py<Step>,
    /// For each sequence: its request, the number of its tokens, of drafts at their end, and of
    /// last tokens that need logits.
    #[pyo3(get)]
    chunks: Vec<(usize, u32, u32, u32)>,
    tokens: Vec<u8>,
    positions: Vec<u8>,
    logit_rows: Vec<u8>,
}

#[pymethods]
impl Batch {
    /// The tokens, a `memoryview` of `int32`.
    #[getter]
    fn tokens<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        numbers(py, &self.tokens)
    }

    /// The positions of the tokens in their sequences, a `memoryview` of `int32`.
    #[getter]
    fn positions<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        numbers(py, &self.positions)
    }

    /// The places in `tokens` after which logits are needed, a `memoryview` of `int32`.
    #[getter]
    fn logit_rows<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        numbers(py, &self.logit_rows)
    }

    fn __repr__(&self) -> String {
        let tokens = self.tokens.len() / size_of::<u32>();
        format!("Batch({tokens} tokens of {} sequences)", self.chunks.len())
    }
}

#[pymethods]
#[expect(clippy::too_many_arguments, reason = "Python names them")]
impl Engine {
    #[new]
    #[pyo3(signature = (
        cache, *, context, max_batch = 8, max_step_tokens = 512, stop = None, vocab = None,
        draft_tokens = 0, max_overtakes = 16
    ))]
    fn new(
        cache: Bound<'_, Cache>,
        context: u32,
        max_batch: u32,
        max_step_tokens: u32,
        stop: Option<Vec<u32>>,
        vocab: Option<u32>,
        draft_tokens: u32,
        max_overtakes: u32,
    ) -> PyResult<Self> {
        for (name, value) in
            [("context", context), ("max_batch", max_batch), ("max_step_tokens", max_step_tokens)]
        {
            if value == 0 {
                return Err(PyValueError::new_err(format!("{name}=0: at least 1 is expected")));
            }
        }
        let limits = Limits {
            max_batch,
            max_step_tokens,
            vocab,
            stop: stop.unwrap_or_default(),
            draft_tokens,
            max_overtakes,
            ..Limits::new(context)
        };
        cache.get().locked(cache.py(), |guarded| guarded.run_by(limits))?;
        Ok(Self { cache: cache.unbind() })
    }

    /// The cache, for its counts and events.
    #[getter]
    fn cache<'py>(&self, py: Python<'py>) -> Bound<'py, Cache> {
        self.cache.bind(py).clone()
    }

    /// Whether a request waits or runs.
    #[getter]
    fn has_work(&self, py: Python<'_>) -> PyResult<bool> {
        self.cache.get().locked(py, |guarded| Ok(guarded.engine()?.has_work()))
    }

    /// Appends a request to the queue and returns the numbers of its texts: one, or `n` texts after
    /// one prompt, which is computed once.
    ///
    /// `temperature` 0 takes the most likely token; otherwise the first tokens of share `top_p` of
    /// the probability are sampled from, with `seed`. `num_beams` above 1 searches instead. Prompts
    /// share blocks only with those of the same `salt`. `stops` are lengths of the prompt,
    /// ascending, at which recurrent states are kept for other prompts, beside the cache's own.
    /// `hint` is what is expected after the end: see `Cache.hint`.
    #[pyo3(signature = (
        prompt, max_new_tokens, *, n = 1, temperature = 0.0, top_p = 1.0, seed = 0, num_beams = 1,
        length_penalty = 1.0, salt = None, ignore_stop = false, stops = None, hint = None
    ))]
    fn submit(
        &self,
        py: Python<'_>,
        prompt: Vec<u32>,
        max_new_tokens: u32,
        n: usize,
        temperature: f64,
        top_p: f64,
        seed: u64,
        num_beams: u32,
        length_penalty: f64,
        salt: Option<PyBackedBytes>,
        ignore_stop: bool,
        stops: Option<Vec<u32>>,
        hint: Option<&str>,
    ) -> PyResult<Vec<usize>> {
        let refused = |text: String| Err(PyValueError::new_err(text));
        if n == 0 || num_beams == 0 {
            return refused("n and num_beams are at least 1".to_owned());
        }
        if !(temperature.is_finite() && temperature >= 0.0) {
            return refused(format!("temperature={temperature}: 0 or more is expected"));
        }
        if !(0.0..=1.0).contains(&top_p) {
            return refused(format!("top_p={top_p}: from 0 to 1 is expected"));
        }
        if !length_penalty.is_finite() {
            return refused(format!("length_penalty={length_penalty}: a number is expected"));
        }
        let sampler = |index| Sampler::new(temperature, seed, index).with_top_p(top_p);
        let request = Request {
            sampler: sampler(0),
            beams: (num_beams > 1).then_some(BeamOptions { width: num_beams, length_penalty }),
            salt: salt.map(|salt| salt.to_vec()).unwrap_or_default(),
            ignore_stop,
            stops: stops.unwrap_or_default(),
            hint: hint.map(hint_of).transpose()?,
            ..Request::new(prompt, max_new_tokens)
        };
        let others: Vec<Sampler> = (1..n).map(sampler).collect();
        self.cache.get().locked(py, |guarded| {
            let numbers = guarded.engine()?.submit_choices(request, others);
            Ok(numbers.map_err(kv::engine::EngineError::from)?.collect())
        })
    }

    /// Ends a request now, and returns its text so far; `None` for one that has ended.
    fn cancel<'py>(&self, py: Python<'py>, request: usize) -> PyResult<Option<Bound<'py, PyDict>>> {
        let ended = self.cache.get().locked(py, |guarded| Ok(guarded.engine()?.cancel(request)))?;
        ended.map(|generated| report::generated(py, &generated)).transpose()
    }

    /// Begins a step and returns its batch, `None` without work. The step stays open until
    /// `end_step` or `roll_back`.
    fn begin_step(&self, py: Python<'_>) -> PyResult<Option<Batch>> {
        let begun = self.cache.get().locked(py, |guarded| {
            let engine = guarded.engine()?;
            let Some(batch) = engine.begin_step()? else { return Ok(None) };
            let chunks: Vec<_> = batch
                .chunks
                .iter()
                .map(|chunk| (chunk.request, chunk.tokens, chunk.drafts, chunk.logits))
                .collect();
            let logit_rows: Vec<u32> = batch.logit_rows().collect();
            let [tokens, logit_rows] = [words(&batch.tokens), words(&logit_rows)];
            let positions = engine.with_step(|step, _| words(step.positions()))?;
            Ok(Some((guarded.opened(), chunks, tokens, positions, logit_rows)))
        })?;
        let Some((number, chunks, tokens, positions, logit_rows)) = begun else {
            return Ok(None);
        };
        let step =
            Step::of_engine(self.cache.clone_ref(py), number, positions.clone(), chunks.len());
        let step = Py::new(py, step)?;
        Ok(Some(Batch { step, chunks, tokens, positions, logit_rows }))
    }

    /// Ends the step and returns what it gave, a list of dictionaries: `kind` is `"token"` or
    /// `"finished"`.
    ///
    /// `logits` is float32 `[rows, vocab]`, a row for each of `Batch.logit_rows`; or `tokens` has
    /// the tokens that the caller has chosen: for each chunk that needs logits, the accepted drafts
    /// and the token after them. If they are refused, the step is rolled back and the next one
    /// repeats it.
    #[pyo3(signature = (logits = None, *, tokens = None))]
    fn end_step<'py>(
        &self,
        py: Python<'py>,
        logits: Option<Bound<'py, PyAny>>,
        tokens: Option<Vec<Vec<u32>>>,
    ) -> PyResult<Bound<'py, PyList>> {
        let events = self.end(py, None, logits.as_ref(), tokens.as_deref())?;
        report::results(py, events)
    }

    /// Rolls the open step back: its requests go on as if it had not begun. Does nothing without
    /// an open step.
    fn roll_back(&self, py: Python<'_>) -> PyResult<()> {
        self.cache.get().locked(py, |guarded| {
            guarded.engine()?;
            guarded.roll_back();
            Ok(())
        })
    }

    /// Runs one step: begins it, calls `forward(batch)` for its logits, ends it, and returns what
    /// it gave; an empty list without work. An exception of `forward` rolls the step back.
    fn step<'py>(
        &self,
        py: Python<'py>,
        forward: Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyList>> {
        let Some(batch) = self.begin_step(py)? else { return Ok(PyList::empty(py)) };
        // Of another thread, that has rolled this one back, it may be another one by then.
        let number = batch.step.get().number();
        let logits = forward.call1((batch,));
        match logits.and_then(|logits| self.end(py, Some(number), Some(&logits), None)) {
            Ok(events) => report::results(py, events),
            Err(error) => {
                self.cache.get().abandon_from(py, number);
                Err(error)
            }
        }
    }

    /// Returns counts of the requests and steps, the seconds of the steps, and the counts of the
    /// cache.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let (stats, queued) = self.cache.get().locked(py, |guarded| {
            let engine = guarded.engine()?;
            Ok((engine.stats(), engine.queued()))
        })?;
        let dict = report::engine(py, &stats)?;
        dict.set_item("waiting", queued.0)?;
        dict.set_item("running", queued.1)?;
        Ok(dict)
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let queued = self.cache.get().locked(py, |guarded| Ok(guarded.engine()?.queued()));
        let cache = self.cache.bind(py).repr()?;
        Ok(match queued {
            Ok((waiting, running)) => {
                format!("Engine({running} texts run, {waiting} wait, {cache})")
            }
            Err(_) => format!("Engine({cache})"),
        })
    }
}

impl Engine {
    /// Ends the open step, which is the one of a number if one is given.
    fn end(
        &self,
        py: Python<'_>,
        step: Option<u64>,
        logits: Option<&Bound<'_, PyAny>>,
        tokens: Option<&[Vec<u32>]>,
    ) -> PyResult<Vec<Event>> {
        let logits = logits.map(|logits| Floats::of(logits, "logits", "[rows, vocab]"));
        let logits = logits.transpose()?;
        let rows = logits.as_ref().map(|logits| Ok::<_, PyErr>((logits.rows()?, logits.dims())));
        let rows = rows.transpose()?;
        self.cache.get().locked(py, |guarded| {
            if step.is_some_and(|step| guarded.open != Some(step)) {
                return Err(Failure::State(ENDED));
            }
            let engine = guarded.engine()?;
            let output = match (&rows, tokens) {
                (Some((rows, [_, _, vocab])), None) => {
                    Output::Logits(Logits::new(rows.values(), *vocab))
                }
                (None, Some(tokens)) => Output::Tokens(chosen(engine, tokens)?),
                _ => {
                    let message = "either logits or tokens= is expected";
                    return Err(PyTypeError::new_err(message).into());
                }
            };
            let ended = engine.end_step(output);
            guarded.open = None;
            Ok(ended?)
        })
    }
}

/// Names the sequence of each entry of chosen tokens.
fn chosen(engine: &mut kv::engine::Engine, tokens: &[Vec<u32>]) -> Result<Vec<Chosen>, Failure> {
    let sequences: Vec<_> = engine.with_step(|_, batch| {
        let with_logits = batch.chunks.iter().filter(|chunk| chunk.logits > 0);
        with_logits.map(|chunk| chunk.sequence).collect()
    })?;
    if sequences.len() != tokens.len() {
        return Err(PyValueError::new_err(format!(
            "tokens of {} chunks, the batch has {} that need logits",
            tokens.len(),
            sequences.len()
        ))
        .into());
    }
    let named = sequences.into_iter().zip(tokens);
    Ok(named.map(|(sequence, tokens)| Chosen { sequence, tokens: tokens.clone() }).collect())
}
