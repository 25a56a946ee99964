//! Decode steps of a cache with tiers beside those of one without.
use std::hint::black_box;
use std::time::{Duration, Instant};

use kv::tier::policy::{WritePolicy, WriteRule};
use kv::tier::{
    BlockStore, DiskOptions, DiskStore, Identity, ModelDigest, StoreOptions, TierOptions as Tiered,
    TieredCache,
};
use kv::{
    AttentionOptions, Axes, CacheSpec, Device, KvCache, KvFormat, SequenceId, StartOptions,
    StepInput, TensorView, TensorViewMut,
};

use super::TierOptions;
use super::error::TierError;
use super::report::TierLine;
use crate::measure::Progress;
use crate::num::{to_f64, to_u64, to_usize};

/// The layers of SmolLM2-135M.
const LAYERS: u16 = 30;
const KV_HEADS: u32 = 3;
const Q_HEADS: u32 = 9;
const HEAD_DIM: u32 = 64;
const BLOCK: u32 = 16;
/// Sequences of a step, and tokens of each before the first step.
const SEQUENCES: u32 = 8;
const CONTEXT: u32 = 512;
/// Calls of `poll` of one figure.
const POLLS: u32 = 100_000;

/// Returns the steps of each cache: a block is filled in each round.
pub(super) fn steps(options: &TierOptions) -> u32 {
    options.rounds.clamp(1, 16) * BLOCK
}

/// Measures `poll` with nothing to do, and decode steps without tiers, with tiers that keep
/// nothing, and with tiers that write every block to the folder.
pub(super) fn measure(
    options: &TierOptions,
    progress: &mut dyn Progress,
) -> Result<Vec<TierLine>, TierError> {
    let folder = tempfile::Builder::new().prefix("kv-bench-tier-").tempdir_in(&options.dir);
    let folder = folder.map_err(TierError::io("creation of a folder"))?;
    let open = |name: &str, policy| -> Result<Side, TierError> {
        let store = DiskStore::open(folder.path().join(name), DiskOptions::new(1 << 30));
        let store: Box<dyn BlockStore> = Box::new(store.map_err(TierError::other)?);
        let rule = StoreOptions::new(store.tier()).with_write(WriteRule::new(policy));
        Side::new(steps(options), Some(Tiered::new().with_store_options(store, rule)))
    };
    let mut none = Side::new(steps(options), None)?;
    let mut quiet = open("quiet", WritePolicy::Never)?;
    let mut writing = open("writing", WritePolicy::OnPublish)?;
    for side in [&mut none, &mut quiet, &mut writing] {
        side.prefill()?;
    }
    let poll = quiet.poll()?;
    let mut times: [Vec<f64>; 3] = Default::default();
    for _ in 0..steps(options) {
        progress.advance(1);
        for (side, times) in [&mut none, &mut quiet, &mut writing].into_iter().zip(&mut times) {
            times.push(side.step()?.as_secs_f64());
        }
    }
    // Means: a block ends in one step of sixteen, and its copy counts.
    let [none, quiet, writing] = times.map(|times| 1e3 * mean(&times));
    let line = |case, peer, unit, (ours, theirs), goal| TierLine {
        case,
        peer,
        unit,
        threads: 1,
        bytes: 0,
        ours,
        theirs,
        ratio: theirs / f64::max(ours, f64::MIN_POSITIVE),
        goal,
        cpu_s_per_gib: None,
        peer_cpu_s_per_gib: None,
    };
    Ok(vec![
        line("poll, nothing to do", "100 ns", "ns", (poll, 100.0), 1.0),
        line("decode step, host memory", "no tiers", "ms", (quiet, none), 0.99),
        line("decode step, to disk", "no tiers", "ms", (writing, none), 0.97),
    ])
}

fn mean(times: &[f64]) -> f64 {
    times.iter().sum::<f64>() / to_f64(to_u64(times.len()))
}

/// A cache and its sequences, with or without tiers.
struct Side {
    memory: Memory,
    len: u32,
}

enum Memory {
    Device(Box<KvCache>),
    Tiers(Box<TieredCache>),
}

impl Memory {
    fn cache_mut(&mut self) -> &mut KvCache {
        match self {
            Self::Device(cache) => cache,
            Self::Tiers(tiered) => tiered.cache_mut(),
        }
    }
}

impl Side {
    fn new(steps: u32, tiers: Option<Tiered>) -> Result<Self, TierError> {
        let tokens = CONTEXT + steps;
        let blocks = SEQUENCES * tokens.div_ceil(BLOCK);
        let spec = CacheSpec::builder().layers(LAYERS).kv_heads(KV_HEADS).head_dim(HEAD_DIM);
        let spec = spec.format(KvFormat::Bf16).paged(BLOCK, blocks);
        let spec = spec.changes(if tiers.is_some() { 4096 } else { 0 });
        let spec = spec.build().map_err(TierError::other)?;
        let device = Device::open("cpu").map_err(TierError::other)?;
        let cache = KvCache::new(device, spec).map_err(TierError::other)?;
        let identity = Identity::new(ModelDigest::of_bytes(b"measured"));
        let memory = match tiers {
            None => Memory::Device(Box::new(cache)),
            Some(options) => {
                let tiered = TieredCache::new(cache, identity, options);
                Memory::Tiers(Box::new(tiered.map_err(TierError::other)?))
            }
        };
        Ok(Self { memory, len: 0 })
    }

    /// Starts the sequences and computes their prompts.
    fn prefill(&mut self) -> Result<(), TierError> {
        for sequence in ids() {
            let start = self.memory.cache_mut().start(sequence, &[], StartOptions::default());
            start.map_err(TierError::other)?;
        }
        while self.len < CONTEXT {
            self.forward(BLOCK, false)?;
        }
        if let Memory::Tiers(tiered) = &mut self.memory {
            let now = Instant::now();
            let deadline = now.checked_add(Duration::from_mins(1)).unwrap_or(now);
            let left = tiered.flush(deadline).map_err(TierError::other)?;
            assert!(left.is_empty(), "a store takes everything: {left:?}");
        }
        Ok(())
    }

    /// Returns the nanoseconds of one `poll`.
    fn poll(&mut self) -> Result<f64, TierError> {
        let Memory::Tiers(tiered) = &mut self.memory else { return Ok(0.0) };
        let start = Instant::now();
        for _ in 0..POLLS {
            black_box(tiered.poll().map_err(TierError::other)?);
        }
        Ok(start.elapsed().as_secs_f64() * 1e9 / f64::from(POLLS))
    }

    /// Returns the time of a decode step, with the work of the tiers before it.
    fn step(&mut self) -> Result<Duration, TierError> {
        let start = Instant::now();
        self.forward(1, true)?;
        Ok(start.elapsed())
    }

    fn forward(&mut self, new: u32, attends: bool) -> Result<(), TierError> {
        let Self { memory, len } = self;
        // Texts differ from the first token on.
        let text = |number: u32| -> Vec<u32> {
            let tokens = *len..*len + new;
            tokens.map(|at| at * SEQUENCES + number).collect()
        };
        let texts: Vec<_> = (0..SEQUENCES).map(text).collect();
        let inputs: Vec<_> =
            ids().zip(&texts).map(|(id, text)| StepInput::tokens(id, text)).collect();
        let rows = SEQUENCES * new;
        let size = |heads: u32| to_usize(rows * heads * HEAD_DIM);
        let (kv, q) = (vec![0.5_f32; size(KV_HEADS)], vec![0.25_f32; size(Q_HEADS)]);
        let mut out = vec![0.0_f32; size(Q_HEADS)];
        let (kv_dims, q_dims) = ([rows, KV_HEADS, HEAD_DIM], [rows, Q_HEADS, HEAD_DIM]);
        let step = match memory {
            Memory::Device(cache) => cache.begin_step(&inputs).map_err(TierError::other),
            Memory::Tiers(tiered) => tiered.begin_step(&inputs).map_err(TierError::other),
        };
        let mut step = step?;
        for layer in 0..LAYERS {
            let view = TensorView::host::<f32>(&kv, &kv_dims);
            step.write(layer, view, view, Axes::Thd).map_err(TierError::other)?;
            if attends {
                let (q, out) =
                    (TensorView::host(&q, &q_dims), TensorViewMut::host(&mut out, &q_dims));
                let options = AttentionOptions::causal(0.125);
                step.attend(layer, q, out, &options).map_err(TierError::other)?;
            }
        }
        step.commit().map_err(TierError::other)?;
        *len += new;
        Ok(())
    }
}

fn ids() -> impl Iterator<Item = SequenceId> {
    (0..u64::from(SEQUENCES)).map(SequenceId)
}
