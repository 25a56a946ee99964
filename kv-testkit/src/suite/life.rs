//! Caches at scale, of several groups, beside each other, and their memory.
use kv_core::{
    CacheError, CacheSpec, GroupId, KvCache, KvFormat, PlanError, Plane, StartOptions, StepInput,
};

use super::{case, small};
use crate::case::{At, Case, CaseError, CaseResult, Outcome, ensure, refused, same};
use crate::device::{Device, dim, fetch};
use crate::lab::{Brings, How, Lab, seq};

pub(super) fn cases<B: Device>() -> Vec<Case<B>> {
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

/// Every byte of every plane of a group.
pub(crate) fn bytes<B: Device>(
    cache: &mut KvCache<B>,
    group: GroupId,
) -> Result<Vec<Vec<u8>>, CaseError> {
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

fn wipe<B: Device>(backend: &B) -> CaseResult {
    for format in KvFormat::PLAIN {
        let spec = small().format(*format).wipe_on_release(true).build()?;
        let mut lab = Lab::new(backend, spec, 1)?;
        let zero = |lab: &mut Lab<B>, what: &str| -> Result<usize, CaseError> {
            let all = bytes(&mut lab.cache, GroupId(0)).at(what)?;
            Ok(all.iter().flatten().filter(|byte| **byte != 0).count())
        };
        same("bytes left by released NaN", zero(&mut lab, "poison")?, 0)?;
        lab.fill(1, 9)?;
        ensure(zero(&mut lab, "filled")? > 0, || "nothing was stored".to_owned())?;
        lab.fork(1, 2)?;
        lab.release(1)?;
        lab.check().at("release of a parent wiped what its child holds")?;
        lab.step(&[(2, Brings::Tokens(2))], &How::default())?;
        lab.truncate(2, 4)?;
        lab.check().at("truncation")?;
        lab.step(
            &[(2, Brings::Tokens(5))],
            &How { finish: crate::lab::Finish::Drop, ..How::default() },
        )?;
        lab.release(2)?;
        same("bytes left after the last release", zero(&mut lab, "released")?, 0)?;
        lab.fill(3, 20)?;
        lab.check()?;
        lab.reset()?;
        same("bytes left after reset", zero(&mut lab, "reset")?, 0)?;
    }
    Ok(Outcome::Holds)
}

fn fresh<B: Device>(backend: &B) -> CaseResult {
    let mut cache = KvCache::new(backend.clone(), small().build()?)?;
    let all = bytes(&mut cache, GroupId(0))?;
    same("planes", all.len(), 4)?;
    ensure(all.iter().flatten().all(|byte| *byte == 0), || "fresh planes hold data".to_owned())?;
    Ok(Outcome::Holds)
}

/// Three groups: other heads, dims, formats, block sizes and pools.
fn three_groups() -> Result<CacheSpec, CaseError> {
    let spec = small().layers(5).paged(4, 40);
    let spec = spec.group([1, 3], |group| {
        group.kv_heads(1).head_dims(16, 4).formats(KvFormat::Bf16, KvFormat::F16).paged(16, 12)
    });
    let spec = spec.group([4], |group| group.kv_heads(3).format(KvFormat::F16).paged(1, 150));
    Ok(spec.build()?)
}

fn groups<B: Device>(backend: &B) -> CaseResult {
    let mut lab = Lab::new(backend, three_groups()?, 2)?;
    let tokens = Brings::Tokens;
    lab.start(1)?;
    lab.start(2)?;
    lab.step(&[(1, tokens(19)), (2, tokens(3))], &How::default())?;
    lab.fork(1, 3)?;
    lab.step(&[(3, tokens(2)), (1, tokens(1)), (2, Brings::Query(2))], &How::default())?;
    lab.check()?;
    lab.truncate(1, 5)?;
    lab.check()?;
    // The smallest pool decides: 150 slots of single tokens in the third group.
    let before = lab.state();
    let free = lab.cache.free_blocks(GroupId(2));
    let step = lab.cache.begin_step(&[StepInput::count(seq(1), free + 1)]).map(drop);
    refused("more tokens than the third group has", step, |error| {
        matches!(error, CacheError::Exhausted(e) if e.group == GroupId(2) && e.needed == free + 1)
            || matches!(error, CacheError::Plan(PlanError::SequenceTooLong { .. }))
    })?;
    crate::lab::unchanged(&mut lab, &before, "an exhausted group")?;
    lab.release(1)?;
    lab.release(3)?;
    lab.step(&[(2, tokens(30))], &How::default())?;
    lab.check()?;
    Ok(Outcome::Holds)
}

fn two_caches<B: Device>(backend: &B) -> CaseResult {
    let mut one = Lab::new(backend, small().build()?, 3)?;
    let mut two = Lab::new(backend, small().format(KvFormat::F16).contiguous(3, 20).build()?, 4)?;
    for round in 0..3 {
        for lab in [&mut one, &mut two] {
            lab.fill(round, 5)?;
            lab.step(&[(round, Brings::Tokens(2))], &How::default())?;
        }
        one.check().at("the first cache")?;
        two.check().at("the second cache")?;
    }
    Ok(Outcome::Holds)
}

/// A thousand sequences in one step, again and again, and less than a block of each unused.
fn thousand<B: Device>(backend: &B) -> CaseResult {
    let spec = small().layers(1).kv_heads(1).head_dim(4).paged(16, 2600).build()?;
    let mut lab = Lab::new(backend, spec, 5)?;
    let lens: Vec<_> = (0..1000_u64).map(|id| (id, 1 + (id * 7 % 29) as u32)).collect();
    for (id, _) in &lens {
        lab.start(*id)?;
    }
    let prompts: Vec<_> = lens.iter().map(|(id, n)| (*id, Brings::Tokens(*n))).collect();
    let how = How { group: 1, ..How::default() };
    lab.step(&prompts, &how)?;
    for round in 0..5 {
        let decode: Vec<_> = lens.iter().map(|(id, _)| (*id, Brings::Tokens(1))).collect();
        lab.step(&decode, &how).at(format!("decode {round}"))?;
        let usage = lab.cache.usage();
        same("sequences", usage.sequences, 1000)?;
        ensure(usage.slots_wasted < 1000 * 16, || {
            format!("{} slots wasted by 1000 sequences of 16-token blocks", usage.slots_wasted)
        })?;
        let slots = u64::from(usage.blocks_used) * 16;
        same("slots that hold a token or are wasted", usage.tokens + usage.slots_wasted, slots)?;
    }
    lab.check()?;
    for (id, _) in lens.iter().step_by(2) {
        lab.release(*id)?;
    }
    lab.check()?;
    Ok(Outcome::Holds)
}

fn reserve<B: Device>(backend: &B) -> CaseResult {
    let mut lab = Lab::new(backend, small().paged(4, 6).build()?, 6)?;
    let options = StartOptions::default().with_reserve(14);
    lab.cache.start(seq(1), &[], options)?;
    lab.model.start(seq(1));
    same("free blocks", lab.cache.free_blocks(GroupId(0)), 2)?;
    lab.fill(2, 8)?;
    for len in [5, 5, 6] {
        lab.step(&[(1, Brings::Tokens(len))], &How::default()).at("within the reserve")?;
        lab.check()?;
    }
    lab.truncate(1, 1)?;
    same("free blocks", lab.cache.free_blocks(GroupId(0)), 0)?;
    lab.step(&[(1, Brings::Tokens(13))], &How::default())?;
    lab.check()?;
    lab.release(1)?;
    same("free blocks", lab.cache.free_blocks(GroupId(0)), 4)?;
    Ok(Outcome::Holds)
}

fn on_demand<B: Device>(backend: &B) -> CaseResult {
    let spec = CacheSpec::builder().layers_on_demand().kv_heads(2).head_dim(8).paged(4, 16);
    let mut cache = KvCache::new(backend.clone(), spec.build()?)?;
    same("layer 3 gets memory", cache.allocate_layer(3)?, true)?;
    same("layer 3 has it", cache.allocate_layer(3)?, false)?;
    same("layer 7 gets memory", cache.allocate_layer(7)?, true)?;
    cache.start(seq(1), &[], StartOptions::default())?;
    let values = vec![1.0_f32; 3 * 16];
    let view = kv_core::TensorView::host(&values, &[3, 2, 8]);
    let format = kv_core::QkvFormat::Thd;
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
        (crate::lab::dense(format, &[3], [2, 8]), kv_core::DType::F32),
        crate::device::Place::Device,
    )?;
    cache.gather(7, Plane::Value, &[(seq(1), 0, 3)], out.view_mut(), format)?;
    let capabilities = backend.capabilities();
    same("values", out.read(capabilities, cache.queue_mut())?.values(), values)?;
    Ok(Outcome::Holds)
}

/// A prompt that was cached when one layer had memory, asked for again when another one has it too.
fn late_layer<B: Device>(backend: &B) -> CaseResult {
    let spec = CacheSpec::builder().layers_on_demand().kv_heads(1).head_dim(8).paged(4, 16);
    let mut cache = KvCache::new(backend.clone(), spec.format(KvFormat::F32).build()?)?;
    let (prompt, ones) = ([1, 2, 3, 4, 5, 6, 7, 8, 9], [1.0_f32; 9 * 8]);
    let format = kv_core::QkvFormat::Thd;
    // One sequence lives on, another has gone, and the third finds neither.
    for (id, layers) in [(1, 1), (2, 1), (3, 2)] {
        for layer in 0..layers {
            cache.allocate_layer(layer)?;
        }
        let reused = cache.start(seq(id), &prompt, StartOptions::default())?;
        same(format!("tokens that sequence {id} takes over"), reused, if id == 2 { 8 } else { 0 })?;
        let view = || kv_core::TensorView::host(&ones, &[9, 1, 8]);
        let mut step = cache.begin_step(&[StepInput::prompt(seq(id), &prompt, reused)])?;
        (0..layers).try_for_each(|layer| step.write(layer, view(), view(), format))?;
        step.commit()?;
        if id == 2 {
            cache.release(seq(2))?;
        }
    }
    for (id, layer) in [(1, 0), (3, 0), (3, 1), (1, 1)] {
        let layout = crate::lab::dense(format, &[1], [1, 8]);
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

fn one_block<B: Device>(backend: &B) -> CaseResult {
    let mut lab = Lab::new(backend, small().paged(4, 1).build()?, 7)?;
    for id in 1..4 {
        lab.fill(id, 3)?;
        lab.step(&[(id, Brings::Tokens(1))], &How::default())?;
        lab.check()?;
        lab.release(id)?;
    }
    Ok(Outcome::Holds)
}

fn long_tables<B: Device>(backend: &B) -> CaseResult {
    let spec = small().layers(1).kv_heads(1).head_dim(dim(backend, 2)).paged(1, 3000).build()?;
    let mut lab = Lab::new(backend, spec, 8)?;
    lab.fill(1, 900)?;
    lab.fill(2, 10)?;
    lab.fork(1, 3)?;
    for (id, n) in [(1, 400), (2, 3), (3, 1200)] {
        let rows = lab.random_rows(&[n as usize], &How::default());
        lab.write_only(&[(id, n)], &rows, kv_core::DType::F32)?;
    }
    let inputs = [1, 2, 3].map(|id| (id, Brings::Tokens(1)));
    lab.step(&inputs, &How { group: 1, ..How::default() })?;
    lab.check()?;
    Ok(Outcome::Holds)
}
