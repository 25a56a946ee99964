//! `te-quirks/1`: inputs that TransformerEngine accepts and mishandles, with the intended
//! behaviour.
use std::collections::BTreeMap;

use kv_compat::{InferenceConfig, InferenceParams};
use kv_core::DType;
use kv_core::backend::AnyBackend;
use serde::Deserialize;

use super::te::{Config, Entry, Form, check_content, state, write};
use crate::case::{At, CaseError, CaseResult, Outcome, ensure, refused, same};
use crate::device::{dim, limited_erased};
use crate::fixture::AXES;

/// One input and the intended lengths.
#[derive(Debug, Deserialize)]
pub(super) struct Quirk {
    config: Option<Config>,
    #[serde(default)]
    te_steps: Vec<Step>,
    #[serde(default)]
    sane: String,
    exact_cu: Option<Vec<u32>>,
}

#[derive(Debug, Deserialize)]
struct Step {
    step: Vec<(u64, u32)>,
    #[serde(default)]
    intended_len: BTreeMap<u64, u32>,
}

/// Runs the steps in every axes: the intended lengths and rows, or a refusal that changes
/// nothing.
pub(super) fn run(backend: &AnyBackend, quirk: &Quirk) -> CaseResult {
    if let Some(sums) = &quirk.exact_cu {
        exact_sums(backend, sums)?;
    }
    let Some(config) = quirk.config.as_ref().map(|config| config.fitted(backend)) else {
        ensure(quirk.exact_cu.is_some(), || "neither a config nor exact sums".to_owned())?;
        return Ok(Outcome::Holds);
    };
    for axes in AXES {
        let mut params = config.open(backend)?;
        let form = Form { axes, padded: None };
        for (index, step) in quirk.te_steps.iter().enumerate() {
            let place = format!("{axes}, step {index} {:?} ({})", step.step, quirk.sane);
            if !one_step(backend, &mut params, &config, (step, form)).at(place)? {
                break;
            }
        }
    }
    Ok(Outcome::Holds)
}

/// Runs one step; returns whether it was accepted.
fn one_step(
    backend: &AnyBackend,
    params: &mut InferenceParams,
    config: &Config,
    (step, form): (&Step, Form),
) -> Result<bool, CaseError> {
    let entry = |(id, n): &(u64, u32)| -> Entry { (*id, params.sequence_length(*id), *n) };
    let entries: Vec<_> = step.step.iter().map(entry).collect();
    let before = state(params);
    let begun = params.pre_step(&step.step);
    let longest = entries.iter().map(|(_, before, n)| u64::from(*before) + u64::from(*n)).max();
    if longest.unwrap_or(0) > u64::from(config.max_sequence_length)
        || entries.len() > config.max_batch_size as usize
    {
        refused("more than the cache is made for", begun, |error| {
            matches!(error, kv_core::CacheError::Plan(_))
        })?;
        same("state after the refusal", state(params), before)?;
        return Ok(false);
    }
    begun?;
    for layer in 1..=config.layers() {
        write(backend, params, config, (layer, &entries), form)?;
    }
    let order: Vec<_> = params.sequences().iter().map(|row| row.id.0).collect();
    same("row i is entry i", order, step.step.iter().map(|(id, _)| *id).collect())?;
    for (id, before, new) in &entries {
        let expected = step.intended_len.get(id).copied().unwrap_or(before + new);
        same(format!("length of sequence {id}"), params.sequence_length(*id), expected)?;
    }
    let sums = |values: &mut dyn Iterator<Item = u32>| {
        let mut sums = vec![0];
        sums.extend(values.scan(0, |sum, n| {
            *sum += n;
            Some(*sum)
        }));
        sums.resize(config.max_batch_size as usize + 1, sums[sums.len() - 1]);
        sums
    };
    let queries = sums(&mut entries.iter().map(|entry| entry.2));
    same("cu_q", params.cu_seqlens_q(), &queries)?;
    let lens = sums(&mut entries.iter().map(|entry| entry.1 + entry.2));
    same("cu_kv", params.cu_seqlens_kv(), &lens)?;
    check_content(backend, params, config)?;
    Ok(true)
}

/// Checks prefix sums beyond the precision of f32. Without layers, such lengths need no memory.
fn exact_sums(backend: &AnyBackend, sums: &[u32]) -> Result<(), CaseError> {
    let lens: Option<Vec<_>> = sums.windows(2).map(|pair| pair[1].checked_sub(pair[0])).collect();
    let mut lens = lens.ok_or("exact_cu falls")?;
    let batch = lens.len() as u32;
    let longest = lens.iter().copied().max().unwrap_or(0);
    let total = sums.last().copied().unwrap_or(0);
    ensure(batch > 0 && total <= 1 << 26 && sums[0] == 0, || {
        format!("exact_cu {sums:?} is out of bounds")
    })?;
    while lens.last() == Some(&0) {
        lens.pop();
    }
    let config = InferenceConfig::new(batch, longest.max(1)).num_heads_kv(1);
    let config = config.head_dim_k(dim(backend, 1)).dtype(DType::F16);
    // No layer is allocated, so limits of memory do not matter.
    let device = limited_erased(backend, |c| {
        c.with_binding_bytes_max(u64::MAX).with_buffer_bytes_max(u64::MAX)
    });
    let mut params = InferenceParams::new(device, config)?;
    let step: Vec<_> = (0_u64..).zip(lens).collect();
    params.pre_step(&step)?;
    same("cu_q", params.cu_seqlens_q(), sums)?;
    same("cu_kv", params.cu_seqlens_kv(), sums)
}
