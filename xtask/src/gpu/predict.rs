//! Predictions of a model of the machine code, so that the report shows surprises.
//!
//! The gate counts the instructions of each kernel's main loop in the machine code for `sm_90a` and
//! issues them to the pipes of a multiprocessor (`docs/gpu/model.md`): [`LOOPS`] has the cycles of
//! a trip. The model distributes work items over multiprocessors as the planner does, adds what an
//! item costs besides its trips, and joins that with the bytes over the rate of a copy. Faster
//! kernels change its predictions by themselves; what a card has shown about stalls and items is in
//! [`KERNELS`], which reports of new kernels should change.
use super::loops::LOOPS;
use super::record::Measure;
use crate::gate::{CLOCK, MULTIPROCESSORS};

/// Relative difference from its prediction above which a measurement is marked.
const NEAR: f64 = 0.15;

/// The main loop of a kernel.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Loop {
    pub(super) kernel: &'static str,
    /// Bytes of K and V that a warp reads in a trip.
    pub(super) bytes: u32,
    /// Cycles of a trip where two thread blocks share a multiprocessor, and where one has it alone.
    pub(super) cycles: f64,
    pub(super) cycles_alone: f64,
}

/// The unit of a prediction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unit {
    /// Fraction of the rate of the driver's copy.
    OfCopy,
    TflopPerS,
}

/// The expected value.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Prediction {
    pub(super) value: f64,
    pub(super) unit: Unit,
    /// The measurement over the prediction, if there is one.
    pub(super) ratio: Option<f64>,
}

impl Prediction {
    /// Returns whether the measurement differs from the prediction, in either direction.
    pub(super) fn is_missed(&self) -> bool {
        self.ratio.is_some_and(|ratio| (ratio - 1.0).abs() > NEAR)
    }
}

/// What cards have shown of a kernel beyond its instructions: fitted to the reports of an H200 and
/// an H100 of 2026-11, whose decode steps of [`SHAPES`] the model then meets within 13 %.
struct Kernel {
    /// Name of the format in measurements.
    format: &'static str,
    main_loop: &'static str,
    /// Cycles of a trip over those of the model, which has no waits for results of other warps.
    stalls: f64,
    /// Cycles of a work item besides its trips: loads that depend on each other, queries, merge.
    item: f64,
}

const KERNELS: [Kernel; 6] = [
    Kernel { format: "bf16", main_loop: "decode_bf16_128", stalls: 1.0, item: 4500.0 },
    Kernel { format: "fp8-e4m3", main_loop: "decode_e4m3_128", stalls: 1.15, item: 11_000.0 },
    Kernel { format: "int8-tensor", main_loop: "decode_int8_128", stalls: 1.35, item: 8500.0 },
    Kernel { format: "int8", main_loop: "decode_int8_row_128", stalls: 1.3, item: 23_500.0 },
    Kernel {
        format: "fp8-e4m3-row",
        main_loop: "decode_e4m3_row_128",
        stalls: 1.25,
        item: 10_500.0,
    },
    Kernel { format: "l4", main_loop: "decode_l4_128", stalls: 1.45, item: 21_000.0 },
];

/// Cards by a part of their names: bytes per second of the model's copy.
const CARDS: [(&str, f64); 2] = [("H200", 4.3e12), ("H100", 3.0e12)];

/// Batches and contexts of decode steps that are predicted. Short contexts of few sequences are
/// left out: there, what the model has no part of takes up to half of the time.
const SHAPES: [(u32, u32); 6] =
    [(1, 8192), (1, 131_072), (4, 131_072), (16, 32_768), (64, 8192), (256, 1024)];

/// Seconds of a launch.
const LAUNCH: f64 = 2.5e-6;

/// Measured values by name: H200, H100.
const MEASURED: [(&str, f64, f64); 2] =
    [("append/bf16/b1/t16384", 0.77, 0.85), ("append/fp8-e4m3/b1/t16384", 0.67, 0.80)];

/// Returns the fraction of copy of a decode step with 8 query heads per kv head, 8 kv heads, head
/// dim 128, blocks of 16.
fn decode(name: &str, copy: f64) -> Option<f64> {
    let parts: Vec<&str> = name.split('/').collect();
    let ["decode", format, "block16", "gqa8", batch, context] = parts.as_slice() else {
        return None;
    };
    let batch: u32 = batch.strip_prefix('b')?.parse().ok()?;
    let context: u32 = context.strip_prefix('c')?.parse().ok()?;
    let kernel = KERNELS.iter().find(|kernel| kernel.format == *format)?;
    let own = LOOPS.iter().find(|own| own.kernel == kernel.main_loop)?;
    if !SHAPES.contains(&(batch, context)) {
        return None;
    }
    Some(decode_step(kernel, own, (batch, context), copy))
}

/// Bytes of queries and outputs of a sequence and kv head: 8 rows of 128 values of 16 bits each.
const ROW_BYTES: f64 = 8.0 * 128.0 * 4.0;
const KV_HEADS: u32 = 8;
/// Tokens that the warps of a thread block take in a trip of each, over those of a KV tile.
const TRIPS_PER_TILE: f64 = 0.5;

fn decode_step(kernel: &Kernel, own: &Loop, (batch, context): (u32, u32), copy: f64) -> f64 {
    let plan = plan(batch * KV_HEADS, context.div_ceil(64));
    let shares = f64::from(plan.slots_used) > MULTIPROCESSORS;
    let trip = if shares { own.cycles } else { own.cycles_alone };
    let tile = trip * kernel.stalls * TRIPS_PER_TILE;
    let cycles = |slot: &Slot| f64::from(slot.items) * kernel.item + f64::from(slot.tiles) * tile;
    let compute = plan.slots.iter().map(cycles).fold(0.0, f64::max);
    let items = plan.slots.iter().map(|slot| slot.items).max().unwrap_or(0);
    // A trip of a warp is 32 tokens.
    let rows = f64::from(batch * KV_HEADS);
    let bytes = rows * (f64::from(context) * f64::from(own.bytes) / 32.0 + ROW_BYTES);
    let memory = bytes / copy * CLOCK + 0.35 * f64::from(items) * kernel.item;
    // A thread block's items overlap with the other block's reads: a smooth maximum.
    let body = (compute.powi(4) + memory.powi(4)).powf(0.25);
    // The last work item of a query tile merges its splits: four at a time, two loads each.
    let merges = if plan.splits > 1 { f64::from(plan.splits.div_ceil(4)) } else { 0.0 };
    let merge = merges * 2.0 * 340.0 * 4.0;
    let seconds = (body + merge) / CLOCK + LAUNCH;
    bytes / copy / seconds
}

/// A slot of the plan: a thread block and what it does.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Slot {
    items: u32,
    tiles: u32,
}

/// The result of the planner.
struct Plan {
    slots: Vec<Slot>,
    slots_used: u32,
    /// Most work items of a query tile.
    splits: u32,
}

/// Distributes query tiles of equal contexts over two thread blocks for each multiprocessor, as
/// `plan.cu` does: an item costs as much as two KV tiles, and no split has fewer than three.
fn plan(query_tiles: u32, tiles: u32) -> Plan {
    const SLOTS: u32 = 264;
    const OVERHEAD: u32 = 2;
    const LEAST: u32 = 3;
    const SHARE_LEAST: u32 = 6;
    let cost = tiles + OVERHEAD;
    let share = (query_tiles * cost).div_ceil(SLOTS).max(SHARE_LEAST);
    let mut slots: Vec<Slot> = (0..SLOTS).map(|_| Slot::default()).collect();
    let mut splits = 1;
    for query_tile in 0..query_tiles {
        let first = query_tile * cost + OVERHEAD;
        let stop = first + tiles;
        let (mut begin, mut end) = (first / share, (stop - 1) / share);
        if begin < end && (begin + 1) * share - first < LEAST {
            begin += 1;
        }
        if begin < end && stop - end * share < LEAST {
            end -= 1;
        }
        splits = splits.max(end - begin + 1);
        for slot in begin..=end {
            let low = if slot == begin { 0 } else { slot * share - first };
            let high = if slot == end { tiles } else { (slot + 1) * share - first };
            let own = slots.iter_mut().zip(0..).find(|(_, index)| *index == slot);
            if let Some((own, _)) = own {
                own.items += 1;
                own.tiles += high - low;
            }
        }
    }
    let slots_used = slots.iter().map(|slot| u32::from(slot.items > 0)).sum();
    Plan { slots, slots_used, splits }
}

/// Prefill of bf16, as [`Kernel`]: fitted to whole prompts of 1k to 16k tokens.
const PREFILL: Kernel =
    Kernel { format: "bf16", main_loop: "prefill_bf16_128", stalls: 1.17, item: 22_000.0 };

/// Returns the TFLOP/s of causal prefill with 4 query heads per kv head, 8 kv heads, head dim 128:
/// query tiles of 128 rows, the longest first, each to the place that is free first.
fn prefill(name: &str) -> Option<f64> {
    let tokens = name.strip_prefix("prefill/bf16/gqa4/t")?;
    let tokens: u32 = tokens.parse().ok().filter(|tokens| (1..=65_536).contains(tokens))?;
    let own = LOOPS.iter().find(|own| own.kernel == PREFILL.main_loop)?;
    let mut places = [0.0_f64; 264];
    for query_tile in (0..(tokens * 4).div_ceil(128)).rev() {
        let tiles = (((query_tile + 1) * 32).min(tokens)).div_ceil(64);
        let cycles = f64::from(tiles) * own.cycles * PREFILL.stalls + PREFILL.item;
        for _ in 0..KV_HEADS {
            let free = places.iter_mut().min_by(|a, b| a.total_cmp(b))?;
            *free += cycles;
        }
    }
    let seconds = places.iter().copied().fold(0.0, f64::max) / CLOCK + LAUNCH;
    // Two products of 2 * 128 operations for each visible pair and query head.
    let pairs = f64::from(tokens) * (f64::from(tokens) + 1.0) / 2.0;
    Some(pairs * 32.0 * 4.0 * 128.0 / seconds / 1e12)
}

/// Returns the prediction for a measurement on a card, if there is one.
pub(super) fn prediction(card: &str, measure: &Measure) -> Option<Prediction> {
    let (name, copy) = CARDS.iter().find(|(name, _)| card.contains(name))?;
    let measured = MEASURED.iter().find(|(known, ..)| measure.name == *known);
    let measured = measured.map(|(_, h200, h100)| if *name == "H200" { *h200 } else { *h100 });
    let of_copy = decode(&measure.name, *copy).or(measured);
    let (unit, value) = match of_copy {
        Some(value) => (Unit::OfCopy, value),
        None => (Unit::TflopPerS, prefill(&measure.name)?),
    };
    let measured = match unit {
        Unit::OfCopy => measure.of_copy,
        Unit::TflopPerS => measure.tflop_per_s,
    };
    Some(Prediction { value, unit, ratio: measured.map(|measured| measured / value) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(name: &str) -> Measure {
        Measure {
            name: name.to_owned(),
            micros: 1.0,
            bytes: None,
            gb_per_s: None,
            tflop_per_s: None,
            of_copy: None,
            peers: Vec::new(),
        }
    }

    fn value(card: &str, name: &str) -> f64 {
        prediction(card, &named(name)).unwrap_or_else(|| panic!("{card}: {name}")).value
    }

    /// The reports of 2026-11, of kernels whose loops have hardly changed since.
    #[test]
    fn the_model_meets_what_cards_have_shown() {
        let decode = |format, shape| format!("decode/{format}/block16/gqa8/{shape}");
        for (card, name, shown) in [
            ("H200", decode("bf16", "b1/c8192"), 0.374),
            ("H200", decode("bf16", "b256/c1024"), 0.981),
            ("H200", decode("fp8-e4m3", "b64/c8192"), 0.908),
            ("H100", decode("bf16", "b1/c131072"), 0.928),
            ("H100", decode("fp8-e4m3", "b256/c1024"), 0.786),
            ("H100", decode("int8-tensor", "b64/c8192"), 0.923),
            ("H200", "prefill/bf16/gqa4/t2048".to_owned(), 276.0),
            ("H200", "prefill/bf16/gqa4/t4096".to_owned(), 307.0),
            ("H100", "prefill/bf16/gqa4/t16384".to_owned(), 353.0),
        ] {
            let ratio = shown / value(card, &name);
            assert!((ratio - 1.0).abs() <= NEAR, "{card} {name}: {ratio:.2} of the prediction");
        }
    }

    /// The loops of rows with scales and of l4 are shorter than in the reports of 2026-11.
    #[test]
    fn kernels_that_changed_since_are_expected_to_be_faster() {
        for (card, name, shown) in [
            ("H200", "decode/int8/block16/gqa8/b64/c8192", 0.559),
            ("H200", "decode/l4/block16/gqa8/b64/c8192", 0.280),
            ("H100", "decode/fp8-e4m3-row/block16/gqa8/b64/c8192", 0.814),
            ("H100", "decode/l4/block16/gqa8/b1/c131072", 0.329),
        ] {
            let expected = value(card, name);
            assert!(expected > shown * 1.05, "{card} {name}: {expected:.3}, shown {shown}");
        }
    }

    /// Every kernel of the model has a loop in the machine code.
    #[test]
    fn kernels_have_loops() {
        for kernel in KERNELS.iter().chain([&PREFILL]) {
            assert!(LOOPS.iter().any(|own| own.kernel == kernel.main_loop), "{}", kernel.main_loop);
        }
    }

    #[test]
    fn other_shapes_have_no_prediction() {
        for name in [
            "decode/bf16/block16/gqa4/b1/c8192",
            "decode/bf16/block16/gqa8/b0/c8192",
            "decode/bf16/block16/gqa8/b4/c1024",
            "decode/bf16/block16/gqa8/b1/c4000000000",
            "decode/q8_0/block16/gqa8/b1/c8192",
            "decode/bf16/block16/gqa8/b1/c8192/shuffled",
            "prefill/bf16/gqa4/t64/c32768",
            "prefill/bf16/gqa4/t0",
        ] {
            assert!(prediction("H200", &named(name)).is_none(), "{name}");
        }
    }

    /// All KV tiles are distributed, and two thread blocks share each multiprocessor.
    #[test]
    fn the_plan_has_every_tile_once() {
        for (query_tiles, tiles) in [(8, 128), (2048, 16), (8, 2048), (512, 128), (1, 1)] {
            let plan = plan(query_tiles, tiles);
            let sum: u32 = plan.slots.iter().map(|slot| slot.tiles).sum();
            assert_eq!(sum, query_tiles * tiles, "{query_tiles} of {tiles}");
            assert!(plan.slots_used <= 264 && plan.splits >= 1);
        }
        assert_eq!(plan(1, 1).splits, 1);
    }
}
