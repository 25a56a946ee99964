//! `te-rope/1`: rotary embedding from the positions of a step.
use kv_core::backend::AnyBackend;
use kv_core::{CacheSpec, KvCache, StartOptions, StepInput};
use serde::Deserialize;

use crate::case::{CaseError, CaseResult, Outcome, ensure};
use crate::device::dim;
use crate::fixture::seq;
use crate::oracle::Rope;
use crate::rng::mix;

/// Rows rotated at the positions that follow each sequence's start.
#[derive(Debug, Deserialize)]
pub(super) struct RopeCase {
    rotary_percent: f64,
    interleaved: bool,
    interpolation_factor: Option<f64>,
    pretrained_max: Option<f64>,
    base: f64,
    max_seq: u32,
    start_positions: Vec<u32>,
    shape: [u32; 4],
    y: Vec<f64>,
}

impl RopeCase {
    fn rope(&self) -> Rope {
        let interpolation = match (self.interpolation_factor, self.pretrained_max) {
            // Longer than the length that the factor was made for: the factor grows with the
            // length.
            (Some(factor), Some(max)) if f64::from(self.max_seq) > max * factor => {
                f64::from(self.max_seq) / max
            }
            (Some(factor), Some(_)) => factor,
            _ => 1.0,
        };
        let Self { base, rotary_percent, interleaved, .. } = *self;
        Rope { base, rotary_percent, interleaved, interpolation }
    }
}

/// Rotates with the oracle at the positions that a step of the cache reports.
pub(super) fn run(backend: &AnyBackend, case: &RopeCase) -> CaseResult {
    let [batch, tokens, heads, dim] = case.shape;
    let len = [tokens, heads, dim].iter().try_fold(batch, |n, x| n.checked_mul(*x));
    ensure(len.is_some_and(|len| len as usize == case.y.len() && len > 0), || {
        format!("y has {} values, shape {:?}", case.y.len(), case.shape)
    })?;
    ensure(case.start_positions.len() == batch as usize, || "not one start a sequence".to_owned())?;
    let fits = |start: &u32| start.checked_add(tokens).is_some();
    ensure(case.start_positions.iter().all(fits), || "start positions out of bounds".to_owned())?;
    let positions = positions(backend, case)?;
    let rope = case.rope();
    let rotated = f64::from(dim) * case.rotary_percent;
    ensure(rotated >= 0.0 && rotated <= f64::from(dim), || "rotary_percent".to_owned())?;
    let mut at = 0;
    for (row, position) in positions.iter().enumerate() {
        let sequence = row as u32 / tokens;
        for head in 0..heads {
            let x: Vec<_> = (0..dim).map(|d| mix([sequence, *position, head, d, 0, 1])).collect();
            for (d, got) in rope.rotate(&x, *position).into_iter().enumerate() {
                let expected = case.y[at];
                ensure((got - expected).abs() <= 1e-6, || {
                    format!(
                        "sequence {sequence}, position {position}, head {head}, value {d}: \
                         expected {expected}, got {got}"
                    )
                })?;
                at += 1;
            }
        }
    }
    Ok(Outcome::Holds)
}

/// Returns the positions that a step reports after every sequence has cached its start. No layer
/// has memory, so nothing is written.
fn positions(backend: &AnyBackend, case: &RopeCase) -> Result<Vec<u32>, CaseError> {
    let [batch, tokens, ..] = case.shape;
    let total: u64 = case.start_positions.iter().map(|start| u64::from(start + tokens)).sum();
    ensure(total <= 1 << 24, || "start positions out of bounds".to_owned())?;
    let longest = case.start_positions.iter().max().copied().unwrap_or(0) + tokens;
    let spec = CacheSpec::builder().layers_on_demand().kv_heads(1).head_dim(dim(backend, 1));
    let mut cache = KvCache::new(backend.clone(), spec.contiguous(batch, longest).build()?)?;
    let (mut prefix, mut step) = (Vec::new(), Vec::new());
    for (id, start) in (0..).zip(&case.start_positions) {
        cache.start(seq(id), &[], StartOptions::default())?;
        if *start > 0 {
            prefix.push(StepInput::count(seq(id), *start));
        }
        step.push(StepInput::count(seq(id), tokens));
    }
    cache.begin_step(&prefix)?.commit()?;
    Ok(cache.begin_step(&step)?.positions().to_vec())
}
