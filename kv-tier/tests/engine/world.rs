//! A cache with tiers over stores with faults, and sequences whose rows are known.
use std::sync::Arc;
use std::time::{Duration, Instant};

use kv_core::backend::Plane;
use kv_core::calibration::{Calibration, LayerCalibration, PlaneCalibration};
use kv_core::error::PlanError;
use kv_core::events::Tier;
use kv_core::eviction::{Priority, Retention, RetentionRange};
use kv_core::reuse::{ContentSpan, PinId};
use kv_core::spec::{KeyMean, PrefixReuse, Transform};
use kv_core::{
    CacheError, CacheSpec, KvCache, KvFormat, QkvFormat, Scaling, SequenceId, StartOptions,
    StepInput, TensorView, TensorViewMut,
};
use kv_cpu::{CpuBackend, CpuOptions};
use kv_testkit::rng::Rng;
use kv_testkit::store::{Fault, FaultSchedule, FaultStore};
use kv_tier::policy::{WritePolicy, WriteRule};
use kv_tier::{
    Identity, MemoryStore, ModelDigest, PrefetchId, StoreOptions, TierError, TierOptions, Tiers,
    Wait,
};

const LAYERS: u16 = 2;
const HEADS: u32 = 2;
const BLOCK: u32 = 4;

type Store = Arc<FaultStore<MemoryStore>>;

/// Kinds of caches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Plain,
    Partial,
    Window,
    LayerWindow,
    OtherBlocks,
    Int8,
    Prefix,
    Tail,
}

impl Kind {
    pub(crate) const ALL: [Self; 8] = [
        Self::Plain,
        Self::Partial,
        Self::Window,
        Self::LayerWindow,
        Self::OtherBlocks,
        Self::Int8,
        Self::Prefix,
        Self::Tail,
    ];
}

const WINDOW: u32 = 12;
const SINKS: u32 = 4;

/// What a prompt is besides its tokens.
#[derive(Debug, Clone)]
struct Asked {
    prompt: Vec<u32>,
    salt: &'static [u8],
    adapter: Option<u64>,
    spans: Vec<ContentSpan>,
    retention: Option<Retention>,
    backoff: u32,
    reserve: u32,
    reuse: bool,
}

impl Asked {
    fn options(&self) -> StartOptions<'_> {
        let options = StartOptions::default()
            .with_salt(self.salt)
            .with_contents(&self.spans)
            .with_backoff_blocks(self.backoff)
            .with_reserve(self.reserve)
            .with_reuse(self.reuse);
        let options = match &self.retention {
            Some(retention) => options.with_retention(retention),
            None => options,
        };
        self.adapter.map_or(options, |adapter| options.with_adapter(adapter))
    }

    /// Returns the words that rows follow from: a placeholder stands for its content, and other
    /// tenants and adapters have other rows, so that a block of theirs is seen.
    fn words(&self, tokens: &[u32]) -> Vec<u32> {
        let salt = self.salt.iter().fold(1_u32, |sum, byte| sum * 31 + u32::from(*byte));
        // Adapters 3 and 4 are one.
        let adapter = self.adapter.map_or(0, |number| if number == 4 { 3 } else { number as u32 });
        let mut words = vec![salt, adapter];
        words.extend_from_slice(tokens);
        for span in &self.spans {
            for at in span.begin..(span.begin + span.len).min(tokens.len() as u32) {
                words[at as usize + 2] = (span.id as u32) * 1000 + at - span.begin + 500_000;
            }
        }
        words
    }
}

/// A sequence.
#[derive(Debug)]
struct Live {
    id: SequenceId,
    asked: Asked,
    tokens: Vec<u32>,
}

pub(crate) struct World {
    rng: Rng,
    kind: Kind,
    dim: u32,
    tolerance: f32,
    spec: CacheSpec,
    cache: KvCache<CpuBackend>,
    tiers: Option<Tiers<CpuBackend>>,
    stores: [Store; 2],
    prefetches: Vec<(PrefetchId, Asked)>,
    /// Prompts that come again.
    asked: Vec<Asked>,
    live: Vec<Live>,
    pins: Vec<PinId>,
    next: u64,
    recalibrated: u32,
    pub(crate) log: Vec<String>,
    pub(crate) loaded: u64,
}

impl World {
    pub(crate) fn new(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let kind = rng.pick(&Kind::ALL);
        let blocks = rng.pick(&[6, 12, 24, 64, 64]);
        let is_coded = matches!(kind, Kind::Int8 | Kind::Prefix | Kind::Tail);
        let dim = if is_coded { 32 } else { 4 };
        let spec = CacheSpec::builder().layers(LAYERS).kv_heads(HEADS).head_dim(dim);
        let format = if is_coded { KvFormat::Int8(Scaling::Row) } else { KvFormat::F32 };
        let spec = spec.format(format);
        let spec = match kind {
            Kind::Int8 => spec.transform(Transform::On),
            Kind::Prefix => spec.transform(Transform::On).full_precision_prefix(6),
            Kind::Tail => spec.tail(true).key_mean(KeyMean::PerBlock),
            _ => spec,
        };
        let spec = spec.paged(if is_coded { 16 } else { BLOCK }, blocks);
        let spec = match kind {
            Kind::Window => spec.window_left(WINDOW).sink_tokens(SINKS),
            Kind::LayerWindow => spec.group([1], |group| group.window_left(WINDOW)),
            Kind::OtherBlocks => {
                spec.group([1], |group| group.paged(2 * BLOCK, blocks.div_ceil(2)))
            }
            _ => spec,
        };
        let reuse =
            if kind == Kind::Partial { PrefixReuse::Partial } else { PrefixReuse::FullBlocks };
        let spec = spec
            .prefix_reuse(reuse)
            .changes(rng.pick(&[2, 8, 256]))
            .events(16)
            .wipe_on_release(rng.one_in(2))
            .max_seq_len(200)
            .max_sequences(6)
            .build()
            .unwrap();
        let (tolerance, kinds) = (if is_coded { 16.0 } else { 0.0 }, &Fault::ALL);
        let one_in = rng.pick(&[3, 6, 12]);
        let stores = [0, 1].map(|at| {
            // One of them is too small for everything.
            let within = MemoryStore::new(if at == 0 { 64 << 20 } else { 200 << 10 });
            let schedule = FaultSchedule::seeded(seed * 2 + at, one_in, kinds);
            Arc::new(FaultStore::new(within, schedule))
        });
        let cache = cache(&spec);
        let mut world = Self {
            rng,
            kind,
            dim,
            tolerance,
            spec,
            cache,
            tiers: None,
            stores,
            prefetches: Vec::new(),
            asked: Vec::new(),
            live: Vec::new(),
            pins: Vec::new(),
            next: 0,
            recalibrated: 0,
            log: Vec::new(),
            loaded: 0,
        };
        world.open();
        world
    }

    pub(crate) fn kind(&self) -> String {
        format!("{:?}", self.kind)
    }

    /// Returns the number of faults so far.
    pub(crate) fn faults(&self) -> u64 {
        self.stores.iter().map(|store| store.counts().values().sum::<u64>()).sum()
    }

    fn open(&mut self) {
        let rng = &mut self.rng;
        let digest = |name: &str| ModelDigest::of_bytes(name.as_bytes());
        let identity = Identity::new(digest("weights"))
            .with_adapter(1, digest("one"))
            .with_adapter(3, digest("three"))
            .with_adapter(4, digest("three"));
        let policies = [WritePolicy::OnPublish, WritePolicy::OnLeave, WritePolicy::Never];
        let mut options = TierOptions::new()
            .with_host(rng.pick(&[64 << 10, 160 << 10, 4 << 20]))
            .with_chunk_blocks(if self.dim == 32 { 1 } else { 2 })
            .with_wait(rng.pick(&[Wait::All, Wait::Compute, Wait::For(Duration::from_millis(1))]));
        for store in &self.stores {
            let lane = StoreOptions::new(Tier::Disk)
                .with_write(WriteRule::new(rng.pick(&policies)))
                .with_threads(rng.pick(&[1, 3]))
                .with_waiting_writes(rng.pick(&[1, 64]));
            options = options.with_store_options(Box::new(Arc::clone(store)), lane);
        }
        self.tiers = Some(Tiers::new(&self.cache, identity, options).unwrap());
    }

    fn tiers(&mut self) -> (&mut Tiers<CpuBackend>, &mut KvCache<CpuBackend>) {
        (self.tiers.as_mut().unwrap(), &mut self.cache)
    }

    /// Prompts share beginnings of few texts.
    fn ask(&mut self) -> Asked {
        let rng = &mut self.rng;
        let len = 1 + rng.pick(&[3, 20, 60, 90, 210]);
        let len = 1 + rng.below(len);
        let (family, other, fork) = (rng.below(2), rng.below(2), rng.pick(&[10, 40, 200]));
        let prompt =
            (0..len).map(|at| if at < fork { at * 10 + family } else { at * 10 + other }).collect();
        let spans = match rng.below(4) {
            0 => vec![ContentSpan { begin: 5, len: 9, id: u128::from(rng.below(2)) }],
            _ => Vec::new(),
        };
        let low = Priority { level: 0, duration: None };
        let retention = rng.one_in(8).then(|| {
            let range = RetentionRange { begin: 0, end: None, priority: low };
            Retention::new(vec![range]).unwrap()
        });
        Asked {
            prompt,
            salt: rng.pick(&[&[], &[], &[], &b"a"[..], b"b"]),
            adapter: rng.pick(&[None, None, None, None, None, Some(1), Some(2), Some(3), Some(4)]),
            spans,
            retention,
            backoff: rng.pick(&[0, 0, 0, 1]),
            reserve: rng.pick(&[0, 0, 20, 60]),
            reuse: !rng.one_in(12),
        }
    }

    /// Does one thing.
    pub(crate) fn act(&mut self) {
        let kind = self.rng.below(30);
        self.log.push(format!("{kind}"));
        match kind {
            0..5 => self.prefetch(),
            5..11 => self.start(),
            11 => self.cancel(),
            12..18 => self.step(),
            18 => self.fork(),
            19 => self.truncate(),
            20 => self.end(),
            21..23 => self.empty_device(),
            23 => self.recalibrate(),
            24 => {
                let wait = Duration::from_millis(self.rng.below(20).into());
                let (tiers, cache) = self.tiers();
                tiers.flush(cache, Instant::now() + wait).unwrap();
            }
            25 => self.reopen(),
            26 => self.pin(),
            27 => self.start_in_a_step(),
            28 => {
                let asked = self.ask();
                self.cache.forget_prefix(&asked.prompt, asked.options(), 0).unwrap();
            }
            _ => self.poll(),
        }
        if self.rng.one_in(2) {
            self.poll();
        }
    }

    /// Removes what can be removed; often everything, so that it has to come back.
    fn empty_device(&mut self) {
        if !self.rng.one_in(4) {
            (0..self.live.len()).for_each(|at| self.check(at));
            self.cache.reset().unwrap();
            self.live.clear();
            self.pins.drain(..).for_each(|pin| assert!(self.cache.unpin(pin).unwrap()));
            let (tiers, cache) = self.tiers();
            tiers.flush(cache, Instant::now() + Duration::from_millis(20)).unwrap();
        }
        let is_empty = self.cache.reset_prefixes().unwrap();
        self.log.push(format!("empty: {is_empty}"));
    }

    fn poll(&mut self) {
        let (tiers, cache) = self.tiers();
        tiers.poll(cache).unwrap();
    }

    fn prefetch(&mut self) {
        let asked = match self.rng.below(4) {
            // The same prompt again.
            0 if !self.prefetches.is_empty() => self.prefetches[0].1.clone(),
            0..3 if !self.asked.is_empty() => {
                let at = self.rng.below(self.asked.len() as u32);
                self.asked[at as usize].clone()
            }
            _ => self.ask(),
        };
        if self.asked.len() < 8 {
            self.asked.push(asked.clone());
        }
        let wait = self.rng.pick(&[None, Some(Wait::None), Some(Wait::All)]);
        let tiers = self.tiers.as_mut().unwrap();
        let (prompt, options) = (&asked.prompt, asked.options());
        let prefetch = match wait {
            None => tiers.prefetch(&self.cache, prompt, &options),
            Some(wait) => tiers.prefetch_within(&self.cache, prompt, &options, wait),
        };
        self.prefetches.push((prefetch, asked));
        if self.prefetches.len() > 5 {
            self.cancel();
        }
    }

    fn cancel(&mut self) {
        if self.prefetches.is_empty() {
            return;
        }
        let at = self.rng.below(self.prefetches.len() as u32) as usize;
        let (prefetch, _) = self.prefetches.remove(at);
        assert!(self.tiers().0.cancel(prefetch));
    }

    fn start(&mut self) {
        if self.prefetches.is_empty() {
            self.prefetch();
        }
        let at = self.rng.below(self.prefetches.len() as u32) as usize;
        let (prefetch, asked) = self.prefetches.remove(at);
        if !self.rng.one_in(3) {
            let end = Instant::now() + Duration::from_secs(30);
            while !self.tiers().0.is_ready(prefetch) {
                self.poll();
                assert!(Instant::now() < end, "a prefetch is never ready");
                std::thread::sleep(Duration::from_micros(20));
            }
        }
        let id = SequenceId(self.next);
        self.next += 1;
        let (tiers, cache) = self.tiers();
        let started = tiers.start(cache, prefetch, id, asked.options());
        assert_eq!((cache.num_imports(), cache.contains(id)), (0, started.is_ok()));
        match started {
            Ok(reused) => {
                self.log.push(format!("start {} reuses {reused}", asked.prompt.len()));
                assert_eq!(self.cache.seq_len(id), Some(reused));
                assert!(asked.reuse || reused == 0);
                let tokens = asked.prompt[..reused as usize].to_vec();
                self.live.push(Live { id, asked, tokens });
                let last = self.live.len() - 1;
                self.check(last);
                self.compute(last);
            }
            Err(TierError::Cache(error)) => {
                let is_known = matches!(
                    error,
                    CacheError::Exhausted(_)
                        | CacheError::Plan(
                            PlanError::TooMany { .. } | PlanError::SequenceTooLong { .. }
                        )
                );
                assert!(is_known, "{error}");
                let without = self.cache.start(id, &asked.prompt, asked.options());
                assert!(without.is_err(), "{error}, but {without:?} without tiers");
            }
            Err(error) => panic!("{error}"),
        }
        if self.live.len() > 4 {
            self.end();
        }
    }

    /// Computes what is left of a prompt, or a few new tokens, in some steps.
    fn compute(&mut self, at: usize) {
        while at < self.live.len() {
            let live = &self.live[at];
            let left = &live.asked.prompt[live.tokens.len().min(live.asked.prompt.len())..];
            if left.is_empty() {
                break;
            }
            let most = 1 + self.rng.pick(&[3, 17, 300]);
            let new = left[..left.len().min(most)].to_vec();
            if !self.append(at, &new) {
                break;
            }
            if self.rng.one_in(3) {
                break;
            }
        }
    }

    fn step(&mut self) {
        if self.live.is_empty() {
            return;
        }
        let at = self.rng.below(self.live.len() as u32) as usize;
        if self.live[at].tokens.len() < self.live[at].asked.prompt.len() {
            return self.compute(at);
        }
        let len = self.live[at].tokens.len() as u32;
        let family = self.rng.below(3);
        let new: Vec<_> = (len..len + 1 + self.rng.below(9)).map(|n| n * 10 + family).collect();
        self.append(at, &new);
    }

    /// Appends tokens; `false` if there is no room.
    fn append(&mut self, at: usize, new: &[u32]) -> bool {
        let live = &self.live[at];
        let all = [&live.tokens[..], new].concat();
        let inputs = [StepInput::tokens(live.id, new)];
        let mut step = match self.cache.begin_step(&inputs) {
            Ok(step) => step,
            Err(CacheError::Exhausted(_) | CacheError::Plan(PlanError::SequenceTooLong { .. })) => {
                return false;
            }
            Err(error) => panic!("{error}"),
        };
        let dims = [new.len() as u32, HEADS, self.dim];
        let width = (HEADS * self.dim) as usize;
        for layer in 0..LAYERS {
            let [k, v] = [Plane::Key, Plane::Value].map(|plane| {
                let words = live.asked.words(&all);
                rows(&words, (layer, plane), width).split_off(live.tokens.len() * width)
            });
            let (k, v) = (TensorView::host(&k, &dims), TensorView::host(&v, &dims));
            step.write(layer, k, v, QkvFormat::Thd).unwrap();
        }
        if self.rng.one_in(10) {
            // Dropped: as if it had not begun.
            drop(step);
            self.check(at);
            return true;
        }
        step.commit().unwrap();
        self.live[at].tokens = all;
        self.check(at);
        true
    }

    /// Checks all rows of a sequence that a window has not passed.
    fn check(&mut self, at: usize) {
        let live = &self.live[at];
        let len = live.tokens.len() as u32;
        assert_eq!(self.cache.seq_len(live.id), Some(len));
        let width = (HEADS * self.dim) as usize;
        let words = live.asked.words(&live.tokens);
        for layer in 0..LAYERS {
            let has_window =
                self.kind == Kind::Window || (self.kind == Kind::LayerWindow && layer == 1);
            let ranges = if has_window && len > WINDOW {
                let sinks = if self.kind == Kind::Window { SINKS } else { 0 };
                vec![(0, sinks), (len - WINDOW, WINDOW)]
            } else {
                vec![(0, len)]
            };
            for plane in [Plane::Key, Plane::Value] {
                let expected = rows(&words, (layer, plane), width);
                for (begin, count) in ranges.iter().copied().filter(|(_, count)| *count > 0) {
                    let mut got = vec![0.0_f32; count as usize * width];
                    let out = TensorViewMut::host(&mut got, &[1, count, HEADS, self.dim]);
                    let range = [(live.id, begin, count)];
                    self.cache.gather(layer, plane, &range, out, QkvFormat::Bshd).unwrap();
                    let expected = &expected[begin as usize * width..];
                    let tolerance = self.tolerance;
                    let wrong =
                        got.iter().zip(expected).position(|(a, b)| (a - b).abs() > tolerance);
                    let wrong = wrong.map(|at| begin as usize + at / width);
                    assert_eq!(wrong, None, "row of layer {layer}, {plane:?}, {:?}", live.asked);
                }
            }
        }
    }

    fn fork(&mut self) {
        if self.live.is_empty() || self.live.len() > 4 {
            return;
        }
        let at = self.rng.below(self.live.len() as u32) as usize;
        let id = SequenceId(self.next);
        self.next += 1;
        let (asked, tokens) = (self.live[at].asked.clone(), self.live[at].tokens.clone());
        self.cache.fork(self.live[at].id, id).unwrap();
        self.live.push(Live { id, asked, tokens });
        self.check(self.live.len() - 1);
    }

    fn truncate(&mut self) {
        if self.live.is_empty() {
            return;
        }
        let at = self.rng.below(self.live.len() as u32) as usize;
        let live = &mut self.live[at];
        let len = self.rng.below(live.tokens.len() as u32 + 1);
        match self.cache.truncate(live.id, len) {
            Ok(()) => live.tokens.truncate(len as usize),
            Err(CacheError::Plan(PlanError::OutOfWindow { .. })) => {}
            Err(error) => panic!("{error}"),
        }
    }

    fn end(&mut self) {
        if self.live.is_empty() {
            return;
        }
        let at = self.rng.below(self.live.len() as u32) as usize;
        self.check(at);
        let live = self.live.remove(at);
        match self.rng.below(8) {
            0 => {
                self.cache.reset().unwrap();
                self.live.clear();
            }
            1 => {
                self.cache.forget_sequence(live.id).unwrap();
                self.cache.release(live.id).unwrap();
            }
            2..5 => self.cache.preempt(live.id).unwrap(),
            _ => self.cache.release(live.id).unwrap(),
        }
    }

    fn pin(&mut self) {
        if self.pins.len() > 1 || self.rng.one_in(2) {
            for pin in self.pins.drain(..) {
                assert!(self.cache.unpin(pin).unwrap());
            }
            return;
        }
        let asked = self.ask();
        self.pins.push(self.cache.pin_prefix(&asked.prompt, asked.options()).id);
    }

    fn recalibrate(&mut self) {
        // Each time rows are rounded once more.
        if self.recalibrated >= 2 {
            return;
        }
        let mean = self.rng.pick(&[1.0, -2.0, 3.0]);
        let of = |mean: f32| PlaneCalibration {
            mean: vec![mean; (HEADS * self.dim) as usize],
            ..Default::default()
        };
        let layer = || LayerCalibration { k: of(mean), v: PlaneCalibration::default() };
        let given = Calibration::new((0..LAYERS).map(|_| layer()).collect());
        match self.cache.recalibrate(given) {
            Ok(()) => self.recalibrated += 1,
            Err(CacheError::Plan(PlanError::State { .. })) => {}
            Err(error) => panic!("{error}"),
        }
        (0..self.live.len()).for_each(|at| self.check(at));
    }

    /// Ends the tiers, and often the process with them, and opens others over the same stores.
    fn reopen(&mut self) {
        let stats = self.tiers().0.stats();
        self.loaded += stats.loaded_tokens;
        self.tiers = None;
        self.prefetches.clear();
        if self.rng.one_in(2) {
            self.live.clear();
            self.pins.clear();
            self.recalibrated = 0;
            self.cache = cache(&self.spec);
        } else {
            self.cache.release_holds().unwrap();
        }
        self.open();
    }

    fn start_in_a_step(&mut self) {
        let Some(live) = self.live.first() else { return };
        let Ok(()) = self.cache.open_step(&[StepInput::tokens(live.id, &[1])]) else { return };
        self.poll();
        self.prefetch();
        let (prefetch, asked) = self.prefetches.pop().unwrap();
        let id = SequenceId(self.next);
        let (tiers, cache) = self.tiers();
        let refused = tiers.start(cache, prefetch, id, asked.options()).unwrap_err();
        assert!(matches!(refused, TierError::Cache(CacheError::Plan(_))), "{refused}");
        assert!(matches!(tiers.flush(cache, Instant::now()), Err(TierError::StepOpen)));
        self.cache.roll_back();
        assert_eq!(self.cache.num_imports(), 0);
    }

    /// Ends everything, and checks that nothing is held and all counts agree.
    pub(crate) fn finish(mut self) -> u64 {
        (0..self.live.len()).for_each(|at| self.check(at));
        for store in &self.stores {
            store.set_schedule(FaultSchedule::listed(&[]));
        }
        while !self.prefetches.is_empty() {
            self.cancel();
        }
        for live in self.live.drain(..) {
            self.cache.release(live.id).unwrap();
        }
        for pin in self.pins.drain(..) {
            assert!(self.cache.unpin(pin).unwrap());
        }
        let (tiers, cache) = self.tiers();
        assert!(tiers.flush(cache, Instant::now() + Duration::from_secs(30)).unwrap(), "{tiers:?}");
        assert_eq!((cache.num_holds(), cache.num_imports(), cache.usage().blocks_used), (0, 0, 0));
        assert!(cache.reset_prefixes().unwrap(), "a block is held");
        let stats = tiers.stats();
        assert!(stats.host_bytes <= stats.host_capacity, "{stats:?}");
        for store in &stats.stores {
            assert!(store.found <= store.lookups, "{store:?}");
        }
        self.loaded + stats.loaded_tokens
    }
}

fn cache(spec: &CacheSpec) -> KvCache<CpuBackend> {
    let backend = CpuBackend::open(CpuOptions::default().with_threads(1)).unwrap();
    KvCache::new(backend, spec.clone()).unwrap()
}

/// Returns rows that follow from all words up to their own; the first two words have none.
fn rows(words: &[u32], (layer, plane): (u16, Plane), width: usize) -> Vec<f32> {
    let mut state =
        0x9e37_79b9_u32.wrapping_add(u32::from(layer) * 2 + u32::from(plane == Plane::Key));
    let mut rows = Vec::with_capacity(words.len() * width);
    for (at, word) in words.iter().enumerate() {
        state = (state ^ word).wrapping_mul(0x85eb_ca6b).rotate_left(13);
        if at < 2 {
            continue;
        }
        let value = |at: usize| {
            let bits = state.wrapping_add(at as u32 * 977).wrapping_mul(0x9e37_79b1) >> 24;
            bits as f32 - 127.0
        };
        rows.extend((0..width).map(value));
    }
    rows
}
