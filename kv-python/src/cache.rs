//! `Cache`: sequences of tokens, and their keys and values.
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use kv::backend::Plane;
use kv::eviction::Return;
use kv::tier::session;
use kv::{SequenceId, StartOptions, StepInput};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyBytes, PyDict, PyList};

use crate::calibrate;
use crate::card::{Home, Order, stream_of_caller};
use crate::guarded::{CLOSED, Guarded, Memory, Owner};
use crate::report::{self, Failure};
use crate::settings::{Settings, Size, device_of};
use crate::shared::Shared;
use crate::states::{StateLayers, States};
use crate::step::{Step, words};
use crate::tensor::{self, Tensor};

/// Tokens of an input of a step.
#[derive(Debug, FromPyObject)]
enum Tokens {
    /// How many tokens come, where nothing is to be reused by others.
    Count(u32),
    /// The tokens themselves.
    Ids(Vec<u32>),
}

/// A paged KV cache.
///
/// One cache has the keys and values of many sequences, in blocks that sequences share as far as
/// their tokens agree. `num_blocks` blocks of `block_size` tokens are allocated at once, or as many
/// as `memory` bytes hold (`"2GiB"`).
///
/// `format` is how rows are stored: `"bf16"`, `"int8"`, `"l4"`, `"int8/l4"` for K and V, with
/// options after commas. `windows` gives layers a sliding window: `{layer: tokens before a token's
/// own}`. `states` gives layers recurrent states, whose slots and snapshots are allocated beside
/// these blocks. `tiers` keep what the device evicts, in chunks of `chunk_blocks` blocks:
/// `"host=2GiB"`, `"disk=DIR:200GB"`; they need `model`, bytes that name the weights.
///
/// `device="cuda:0"` takes tensors on that device in place, and in host memory too. All work is
/// submitted to `stream`: one of torch or cupy, or a handle, which must stay open as long as the
/// cache. Nobody may capture on it. Without one it is torch's current stream, or the legacy default
/// stream where torch does not use CUDA yet.
///
/// All calls may come from any thread.
#[pyclass(frozen, module = "kvblock", weakref)]
#[derive(Debug)]
pub(crate) struct Cache {
    guarded: Shared<Guarded>,
    text: String,
    #[pyo3(get)]
    layers: u16,
    #[pyo3(get)]
    kv_heads: u32,
    #[pyo3(get)]
    head_dim: u32,
    #[pyo3(get)]
    head_dim_v: u32,
    #[pyo3(get)]
    block_size: u32,
    #[pyo3(get)]
    format: String,
    #[pyo3(get)]
    device: String,
    windows: BTreeMap<u16, u32>,
    sink_tokens: u32,
    home: Home,
    /// The owner of the caller's stream: dropped after the queue that is on it.
    _keep: Option<Py<PyAny>>,
}

impl Cache {
    /// Locks the cache, without the interpreter, and runs a call.
    ///
    /// # Errors
    /// Those of the call; [`Failure::Forked`] in a child of the process that made the cache.
    pub(crate) fn locked<T: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut Guarded) -> Result<T, Failure> + Send,
    ) -> PyResult<T> {
        self.guarded.locked(py, call)
    }

    /// Rolls a step back that nobody has ended.
    pub(crate) fn abandon(&self, step: u64) {
        if let Ok(mut guarded) = self.guarded.guard()
            && guarded.open == Some(step)
        {
            guarded.roll_back();
        }
    }

    /// Rolls a step back that its block has left by an exception.
    pub(crate) fn abandon_from(&self, py: Python<'_>, step: u64) {
        py.detach(|| self.abandon(step));
    }

    pub(crate) fn home(&self) -> &Home {
        &self.home
    }

    pub(crate) fn width_of_v(&self) -> u32 {
        self.head_dim_v
    }

    /// Returns `1 / sqrt(head_dim)`.
    pub(crate) fn default_scale(&self) -> f32 {
        tensor::default_scale(self.head_dim)
    }

    pub(crate) fn sink_tokens(&self) -> u32 {
        self.sink_tokens
    }

    /// Returns the window of a layer.
    pub(crate) fn window_left(&self, layer: u16) -> Option<u32> {
        self.windows.get(&layer).copied()
    }
}

fn options(salt: &[u8], adapter: Option<u64>) -> StartOptions<'_> {
    let options = StartOptions::default().with_salt(salt);
    match adapter {
        Some(adapter) => options.with_adapter(adapter),
        None => options,
    }
}

/// Parses what a caller expects after the end of a sequence.
pub(crate) fn hint_of(text: &str) -> PyResult<Return> {
    text.parse().map_err(|unknown| PyValueError::new_err(format!("hint={text:?}: {unknown}")))
}

#[pymethods]
#[expect(clippy::too_many_arguments, reason = "Python names them")]
impl Cache {
    #[new]
    #[pyo3(signature = (
        *, layers, kv_heads, head_dim, head_dim_v = None, format = "bf16",
        block_size = 16, num_blocks = None, memory = None, max_seq_len = None,
        max_sequences = None, windows = None, window_slack = 0, sink_tokens = 0,
        prefix_reuse = "partial", eviction = "reuse-rate",
        batch_invariant = false, events = 0, device = "cpu", threads = None,
        calibration = None, tiers = None, wait = "compute",
        chunk_blocks = None, model = None, stream = None, states = None,
    ))]
    fn new(
        py: Python<'_>,
        layers: u16,
        kv_heads: u32,
        head_dim: u32,
        head_dim_v: Option<u32>,
        format: &str,
        block_size: u32,
        num_blocks: Option<u32>,
        memory: Option<Size>,
        max_seq_len: Option<u32>,
        max_sequences: Option<u32>,
        windows: Option<BTreeMap<u16, u32>>,
        window_slack: u32,
        sink_tokens: u32,
        prefix_reuse: &str,
        eviction: &str,
        batch_invariant: bool,
        events: usize,
        device: &str,
        threads: Option<usize>,
        calibration: Option<PathBuf>,
        tiers: Option<Vec<String>>,
        wait: &str,
        chunk_blocks: Option<u32>,
        model: Option<Bound<'_, PyAny>>,
        stream: Option<Bound<'_, PyAny>>,
        states: Option<Vec<Py<States>>>,
    ) -> PyResult<Self> {
        let model = model.map(|model| bytes_of(&model)).transpose()?;
        let settings = Settings {
            layers,
            kv_heads,
            head_dim,
            head_dim_v,
            format: format.to_owned(),
            block_size,
            num_blocks,
            memory,
            max_seq_len,
            max_sequences,
            windows: windows.unwrap_or_default(),
            window_slack,
            sink_tokens,
            prefix_reuse: prefix_reuse.to_owned(),
            eviction: eviction.to_owned(),
            batch_invariant,
            events,
            device: device.to_owned(),
            threads,
            calibration,
            tiers: tiers.unwrap_or_default(),
            wait: wait.to_owned(),
            chunk_blocks,
            model,
            states: states.iter().flatten().map(|of| StateLayers::of(of.get())).collect(),
        };
        let place = device_of(&settings.device)?;
        let stream_of_caller = stream_of_caller(py, &place, stream.as_ref())?;
        let (memory, identity, home) = py.detach(|| settings.open(place, stream_of_caller))?;
        let Settings { format, device, windows, .. } = settings;
        let text = format!("layers={layers}, kv_heads={kv_heads}, head_dim={head_dim}");
        Ok(Self {
            guarded: Shared::new(Guarded {
                owner: Owner::Caller(memory),
                identity,
                open: None,
                steps: 0,
            }),
            text,
            layers,
            kv_heads,
            head_dim,
            head_dim_v: head_dim_v.unwrap_or(head_dim),
            block_size,
            format,
            device,
            windows,
            sink_tokens,
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

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let usage = self.locked(py, |guarded| {
            Ok(match &guarded.owner {
                Owner::Closed => None,
                _ => Some(guarded.cache()?.state().usage()),
            })
        })?;
        let Some(usage) = usage else { return Ok(format!("Cache({}, closed)", self.text)) };
        Ok(format!(
            "Cache({}, format={:?}, device={:?}, block_size={}, blocks={} of {} used, \
             sequences={})",
            self.text,
            self.format,
            self.device,
            self.block_size,
            usage.blocks_used,
            usage.blocks_total,
            usage.sequences,
        ))
    }

    /// Starts a sequence on a prompt and returns the number of its tokens that are cached already:
    /// steps compute the others. Prompts share blocks only with those of the same `salt` and
    /// `adapter`; `reserve` allocates slots for that many tokens at once. `stops` are lengths of
    /// the prompt at which recurrent states are kept for other prompts: see `next_stop`. `hint` is
    /// what is expected after its end: see `hint`.
    #[pyo3(signature = (
        seq, tokens = None, *, salt = None, adapter = None, reserve = 0, reuse = true,
        stops = None, hint = None
    ))]
    fn start(
        &self,
        py: Python<'_>,
        seq: u64,
        tokens: Option<Vec<u32>>,
        salt: Option<PyBackedBytes>,
        adapter: Option<u64>,
        reserve: u32,
        reuse: bool,
        stops: Option<Vec<u32>>,
        hint: Option<&str>,
    ) -> PyResult<u32> {
        let (tokens, salt) = (tokens.unwrap_or_default(), bytes(salt.as_ref()));
        let hint = hint.map(hint_of).transpose()?;
        let mut stops = stops.unwrap_or_default();
        stops.sort_unstable();
        self.locked(py, |guarded| {
            let options = options(salt, adapter).with_reserve(reserve).with_reuse(reuse);
            let options = options.with_stops(&stops);
            let options = hint.map_or(options, |hint| options.with_hint(hint));
            match guarded.idle()? {
                Memory::Device(cache) => Ok(cache.start(SequenceId(seq), &tokens, options)?),
                Memory::Tiered(cache) => {
                    let prefetch = cache.prefetch(&tokens, &options);
                    if let Err(error) = cache.wait(prefetch) {
                        cache.cancel(prefetch);
                        return Err(error.into());
                    }
                    Ok(cache.start(prefetch, SequenceId(seq), options)?)
                }
            }
        })
    }

    /// Begins a step: one forward pass over some sequences. `inputs` are pairs of a sequence and
    /// its new tokens, or their number. Blocks are allocated here, or none at all.
    ///
    /// `with cache.step(..) as step:` commits at the end, and rolls back on an exception.
    #[pyo3(signature = (inputs, *, drafts = None))]
    fn step(
        slf: Bound<'_, Self>,
        inputs: Vec<(u64, Bound<'_, PyAny>)>,
        drafts: Option<BTreeMap<u64, u32>>,
    ) -> PyResult<Step> {
        let (py, cache) = (slf.py(), slf.get());
        let read = |(seq, tokens): &(u64, Bound<'_, PyAny>)| -> PyResult<(u64, Tokens)> {
            Ok((*seq, tokens.extract()?))
        };
        let inputs = inputs.iter().map(read).collect::<PyResult<Vec<_>>>()?;
        let drafts = drafts.unwrap_or_default();
        let (number, positions) = cache.locked(py, |guarded| {
            let inputs: Vec<_> = inputs
                .iter()
                .map(|(seq, tokens)| {
                    let input = match tokens {
                        Tokens::Count(count) => StepInput::count(SequenceId(*seq), *count),
                        Tokens::Ids(ids) => StepInput::tokens(SequenceId(*seq), ids),
                    };
                    input.with_drafts(drafts.get(seq).copied().unwrap_or(0))
                })
                .collect();
            let step = match guarded.idle()? {
                Memory::Device(cache) => cache.begin_step(&inputs)?,
                Memory::Tiered(cache) => cache.begin_step(&inputs)?,
            };
            let positions = words(step.positions());
            step.hold();
            Ok((guarded.opened(), positions))
        })?;
        Ok(Step::new(slf.unbind(), number, positions, inputs.len()))
    }

    /// Makes a copy of a sequence that shares its blocks until one of them is written.
    fn fork(&self, py: Python<'_>, parent: u64, child: u64) -> PyResult<()> {
        self.locked(py, |guarded| {
            let cache = guarded.idle()?.cache_mut();
            Ok(cache.fork(SequenceId(parent), SequenceId(child))?)
        })
    }

    /// Returns the next length at which a step of a sequence should end, so that its recurrent
    /// states are kept there for other prompts: in front of the last token of its prompt, where
    /// rows were cached and the state was not, and at `stops`. `None` if there is no further one.
    /// A step that ends elsewhere keeps fewer states and no wrong ones.
    fn next_stop(&self, py: Python<'_>, seq: u64) -> PyResult<Option<u32>> {
        self.locked(py, |guarded| Ok(guarded.cache()?.state().next_stop(SequenceId(seq))))
    }

    /// Adds a stop to a running sequence; one at a length that it has reached changes nothing.
    fn add_stop(&self, py: Python<'_>, seq: u64, len: u32) -> PyResult<()> {
        self.locked(py, |guarded| Ok(guarded.idle()?.cache_mut().add_stop(SequenceId(seq), len)?))
    }

    /// Keeps the recurrent states of a sequence as they are, for other prompts with its text, as
    /// `release` does.
    fn keep_state(&self, py: Python<'_>, seq: u64) -> PyResult<()> {
        self.locked(py, |guarded| Ok(guarded.idle()?.cache_mut().keep_state(SequenceId(seq))?))
    }

    /// Says how far a prompt is cached: `"tokens"` would be reused, `"rows"` are cached by the
    /// layers that attend, and behind `"state"` tokens the longest recurrent states are, `None` in
    /// a cache without states. Changes nothing.
    #[pyo3(signature = (tokens, *, salt = None, adapter = None))]
    fn explain_hit<'py>(
        &self,
        py: Python<'py>,
        tokens: Vec<u32>,
        salt: Option<PyBackedBytes>,
        adapter: Option<u64>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let salt = bytes(salt.as_ref());
        let hit = self.locked(py, |guarded| {
            Ok(guarded.cache()?.state().explain_hit(&tokens, options(salt, adapter)))
        })?;
        report::hit(py, &hit)
    }

    /// Removes a sequence's tokens from the `len`-th on. With recurrent states, only to a length
    /// behind which they are kept.
    fn truncate(&self, py: Python<'_>, seq: u64, len: u32) -> PyResult<()> {
        self.locked(py, |guarded| Ok(guarded.idle()?.cache_mut().truncate(SequenceId(seq), len)?))
    }

    /// Says what is expected after the end of a sequence, for the order of eviction: `"ended"`,
    /// `"idle"` (the user reads), `"tool-call"` or `"within=SECONDS"`; `None` takes it back. It
    /// pins nothing, and the last word before the end counts.
    #[pyo3(signature = (seq, hint))]
    fn hint(&self, py: Python<'_>, seq: u64, hint: Option<&str>) -> PyResult<()> {
        let hint = hint.map(hint_of).transpose()?;
        self.locked(py, |guarded| Ok(guarded.idle()?.cache_mut().hint(SequenceId(seq), hint)?))
    }

    /// Ends a sequence. Its blocks stay reusable until others need them.
    fn release(&self, py: Python<'_>, seq: u64) -> PyResult<()> {
        self.locked(py, |guarded| Ok(guarded.idle()?.cache_mut().release(SequenceId(seq))?))
    }

    /// Frees the blocks now: the cache ends, also for an engine that runs it. An open step is
    /// rolled back; tiers keep what they have written.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.locked(py, |guarded| {
            guarded.roll_back();
            guarded.owner = Owner::Closed;
            Ok(())
        })
    }

    /// Ends all sequences.
    fn reset(&self, py: Python<'_>) -> PyResult<()> {
        self.locked(py, |guarded| Ok(guarded.idle()?.cache_mut().reset()?))
    }

    /// Returns the number of a sequence's tokens, `None` for an unknown one.
    fn seq_len(&self, py: Python<'_>, seq: u64) -> PyResult<Option<u32>> {
        self.locked(py, |guarded| Ok(guarded.cache()?.state().seq_len(SequenceId(seq))))
    }

    /// Lists the sequences.
    fn sequences(&self, py: Python<'_>) -> PyResult<Vec<u64>> {
        self.locked(py, |guarded| {
            Ok(guarded.cache()?.state().sequences().map(|seq| seq.0).collect())
        })
    }

    /// Returns a sequence's rows of one layer, `[1, tokens, kv_heads, head_dim]`; `plane` is `"k"`
    /// or `"v"`. `out` is a tensor of that shape, a new one of numpy in f32 unless given.
    #[pyo3(signature = (seq, layer, plane, out = None))]
    fn gather<'py>(
        &self,
        py: Python<'py>,
        seq: u64,
        layer: u16,
        plane: &str,
        out: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (plane, dim) = match plane {
            "k" => (Plane::Key, self.head_dim),
            "v" => (Plane::Value, self.head_dim_v),
            other => {
                let message = format!("plane={other:?}: \"k\" or \"v\" is expected");
                return Err(PyValueError::new_err(message));
            }
        };
        let len = self.seq_len(py, seq)?.unwrap_or(0);
        let out = if let Some(out) = out {
            out
        } else {
            let shape = (1, len, self.kv_heads, dim);
            py.import("numpy")?.call_method1("zeros", (shape, "float32"))?
        };
        let order = tensor::order(Some("bshd"), 4)?;
        let tensor = Tensor::output(&out, order, "out", &self.home)?;
        let streams = Order::of(py, &self.home, &[&tensor])?;
        let mut rows = tensor.rows()?;
        self.locked(py, |guarded| {
            let cache = guarded.idle()?.cache_mut();
            let ranges = [(SequenceId(seq), 0, len)];
            streams.run(cache, |cache| {
                Ok(cache.gather(layer, plane, &ranges, rows.view_mut(), kv::Axes::Bshd)?)
            })
        })?;
        Ok(out)
    }

    /// Replaces the constants of the stored format by those of a file, and encodes the rows of all
    /// sequences again. What was cached before is not reused any more.
    fn recalibrate(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        let calibration = py.detach(|| calibrate::read(&path))?;
        self.locked(py, |guarded| Ok(guarded.idle()?.cache_mut().recalibrate(calibration)?))
    }

    /// Returns counts since the cache was made: reused tokens, evictions, copies, and those of the
    /// tiers in `"tiers"`.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let (stats, tiers) = self.locked(py, |guarded| {
            let tiers = match &guarded.owner {
                Owner::Caller(Memory::Tiered(cache)) => Some(cache.stats()),
                Owner::Engine(engine) => engine.tiers(),
                Owner::Caller(Memory::Device(_)) | Owner::Closed => None,
            };
            Ok((guarded.cache()?.state().stats(), tiers))
        })?;
        let dict = report::stats(py, &stats)?;
        if let Some(tiers) = tiers {
            dict.set_item("tiers", report::tiers(py, &tiers)?)?;
        }
        Ok(dict)
    }

    /// Returns what is in use now: sequences, tokens, blocks, and in `"states"` the slots and the
    /// snapshots of each of a cache's `states`.
    fn usage<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let (usage, states) = self.locked(py, |guarded| {
            let state = guarded.cache()?.state();
            Ok((state.usage(), report::fill_of_states(state)))
        })?;
        let dict = report::usage(py, &usage)?;
        if !states.is_empty() {
            dict.set_item("states", report::states(py, &states)?)?;
        }
        Ok(dict)
    }

    /// Returns the events since the last call, oldest first; none unless the cache was made with
    /// `events=`.
    fn take_events<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let events = self.locked(py, |guarded| match &mut guarded.owner {
            Owner::Caller(memory) => Ok(memory.cache_mut().take_events()),
            Owner::Engine(engine) => Ok(engine.take_events()),
            Owner::Closed => Err(CLOSED),
        })?;
        report::events(py, events)
    }

    /// Lists all blocks that can be reused, with the number of the first event after them.
    fn snapshot<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let snapshot = self.locked(py, |guarded| {
            Ok(match &mut guarded.owner {
                Owner::Caller(Memory::Device(cache)) => cache.state().snapshot(),
                Owner::Caller(Memory::Tiered(cache)) => cache.snapshot(),
                Owner::Engine(engine) => engine.snapshot(),
                Owner::Closed => return Err(CLOSED),
            })
        })?;
        let dict = PyDict::new(py);
        let blocks = snapshot.blocks.iter().map(|block| report::stored(py, block));
        dict.set_item("next_id", snapshot.next_id)?;
        dict.set_item("blocks", blocks.collect::<PyResult<Vec<_>>>()?)?;
        Ok(dict)
    }

    /// Forgets a prompt after its first `keep` tokens, on the device and in all tiers. Returns the
    /// number of blocks of the device that hold it no more.
    #[pyo3(signature = (tokens, *, keep = 0, salt = None, adapter = None, timeout = 10.0))]
    fn forget(
        &self,
        py: Python<'_>,
        tokens: Vec<u32>,
        keep: u32,
        salt: Option<PyBackedBytes>,
        adapter: Option<u64>,
        timeout: f64,
    ) -> PyResult<u32> {
        let (salt, deadline) = (bytes(salt.as_ref()), deadline(timeout)?);
        self.locked(py, |guarded| {
            let options = options(salt, adapter);
            match guarded.idle()? {
                Memory::Device(cache) => Ok(cache.forget_prefix(&tokens, options, keep)?),
                Memory::Tiered(cache) => {
                    Ok(cache.forget_prefix(&tokens, options, keep, deadline)?.blocks)
                }
            }
        })
    }

    /// Writes to the tiers what only the device and host memory have, for at most `timeout`
    /// seconds. Returns whether all of it is written; call it before the program ends.
    #[pyo3(signature = (timeout = 60.0))]
    fn flush(&self, py: Python<'_>, timeout: f64) -> PyResult<bool> {
        let deadline = deadline(timeout)?;
        self.locked(py, |guarded| {
            if let Owner::Engine(engine) = &mut guarded.owner {
                return Ok(engine.flush_tiers(deadline)?.is_empty());
            }
            match guarded.idle()? {
                Memory::Device(_) => Ok(true),
                Memory::Tiered(cache) => Ok(cache.flush(deadline)?.is_empty()),
            }
        })
    }

    /// Writes a sequence to a session file, with a note of the caller. Returns its bytes.
    #[pyo3(signature = (seq, path, *, note = None))]
    fn save(
        &self,
        py: Python<'_>,
        seq: u64,
        path: PathBuf,
        note: Option<PyBackedBytes>,
    ) -> PyResult<u64> {
        let note = bytes(note.as_ref());
        self.locked(py, |guarded| {
            let identity = guarded.identity()?.clone();
            let cache = guarded.idle()?.cache_mut();
            Ok(session::dump(cache, &identity, SequenceId(seq), note, &path)?.bytes)
        })
    }

    /// Loads a session file: the next prompt that begins with its text reuses its rows. Returns the
    /// text and the note.
    #[pyo3(signature = (path, *, salt = None, adapter = None))]
    fn load<'py>(
        &self,
        py: Python<'py>,
        path: PathBuf,
        salt: Option<PyBackedBytes>,
        adapter: Option<u64>,
    ) -> PyResult<(Vec<u32>, Bound<'py, PyBytes>)> {
        let salt = bytes(salt.as_ref());
        let loaded = self.locked(py, |guarded| {
            let (identity, options) = (guarded.identity()?.clone(), options(salt, adapter));
            Ok(session::load(guarded.idle()?.cache_mut(), &identity, &path, &options)?)
        })?;
        Ok((loaded.tokens, PyBytes::new(py, &loaded.note)))
    }
}

/// Returns the bytes of an argument, none without one.
fn bytes(argument: Option<&PyBackedBytes>) -> &[u8] {
    argument.map_or(&[], |bytes| bytes)
}

/// Returns the bytes of `bytes`, or of text.
fn bytes_of(object: &Bound<'_, PyAny>) -> PyResult<Vec<u8>> {
    match object.extract::<String>() {
        Ok(text) => Ok(text.into_bytes()),
        Err(_) => object.extract(),
    }
}

fn deadline(timeout: f64) -> PyResult<Instant> {
    let refused = || PyValueError::new_err(format!("timeout={timeout}: seconds are expected"));
    let time = Duration::try_from_secs_f64(timeout).map_err(|_| refused())?;
    Instant::now().checked_add(time).ok_or_else(refused)
}
