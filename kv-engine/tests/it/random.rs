//! Random operation sequences of an engine over tiers, with faults of the model, of the device and
//! of the stores, and processes that end at any time: every text is the expected one, and no block
//! is lost.
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kv_core::KvFormat;
use kv_core::events::Tier;
use kv_testkit::rng::Rng;
use kv_testkit::store::{Fault, FaultSchedule, FaultStore};
use kv_testkit::{FaultInjector, FaultKind, LateDevice};
use kv_tier::policy::{WritePolicy, WriteRule};
use kv_tier::{
    BlockStore, DiskOptions, DiskStore, Identity, MemoryStore, ModelDigest, StoreOptions,
    TierError, TierOptions, TieredCache, Wait,
};

use super::drafts::{wave, wave_text};
use super::*;

/// A device with late copies that fails now and then.
type Device = FaultInjector<LateDevice<CpuBackend>>;
type Store = Arc<FaultStore<Arc<dyn BlockStore>>>;

/// Steps without a fault after which a request that does not end is a failure.
const STEPS_MAX: usize = 3000;
/// Operations of one run.
const OPERATIONS: usize = 120;

/// A request that has not ended.
struct Asked {
    prompt: Vec<u32>,
    max_new_tokens: u32,
    has_beams: bool,
    /// Tokens so far.
    tokens: Vec<u32>,
}

/// Faults that a step may meet.
#[derive(Debug, Clone, Copy, PartialEq)]
enum ModelFault {
    None,
    Error,
    Panic,
    NotANumber,
}

/// A model that fails on demand.
struct Faulty {
    model: Echo,
    fault: ModelFault,
}

impl Model<Device> for Faulty {
    fn forward(
        &mut self,
        step: &mut Step<'_, Device>,
        batch: &Batch,
    ) -> Result<Logits, ModelError> {
        let logits = self.model.forward(step, batch)?;
        match self.fault {
            ModelFault::None => Ok(logits),
            ModelFault::Error => Err("out of luck".into()),
            ModelFault::Panic => panic!("{ON_PURPOSE}"),
            ModelFault::NotANumber => {
                Ok(Logits::new(vec![f32::NAN; logits.values().len()], logits.width()))
            }
        }
    }
}

const ON_PURPOSE: &str = "on purpose";

/// Counts of one run, to prove that the run was one worth having.
#[derive(Debug, Default)]
struct Counts {
    ended: u64,
    cancelled: u64,
    loaded: u64,
    preempted: u64,
    of_device: u64,
    of_model: u64,
    of_stores: u64,
    processes: u64,
}

struct World {
    rng: Rng,
    engine: Engine<Device>,
    model: Faulty,
    stores: [Store; 2],
    asked: HashMap<usize, Asked>,
    is_armed: bool,
    counts: Counts,
    log: Vec<String>,
}

impl World {
    fn new(seed: u64, disk: DiskStore) -> Self {
        let mut rng = Rng::new(seed);
        let one_in = rng.pick(&[3, 8, 20]);
        let stores: [Arc<dyn BlockStore>; 2] =
            [Arc::new(MemoryStore::new(256 << 10)), Arc::new(disk)];
        let mut number = seed * 2;
        let stores = stores.map(|within| {
            number += 1;
            Arc::new(FaultStore::new(within, FaultSchedule::seeded(number, one_in, &Fault::ALL)))
        });
        let window_left = rng.pick(&[None, None, Some(9), Some(30)]);
        let engine = open(&mut rng, window_left, &stores);
        let model = Echo { window_left, ..Echo::new(wave) };
        Self {
            rng,
            engine,
            model: Faulty { model, fault: ModelFault::None },
            stores,
            asked: HashMap::new(),
            is_armed: false,
            counts: Counts::default(),
            log: Vec::new(),
        }
    }

    fn act(&mut self) {
        let kind = self.rng.below(32);
        self.log.push(format!("{kind}"));
        match kind {
            0..7 => self.submit(),
            7..24 => self.step(),
            24..26 => self.held(),
            26..28 => self.cancel(),
            28 => {
                self.arm();
                let polled = self.engine.poll_tiers();
                self.check(polled);
            }
            29 => self.flush(),
            30 if self.rng.one_in(4) => self.end_the_process(),
            _ => self.fault_of_the_model(),
        }
        self.disarm();
    }

    fn submit(&mut self) {
        let prompt = self.prompt();
        let max_new_tokens = self.rng.within(1, 24);
        let has_beams = self.rng.one_in(8);
        let request = Request {
            beams: has_beams.then_some(BeamOptions { width: 2, length_penalty: 1.0 }),
            salt: self.rng.pick(&[&b""[..], b"", b"a"]).to_vec(),
            ..Request::new(prompt.clone(), max_new_tokens)
        };
        let more = if has_beams { 0 } else { self.rng.pick(&[0, 0, 0, 2]) };
        match self.engine.submit_choices(request, vec![Sampler::greedy(); more]) {
            Ok(numbers) => {
                for number in numbers {
                    let prompt = prompt.clone();
                    let asked = Asked { prompt, max_new_tokens, has_beams, tokens: Vec::new() };
                    assert!(self.asked.insert(number, asked).is_none(), "a number given twice");
                }
            }
            // Two beams need more than some pools have.
            Err(RequestError::DoesNotFit { .. }) => assert!(has_beams || more > 0),
            Err(RequestError::TooManyBeams { .. }) => assert!(has_beams),
            Err(error) => panic!("{error}"),
        }
    }

    /// Returns a prompt that begins like others.
    fn prompt(&mut self) -> Vec<u32> {
        let family = self.rng.below(3);
        let shared = self.rng.pick(&[0, 7, 16, 40, 64]);
        let own = self.rng.within(1, 30);
        let number = self.rng.below(3);
        let of_family = (0..shared).map(|at| (family * 11 + at * 3) % 12);
        of_family.chain((0..own).map(|at| (number * 5 + at + 1) % 12)).collect()
    }

    fn step(&mut self) {
        self.arm();
        let stepped = self.engine.step(&mut self.model);
        if let Some(events) = self.check(stepped) {
            self.read(events);
        }
    }

    /// Holds a step, and does other things before it ends.
    fn held(&mut self) {
        self.arm();
        let begun = self.engine.begin_step().map(|batch| batch.is_some());
        let Some(true) = self.check(begun) else { return };
        assert!(matches!(self.engine.begin_step(), Err(EngineError::StepOpen { .. })));
        assert!(matches!(
            self.engine.flush_tiers(Instant::now()),
            Err(EngineError::StepOpen { .. })
        ));
        for _ in 0..self.rng.below(3) {
            match self.rng.below(3) {
                0 => self.submit(),
                1 => self.cancel(),
                _ => {
                    let polled = self.engine.poll_tiers();
                    self.check(polled);
                }
            }
        }
        if self.rng.one_in(3) {
            return self.engine.roll_back();
        }
        let ended = self.engine.forward(&mut self.model);
        if let Some(events) = self.check(ended) {
            self.read(events);
        }
    }

    /// Runs a step whose model fails: the step is repeated, and no text changes.
    fn fault_of_the_model(&mut self) {
        self.model.fault =
            self.rng.pick(&[ModelFault::Error, ModelFault::Panic, ModelFault::NotANumber]);
        let step = AssertUnwindSafe(|| self.engine.step(&mut self.model));
        match catch_unwind(step) {
            Ok(Ok(events)) => self.read(events),
            Ok(Err(EngineError::Model(_) | EngineError::Output(_))) => self.counts.of_model += 1,
            Ok(Err(error)) => self.expect_failure(&error),
            Err(panic) => {
                if panic.downcast_ref::<String>().is_none_or(|words| words != ON_PURPOSE) {
                    resume_unwind(panic);
                }
                self.counts.of_model += 1;
            }
        }
        self.model.fault = ModelFault::None;
    }

    fn cancel(&mut self) {
        let mut numbers: Vec<_> = self.asked.keys().copied().collect();
        numbers.sort_unstable();
        if numbers.is_empty() {
            return;
        }
        let number = numbers[to_usize(self.rng.below(to_u32(numbers.len())))];
        let asked = self.asked.remove(&number).expect("it is in the list");
        let generated = self.engine.cancel(number).expect("it has not ended");
        assert_eq!(generated.finish, Finish::Cancelled);
        if !asked.has_beams {
            assert_eq!(generated.tokens, asked.tokens);
        }
        assert!(self.engine.cancel(number).is_none());
        self.counts.cancelled += 1;
    }

    fn flush(&mut self) {
        let soon = Instant::now() + Duration::from_millis(self.rng.below(20).into());
        self.arm();
        if self.rng.one_in(2) {
            let flushed = self.engine.flush_tiers(soon);
            self.check(flushed);
        } else {
            let drained = self.engine.drain_tiers(soon);
            self.check(drained);
        }
    }

    /// Ends the process as a kill does: nothing is flushed, and the next one has the stores.
    fn end_the_process(&mut self) {
        self.note_counts();
        self.asked.clear();
        self.engine = open(&mut self.rng, self.model.model.window_left, &self.stores);
        self.counts.processes += 1;
    }

    fn note_counts(&mut self) {
        self.counts.loaded += self.engine.tiers().expect("it has tiers").loaded_tokens;
        self.counts.preempted += u64::try_from(self.engine.stats().preemptions).expect("small");
    }

    /// Compares events with the texts that the rule gives.
    fn read(&mut self, events: Vec<Event>) {
        for event in events {
            match event {
                Event::Token { index, token } => {
                    let asked = self.asked.get_mut(&index).expect("a token of no request");
                    asked.tokens.push(token);
                }
                Event::Finished { index, generated } => {
                    let asked = self.asked.remove(&index).expect("an end of no request");
                    let room = CONTEXT - to_u32(asked.prompt.len());
                    let new = asked.max_new_tokens.min(room);
                    assert_eq!(generated.tokens, wave_text(&asked.prompt, to_usize(new)));
                    assert_eq!(asked.tokens, generated.tokens);
                    assert_eq!(generated.finish == Finish::Context, new < asked.max_new_tokens);
                    self.counts.ended += 1;
                }
                event => panic!("{event:?}"),
            }
        }
        assert_eq!(self.engine.cache().state().num_imports(), 0, "imports end with their step");
    }

    /// Lets the device fail in one of its next operations, once in a while.
    fn arm(&mut self) {
        if self.rng.one_in(6) {
            let (more, kind) = (self.rng.pick(&[4, 30, 300]), self.rng.pick(&FaultKind::ALL));
            let more = self.rng.below(more);
            self.log.push(format!("{kind:?} after {more}"));
            self.engine.cache().backend().fail(more.into(), kind);
            self.is_armed = true;
        }
    }

    fn disarm(&mut self) {
        self.counts.of_device += u64::from(self.engine.cache().backend().clear());
        self.is_armed = false;
    }

    /// Returns the result of a call; `None` if the device failed in it.
    fn check<T>(&mut self, result: Result<T, EngineError>) -> Option<T> {
        match result {
            Ok(done) => Some(done),
            Err(error) => {
                self.expect_failure(&error);
                None
            }
        }
    }

    /// Checks that an error is that of the device, which may fail now or has failed in a call that
    /// stands, or that a copy held the blocks that were needed.
    fn expect_failure(&self, error: &EngineError) {
        let device = |error: &CacheError| matches!(error, CacheError::Device(_));
        let is_device = match error {
            EngineError::Cache(error) | EngineError::Tier(TierError::Cache(error)) => device(error),
            EngineError::Model(error) => error.downcast_ref().is_some_and(device),
            _ => false,
        };
        let is_held = matches!(error, EngineError::Cache(CacheError::Exhausted(_)))
            && self.engine.cache().state().num_holds() > 0;
        assert!(is_device || is_held, "{error}: {:?}", self.engine.cache().state().usage());
    }

    /// Ends all texts without faults, and checks that nothing is held.
    fn finish(mut self) -> Counts {
        let of = |store: &Store| store.counts().values().sum::<u64>();
        self.counts.of_stores = self.stores.iter().map(of).sum();
        for store in &self.stores {
            store.set_schedule(FaultSchedule::listed(&[]));
        }
        for _ in 0..STEPS_MAX {
            if !self.engine.has_work() {
                break;
            }
            self.step_quietly();
        }
        assert!(self.asked.is_empty(), "{} requests never end", self.asked.len());
        assert!(!self.engine.has_work());
        let end = Instant::now() + Duration::from_secs(30);
        while !self.engine.drain_tiers(end).expect("no device fails now") {
            assert!(Instant::now() < end, "copies never end");
        }
        let state = self.engine.cache().state();
        let usage = state.usage();
        assert_eq!((usage.sequences, usage.blocks_used), (0, 0), "a block is lost");
        assert_eq!((state.num_holds(), state.num_imports()), (0, 0));
        self.note_counts();
        let mut cache = self.engine.into_cache();
        assert!(cache.reset_prefixes().expect("no device fails now"), "a block is held");
        self.counts
    }

    fn step_quietly(&mut self) {
        let stepped = self.engine.step(&mut self.model);
        if let Some(events) = self.check(stepped) {
            self.read(events);
        }
    }
}

/// Opens a cache with tiers over the stores of the processes before.
fn open(rng: &mut Rng, window_left: Option<u32>, stores: &[Store; 2]) -> Engine<Device> {
    let block_size = rng.pick(&[4, 8]);
    // From the longest text alone to room for several.
    let num_blocks = CONTEXT / block_size * rng.pick(&[1, 2, 5]) + rng.below(3);
    let spec = CacheSpec::builder().layers(LAYERS).kv_heads(1).head_dim(CONTEXT);
    let spec =
        spec.max_seq_len(CONTEXT).publish_at(rng.pick(&[PublishAt::Begin, PublishAt::Commit]));
    let spec = spec.prefix_reuse(rng.pick(&[PrefixReuse::FullBlocks, PrefixReuse::Partial]));
    let spec = spec.wipe_on_release(rng.one_in(3)).format(KvFormat::F32);
    let spec = spec.paged(block_size, num_blocks).changes(rng.pick(&[4, 256]));
    let spec = match window_left {
        Some(left) => {
            spec.group([1], |group| group.window_left(left).paged(block_size, num_blocks))
        }
        None => spec,
    };
    let spec = if rng.one_in(2) {
        let sizes = (rng.pick(&[5, 8, 20]), rng.pick(&[0, 2, 3]), rng.pick(&[1, 3, 40]));
        states::with_states(spec, sizes)
    } else {
        spec
    };
    let device = FaultInjector::new(LateDevice::new(cpu(), 2));
    let room = 64 << 10; // for two states of each group
    let cache = KvCache::new(device, spec.build().expect("spec")).expect("cache");
    let policies = [WritePolicy::OnPublish, WritePolicy::OnLeave, WritePolicy::Never];
    let waits = [Wait::All, Wait::All, Wait::Compute, Wait::IfFaster, Wait::None];
    let mut options = TierOptions::new()
        .with_host(rng.pick(&[80 << 10, 4 << 20]) + room)
        .with_chunk_blocks(rng.pick(&[1, 2]))
        .with_wait(rng.pick(&waits));
    for store in stores {
        let lane = StoreOptions::new(Tier::Disk)
            .with_write(WriteRule::new(rng.pick(&policies)))
            .with_threads(rng.pick(&[1, 3]))
            .with_waiting_writes(rng.pick(&[1, 64]));
        options = options.with_store_options(Box::new(Arc::clone(store)), lane);
    }
    let identity = Identity::new(ModelDigest::of_bytes(b"echo"));
    let cache = TieredCache::new(cache, identity, options).expect("tiers");
    let limits = Limits {
        draft_tokens: rng.pick(&[0, 0, 3]),
        max_overtakes: rng.pick(&[0, 2, 16]),
        ..limits(rng.pick(&[1, 3, 8]), rng.pick(&[1, 6, 40, 1000]))
    };
    Engine::tiered(cache, limits)
}

/// `KV_ENGINE_RUNS` sets the number of runs, `KV_ENGINE_SEED` the first seed.
#[test]
fn texts_are_right_and_no_block_is_lost_whatever_goes_wrong() {
    let number = |name: &str, default| {
        std::env::var(name).map_or(default, |text| text.parse::<u64>().expect("a number"))
    };
    let (runs, first) = (number("KV_ENGINE_RUNS", 24), number("KV_ENGINE_SEED", 1));
    let mut all = Counts::default();
    for seed in first..first + runs {
        let folder = tempfile::tempdir().expect("a folder");
        let disk = DiskStore::open(folder.path(), DiskOptions::new(4 << 20).with_floor(0));
        let mut world = World::new(seed, disk.expect("a store"));
        let acted = catch_unwind(AssertUnwindSafe(|| (0..OPERATIONS).for_each(|_| world.act())));
        if let Err(panic) = acted {
            println!("seed {seed}: {}", world.log.join(", "));
            resume_unwind(panic);
        }
        let ended = catch_unwind(AssertUnwindSafe(|| world.finish()));
        let counts = ended.unwrap_or_else(|panic| {
            println!("seed {seed}: at the end");
            resume_unwind(panic)
        });
        all.ended += counts.ended;
        all.cancelled += counts.cancelled;
        all.loaded += counts.loaded;
        all.preempted += counts.preempted;
        all.of_device += counts.of_device;
        all.of_model += counts.of_model;
        all.of_stores += counts.of_stores;
        all.processes += counts.processes;
    }
    println!("{all:?}");
    let each = [all.ended / 8, all.cancelled, all.of_device, all.of_model, all.of_stores];
    assert!(each.iter().all(|count| *count > runs / 2), "{all:?}");
    assert!(all.loaded > runs && all.preempted > runs / 8 && all.processes > runs / 8, "{all:?}");
}
