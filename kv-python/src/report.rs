//! Counts, events and errors of the library as objects of Python.
use kv::engine::{EngineError, Event, Finish, Generated, RequestError};
use kv::events::{EventKind, StoredBlock, Tier};
use kv::scheduling::{CacheState, GroupUsage, HitByKind};
use kv::tier::{SessionError, StoreStats, TierError, TiersStats};
use kv::{CacheError, GroupId, Stats, Usage};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

/// An error of the library, or of Python.
#[derive(Debug)]
pub(crate) enum Failure {
    Cache(kv::Error),
    Tier(TierError),
    Session(SessionError),
    Engine(EngineError),
    /// A call that is not possible in this state of the cache.
    State(&'static str),
    /// The cache belongs to the parent process.
    Forked {
        parent: u32,
    },
    Python(PyErr),
}

impl From<kv::Error> for Failure {
    fn from(error: kv::Error) -> Self {
        Self::Cache(error)
    }
}

impl From<CacheError> for Failure {
    fn from(error: CacheError) -> Self {
        Self::Cache(error.into())
    }
}

impl From<TierError> for Failure {
    fn from(error: TierError) -> Self {
        match error {
            TierError::Cache(error) => Self::Cache(error.into()),
            error => Self::Tier(error),
        }
    }
}

impl From<EngineError> for Failure {
    fn from(error: EngineError) -> Self {
        match error {
            EngineError::Cache(error) => error.into(),
            EngineError::Tier(error) => error.into(),
            error => Self::Engine(error),
        }
    }
}

impl From<SessionError> for Failure {
    fn from(error: SessionError) -> Self {
        Self::Session(error)
    }
}

impl From<PyErr> for Failure {
    fn from(error: PyErr) -> Self {
        Self::Python(error)
    }
}

impl From<Failure> for PyErr {
    fn from(failure: Failure) -> Self {
        Python::attach(|py| failure.raise(py).unwrap_or_else(|error| error))
    }
}

impl Failure {
    /// Makes the exception, with its numbers as attributes.
    fn raise(self, py: Python<'_>) -> PyResult<PyErr> {
        let (class, text) = match &self {
            Self::Python(_) => ("", String::new()),
            Self::Cache(kv::Error::Cache(error)) => (class_of(error), error.to_string()),
            Self::Cache(error) => ("DeviceError", error.to_string()),
            Self::Tier(error) => ("TierError", error.to_string()),
            Self::Session(error) => ("SessionError", error.to_string()),
            Self::Engine(error) => (class_of_engine(error), error.to_string()),
            Self::State(text) => ("StateError", (*text).to_owned()),
            Self::Forked { parent } => (
                "ForkedError",
                format!(
                    "the cache belongs to process {parent}, whose threads this fork of it does \
                     not have: make a new cache here"
                ),
            ),
        };
        let failure = match self {
            Self::Python(error) => return Ok(error),
            failure => failure,
        };
        let errors = py.import(intern!(py, "kvblock._errors"))?;
        let exception = errors.getattr(class)?.call1((text,))?;
        match failure {
            Self::Cache(kv::Error::Cache(CacheError::Exhausted(exhausted))) => {
                exception.setattr("group", exhausted.group.0)?;
                exception.setattr("needed", exhausted.needed)?;
                exception.setattr("free", exhausted.free)?;
                exception.setattr("evictable", exhausted.evictable)?;
            }
            Self::Cache(kv::Error::Cache(CacheError::Device(error))) => {
                exception.setattr("kind", format!("{:?}", error.kind()))?;
            }
            Self::Engine(EngineError::Request(RequestError::DoesNotFit { shortage, .. })) => {
                exception.setattr("group", shortage.group)?;
                exception.setattr("needed", shortage.needed)?;
                exception.setattr("available", shortage.available)?;
            }
            Self::Forked { parent } => exception.setattr("parent", parent)?,
            _ => {}
        }
        Ok(PyErr::from_value(exception))
    }
}

fn class_of(error: &CacheError) -> &'static str {
    match error {
        CacheError::Spec(_) => "SpecError",
        CacheError::Plan(_) => "PlanError",
        CacheError::Calibration(_) => "CalibrationError",
        CacheError::Exhausted(_) => "Exhausted",
        CacheError::Device(_) => "DeviceError",
        _ => "Error",
    }
}

fn class_of_engine(error: &EngineError) -> &'static str {
    match error {
        EngineError::Request(_) => "RequestError",
        EngineError::Output(_) => "PlanError",
        EngineError::StepOpen { .. } | EngineError::NoStep { .. } => "StateError",
        EngineError::Session(_) => "SessionError",
        _ => "Error",
    }
}

/// Sets entries of a dictionary to fields of the same names.
macro_rules! fields {
    ($dict:expr, $of:expr, $($field:ident),+ $(,)?) => {
        $($dict.set_item(stringify!($field), $of.$field)?;)+
    };
}

pub(crate) fn stats<'py>(py: Python<'py>, stats: &Stats) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    fields!(
        dict,
        stats,
        requests,
        query_tokens,
        hit_tokens,
        hit_blocks,
        partial_hit_tokens,
        host_hit_tokens,
        disk_hit_tokens,
        store_hit_tokens,
        stateless_tokens,
        stored_snapshots,
        evicted_snapshots,
        stored_blocks,
        duplicate_blocks,
        cow_copies,
        evictions,
        preemptions,
        resumed_requests,
        resumed_query_tokens,
        resumed_hit_tokens,
    );
    Ok(dict)
}

pub(crate) fn usage<'py>(py: Python<'py>, usage: &Usage) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    fields!(
        dict,
        usage,
        sequences,
        tokens,
        blocks_total,
        blocks_used,
        blocks_peak,
        blocks_cached,
        slots_wasted,
    );
    Ok(dict)
}

/// The fill of the slots of a group of states, and of its snapshots.
type StatesFill = [GroupUsage; 2];

/// Returns the fill of each group of states.
pub(crate) fn fill_of_states(state: &CacheState) -> Vec<StatesFill> {
    let spec = state.spec();
    let slots = (0..=u8::MAX).map(GroupId).skip(spec.groups().len()).take(spec.states().len());
    let fill = |group| state.group_usage(group).unwrap_or_default();
    slots.zip(spec.snapshot_groups()).map(|(slots, kept)| [slots, kept].map(fill)).collect()
}

/// Makes the list of the fill of groups of states.
pub(crate) fn states<'py>(
    py: Python<'py>,
    states: &[StatesFill],
) -> PyResult<Vec<Bound<'py, PyDict>>> {
    let of = |[slots, snapshots]: &StatesFill| {
        let dict = PyDict::new(py);
        dict.set_item("slots_total", slots.total)?;
        dict.set_item("slots_used", slots.used)?;
        dict.set_item("snapshots_total", snapshots.total)?;
        dict.set_item("snapshots_used", snapshots.used)?;
        dict.set_item("snapshots_cached", snapshots.cached)?;
        Ok(dict)
    };
    states.iter().map(of).collect()
}

/// Makes the cached tokens of a prompt, by kind of layer.
pub(crate) fn hit<'py>(py: Python<'py>, hit: &HitByKind) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    fields!(dict, hit, tokens, rows, state);
    Ok(dict)
}

pub(crate) fn tiers<'py>(py: Python<'py>, tiers: &TiersStats) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    fields!(
        dict,
        tiers,
        prefetches,
        late,
        loaded_tokens,
        cheaper_to_compute,
        no_room,
        offloaded,
        offload_missed,
        unnamed_blocks,
        host_chunks,
        host_bytes,
        host_capacity,
        host_evictions,
    );
    let stores = tiers.stores.iter().map(|of| store(py, of)).collect::<PyResult<Vec<_>>>()?;
    dict.set_item("stores", stores)?;
    Ok(dict)
}

fn store<'py>(py: Python<'py>, store: &StoreStats) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    fields!(
        dict,
        store,
        lookups,
        found,
        reads,
        read_bytes,
        missed,
        writes,
        written_bytes,
        were_there,
        failures,
        dropped_by_queue,
        dropped_by_breaker,
        dropped_by_budget,
    );
    dict.set_item("refused", store.refused.values().sum::<u64>())?;
    dict.set_item("last_failure", store.last_failure.as_deref())?;
    Ok(dict)
}

pub(crate) fn events(
    py: Python<'_>,
    events: Vec<kv::events::Event>,
) -> PyResult<Bound<'_, PyList>> {
    let list = PyList::empty(py);
    for event in events {
        let dict = match event.kind {
            EventKind::Stored(block) => {
                let dict = stored(py, &block)?;
                dict.set_item("kind", "stored")?;
                dict
            }
            EventKind::Removed { group, key, tier } => {
                let dict = of_kind(py, "removed")?;
                dict.set_item("group", group.0)?;
                dict.set_item("key", key.to_string())?;
                dict.set_item("tier", tier_name(tier))?;
                dict
            }
            EventKind::Updated { group, key, tier, priority } => {
                let dict = of_kind(py, "updated")?;
                dict.set_item("group", group.0)?;
                dict.set_item("key", key.to_string())?;
                dict.set_item("tier", tier_name(tier))?;
                dict.set_item("priority", priority.level)?;
                dict
            }
            EventKind::Cleared { tier } => {
                let dict = of_kind(py, "cleared")?;
                dict.set_item("tier", tier_name(tier))?;
                dict
            }
            EventKind::Lost { from, to } => {
                let dict = of_kind(py, "lost")?;
                dict.set_item("from", from)?;
                dict.set_item("to", to)?;
                dict
            }
            _ => of_kind(py, "unknown")?,
        };
        dict.set_item("id", event.id)?;
        list.append(dict)?;
    }
    Ok(list)
}

/// Makes the list of what a step of an engine has given.
pub(crate) fn results(py: Python<'_>, events: Vec<Event>) -> PyResult<Bound<'_, PyList>> {
    let list = PyList::empty(py);
    for event in events {
        let dict = match event {
            Event::Token { index, token } => {
                let dict = of_kind(py, "token")?;
                dict.set_item("request", index)?;
                dict.set_item("token", token)?;
                dict
            }
            Event::Finished { index, generated } => {
                let dict = self::generated(py, &generated)?;
                dict.set_item("kind", "finished")?;
                dict.set_item("request", index)?;
                dict
            }
            _ => of_kind(py, "unknown")?,
        };
        list.append(dict)?;
    }
    Ok(list)
}

/// Makes the result of one request.
pub(crate) fn generated<'py>(
    py: Python<'py>,
    generated: &Generated,
) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    fields!(dict, generated, reused, admitted_ms, first_token_ms);
    dict.set_item("tokens", &generated.tokens)?;
    dict.set_item("finish", finish_name(generated.finish))?;
    let beams = PyList::empty(py);
    for hypothesis in &generated.hypotheses {
        let beam = PyDict::new(py);
        fields!(beam, hypothesis, log_prob, score);
        beam.set_item("tokens", &hypothesis.tokens)?;
        beam.set_item("finish", finish_name(hypothesis.finish))?;
        beams.append(beam)?;
    }
    dict.set_item("beams", beams)?;
    Ok(dict)
}

fn finish_name(finish: Finish) -> &'static str {
    match finish {
        Finish::Length => "length",
        Finish::Stop => "stop",
        Finish::Context => "context",
        Finish::Cancelled => "cancelled",
    }
}

/// Makes the counts of an engine, with those of its cache.
pub(crate) fn engine<'py>(
    py: Python<'py>,
    stats: &kv::engine::Stats,
) -> PyResult<Bound<'py, PyDict>> {
    let dict = self::stats(py, &stats.cache)?;
    fields!(
        dict,
        stats,
        seconds,
        prompt_tokens,
        generated_tokens,
        steps,
        preemptions,
        bytes_per_token,
        cache_bytes,
        blocks_total,
        blocks_peak,
        drafted_tokens,
        accepted_tokens,
    );
    Ok(dict)
}

fn of_kind<'py>(py: Python<'py>, kind: &str) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("kind", kind)?;
    Ok(dict)
}

pub(crate) fn stored<'py>(py: Python<'py>, block: &StoredBlock) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("group", block.group.0)?;
    dict.set_item("key", block.key.to_string())?;
    dict.set_item("parent", block.parent.to_string())?;
    dict.set_item("index", block.index)?;
    dict.set_item("tokens", block.tokens.to_vec())?;
    dict.set_item("tier", tier_name(block.tier))?;
    dict.set_item("priority", block.priority.level)?;
    Ok(dict)
}

fn tier_name(tier: Tier) -> &'static str {
    match tier {
        Tier::Device => "device",
        Tier::Host => "host",
        Tier::Disk => "disk",
        Tier::Store => "store",
        _ => "unknown",
    }
}

/// Lists the devices that this build can open here, by name.
#[pyfunction]
pub(crate) fn device_names() -> Vec<String> {
    let mut names = vec!["cpu".to_owned()];
    for backend in feature_names() {
        let opens = |index: u32| {
            let name = format!("{backend}:{index}");
            kv::Device::open(&name).is_ok().then_some(name)
        };
        if backend != "cpu" && backend != "emulated" {
            names.extend((0..8).map_while(opens));
        }
    }
    names
}

/// Lists the backends that this build has.
#[pyfunction]
pub(crate) fn feature_names() -> Vec<&'static str> {
    let mut names = vec!["cpu"];
    if cfg!(feature = "cuda") {
        names.push("cuda");
    }
    if cfg!(feature = "wgpu") {
        names.push("wgpu");
    }
    if cfg!(feature = "emulated") {
        names.push("emulated");
    }
    names
}
