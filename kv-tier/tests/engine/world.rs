//! A cache with tiers over stores with faults, and sequences whose rows are known.
use std::sync::Arc;
use std::time::{Duration, Instant};

use kv_core::calibration::{Calibration, LayerCalibration, PlaneCalibration};
use kv_core::error::PlanError;
use kv_core::events::{Snapshot, Tier};
use kv_core::reuse::PinId;
use kv_core::{CacheError, CacheSpec, KvCache, SequenceId, StartOptions, StepInput};
use kv_events::Publisher;
use kv_testkit::consumer::Consumer;
use kv_testkit::rng::Rng;
use kv_testkit::store::{Fault, FaultSchedule, FaultStore};
use kv_testkit::{FaultInjector, FaultKind};
use kv_tier::policy::{WritePolicy, WriteRule};
use kv_tier::{
    BlockStore, Identity, MemoryStore, ModelDigest, PrefetchId, StoreOptions, TierError,
    TierOptions, TieredCache, Wait,
};

use crate::kind::{Kind, LAYERS};
use crate::prompt::Asked;
use crate::support::{Late, late};

/// A device with late copies that fails now and then.
pub(crate) type Device = FaultInjector<Late>;
type Store = Arc<FaultStore<Arc<dyn BlockStore>>>;

/// A sequence.
#[derive(Debug)]
pub(crate) struct Live {
    pub(crate) id: SequenceId,
    pub(crate) asked: Asked,
    pub(crate) tokens: Vec<u32>,
}

pub(crate) struct World {
    pub(crate) rng: Rng,
    pub(crate) kind: Kind,
    spec: CacheSpec,
    pub(crate) cache: TieredCache<Device>,
    stores: [Store; 2],
    prefetches: Vec<(PrefetchId, Asked)>,
    /// Prompts that come again.
    asked: Vec<Asked>,
    pub(crate) live: Vec<Live>,
    pins: Vec<PinId>,
    pub(crate) next: u64,
    recalibrated: u32,
    pub(crate) log: Vec<String>,
    pub(crate) loaded: u64,
    /// Whether the device may fail in the operation that runs.
    pub(crate) is_armed: bool,
    device_faults: u64,
    /// A reader of the cache's events.
    reader: Consumer,
    /// Sends the same events to readers elsewhere.
    publisher: Option<Arc<Publisher>>,
}

impl World {
    pub(crate) fn new(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let kind = rng.pick(&Kind::ALL);
        let spec = kind.spec(&mut rng);
        // One of them is too small for everything.
        let stores = [64 << 20, 200 << 10]
            .map(|bytes| -> Arc<dyn BlockStore> { Arc::new(MemoryStore::new(bytes)) });
        Self::over(rng, seed, (kind, spec), stores)
    }

    /// Creates one over stores that others may use too.
    pub(crate) fn over(
        mut rng: Rng,
        seed: u64,
        (kind, spec): (Kind, CacheSpec),
        stores: [Arc<dyn BlockStore>; 2],
    ) -> Self {
        let one_in = rng.pick(&[3, 6, 12]);
        let mut number = seed * 2;
        let stores = stores.map(|within| {
            let schedule = FaultSchedule::seeded(number, one_in, &Fault::ALL);
            number += 1;
            Arc::new(FaultStore::new(within, schedule))
        });
        let cache = open(&mut rng, kind, &stores, cache(&spec));
        Self {
            rng,
            kind,
            spec,
            cache,
            stores,
            prefetches: Vec::new(),
            asked: Vec::new(),
            live: Vec::new(),
            pins: Vec::new(),
            next: 0,
            recalibrated: 0,
            log: Vec::new(),
            loaded: 0,
            is_armed: false,
            device_faults: 0,
            reader: Consumer::default(),
            publisher: None,
        }
    }

    /// Publishes all events from now on; what is there, at once.
    pub(crate) fn publish(&mut self, publisher: Publisher) -> Arc<Publisher> {
        let publisher = Arc::new(publisher);
        self.read_events();
        publisher.reset(&self.cache.snapshot());
        self.publisher = Some(Arc::clone(&publisher));
        publisher
    }

    pub(crate) fn kind(&self) -> String {
        format!("{:?}", self.kind)
    }

    /// Returns the number of faults of stores and of the device so far.
    pub(crate) fn faults(&self) -> (u64, u64) {
        let of_stores = self.stores.iter().map(|store| store.counts().values().sum::<u64>()).sum();
        (of_stores, self.device_faults)
    }

    /// Lets the device fail in one of its next operations, once in a while.
    pub(crate) fn arm(&mut self) {
        if self.rng.one_in(6) {
            let (more, kind) = (self.rng.pick(&[4, 30, 300]), self.rng.pick(&FaultKind::ALL));
            let more = self.rng.below(more);
            self.log.push(format!("{kind:?} after {more}"));
            self.cache.cache().backend().fail(more.into(), kind);
            self.is_armed = true;
        }
    }

    /// Ends what [`Self::arm`] began.
    pub(crate) fn disarm(&mut self) {
        self.is_armed = false;
        self.device_faults += u64::from(self.cache.cache().backend().clear());
    }

    /// Returns the result of a call; `None` if the device failed in it.
    #[track_caller]
    pub(crate) fn done<T>(&self, result: Result<T, impl Into<TierError>>) -> Option<T> {
        done(self.is_armed, result)
    }

    /// Does one thing.
    pub(crate) fn act(&mut self) {
        let kind = self.rng.below(32);
        self.log.push(format!("{kind}"));
        self.arm();
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
                let flushed = self.cache.flush(Instant::now() + wait);
                self.done(flushed);
            }
            25 => self.reopen(),
            26 => self.pin(),
            27 => self.start_in_a_step(),
            28 => {
                let asked = Asked::choose(&mut self.rng);
                let forgotten =
                    self.cache.cache_mut().forget_prefix(&asked.prompt, asked.options(), 0);
                self.done(forgotten);
            }
            29 => self.forget(),
            _ => self.poll(),
        }
        if self.rng.one_in(2) {
            self.poll();
        }
        self.disarm();
    }

    /// Removes what can be removed; often everything, so that it has to come back.
    fn empty_device(&mut self) {
        if !self.rng.one_in(4) {
            (0..self.live.len()).for_each(|at| self.check(at));
            self.arm();
            let reset = self.cache.cache_mut().reset();
            self.done(reset);
            self.live.clear();
            self.unpin();
            let flushed = self.cache.flush(Instant::now() + Duration::from_millis(20));
            self.done(flushed);
        }
        let is_empty = self.cache.cache_mut().reset_prefixes();
        let is_empty = self.done(is_empty);
        self.log.push(format!("empty: {is_empty:?}"));
    }

    /// Forgets through the tiers. Stores that lie bring it back: its rows must be right then too.
    fn forget(&mut self) {
        let Asked { prompt, salt, .. } = &Asked::choose(&mut self.rng);
        let (kind, keep) = (self.rng.below(4), self.rng.pick(&[0, 8, 30]));
        let live = self.live.first().map(|live| live.id);
        let options = StartOptions::default().with_salt(salt);
        let end = Instant::now() + Duration::from_millis(self.rng.below(30).into());
        let cache = &mut self.cache;
        let forgotten = match (kind, live) {
            (0, Some(live)) => cache.forget_sequence(live, end),
            (0 | 1, _) => cache.forget_prefix(prompt, options, keep, end),
            (2, _) => cache.forget_salt(salt, end),
            _ => match cache.forget_all(end) {
                Err(TierError::Held) => return,
                forgotten => forgotten,
            },
        };
        self.done(forgotten);
    }

    fn poll(&mut self) {
        let polled = self.cache.poll();
        self.done(polled);
        self.read_events();
    }

    /// Lets readers follow, and checks that they know what can be reused, which it returns.
    pub(crate) fn read_events(&mut self) -> Snapshot {
        let Self { reader, cache, publisher, .. } = self;
        let snapshot = cache.snapshot();
        let events = cache.cache_mut().take_events();
        reader.apply(&events).unwrap();
        if reader.is_lost() {
            reader.resync(&snapshot);
        } else {
            reader.check(&snapshot).unwrap();
        }
        if let Some(publisher) = publisher {
            publisher.publish(&events);
            if publisher.needs_snapshot() {
                publisher.reset(&snapshot);
            }
        }
        snapshot
    }

    fn unpin(&mut self) {
        for pin in std::mem::take(&mut self.pins) {
            let unpinned = self.cache.cache_mut().unpin(pin);
            assert_ne!(self.done(unpinned), Some(false));
        }
    }

    fn prefetch(&mut self) {
        let asked = match self.rng.below(4) {
            // The same prompt again.
            0 if !self.prefetches.is_empty() => self.prefetches[0].1.clone(),
            0..3 if !self.asked.is_empty() => {
                let at = self.rng.below(self.asked.len() as u32);
                self.asked[at as usize].clone()
            }
            _ => Asked::choose(&mut self.rng),
        };
        if self.asked.len() < 8 {
            self.asked.push(asked.clone());
        }
        let wait = self.rng.pick(&[None, Some(Wait::None), Some(Wait::All)]);
        let (prompt, options) = (&asked.prompt, asked.options());
        let prefetch = match wait {
            None => self.cache.prefetch(prompt, &options),
            Some(wait) => self.cache.prefetch_within(prompt, &options, wait),
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
        assert!(self.cache.cancel(prefetch));
    }

    fn start(&mut self) {
        if self.prefetches.is_empty() {
            self.prefetch();
        }
        let at = self.rng.below(self.prefetches.len() as u32) as usize;
        let (prefetch, asked) = self.prefetches.remove(at);
        if !self.rng.one_in(3) {
            let end = Instant::now() + Duration::from_secs(30);
            while !self.cache.is_ready(prefetch) {
                self.poll();
                assert!(Instant::now() < end, "a prefetch is never ready");
                std::thread::sleep(Duration::from_micros(20));
            }
        }
        let id = SequenceId(self.next);
        self.next += 1;
        let in_step = self.rng.one_in(3);
        let started = if in_step {
            self.start_in_next_step(prefetch, id, &asked)
        } else {
            self.cache.start(prefetch, id, asked.options())
        };
        assert_eq!(self.cache.state().contains(id), started.is_ok(), "{started:?}");
        if matches!(started, Err(TierError::Cache(CacheError::Device(_)))) {
            self.done(started);
            self.disarm();
            // Does what the failure has left.
            self.poll();
            assert_eq!(self.cache.state().num_imports(), 0);
            return;
        }
        assert_eq!(self.cache.state().num_imports(), 0, "{started:?}");
        match started {
            Ok(reused) => {
                self.log.push(format!("start {} reuses {reused}", asked.prompt.len()));
                assert_eq!(self.cache.state().seq_len(id), Some(reused));
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
                self.disarm();
                let without = self.cache.cache_mut().start(id, &asked.prompt, asked.options());
                // In a step the import held blocks beside those that the sequence takes, and
                // nothing tries again without it.
                let message = format!("{error}, but {without:?} without tiers");
                assert!(without.is_err() || in_step, "{message}");
                if without.is_ok() {
                    self.cache.cache_mut().release(id).unwrap();
                }
            }
            Err(error) => panic!("{error}"),
        }
        if self.live.len() > 4 {
            self.end();
        }
    }

    fn pin(&mut self) {
        if self.pins.len() > 1 || self.rng.one_in(2) {
            return self.unpin();
        }
        let asked = Asked::choose(&mut self.rng);
        self.pins.push(self.cache.cache_mut().pin_prefix(&asked.prompt, asked.options()).id);
    }

    fn recalibrate(&mut self) {
        // Each time rows are rounded once more.
        if self.recalibrated >= 2 || self.kind.has_states() {
            return;
        }
        let mean = self.rng.pick(&[1.0, -2.0, 3.0]);
        let of = |mean: f32| PlaneCalibration {
            mean: vec![mean; self.kind.width()],
            ..Default::default()
        };
        let layer = || LayerCalibration { k: of(mean), v: PlaneCalibration::default() };
        let given = Calibration::new((0..LAYERS).map(|_| layer()).collect());
        match self.cache.cache_mut().recalibrate(given) {
            Ok(()) => self.recalibrated += 1,
            Err(CacheError::Plan(PlanError::State { .. })) => {}
            Err(error) => _ = self.done(Err::<(), _>(error)),
        }
        (0..self.live.len()).for_each(|at| self.check(at));
    }

    /// Ends the tiers, and often the process with them, and opens others over the same stores.
    fn reopen(&mut self) {
        self.disarm();
        let stats = self.cache.stats();
        self.loaded += stats.loaded_tokens;
        self.prefetches.clear();
        // What stands for the cache until it has its tiers again.
        let Self { rng, kind, stores, spec, .. } = self;
        let stand_in = open(rng, *kind, stores, cache(spec));
        let before = std::mem::replace(&mut self.cache, stand_in);
        if self.rng.one_in(2) {
            self.live.clear();
            self.pins.clear();
            self.recalibrated = 0;
            self.reader = Consumer::default();
            if let Some(publisher) = &self.publisher {
                publisher.reset(&self.cache.snapshot());
            }
            return;
        }
        let before = before.into_cache();
        self.cache = open(&mut self.rng, self.kind, &self.stores, before);
    }

    /// Starts a sequence in an open step, with blocks that were brought before it.
    fn start_in_next_step(
        &mut self,
        prefetch: PrefetchId,
        id: SequenceId,
        asked: &Asked,
    ) -> Result<u32, TierError> {
        let was_brought = self.cache.bring(prefetch, &asked.options())?;
        let mut step = self.cache.begin_step(&[])?;
        let started = step.start(id, &asked.prompt, asked.options());
        // Without inputs, a commit needs no writes, and the sequence stays.
        let ended = if started.is_ok() {
            step.commit()
        } else {
            step.roll_back();
            Ok(())
        };
        assert!(!was_brought || self.cache.state().num_imports() > 0, "the step holds them");
        // Releases them, whatever the device does then.
        let polled = self.cache.poll();
        self.done(polled);
        ended?;
        Ok(started?)
    }

    fn start_in_a_step(&mut self) {
        let Some(live) = self.live.first() else { return };
        let Ok(step) = self.cache.begin_step(&[StepInput::tokens(live.id, &[1])]) else { return };
        step.hold();
        self.poll();
        self.prefetch();
        let (prefetch, asked) = self.prefetches.pop().unwrap();
        let id = SequenceId(self.next);
        let refused = self.cache.start(prefetch, id, asked.options()).unwrap_err();
        assert!(matches!(refused, TierError::Cache(CacheError::Plan(_))), "{refused}");
        assert!(matches!(self.cache.flush(Instant::now()), Err(TierError::StepOpen)));
        drop(self.cache.cache_mut().held());
        assert_eq!(self.cache.state().num_imports(), 0);
    }

    /// Ends everything, and checks that nothing is held and all counts agree.
    pub(crate) fn finish(mut self) -> u64 {
        self.disarm();
        (0..self.live.len()).for_each(|at| self.check(at));
        for store in &self.stores {
            store.set_schedule(FaultSchedule::listed(&[]));
        }
        while !self.prefetches.is_empty() {
            self.cancel();
        }
        for live in self.live.drain(..) {
            self.cache.cache_mut().release(live.id).unwrap();
        }
        self.unpin();
        let cache = &mut self.cache;
        // A store whose breaker is open is not waited for.
        let end = Instant::now() + Duration::from_secs(30);
        while cache.flush(Instant::now() + Duration::from_millis(20)).unwrap().copies > 0 {
            assert!(Instant::now() < end, "{cache:?}");
        }
        self.read_events();
        let cache = &mut self.cache;
        assert_eq!(
            (
                cache.state().num_holds(),
                cache.state().num_imports(),
                cache.state().usage().blocks_used
            ),
            (0, 0, 0)
        );
        assert!(cache.cache_mut().reset_prefixes().unwrap(), "a block is held");
        let stats = cache.stats();
        assert!(stats.host_bytes <= stats.host_capacity, "{stats:?}");
        for store in &stats.stores {
            assert!(store.found <= store.lookups, "{store:?}");
        }
        self.loaded + stats.loaded_tokens
    }
}

/// Puts tiers below a cache.
fn open(
    rng: &mut Rng,
    kind: Kind,
    stores: &[Store; 2],
    cache: KvCache<Device>,
) -> TieredCache<Device> {
    let digest = |name: &str| ModelDigest::of_bytes(name.as_bytes());
    let identity = Identity::new(digest("weights"))
        .with_adapter(1, digest("one"))
        .with_adapter(3, digest("three"))
        .with_adapter(4, digest("three"));
    let policies = [WritePolicy::OnPublish, WritePolicy::OnLeave, WritePolicy::Never];
    // Two states of each group at least.
    let states = if kind.has_states() { 32 << 10 } else { 0 };
    let mut options = TierOptions::new();
    if let Some(bytes) = rng.pick(&[None, Some(64 << 10), Some(160 << 10), Some(4 << 20)]) {
        options = options.with_host(bytes + states);
    }
    let mut options = options
        .with_chunk_blocks(if kind.is_coded() { 1 } else { 2 })
        .with_wait(rng.pick(&[Wait::All, Wait::Compute, Wait::For(Duration::from_millis(1))]));
    for store in stores {
        let lane = StoreOptions::new(Tier::Disk)
            .with_write(WriteRule::new(rng.pick(&policies)))
            .with_threads(rng.pick(&[1, 3]))
            .with_waiting_writes(rng.pick(&[1, 64]));
        options = options.with_store_options(Box::new(Arc::clone(store)), lane);
    }
    TieredCache::new(cache, identity, options).unwrap()
}

/// Returns the result of a call; `None` if a device failed in it that may fail.
#[track_caller]
pub(crate) fn done<T>(may_fail: bool, result: Result<T, impl Into<TierError>>) -> Option<T> {
    match result.map_err(Into::into) {
        Ok(done) => Some(done),
        Err(TierError::Cache(CacheError::Device(_))) if may_fail => None,
        Err(error) => panic!("{error}"),
    }
}

fn cache(spec: &CacheSpec) -> KvCache<Device> {
    KvCache::new(FaultInjector::new(late()), spec.clone()).unwrap()
}
