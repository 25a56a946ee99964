//! `vllm-scenario/1`: single calls and their outcomes, recorded from vLLM's `KVCacheManager`.
//!
//! Outcomes under `sem` must be the same here, those under `impl` need not, and [`DEVIATIONS`]
//! lists where this cache differs on purpose. A field that this reader does not know is an error,
//! because its content would not be tested.
use kv_core::backend::AnyBackend;
use kv_core::events::{Event, EventKind};
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Map, Value, json};

use super::vllm_engine::{AdmissionTerms, Engine};
use crate::case::{At, CaseError, CaseResult, Outcome, ensure, same};
use crate::consumer::Consumer;

/// A recorded scenario.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Scenario {
    #[serde(rename = "schema")]
    _schema: String,
    #[serde(default, rename = "meta")]
    _meta: Option<IgnoredAny>,
    #[serde(default)]
    name: Option<String>,
    config: Config,
    ops: Vec<Op>,
}

/// An outcome that differs from the recorded one on purpose.
struct Deviation {
    scenario: &'static str,
    operation: usize,
    outcome: &'static str,
    /// The recorded outcome, so that a new recording is noticed.
    recorded: u64,
    ours: u64,
}

/// The deviations from vLLM, with their reasons.
///
/// If two requests compute the same blocks side by side, vLLM keeps both copies. Here the second
/// request takes the blocks of the first when its step is committed and frees its own: copies would
/// evict content that others need.
const DEVIATIONS: &[Deviation] = &[Deviation {
    scenario: "12_duplicate_blocks_not_merged",
    operation: 3,
    outcome: "free_blocks",
    recorded: 55,
    ours: 59,
}];

impl Scenario {
    /// Returns the expected outcome of an operation here.
    fn expected(&self, index: usize, op: &Op) -> Result<Sem, CaseError> {
        let mut sem = op.sem.clone();
        let is_here = |deviation: &&Deviation| {
            Some(deviation.scenario) == self.name.as_deref() && deviation.operation == index
        };
        for Deviation { outcome, recorded, ours, .. } in DEVIATIONS.iter().filter(is_here) {
            let before = sem.insert((*outcome).to_owned(), json!(ours));
            same("an outcome we deviate from", before, Some(json!(recorded)))?;
        }
        Ok(sem)
    }
}

/// The configuration of the recorded cache.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Config {
    pub(super) num_blocks: u32,
    pub(super) block_size: u32,
    #[serde(default)]
    pub(super) watermark: f64,
    #[serde(default)]
    specs: Option<Vec<String>>,
    #[serde(default)]
    window: Option<u32>,
    #[serde(default)]
    pub(super) use_eagle: bool,
    #[serde(default)]
    pub(super) events: bool,
}

impl Config {
    /// Makes a cache of one group without a window.
    pub(super) fn full(num_blocks: u32, block_size: u32, watermark: f64) -> Self {
        Self { num_blocks, block_size, watermark, ..Self::default() }
    }

    /// Returns the number of keys before its own that a query sees, by group; `None` for all.
    pub(super) fn windows(&self) -> Result<Vec<Option<u32>>, CaseError> {
        let full = [String::from("full")];
        let one = |spec: &String| match (spec.as_str(), self.window) {
            ("full", _) => Ok(None),
            ("swa", Some(window)) if window > 0 => Ok(Some(window - 1)),
            ("swa", _) => Err(CaseError::from("config: a spec \"swa\" without a window")),
            (other, _) => Err(CaseError::from(format!("config: an unknown spec {other:?}"))),
        };
        let specs = self.specs.as_deref().unwrap_or(&full);
        ensure(!specs.is_empty(), || "config: an empty list of specs".to_owned())?;
        specs.iter().map(one).collect()
    }

    /// Returns the number of blocks that an admission leaves free while another request is
    /// scheduled.
    pub(super) fn watermark_blocks(&self, is_scheduled: bool) -> u32 {
        if is_scheduled { (self.watermark * f64::from(self.num_blocks)).floor() as u32 } else { 0 }
    }
}

type Sem = Map<String, Value>;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Add {
    id: String,
    tokens: Vec<u32>,
    #[serde(default)]
    salt: Option<String>,
    #[serde(default)]
    lora: Option<String>,
    #[serde(default)]
    chunk: Option<u32>,
    #[serde(default)]
    lookahead: u32,
    #[serde(default)]
    must_fit: bool,
    #[serde(default = "yes")]
    scheduled: bool,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Retry {
    id: String,
    #[serde(default)]
    chunk: Option<u32>,
    #[serde(default)]
    lookahead: u32,
    #[serde(default)]
    must_fit: bool,
    #[serde(default = "yes")]
    scheduled: bool,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Decode {
    id: String,
    tokens: Vec<u32>,
    #[serde(default)]
    lookahead: u32,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Spec {
    id: String,
    draft: u32,
    accept: u32,
    tokens: Vec<u32>,
    #[serde(default)]
    lookahead: u32,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Prefill {
    id: String,
    n: u32,
    #[serde(default)]
    lookahead: u32,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Named {
    id: String,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Lookup {
    tokens: Vec<u32>,
    #[serde(default)]
    salt: Option<String>,
    #[serde(default)]
    lora: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Plain {}

#[derive(Debug, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
enum Call {
    Add(Add),
    Retry(Retry),
    Decode(Decode),
    Spec(Spec),
    Prefill(Prefill),
    Preempt(Named),
    Free(Named),
    Reset(Plain),
    Lookup(Lookup),
    Stats(Plain),
}

/// An operation and its recorded outcomes. Those under `impl` are dropped.
#[derive(Debug, Deserialize)]
#[serde(try_from = "Map<String, Value>")]
struct Op {
    call: Call,
    sem: Sem,
}

impl TryFrom<Map<String, Value>> for Op {
    type Error = serde_json::Error;

    fn try_from(mut fields: Map<String, Value>) -> Result<Self, Self::Error> {
        let sem = serde_json::from_value(fields.remove("sem").unwrap_or_default())?;
        fields.remove("impl");
        Ok(Self { call: serde_json::from_value(fields.into())?, sem })
    }
}

fn yes() -> bool {
    true
}

/// Runs a scenario.
pub(super) fn run(backend: &AnyBackend, scenario: &Scenario) -> CaseResult {
    ensure(!scenario.ops.is_empty(), || "no operation".to_owned())?;
    let engine = Engine::new(backend, &scenario.config)?;
    let (taken, was_reset, events) = ([[0; 3]; 2], false, Consumer::default());
    let mut replay = Replay { config: &scenario.config, engine, taken, was_reset, events };
    for (index, op) in scenario.ops.iter().enumerate() {
        let place = || format!("operation {index}");
        let mut got = replay.run(&op.call).at(place())?;
        got.insert("free_blocks".to_owned(), json!(replay.engine.free()));
        if replay.engine.is_pressed {
            let why = format!("operation {index}: groups that share one pool run out of it");
            return Ok(Outcome::Unsupported(why));
        }
        let expected = scenario.expected(index, op).at(place())?;
        compare(&expected, &got).at(place())?;
        replay.check_events().at(place())?;
    }
    Ok(Outcome::Holds)
}

/// Compares an outcome with the recorded one.
fn compare(sem: &Sem, got: &Sem) -> Result<(), CaseError> {
    for (key, expected) in sem {
        let got = got.get(key);
        let got = got.ok_or_else(|| format!("sem: {key:?} is unknown for this operation"))?;
        // Blocks are listed by group, or counted in total.
        let sum = match (got, expected) {
            (Value::Array(list), Value::Number(_)) => {
                json!(list.iter().filter_map(Value::as_u64).sum::<u64>())
            }
            _ => got.clone(),
        };
        same(key, &sum, expected)?;
    }
    Ok(())
}

struct Replay<'s> {
    config: &'s Config,
    engine: Engine,
    /// Counts at the previous read, which resets them.
    taken: [[u64; 3]; 2],
    was_reset: bool,
    events: Consumer,
}

impl Replay<'_> {
    fn run(&mut self, call: &Call) -> Result<Sem, CaseError> {
        let got = match call {
            Call::Add(add) => {
                let apart = (add.salt.as_deref(), add.lora.as_deref());
                self.engine.arrive(&add.id, add.tokens.clone(), apart)?;
                let limits = (add.chunk, add.lookahead, add.must_fit);
                self.admit(&add.id, limits, add.scheduled)?
            }
            Call::Retry(retry) => {
                let limits = (retry.chunk, retry.lookahead, retry.must_fit);
                self.admit(&retry.id, limits, retry.scheduled)?
            }
            Call::Decode(decode) => self.decode(decode)?,
            Call::Spec(spec) => self.speculate(spec)?,
            Call::Prefill(prefill) => {
                let Prefill { id, n, lookahead, .. } = prefill;
                let before = self.engine.table_lens(id)?;
                let ok = self.engine.step(id, *n, (&[], 0), *lookahead)?;
                json!({ "ok": ok, "new_blocks": self.grown(id, &before)? })
            }
            Call::Preempt(hashes) => {
                self.engine.preempt(&hashes.id)?;
                json!({})
            }
            Call::Free(hashes) => {
                self.engine.free_request(&hashes.id)?;
                json!({})
            }
            Call::Reset(_) => {
                let ok = self.engine.cache.reset_prefixes()?;
                self.was_reset |= ok;
                json!({ "ok": ok })
            }
            Call::Lookup(lookup) => {
                let adapter = self.engine.adapter(lookup.lora.as_deref());
                let salt = lookup.salt.as_deref();
                json!({ "computed_tokens": self.engine.look_up(&lookup.tokens, salt, adapter) })
            }
            Call::Stats(_) => self.stats(),
        };
        match got {
            Value::Object(got) => Ok(got),
            _ => Ok(Map::new()),
        }
    }

    fn admit(
        &mut self,
        id: &str,
        (chunk, lookahead, must_fit): (Option<u32>, u32, bool),
        is_scheduled: bool,
    ) -> Result<Value, CaseError> {
        let watermark = self.config.watermark_blocks(is_scheduled);
        let terms = AdmissionTerms { chunk, lookahead, must_fit, watermark };
        let admitted = self.engine.admit(id, terms)?;
        let mut got = json!({
            "computed_tokens": admitted.computed,
            "admitted": admitted.is_in,
            "new_blocks": admitted.new_blocks,
        });
        if admitted.is_in {
            got["table_len"] = json!(self.engine.table_lens(id)?);
        }
        Ok(got)
    }

    /// Returns the growth of a request's block tables, by group.
    fn grown(&self, id: &str, before: &[u32]) -> Result<Vec<u32>, CaseError> {
        let after = self.engine.table_lens(id)?;
        Ok(after.iter().zip(before).map(|(after, before)| after - before).collect())
    }

    fn decode(&mut self, decode: &Decode) -> Result<Value, CaseError> {
        let before = self.engine.table_lens(&decode.id)?;
        let mut steps = 0;
        for token in &decode.tokens {
            self.engine.append(&decode.id, &[*token])?;
            if !self.engine.step(&decode.id, 1, (&[], 0), decode.lookahead)? {
                self.engine.take_back(&decode.id);
                break;
            }
            steps += 1;
        }
        Ok(json!({ "steps_ok": steps, "new_blocks": self.grown(&decode.id, &before)? }))
    }

    /// Runs one new token and drafts. vLLM learns the new token together with the accepted drafts,
    /// after the step, so all of these tokens are uncertain while it runs.
    fn speculate(&mut self, spec: &Spec) -> Result<Value, CaseError> {
        let stay = spec.accept + 1;
        same("tokens of a spec", spec.tokens.len() as u32, stay)?;
        ensure(spec.accept <= spec.draft, || "more drafts accepted than made".to_owned())?;
        same("tokens before a spec that are not computed", self.engine.pending(&spec.id)?, 0)?;
        let before = self.engine.table_lens(&spec.id)?;
        let wrong = (0..spec.draft - spec.accept).map(|i| u32::MAX - i);
        let drafts: Vec<_> = spec.tokens.iter().copied().chain(wrong).collect();
        let ok = self.engine.step(&spec.id, 0, (&drafts, stay), spec.lookahead)?;
        if ok {
            self.engine.append(&spec.id, &spec.tokens)?;
        }
        Ok(json!({
            "ok": ok,
            "new_blocks": self.grown(&spec.id, &before)?,
            "num_computed_tokens": self.engine.computed(&spec.id)?,
        }))
    }

    /// Returns counts since the previous read.
    fn stats(&mut self) -> Value {
        let now = self.engine.counts();
        let since = |kind: usize, i: usize| now[kind][i] - self.taken[kind][i];
        let got = json!({
            "requests": since(0, 0), "queries": since(0, 1), "hits": since(0, 2),
            "preempted_requests": since(1, 0), "preempted_queries": since(1, 1),
            "preempted_hits": since(1, 2), "reset": self.was_reset,
        });
        (self.taken, self.was_reset) = (now, false);
        got
    }

    /// Checks that a consumer of the events knows the same as the cache.
    fn check_events(&mut self) -> Result<(), CaseError> {
        if !self.config.events {
            return Ok(());
        }
        let events = self.engine.cache.take_events();
        let is_lost = |event: &Event| matches!(event.kind, EventKind::Lost { .. });
        ensure(!events.iter().any(is_lost), || "events were lost".to_owned())?;
        self.events.apply(&events)?;
        self.events.check(&self.engine.cache.state().snapshot())
    }
}
