//! Geometries of random runs: one or two groups, so small that blocks are always short.
use kv_core::backend::AnyBackend;
use kv_core::error::SpecError;
use kv_core::eviction::Eviction;
use kv_core::spec::{CacheSpecBuilder, KeyMean, PrefixReuse, PublishAt, Transform};
use kv_core::{CacheSpec, KvFormat, ScaleGroup, Scaling};

use super::choices::Choices;
use super::coverage::{Behaviour, Coverage};
use crate::case::CaseError;
use crate::device::dim;

/// Storage of rows.
#[derive(Debug, Clone, Copy)]
struct Stored {
    format: KvFormat,
    transform: Transform,
    key_mean: KeyMean,
    full_precision_prefix: u32,
    tail: bool,
}

impl Stored {
    /// Chooses f32 for most runs, because its rows are read back to the bit.
    fn choose(choices: &mut Choices<'_>) -> Self {
        let format = choices.pick(&[
            KvFormat::F32,
            KvFormat::F32,
            KvFormat::F32,
            KvFormat::F32,
            KvFormat::F16,
            KvFormat::Int8(Scaling::Row),
            KvFormat::Q8_0,
            KvFormat::Fp8E4m3(Scaling::Row),
            KvFormat::L4(ScaleGroup::Row),
            KvFormat::L6(ScaleGroup::Group32),
        ]);
        let kind = choices.next();
        let tail = format.is_quantised() && kind & 0b11 < 2;
        let full_precision_prefix = if kind & 0b1100 == 0b1100 { u32::from(kind >> 6) } else { 0 };
        let transform = if kind & 0x10 == 0 { Transform::Auto } else { Transform::Off };
        let per_block = tail && kind & 0x20 == 0x20;
        let key_mean = if per_block { KeyMean::PerBlock } else { KeyMean::Calibrated };
        Self { format, transform, key_mean, full_precision_prefix, tail }
    }

    /// Values of a row: two f32 distinguish prefixes; codes need 32 signs.
    fn head_dim(self, few: u32) -> u32 {
        if self.format == KvFormat::F32 { few } else { 32 }
    }

    /// Returns a block size that holds at least one row in 16 bits.
    fn block_size(self, at_least: u32, few: u32) -> u32 {
        let has_wide = self.format.is_quantised() && (self.tail || self.full_precision_prefix > 0);
        let wide = if has_wide { self.format.wide_slots(self.head_dim(few)) } else { 1 };
        at_least.max(wide)
    }

    fn of(self, spec: CacheSpecBuilder, few: u32) -> CacheSpecBuilder {
        let spec = spec.head_dim(self.head_dim(few)).format(self.format).transform(self.transform);
        spec.key_mean(self.key_mean)
            .full_precision_prefix(self.full_precision_prefix)
            .tail(self.tail)
    }
}

/// Chooses a geometry that the device supports; `None` if a tail does not fit into the blocks.
pub(super) fn choose(
    backend: &AnyBackend,
    choices: &mut Choices<'_>,
    num_blocks: Option<u32>,
) -> Result<Option<CacheSpec>, CaseError> {
    // Enough values for rows of f32.
    let few = dim(backend, 2);
    let least = 1 + choices.below(4);
    let blocks = 1 + choices.below(14);
    let reuse = choices.pick(&[
        PrefixReuse::Partial,
        PrefixReuse::FullBlocks,
        PrefixReuse::Partial,
        PrefixReuse::FullBlocks,
        PrefixReuse::Off,
    ]);
    let publish_at = choices.pick(&[PublishAt::Begin, PublishAt::Commit]);
    let (kind, window) = (choices.below(8), choices.below(10));
    let events = choices.pick(&[64, 0, 1, 3, 8]) as usize;
    let rest = choices.next();
    let eviction = choices.pick(&Eviction::ALL);
    let mut stored = Stored::choose(choices);
    if kind == 2 && stored.format == KvFormat::F32 && rest & 1 == 1 {
        // Recalibration under windows is rare by chance, so it is forced here.
        (stored.format, stored.transform) = (KvFormat::Int8(Scaling::Row), Transform::On);
    }
    let block_size = stored.block_size(least, few);
    // A tail needs blocks of its own; without extra ones, most steps would be refused. A window
    // needs enough blocks to go round its pool.
    let further = if stored.tail { choices.below(20) } else { 0 };
    let further = if kind == 2 { further + 4 } else { further };
    let blocks = num_blocks.unwrap_or(blocks + further);
    let layers = if kind < 3 { 1 } else { 2 };
    let spec = match kind {
        7 => CacheSpec::builder().layers_on_demand(),
        _ => CacheSpec::builder().layers(layers),
    };
    let slack = choices.pick(&[0, 0, 3, 7]);
    let spec = stored.of(spec.kv_heads(1).window_slack(slack), few);
    let spec = spec.paged(block_size, blocks);
    let spec = match kind {
        0 | 1 | 7 => spec,
        2 => spec.window_left(window).sink_tokens(u32::from(rest >> 6)),
        3 => spec.group([1], |group| group.window_left(window)),
        4 => spec.group([1], |group| group.paged(2 * block_size, blocks.div_ceil(2))),
        5 => {
            // Larger and smaller blocks than those of the first group, which has a window at times.
            let other = choices.pick(&[1 + block_size, 1, block_size.div_ceil(2), 2 * block_size]);
            let other = stored.block_size(other, few);
            let spec = if rest & 4 == 4 { spec.window_left(9 - window) } else { spec };
            spec.group([1], |group| {
                group
                    .paged(other, blocks * block_size.div_ceil(other))
                    .window_left(window)
                    .sink_tokens(u32::from(rest >> 6))
            })
        }
        // Formats by layer: the second layer has rows of f32 and no tail.
        _ => spec.group([1], |group| {
            group.head_dim(few).format(KvFormat::F32).tail(false).key_mean(KeyMean::Calibrated)
        }),
    };
    let spec = spec
        .prefix_reuse(reuse)
        .publish_at(publish_at)
        .eviction(eviction)
        .events(events)
        // Long enough that a window goes round its pool several times.
        .max_seq_len(if kind == 2 { 120 } else { 40 });
    match spec.wipe_on_release(rest.is_multiple_of(4)).max_sequences(6).build() {
        Ok(spec) => Ok(Some(spec)),
        Err(SpecError::Conflict { what: "tail", .. }) => Ok(None),
        Err(other) => Err(other.into()),
    }
}

/// Counts the properties of a geometry.
pub(super) fn count(spec: &CacheSpec, coverage: &mut Coverage) {
    let mut note = |what, has: bool| coverage.add_many(what, u64::from(has));
    let any = |has: fn(&kv_core::spec::GroupSpec) -> bool| spec.groups().iter().any(has);
    note(Behaviour::With16Bits, any(|group| group.layouts()[0].format() == KvFormat::F16));
    let is_quantised =
        |group: &kv_core::spec::GroupSpec| group.layouts()[0].format().is_quantised();
    note(Behaviour::WithCodes, spec.groups().iter().any(is_quantised));
    note(Behaviour::WithTail, any(|group| group.slot_map().has_tail()));
    note(
        Behaviour::WithFullPrecisionPrefix,
        any(|group| group.slot_map().full_precision_prefix() > 0),
    );
    let windowed = spec.groups().iter().filter(|group| group.window().is_some());
    note(Behaviour::WithCodesAndWindow, windowed.clone().any(is_quantised));
    note(Behaviour::WithLayersOnDemand, spec.layers_on_demand());
}
