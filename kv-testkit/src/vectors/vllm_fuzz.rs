//! `vllm-fuzz/1`: hundreds of requests in a small pool, recorded from vLLM's `KVCacheManager`.
use std::collections::BTreeMap;

use kv_core::backend::AnyBackend;
use serde::Deserialize;
use serde::de::IgnoredAny;

use super::vllm::Config;
use super::vllm_engine::{AdmissionTerms, Engine};
use crate::case::{At, CaseError, CaseResult, Outcome, ensure, same};

/// A recorded run.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Run {
    #[serde(rename = "schema")]
    _schema: String,
    #[serde(default, rename = "meta")]
    _meta: Option<IgnoredAny>,
    #[serde(default, rename = "seed")]
    _seed: Option<IgnoredAny>,
    num_blocks: u32,
    block_size: u32,
    #[serde(default)]
    watermark: f64,
    requests: u64,
    /// Rounds of the recorder's scheduler, which the log does not distinguish.
    #[serde(default, rename = "steps")]
    _steps: Option<IgnoredAny>,
    preemptions: u64,
    prefix_queries: u64,
    prefix_hits: u64,
    log: Vec<Entry>,
}

/// One line of the log; free blocks are counted after it.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Entry {
    New(New, String, Vec<u32>, u32),
    Admit(Admit, String, u32, bool, u32),
    Step(Step, String, u32),
    Token(Token, String, u32),
    Preempt(Preempt, String, u32),
    Free(Free, String, u32),
}

macro_rules! word {
    ($($name:ident $word:literal),*) => {$(
        #[derive(Debug, Deserialize)]
        enum $name {
            #[serde(rename = $word)]
            Is,
        }
    )*};
}
word!(New "new", Admit "admit", Step "step", Token "tok", Preempt "preempt", Free "free");

/// Runs a log and compares every line.
pub(super) fn run(backend: &AnyBackend, run: &Run) -> CaseResult {
    ensure(!run.log.is_empty(), || "an empty log".to_owned())?;
    let config = Config::full(run.num_blocks, run.block_size, run.watermark);
    let mut engine = Engine::new(backend, &config)?;
    let mut to_come = BTreeMap::new();
    for (index, entry) in run.log.iter().enumerate() {
        let place = || format!("line {index}, {entry:?}");
        match entry {
            Entry::New(_, id, tokens, max_new) => {
                engine.arrive(id, tokens.clone(), (None, None)).at(place())?;
                to_come.insert(id, *max_new);
            }
            Entry::Preempt(_, id, free) => {
                let failing = failing(&run.log[index..], id);
                check_refused(&mut engine, failing).at(place())?;
                engine.preempt(id).at(place())?;
                same("free", engine.free(), *free).at(place())?;
            }
            Entry::Token(_, id, token) => {
                engine.append(id, &[*token]).at(place())?;
                let left = to_come.get_mut(id).filter(|left| **left > 0);
                *left.ok_or("more tokens than announced").at(place())? -= 1;
            }
            Entry::Free(_, id, free) => {
                engine.free_request(id).at(place())?;
                same("tokens still to come", to_come.remove(id), Some(0)).at(place())?;
                same("free", engine.free(), *free).at(place())?;
            }
            other => step(&mut engine, &config, other).at(place())?,
        }
    }
    let [[requests, queries, hits], _] = engine.counts();
    same("requests", requests, run.requests)?;
    same("prefix_queries", queries, run.prefix_queries)?;
    same("prefix_hits", hits, run.prefix_hits)?;
    same("preemptions", engine.cache.state().stats().preemptions, run.preemptions)?;
    Ok(Outcome::Holds)
}

/// Runs admissions and steps.
fn step(engine: &mut Engine, config: &Config, entry: &Entry) -> Result<(), CaseError> {
    match entry {
        Entry::Admit(_, id, computed, ok, free) => {
            let watermark = config.watermark_blocks(engine.is_any_running());
            let admitted =
                engine.admit(id, AdmissionTerms { watermark, ..AdmissionTerms::default() })?;
            same("ok", admitted.is_in, *ok)?;
            same("computed", admitted.computed, *computed)?;
            same("free", engine.free(), *free)
        }
        Entry::Step(_, id, new_blocks) => {
            let before = engine.table_lens(id)?[0];
            ensure(engine.step(id, 1, (&[], 0), 0)?, || "refused".to_owned())?;
            same("new_blocks", engine.table_lens(id)?[0] - before, *new_blocks)
        }
        _ => Ok(()),
    }
}

/// Returns the request whose step was refused, so that the first request of `log` was preempted:
/// the one that steps next, or the last of those preempted.
fn failing<'l>(log: &'l [Entry], first: &'l String) -> &'l String {
    let mut failing = first;
    for entry in log {
        match entry {
            Entry::Preempt(_, id, _) => failing = id,
            Entry::Step(_, id, _) => return id,
            _ => break,
        }
    }
    failing
}

fn check_refused(engine: &mut Engine, id: &str) -> Result<(), CaseError> {
    let free = engine.free();
    let fits = engine.step(id, 1, (&[], 0), 0)?;
    ensure(!fits, || format!("the step of {id} fits, so no preemption is needed"))?;
    same("free blocks after a refusal", engine.free(), free)
}
