//! The TransformerEngine-style and slot-style interfaces on a device.
use std::collections::BTreeMap;

use kv_compat::{InferenceConfig, InferenceParams, KvCacheManager, SlotConfig};
use kv_core::backend::{AnyBackend, Backend};
use kv_core::error::PlanError;
use kv_core::{AttentionOptions, Axes, CacheError, DType, KvFormat, SequenceId, TensorView};

use super::case;
use crate::amount::runs;
use crate::case::{At, Case, CaseError, CaseResult, Outcome, ensure, refused, same};
use crate::device::{Place, Staged, fetch};
use crate::fixture::{AXES, check_attention, dense, options};
use crate::oracle::Attention;
use crate::rng::Rng;
use crate::vectors::te::{Config, Entry, Form, cached, check_content, state, write};

pub(super) fn cases() -> Vec<Case> {
    vec![
        case("compat/inference_params_random_steps", random_steps),
        case("compat/inference_params_attends", attends),
        case("compat/inference_params_arrays", arrays),
        case("compat/inference_params_exhaustion", exhaustion),
        case("compat/inference_params_roll_back", roll_back),
        case("compat/inference_params_late_layer", late_layer),
        case("compat/slots_append_advance_attend", slots),
        case("compat/slots_refusals", slot_refusals),
    ]
}

fn config(backend: &AnyBackend, pages: Option<[u32; 2]>, dtype: &str) -> Config {
    let config = Config {
        max_batch_size: 5,
        max_sequence_length: 24,
        num_heads_kv: Some(2),
        head_dim_k: Some(4),
        head_dim_v: Some(6),
        dtype: Some(dtype.to_owned()),
        max_ctx_len: Some(24),
        qkv_format: None,
        layers: Some(2),
        is_paged: pages.is_some(),
        page_size: pages.map(|pages| pages[0]),
        total_num_pages: pages.map(|pages| pages[1]),
    };
    config.fitted(backend)
}

/// Sequences arrive, leave, get chunks and drafts, and pause in random order; lengths and contents
/// must follow from the steps alone.
fn random_steps(backend: &AnyBackend) -> CaseResult {
    let mut rng = Rng::new(31);
    let geometries = [None, Some([1, 60]), Some([3, 24]), Some([8, 15]), Some([24, 5])];
    for (pages, dtype) in geometries.into_iter().zip(["f32", "f16", "bf16", "f32", "f16"]) {
        let config = config(backend, pages, dtype);
        for life in 0..runs(6) {
            let mut params = config.open(backend)?;
            let mut lens = BTreeMap::new();
            let mut next = rng.bits() >> 40;
            for index in 0..12 {
                let mut step = Vec::new();
                for (id, len) in &lens {
                    if !rng.one_in(4) && len + 4 <= 24 {
                        step.push((*id, rng.below(5)));
                    }
                }
                while step.len() < 5 && rng.one_in(2) {
                    next += u64::from(rng.within(1, 9));
                    step.push((next, rng.below(9)));
                }
                // A random order: row i is entry i.
                for i in (1..step.len()).rev() {
                    step.swap(i, rng.below(i as u32 + 1) as usize);
                }
                let form = Form { axes: rng.pick(&AXES), padded: None };
                let place = format!("{pages:?}, {dtype}, life {life}, step {index} {step:?}");
                one_step(backend, &mut params, &config, (&step, form), &mut lens).at(place)?;
            }
            params.reset()?;
            let total = pages.map_or(5, |pages| pages[1]);
            same("free pages after reset", params.num_free_pages(), total)?;
        }
    }
    Ok(Outcome::Holds)
}

fn one_step(
    backend: &AnyBackend,
    params: &mut InferenceParams,
    config: &Config,
    (step, form): (&[(u64, u32)], Form),
    lens: &mut BTreeMap<u64, u32>,
) -> Result<(), CaseError> {
    let before = |id: &u64| lens.get(id).copied().unwrap_or(0);
    let entries: Vec<Entry> = step.iter().map(|(id, n)| (*id, before(id), *n)).collect();
    let needed: u32 = entries
        .iter()
        .map(|(_, before, n)| (before + n).div_ceil(config.page_size.unwrap_or(24)))
        .sum();
    let total = config.total_num_pages.unwrap_or(5);
    let seen = state(params);
    let begun = params.pre_step(step);
    if config.is_paged && needed > total {
        refused("more pages than there are", begun, |e| matches!(e, CacheError::Exhausted(_)))?;
        return same("the state after a refusal", state(params), seen);
    }
    begun?;
    *lens = entries.iter().map(|(id, before, n)| (*id, before + n)).collect();
    for layer in 1..=config.layers() {
        write(backend, params, config, (layer, &entries), form)?;
    }
    let rows = params.sequences().iter();
    let got: Vec<Entry> = rows.map(|row| (row.id.0, row.pre_step_len, row.len)).collect();
    let expected = entries.iter().map(|(id, before, n)| (*id, *before, before + n)).collect();
    same("id, length before, length after", got, expected)?;
    if config.is_paged {
        same("free pages", params.num_free_pages(), total - needed)?;
    }
    check_content(backend, params, config)
}

/// Attention through `InferenceParams`, with prefill, chunk and decode in one batch, against the
/// oracle.
fn attends(backend: &AnyBackend) -> CaseResult {
    for pages in [None, Some([4, 30])] {
        for axes in AXES {
            let config = config(backend, pages, "f32");
            let mut params = config.open(backend)?;
            let mut rng = Rng::new(5);
            let steps: [&[Entry]; 3] = [
                &[(7, 0, 9), (3, 0, 2)],
                &[(3, 2, 1), (9, 0, 5), (7, 9, 4)],
                &[(9, 5, 1), (7, 13, 1)],
            ];
            for entries in steps {
                let step: Vec<_> = entries.iter().map(|(id, _, n)| (*id, *n)).collect();
                params.pre_step(&step)?;
                let form = Form { axes, padded: None };
                for layer in 1..=config.layers() {
                    write(backend, &mut params, &config, (layer, entries), form)?;
                    attend(backend, &mut params, (layer, entries), axes, &mut rng)
                        .at(format!("{pages:?}, {axes}, {step:?}, layer {layer}"))?;
                }
            }
        }
    }
    Ok(Outcome::Holds)
}

fn attend(
    backend: &AnyBackend,
    params: &mut InferenceParams,
    (layer, entries): (u16, &[Entry]),
    axes: Axes,
    rng: &mut Rng,
) -> Result<(), CaseError> {
    let [dk, dv] = [params.config().head_dim_k, params.config().head_dim_v].map(|n| n as usize);
    let oracle = Attention::causal(4, 2, dk, dv);
    let lens: Vec<_> = entries.iter().map(|entry| entry.2 as usize).collect();
    let q_rows: Vec<_> = lens.iter().map(|n| rng.normals(n * 4 * dk)).collect();
    let layout = dense(axes, &lens, [4, dk]);
    let made = (layout, layout.pack(DType::F32, &q_rows, f32::NAN));
    let q = Staged::new(backend, params.queue_mut(), made, Place::Host)?;
    let layout = dense(axes, &lens, [4, dv]);
    let mut out = Staged::output(backend, params.queue_mut(), (layout, DType::F32), Place::Device)?;
    let chosen = options(&oracle, axes);
    params.attend(usize::from(layer), q.view(), out.view_mut(), &chosen)?;
    let tensor = out.read(backend.capabilities(), params.queue_mut())?;
    let got = layout.unpack("out", tensor, &lens, 0.0)?;
    let cached: Vec<_> = entries
        .iter()
        .map(|(id, before, n)| {
            let rows = |kv, dim| {
                crate::vectors::te::rows(*id, 0..before + n, [kv, u32::from(layer)], [2, dim])
            };
            [rows(0, dk), rows(1, dv)]
        })
        .collect();
    Ok(check_attention(&oracle, &q_rows, &cached, (&got, None), DType::F32)?)
}

/// The arrays of a step keep their addresses, and the device arrays hold the same numbers.
fn arrays(backend: &AnyBackend) -> CaseResult {
    let config = config(backend, Some([4, 30]), "f32");
    let mut params = config.open(backend)?;
    let addresses = |params: &InferenceParams| {
        [
            params.cu_seqlens_q().as_ptr(),
            params.cu_seqlens_kv().as_ptr(),
            params.get_seqlens_pre_step().as_ptr(),
            params.page_table().as_ptr(),
        ]
        .map(<*const u32>::addr)
    };
    let first = addresses(&params);
    let steps: [&[(u64, u32)]; 5] =
        [&[(1, 9), (2, 1)], &[(2, 4), (1, 1), (3, 2)], &[(3, 0)], &[], &[(8, 20), (3, 1)]];
    for (index, step) in steps.into_iter().enumerate() {
        let entry = |(id, n): &(u64, u32)| (*id, params.sequence_length(*id), *n);
        let entries: Vec<Entry> = step.iter().map(entry).collect();
        params.pre_step(step)?;
        let lists = [
            (params.cu_seqlens_q().to_vec(), params.cu_seqlens_q_buffer().clone()),
            (params.cu_seqlens_kv().to_vec(), params.cu_seqlens_kv_buffer().clone()),
            (params.get_seqlens_pre_step().to_vec(), params.seqlens_pre_step_buffer().clone()),
            (params.page_table().to_vec(), params.page_table_buffer().clone()),
        ];
        for (array, (host, buffer)) in lists.into_iter().enumerate() {
            let range = (0, host.len() as u64 * 4);
            let bytes = fetch(backend.capabilities(), params.queue_mut(), &buffer, range)?;
            let (words, _) = bytes.as_chunks::<4>();
            let device: Vec<_> = words.iter().map(|word| u32::from_ne_bytes(*word)).collect();
            same(format!("step {index}, array {array} on the device"), device, host)?;
        }
        same("addresses", addresses(&params), first)?;
        let form = Form { axes: Axes::Thd, padded: None };
        for layer in 1..=config.layers() {
            write(backend, &mut params, &config, (layer, &entries), form)?;
        }
    }
    Ok(Outcome::Holds)
}

/// With fewer pages than the worst case, a step that does not fit is refused whole, and releases
/// make room.
fn exhaustion(backend: &AnyBackend) -> CaseResult {
    let config = config(backend, Some([4, 6]), "f32");
    let mut params = config.open(backend)?;
    let mut lens = BTreeMap::new();
    let form = Form { axes: Axes::Thd, padded: None };
    let steps: [&[(u64, u32)]; 6] = [
        &[(1, 12), (2, 8)],
        &[(1, 1), (2, 1)],
        &[(1, 1), (2, 0)],
        &[(1, 0), (2, 1), (3, 1)],
        &[(1, 0), (3, 8)],
        &[(4, 24)],
    ];
    for (index, step) in steps.into_iter().enumerate() {
        one_step(backend, &mut params, &config, (step, form), &mut lens)
            .at(format!("step {index} {step:?}"))?;
    }
    Ok(Outcome::Holds)
}

fn roll_back(backend: &AnyBackend) -> CaseResult {
    let config = config(backend, Some([4, 30]), "f32");
    let mut params = config.open(backend)?;
    let mut lens = BTreeMap::new();
    let form = Form { axes: Axes::Bshd, padded: None };
    one_step(backend, &mut params, &config, (&[(1, 6), (2, 3)], form), &mut lens)?;
    params.pre_step(&[(1_u64, 2), (2, 1)])?;
    write(backend, &mut params, &config, (1, &[(1, 6, 2), (2, 3, 1)]), form)?;
    let again = params.pre_step(&[(1_u64, 1)]);
    refused("a step after one that is not written", again, |error| {
        matches!(error, CacheError::Plan(PlanError::LayerNumber { number: 2, .. }))
    })?;
    params.roll_back();
    one_step(backend, &mut params, &config, (&[(2, 2), (1, 1)], form), &mut lens)?;
    Ok(Outcome::Holds)
}

/// A layer that gets memory when tokens are cached has zeros in their place.
fn late_layer(backend: &AnyBackend) -> CaseResult {
    for pages in [None, Some([4, 30])] {
        let config = Config { layers: Some(1), ..config(backend, pages, "f32") };
        let mut params = config.open(backend)?;
        let form = Form { axes: Axes::Thd, padded: None };
        params.pre_step(&[(1_u64, 6), (2, 3)])?;
        write(backend, &mut params, &config, (1, &[(1, 0, 6), (2, 0, 3)]), form)?;
        same("layer 2 gets memory", params.allocate_memory(2)?, true)?;
        write(backend, &mut params, &config, (2, &[(1, 0, 6), (2, 0, 3)]), form)?;
        same("layer 3 gets memory", params.allocate_memory(3)?, true)?;
        write(backend, &mut params, &config, (3, &[(1, 0, 6), (2, 0, 3)]), form)?;
        params.pre_step(&[(2_u64, 2), (1, 0)])?;
        same("layer 4 gets memory", params.allocate_memory(4)?, true)?;
        let entries: [Entry; 2] = [(2, 3, 2), (1, 6, 0)];
        for layer in 1..=4 {
            write(backend, &mut params, &config, (layer, &entries), form)?;
        }
        check_content(backend, &mut params, &Config { layers: Some(3), ..config.clone() })?;
        let late = cached(backend, &mut params, &config, 4)?;
        for ((kv, rows), [heads, dim]) in (0_u32..).zip(&late).zip(config.heads_dims()) {
            let width = heads * dim;
            let (before, new) = rows[0].split_at(3 * width);
            let written = crate::vectors::te::rows(2, 3..5, [kv, 4], [heads, dim]);
            same("rows of this step", new, written.as_slice())?;
            let is_zero = before.iter().chain(&rows[1]).all(|value| *value == 0.0);
            ensure(is_zero, || format!("{pages:?}: {before:?}, {:?}", rows[1]))?;
        }
    }
    Ok(Outcome::Holds)
}

const SLOTS: SlotConfig = SlotConfig {
    num_layers: 2,
    num_kv_heads: 2,
    head_dim: 4,
    max_seq_len: 16,
    max_batch_size: 3,
    format: KvFormat::F32,
};

/// Appends `mix` values of `n` rows at `len` to both layers.
fn append(manager: &mut KvCacheManager, id: SequenceId, len: u32, n: u32) -> Result<(), CaseError> {
    for layer in 0..2_u16 {
        let rows =
            |kv| crate::vectors::te::rows(id.0, len..len + n, [kv, u32::from(layer)], [2, 4]);
        let (k, v) = (rows(0), rows(1));
        let dims = [n, 2, 4];
        manager.append_kv(
            id,
            layer,
            TensorView::host(&k, &dims),
            TensorView::host(&v, &dims),
            n,
        )?;
    }
    Ok(())
}

fn slots(backend: &AnyBackend) -> CaseResult {
    let mut manager = KvCacheManager::new(backend.clone(), SLOTS)?;
    let [a, b] = [manager.allocate_sequence(16)?, manager.allocate_sequence(9)?];
    let mut rng = Rng::new(8);
    let oracle = Attention::causal(4, 2, 4, 4);
    let mut lens = BTreeMap::new();
    for news in [[5, 3], [1, 1], [2, 5]] {
        let entries = [(a, news[0]), (b, news[1])];
        for (id, n) in entries {
            let len = lens.get(&id).copied().unwrap_or(0);
            // Repeated without an advance: an append writes at the length, not after the previous
            // append.
            append(&mut manager, id, len + 1, n.min(2))?;
            append(&mut manager, id, len, n)?;
            lens.insert(id, len + n);
        }
        let q_lens = news.map(|n| n as usize);
        let q_rows: Vec<_> = q_lens.iter().map(|n| rng.normals(n * 16)).collect();
        let layout = dense(Axes::Thd, &q_lens, [4, 4]);
        for layer in 0..2_u16 {
            let made = (layout, layout.pack(DType::F32, &q_rows, f32::NAN));
            let q = Staged::new(backend, manager.queue_mut(), made, Place::Host)?;
            let form = (layout, DType::F32);
            let mut out = Staged::output(backend, manager.queue_mut(), form, Place::Device)?;
            let chosen = options(&oracle, Axes::Thd);
            manager.attend(layer, &entries, q.view(), out.view_mut(), &chosen)?;
            let tensor = out.read(backend.capabilities(), manager.queue_mut())?;
            let got = layout.unpack("out", tensor, &q_lens, 0.0)?;
            let cached = [a, b].map(|id| {
                let len = lens.get(&id).copied().unwrap_or(0);
                let place = |kv| [kv, u32::from(layer)];
                [0, 1].map(|kv| crate::vectors::te::rows(id.0, 0..len, place(kv), [2, 4]))
            });
            check_attention(&oracle, &q_rows, &cached, (&got, None), DType::F32)
                .at(format!("{news:?}, layer {layer}"))?;
        }
        for (id, n) in entries {
            manager.advance_seq_len(id, n)?;
            same("length", manager.seq_len(id), lens.get(&id).copied())?;
        }
    }
    let view = manager.cache(a, 1)?;
    same("view", (view.len, view.max_len), (8, 16))?;
    let bytes = (manager.slot_bytes(), manager.total_bytes(), manager.used_bytes());
    let slot = 2 * 2 * 16 * 2 * 4 * 4;
    same("bytes of a slot, in all, in use", bytes, (slot, 3 * slot, 2 * slot))?;
    manager.release_sequence(a)?;
    same("bytes free", manager.free_bytes(), 2 * slot)?;
    Ok(Outcome::Holds)
}

fn slot_refusals(backend: &AnyBackend) -> CaseResult {
    let mut manager = KvCacheManager::new(backend.clone(), SLOTS)?;
    let plan = |error: &CacheError| matches!(error, CacheError::Plan(_));
    let a = manager.allocate_sequence(8)?;
    refused("a slot too long", manager.allocate_sequence(17), plan)?;
    refused("a slot of nothing", manager.allocate_sequence(0), plan)?;
    refused("an advance over nothing", manager.advance_seq_len(a, 1), plan)?;
    append(&mut manager, a, 0, 8)?;
    refused("one row too many", append(&mut manager, a, 0, 9).map_err(cache_error), plan)?;
    refused("an advance too far", manager.advance_seq_len(a, 9), plan)?;
    manager.advance_seq_len(a, 8)?;
    refused("a full slot", append(&mut manager, a, 8, 1).map_err(cache_error), plan)?;
    manager.allocate_sequence(1)?;
    let last = manager.allocate_sequence(1)?;
    refused("a fourth slot", manager.allocate_sequence(1), plan)?;
    manager.release_sequence(last)?;
    let again = manager.release_sequence(last).map_err(CacheError::from);
    refused("a second release", again, plan)?;
    refused(
        "an append to a released one",
        append(&mut manager, last, 0, 1).map_err(cache_error),
        plan,
    )?;
    let again = manager.allocate_sequence(4)?;
    ensure(again != last, || format!("the id {last} was used again"))?;
    let buffer = backend.alloc(64)?;
    let out = kv_core::TensorViewMut::device(DType::F32, &buffer, 0, &[1, 2, 4]);
    let q = [0.0_f32; 8];
    let q = TensorView::host(&q, &[1, 2, 4]);
    let attended = manager.attend(0, &[(last, 1)], q, out, &AttentionOptions::causal(1.0));
    refused("attention over a released one", attended, plan)?;
    let none = InferenceConfig::new(1, 1);
    refused("no heads", InferenceParams::new(backend.clone(), none), |error| {
        matches!(error, CacheError::Spec(_))
    })?;
    Ok(Outcome::Holds)
}

/// Returns the cache's refusal inside a case error.
fn cache_error(error: CaseError) -> CacheError {
    match error {
        CaseError::Cache(error) => error,
        CaseError::Broken(_) => kv_core::error::DeviceError::new(
            kv_core::error::DeviceErrorKind::Driver,
            "a broken promise instead of a refusal",
        )
        .into(),
    }
}
