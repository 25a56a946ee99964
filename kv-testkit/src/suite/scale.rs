//! Caches with many sequences, several groups, layers on demand, and wiped memory.
use kv_core::backend::{AnyBackend, Backend, Plane};
use kv_core::error::PlanError;
use kv_core::{CacheError, CacheSpec, GroupId, KvCache, KvFormat, StartOptions, StepInput};

use super::{case, small};
use crate::case::{At, Case, CaseError, CaseResult, Outcome, ensure, refused, same};
use crate::device::{dim, fetch};
use crate::fixture::{CacheFixture, StepConfig, StepKind, seq};

pub(super) fn cases() -> Vec<Case> {
    vec![
        case("cache/wipe_on_release", wipe),
        case("cache/fresh_memory_is_zero", fresh),
        case("cache/groups_of_different_geometry", groups),
        case("cache/two_caches_on_one_device", two_caches),
        case("cache/a_thousand_sequences", thousand),
        case("cache/reserve_stays", reserve),
        case("cache/layers_on_demand", on_demand),
        case("cache/late_layers_reuse_nothing", late_layer),
        case("cache/one_block_is_enough", one_block),
        case("cache/long_sequences_outgrow_their_table_row", long_tables),
    ]
}

/// Returns every byte of every plane of a group.
pub(crate) fn bytes(cache: &mut KvCache, group: GroupId) -> Result<Vec<Vec<u8>>, CaseError> {
    cache.wipe()?;
    let storage = cache.storage(group).ok_or("a group without storage")?;
    let mut list = Vec::new();
    for plane in storage.view().planes() {
        for index in 0..plane.layout().num_segments() {
            let buffer = plane.segment(index as usize).ok_or("a segment without a buffer")?;
            list.push((buffer.clone(), plane.layout().segment_bytes(index)));
        }
    }
    let capabilities = cache.backend().capabilities().clone();
    let mut all = Vec::new();
    for (buffer, len) in list {
        all.push(fetch(&capabilities, cache.queue_mut(), &buffer, (0, len))?);
    }
    Ok(all)
}

fn wipe(backend: &AnyBackend) -> CaseResult {
    for format in KvFormat::PLAIN {
        let spec = small().format(*format).wipe_on_release(true).build()?;
        let mut fixture = CacheFixture::new(backend, spec, 1)?;
        let zero = |fixture: &mut CacheFixture, what: &str| -> Result<usize, CaseError> {
            let all = bytes(&mut fixture.cache, GroupId(0)).at(what)?;
            Ok(all.iter().flatten().filter(|byte| **byte != 0).count())
        };
        same("bytes left by released NaN", zero(&mut fixture, "poison")?, 0)?;
        fixture.fill(1, 9)?;
        ensure(zero(&mut fixture, "filled")? > 0, || "nothing was stored".to_owned())?;
        fixture.fork(1, 2)?;
        fixture.release(1)?;
        fixture.check().at("release of a parent wiped what its child holds")?;
        fixture.step(&[(2, StepKind::Tokens(2))], &StepConfig::default())?;
        fixture.truncate(2, 4)?;
        fixture.check().at("truncation")?;
        fixture.step(
            &[(2, StepKind::Tokens(5))],
            &StepConfig { finish: crate::fixture::Finish::Drop, ..StepConfig::default() },
        )?;
        fixture.release(2)?;
        same("bytes left after the last release", zero(&mut fixture, "released")?, 0)?;
        fixture.fill(3, 20)?;
        fixture.check()?;
        fixture.reset()?;
        same("bytes left after reset", zero(&mut fixture, "reset")?, 0)?;
    }
    Ok(Outcome::Holds)
}

fn fresh(backend: &AnyBackend) -> CaseResult {
    let mut cache = KvCache::new(backend.clone(), small().build()?)?;
    let all = bytes(&mut cache, GroupId(0))?;
    same("planes", all.len(), 4)?;
    ensure(all.iter().flatten().all(|byte| *byte == 0), || "fresh planes hold data".to_owned())?;
    Ok(Outcome::Holds)
}

/// Three groups with different heads, dims, formats, block sizes and pools.
fn three_groups() -> Result<CacheSpec, CaseError> {
    let spec = small().layers(5).paged(4, 40);
    let spec = spec.group([1, 3], |group| {
        group.kv_heads(1).head_dims(16, 4).formats(KvFormat::Bf16, KvFormat::F16).paged(16, 12)
    });
    let spec = spec.group([4], |group| group.kv_heads(3).format(KvFormat::F16).paged(1, 150));
    Ok(spec.build()?)
}

fn groups(backend: &AnyBackend) -> CaseResult {
    let mut fixture = CacheFixture::new(backend, three_groups()?, 2)?;
    let tokens = StepKind::Tokens;
    fixture.start(1)?;
    fixture.start(2)?;
    fixture.step(&[(1, tokens(19)), (2, tokens(3))], &StepConfig::default())?;
    fixture.fork(1, 3)?;
    fixture
        .step(&[(3, tokens(2)), (1, tokens(1)), (2, StepKind::Query(2))], &StepConfig::default())?;
    fixture.check()?;
    fixture.truncate(1, 5)?;
    fixture.check()?;
    // The smallest pool decides: the third group has 150 slots in blocks of one token.
    let before = fixture.state();
    let free = fixture.cache.state().free_blocks(GroupId(2));
    let step = fixture.cache.begin_step(&[StepInput::count(seq(1), free + 1)]).map(drop);
    refused("more tokens than the third group has", step, |error| {
        matches!(error, CacheError::Exhausted(e) if e.group == GroupId(2) && e.needed == free + 1)
            || matches!(error, CacheError::Plan(PlanError::SequenceTooLong { .. }))
    })?;
    crate::fixture::unchanged(&mut fixture, &before, "an exhausted group")?;
    fixture.release(1)?;
    fixture.release(3)?;
    fixture.step(&[(2, tokens(30))], &StepConfig::default())?;
    fixture.check()?;
    Ok(Outcome::Holds)
}

fn two_caches(backend: &AnyBackend) -> CaseResult {
    let mut one = CacheFixture::new(backend, small().build()?, 3)?;
    let mut two =
        CacheFixture::new(backend, small().format(KvFormat::F16).contiguous(3, 20).build()?, 4)?;
    for round in 0..3 {
        for fixture in [&mut one, &mut two] {
            fixture.fill(round, 5)?;
            fixture.step(&[(round, StepKind::Tokens(2))], &StepConfig::default())?;
        }
        one.check().at("the first cache")?;
        two.check().at("the second cache")?;
    }
    Ok(Outcome::Holds)
}

/// A thousand sequences in every step; each wastes less than one block.
fn thousand(backend: &AnyBackend) -> CaseResult {
    let spec = small().layers(1).kv_heads(1).head_dim(4).paged(16, 2600).build()?;
    let mut fixture = CacheFixture::new(backend, spec, 5)?;
    let lens: Vec<_> = (0..1000_u64).map(|id| (id, 1 + (id * 7 % 29) as u32)).collect();
    for (id, _) in &lens {
        fixture.start(*id)?;
    }
    let prompts: Vec<_> = lens.iter().map(|(id, n)| (*id, StepKind::Tokens(*n))).collect();
    let config = StepConfig { group: 1, ..StepConfig::default() };
    fixture.step(&prompts, &config)?;
    for round in 0..5 {
        let decode: Vec<_> = lens.iter().map(|(id, _)| (*id, StepKind::Tokens(1))).collect();
        fixture.step(&decode, &config).at(format!("decode {round}"))?;
        let usage = fixture.cache.state().usage();
        same("sequences", usage.sequences, 1000)?;
        ensure(usage.slots_wasted < 1000 * 16, || {
            format!("{} slots wasted by 1000 sequences of 16-token blocks", usage.slots_wasted)
        })?;
        let slots = u64::from(usage.blocks_used) * 16;
        same("slots that hold a token or are wasted", usage.tokens + usage.slots_wasted, slots)?;
    }
    fixture.check()?;
    for (id, _) in lens.iter().step_by(2) {
        fixture.release(*id)?;
    }
    fixture.check()?;
    Ok(Outcome::Holds)
}

fn reserve(backend: &AnyBackend) -> CaseResult {
    let mut fixture = CacheFixture::new(backend, small().paged(4, 6).build()?, 6)?;
    let options = StartOptions::default().with_reserve(14);
    fixture.cache.start(seq(1), &[], options)?;
    fixture.model.start(seq(1));
    same("free blocks", fixture.cache.state().free_blocks(GroupId(0)), 2)?;
    fixture.fill(2, 8)?;
    for len in [5, 5, 6] {
        fixture
            .step(&[(1, StepKind::Tokens(len))], &StepConfig::default())
            .at("within the reserve")?;
        fixture.check()?;
    }
    fixture.truncate(1, 1)?;
    same("free blocks", fixture.cache.state().free_blocks(GroupId(0)), 0)?;
    fixture.step(&[(1, StepKind::Tokens(13))], &StepConfig::default())?;
    fixture.check()?;
    fixture.release(1)?;
    same("free blocks", fixture.cache.state().free_blocks(GroupId(0)), 4)?;
    Ok(Outcome::Holds)
}

fn on_demand(backend: &AnyBackend) -> CaseResult {
    let spec = CacheSpec::builder().layers_on_demand().kv_heads(2).head_dim(8).paged(4, 16);
    let mut cache = KvCache::new(backend.clone(), spec.build()?)?;
    same("allocation of layer 3", cache.allocate_layer(3)?, true)?;
    same("second allocation of layer 3", cache.allocate_layer(3)?, false)?;
    same("allocation of layer 7", cache.allocate_layer(7)?, true)?;
    cache.start(seq(1), &[], StartOptions::default())?;
    let values = vec![1.0_f32; 3 * 16];
    let view = kv_core::TensorView::host(&values, &[3, 2, 8]);
    let format = kv_core::Axes::Thd;
    let mut step = cache.begin_step(&[StepInput::count(seq(1), 3)])?;
    refused("a layer without memory", step.write(0, view, view, format), |error| {
        matches!(error, CacheError::Plan(PlanError::LayerUnallocated { .. }))
    })?;
    step.write(7, view, view, format)?;
    step.write(3, view, view, format)?;
    step.commit()?;
    let mut out = crate::device::Staged::output(
        backend,
        cache.queue_mut(),
        (crate::fixture::dense(format, &[3], [2, 8]), kv_core::DType::F32),
        crate::device::Place::Device,
    )?;
    cache.gather(7, Plane::Value, &[(seq(1), 0, 3)], out.view_mut(), format)?;
    let capabilities = backend.capabilities();
    same("values", out.read(capabilities, cache.queue_mut())?.values(), values)?;
    Ok(Outcome::Holds)
}

/// A prompt that was cached when one layer had memory is started again when a second layer has it
/// too.
fn late_layer(backend: &AnyBackend) -> CaseResult {
    let spec = CacheSpec::builder().layers_on_demand().kv_heads(1).head_dim(8).paged(4, 16);
    let mut cache = KvCache::new(backend.clone(), spec.format(KvFormat::F32).build()?)?;
    let (prompt, ones) = ([1, 2, 3, 4, 5, 6, 7, 8, 9], [1.0_f32; 9 * 8]);
    let format = kv_core::Axes::Thd;
    // The first sequence still runs, the second is released, and the third finds neither.
    for (id, layers) in [(1, 1), (2, 1), (3, 2)] {
        for layer in 0..layers {
            cache.allocate_layer(layer)?;
        }
        let reused = cache.start(seq(id), &prompt, StartOptions::default())?;
        same(format!("tokens that sequence {id} reuses"), reused, if id == 2 { 8 } else { 0 })?;
        let view = || kv_core::TensorView::host(&ones, &[9, 1, 8]);
        let mut step = cache.begin_step(&[StepInput::prompt(seq(id), &prompt)])?;
        (0..layers).try_for_each(|layer| step.write(layer, view(), view(), format))?;
        step.commit()?;
        if id == 2 {
            cache.release(seq(2))?;
        }
    }
    for (id, layer) in [(1, 0), (3, 0), (3, 1), (1, 1)] {
        let layout = crate::fixture::dense(format, &[1], [1, 8]);
        let (made, place) = ((layout, kv_core::DType::F32), crate::device::Place::Device);
        let mut out = crate::device::Staged::output(backend, cache.queue_mut(), made, place)?;
        let mut step = cache.begin_step(&[StepInput::query(seq(id), 1)])?;
        let q = kv_core::TensorView::host(&ones, &[1, 1, 8]);
        let options = kv_core::AttentionOptions::causal(1.0);
        let attended = step.attend(layer, q, out.view_mut(), &options);
        drop(step);
        if (id, layer) == (1, 1) {
            refused("rows that a late layer lacks", attended, |error| {
                matches!(error, CacheError::Plan(PlanError::RowsUnwritten { tokens: 9, .. }))
            })?;
            continue;
        }
        attended?;
        let values = out.read(backend.capabilities(), cache.queue_mut())?.values();
        let is_one = |value: &f32| (value - 1.0).abs() < 1e-5;
        ensure(values.iter().all(is_one), || format!("{values:?} in layer {layer} of {id}"))?;
    }
    Ok(Outcome::Holds)
}

fn one_block(backend: &AnyBackend) -> CaseResult {
    let mut fixture = CacheFixture::new(backend, small().paged(4, 1).build()?, 7)?;
    for id in 1..4 {
        fixture.fill(id, 3)?;
        fixture.step(&[(id, StepKind::Tokens(1))], &StepConfig::default())?;
        fixture.check()?;
        fixture.release(id)?;
    }
    Ok(Outcome::Holds)
}

fn long_tables(backend: &AnyBackend) -> CaseResult {
    let spec = small().layers(1).kv_heads(1).head_dim(dim(backend, 2)).paged(1, 3000).build()?;
    let mut fixture = CacheFixture::new(backend, spec, 8)?;
    fixture.fill(1, 900)?;
    fixture.fill(2, 10)?;
    fixture.fork(1, 3)?;
    for (id, n) in [(1, 400), (2, 3), (3, 1200)] {
        let rows = fixture.random_rows(&[n as usize], &StepConfig::default());
        fixture.write_only(&[(id, n)], &rows, kv_core::DType::F32)?;
    }
    let inputs = [1, 2, 3].map(|id| (id, StepKind::Tokens(1)));
    fixture.step(&inputs, &StepConfig { group: 1, ..StepConfig::default() })?;
    fixture.check()?;
    Ok(Outcome::Holds)
}
