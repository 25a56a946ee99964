//! Inputs at the edges of blocks and tiles, over blocks in random order and several buffers, with
//! NaN or infinity in all memory that no query sees: append, decode, prefill and gather.
use kv_core::backend::{AnyBackend, Plane};
use kv_core::{Axes, BlockOrder, DType, GroupId, KvFormat, ScaleGroup, Scaling};

use super::gather::{self, Form};
use super::quant::{NEUTRAL, calibrated};
use super::{ORDERS, case, small};
use crate::case::{At, Case, CaseError, CaseResult, Outcome, ensure};
use crate::device::{Place, limited_erased};
use crate::fixture::{CacheFixture, Poison, StepConfig, StepKind, seq};
use crate::tokens::Padding;

pub(super) fn cases() -> Vec<Case> {
    vec![
        case("edges/bf16", |backend| grid(backend, 0)),
        case("edges/fp8-e4m3", |backend| grid(backend, 1)),
        case("edges/int8", |backend| grid(backend, 2)),
        case("edges/l4", |backend| grid(backend, 3)),
    ]
}

const FORMATS: [KvFormat; 4] = [
    KvFormat::Bf16,
    KvFormat::Fp8E4m3(Scaling::Tensor),
    KvFormat::Int8(Scaling::Row),
    KvFormat::L4(ScaleGroup::Row),
];
/// Tokens of the sequences before the first step: none, one, and the ends of tiles.
const LENS: [u32; 8] = [0, 1, 15, 16, 17, 127, 128, 129];
/// Tokens that a sequence gets at most after that.
const MORE: u32 = 21;
const BLOCK_SIZES: [u32; 4] = [1, 8, 24, 64];
/// Sequences that take all blocks and are released in random order.
const FILLERS: u32 = 20;

fn ids() -> impl Iterator<Item = (u64, u32)> {
    (1..).zip(LENS)
}

/// Runs a format with every block size, and the other properties in turn.
fn grid(backend: &AnyBackend, nth: usize) -> CaseResult {
    let format = FORMATS[nth];
    for (index, block_size) in BLOCK_SIZES.into_iter().enumerate() {
        let poison = [Poison::Nan, Poison::Infinity][(index + nth) % 2];
        let order = ORDERS[(index / 2 + index + nth) % 2];
        let is_cut = (index + nth / 2).is_multiple_of(2);
        let mut fixture = fixture(backend, format, (block_size, order), is_cut)?;
        // Kernels that round levels or transformed queries do not compute a log-sum-exp: l4 has
        // none, and int8 in every other grid.
        let lse = match format {
            KvFormat::L4(_) => false,
            KvFormat::Int8(_) => index % 2 == 0,
            _ => true,
        };
        run(&mut fixture, poison, lse).at(format!(
            "blocks of {block_size}, {order:?}, {poison:?}, lse: {lse}, {}",
            if is_cut { "several buffers" } else { "one buffer" }
        ))?;
    }
    Ok(Outcome::Holds)
}

/// Makes a cache whose planes are one buffer or three.
fn fixture(
    backend: &AnyBackend,
    format: KvFormat,
    (block_size, order): (u32, BlockOrder),
    is_cut: bool,
) -> Result<CacheFixture, CaseError> {
    let blocks: u32 = LENS.iter().map(|len| (len + MORE).div_ceil(block_size)).sum();
    let spec = small().layers(1).head_dim(64).format(format).block_order(order);
    let spec = spec.paged(block_size, blocks);
    let block = spec.clone().build()?.groups()[0].layouts()[0].block_bytes();
    let most = if is_cut { block * u64::from(blocks.div_ceil(3)) } else { u64::MAX };
    let device = limited_erased(backend, |capabilities| {
        let most = most.min(capabilities.binding_bytes_max);
        capabilities.with_binding_bytes_max(most)
    });
    let fixture = calibrated(&device, spec, NEUTRAL, 1)?;
    let storage = fixture.cache.storage(GroupId(0));
    let plane = storage.and_then(|storage| storage.plane(0, Plane::Key));
    let segments = plane.map_or(0, |plane| plane.num_segments());
    ensure((segments > 1) == is_cut, || format!("{segments} buffers"))?;
    Ok(fixture)
}

fn run(fixture: &mut CacheFixture, poison: Poison, lse: bool) -> Result<(), CaseError> {
    let config = StepConfig {
        q_dtype: DType::Bf16,
        kv_dtype: DType::Bf16,
        group: 4,
        lse,
        ..StepConfig::default()
    };
    shuffle(fixture)?;
    fixture.poison_pool(poison)?;
    fill(fixture, &config)?;
    fixture.check().at("filled")?;
    gather_parts(fixture).at("gathered")?;
    let all = |kind: StepKind| -> Vec<_> { ids().map(|(id, _)| (id, kind)).collect() };
    for queries in [1, 12] {
        fixture.step(&all(StepKind::Query(queries)), &config).at(format!("{queries} queries"))?;
    }
    fixture.step(&all(StepKind::Tokens(1)), &config).at("decode")?;
    let mut mixed = all(StepKind::Tokens(2));
    (mixed[0].1, mixed[3].1, mixed[5].1) =
        (StepKind::Tokens(20), StepKind::Idle, StepKind::Tokens(20));
    fixture.step(&mixed, &config).at("several tokens and none")?;
    fixture.step(&all(StepKind::Idle), &config).at("no queries")?;
    fixture.check().at("appended")?;
    // The window begins inside a block and a tile. Fewer queries see fewer rows.
    let config = StepConfig { window_left: Some(37), sink_tokens: 5, ..config };
    for queries in [12, 1] {
        let inputs = all(StepKind::Query(queries));
        let poisoned = fixture.poison_masked_with(&inputs, &config, poison)?;
        ensure(poisoned.rows + poisoned.blocks > 0, || "nothing was poisoned".to_owned())?;
        fixture.step(&inputs, &config).at(format!("{queries} queries under a window"))?;
    }
    Ok(())
}

/// Puts the free blocks of the pool in random order.
fn shuffle(fixture: &mut CacheFixture) -> Result<(), CaseError> {
    let layout = fixture.cache.state().spec().groups()[0].layouts()[0];
    let (blocks, size) = (layout.num_blocks(), layout.slot_map().tokens(1));
    let fillers = blocks.min(FILLERS);
    let mut left: Vec<_> = (0..u64::from(fillers)).map(|id| 100 + id).collect();
    for id in &left {
        fixture.start(*id)?;
    }
    // Block by block, so that those of a sequence are apart.
    for _ in 0..blocks / fillers {
        let inputs: Vec<_> = left.iter().map(|id| (*id, size)).collect();
        append(fixture, &inputs, &StepConfig::default())?;
    }
    while !left.is_empty() {
        let at = fixture.rng.below(left.len() as u32) as usize;
        fixture.release(left.swap_remove(at))?;
    }
    Ok(())
}

fn append(
    fixture: &mut CacheFixture,
    inputs: &[(u64, u32)],
    config: &StepConfig,
) -> Result<(), CaseError> {
    let lens: Vec<_> = inputs.iter().map(|(_, n)| *n as usize).collect();
    let rows = fixture.random_rows(&lens, config);
    fixture.write_only(inputs, &rows, config.kv_dtype)
}

/// Fills all sequences, a part of each at a time.
fn fill(fixture: &mut CacheFixture, config: &StepConfig) -> Result<(), CaseError> {
    for (id, _) in ids() {
        fixture.start(id)?;
    }
    for part in 0..4 {
        let share = |len: u32| len * (part + 1) / 4 - len * part / 4;
        let inputs: Vec<_> = ids().map(|(id, len)| (id, share(len))).collect();
        let inputs: Vec<_> = inputs.into_iter().filter(|(_, n)| *n > 0).collect();
        append(fixture, &inputs, config)?;
    }
    let table = |id| fixture.cache.state().block_table(seq(id), GroupId(0)).unwrap_or_default();
    let is_in_order = |id| table(id).windows(2).all(|pair| pair[0].0 + 1 == pair[1].0);
    ensure(ids().any(|(id, _)| !is_in_order(id)), || "all blocks are in order".to_owned())
}

/// Gathers the parts of all sequences that begin and end inside blocks.
fn gather_parts(fixture: &mut CacheFixture) -> Result<(), CaseError> {
    let form = Form {
        axes: Axes::Thd,
        dtype: DType::Bf16,
        padding: Padding::default(),
        place: Place::Device,
    };
    for begin in [0, 7] {
        let ranges: Vec<_> = ids()
            .map(|(id, len)| (seq(id), begin.min(len), len.saturating_sub(begin + 1)))
            .collect();
        gather::check(fixture, 0, &ranges, form)?;
    }
    Ok(())
}
