//! Processes that come and go over the same stores, which refuse writes for a moment: each finds
//! everything that a flush says is written, and nothing that was forgotten.
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kv_core::{CacheSpec, StartOptions};
use kv_testkit::rng::Rng;
use kv_testkit::store::{Fault, FaultSchedule, FaultStore};
use kv_tier::policy::{WritePolicy, WriteRule};
use kv_tier::{
    BlockStore, DiskOptions, DiskStore, Forgotten, MemoryStore, StoreErrorKind, TierError,
    TierOptions,
};

use crate::recurrence::with_states;
use crate::support::{Engine, builder, identity, patient, text};

type Store = Arc<FaultStore<Arc<dyn BlockStore>>>;

/// The known state of a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Never computed, or forgotten since.
    Gone,
    /// Computed, and perhaps lost before it was written.
    Unknown,
    /// On the device of this process.
    Fresh,
    /// Every store has it.
    Written,
}

struct Run {
    rng: Rng,
    spec: CacheSpec,
    host: Option<u64>,
    waiting: usize,
    stores: [Store; 2],
    engine: Option<Engine>,
    texts: [State; TEXTS],
    log: Vec<String>,
    /// Checks of texts that were written, and of texts that are gone.
    checked: [u32; 2],
}

const TEXTS: usize = 6;
const SALTS: [&[u8]; 3] = [b"", b"a", b"b"];
/// Tokens that all texts begin with: whole chunks.
const COMMON: u32 = 16;

impl Run {
    fn new(seed: u64, folder: &std::path::Path) -> Self {
        let mut rng = Rng::new(seed);
        let spec = builder().paged(4, 256).changes(rng.pick(&[2, 256]));
        let kind = rng.below(5);
        let spec = match kind {
            0 => spec,
            1 => spec.group([1], |group| group),
            2 => spec.group([1], |group| group.paged(8, 128)),
            3 => with_states(spec.layers(3), &[2], (64, 1)),
            _ => with_states(spec, &[0, 1], (64, 1)),
        };
        // A state and tails for each text.
        let room = if kind < 3 { 0 } else { 400 << 10 };
        let disk = DiskStore::open(folder, DiskOptions::new(64 << 20).with_floor(0)).unwrap();
        let within: [Arc<dyn BlockStore>; 2] =
            [Arc::new(MemoryStore::new(64 << 20)), Arc::new(disk)];
        let faults = || FaultSchedule::listed(&[]);
        Self {
            spec: spec.build().unwrap(),
            // Room for one of the texts, or more.
            host: rng.pick(&[None, Some((400 << 10) + room), Some(4 << 20)]),
            waiting: rng.pick(&[1_usize, 4, 256]),
            stores: within.map(|store| Arc::new(FaultStore::new(store, faults()))),
            engine: None,
            texts: [State::Gone; TEXTS],
            log: Vec::new(),
            checked: [0; 2],
            rng,
        }
    }

    /// Lets stores refuse calls from now on, or none.
    fn set_faults(&mut self, has_faults: bool) {
        let kinds = [StoreErrorKind::Unavailable, StoreErrorKind::Full, StoreErrorKind::Timeout];
        let kinds = kinds.map(Fault::Fail);
        for store in &self.stores {
            let seed = self.rng.below(u32::MAX).into();
            let one_in = if has_faults { 5 } else { 0 };
            store.set_schedule(FaultSchedule::seeded(seed, one_in, &kinds));
        }
    }

    fn engine(&mut self) -> &mut Engine {
        let Self { spec, host, waiting, stores, .. } = self;
        self.engine.get_or_insert_with(|| {
            let options = TierOptions::new().with_chunk_blocks(2);
            let mut options = host
                .map_or(options, |bytes| TierOptions::new().with_chunk_blocks(2).with_host(bytes));
            for (store, policy) in stores.iter().zip([WritePolicy::OnPublish, WritePolicy::OnLeave])
            {
                let lane = patient(store).with_write(WriteRule::new(policy));
                let lane = lane.with_waiting_writes(*waiting);
                options = options.with_store_options(Box::new(Arc::clone(store)), lane);
            }
            Engine::new(spec.clone(), identity(), options)
        })
    }

    fn text(number: usize) -> (Vec<u32>, &'static [u8]) {
        let number = number as u32;
        let own = text(number + 1, 20 + 17 * number).split_off(8);
        let common = (0..COMMON).map(|at| 7_000_000 + at).collect::<Vec<_>>();
        ([common, own].concat(), SALTS[number as usize % SALTS.len()])
    }

    fn act(&mut self) {
        let kind = self.rng.below(12);
        let number = self.rng.below(TEXTS as u32) as usize;
        self.log.push(format!("{kind}:{number}"));
        match kind {
            0..6 => self.compute(number),
            6..8 => self.flush(),
            8 => {
                self.engine = None;
                self.note_fresh(State::Unknown);
            }
            9 => {
                let (tokens, salt) = Self::text(number);
                let options = StartOptions::default().with_salt(salt);
                self.forget(|engine, end| {
                    let Engine { cache, .. } = engine;
                    cache.forget_prefix(&tokens, options, COMMON, end)
                });
                self.texts[number] = State::Gone;
            }
            10 => {
                let salt = SALTS[number % SALTS.len()];
                self.forget(|Engine { cache, .. }, end| cache.forget_salt(salt, end));
                let texts = (0..TEXTS).filter(|text| Self::text(*text).1 == salt);
                texts.for_each(|text| self.texts[text] = State::Gone);
            }
            _ if self.rng.one_in(3) => {
                self.forget(|Engine { cache, .. }, end| cache.forget_all(end));
                self.texts = [State::Gone; TEXTS];
            }
            _ => {
                let Engine { cache, .. } = self.engine();
                cache.poll().unwrap();
                // Not while a copy holds a block.
                if cache.cache_mut().reset_prefixes().unwrap() {
                    self.note_fresh(State::Unknown);
                }
            }
        }
    }

    /// Starts a text, checks what comes of it, and computes the rest.
    fn compute(&mut self, number: usize) {
        self.set_faults(false);
        let (tokens, salt) = Self::text(number);
        let state = self.texts[number];
        let engine = self.engine();
        let options = StartOptions::default().with_salt(salt);
        let prefetch = engine.cache.prefetch(&tokens, &options);
        engine.wait(prefetch);
        let (sequence, reused) = engine.start(prefetch, &tokens, options);
        engine.cache.cache_mut().release(sequence).unwrap();
        // Whole chunks of each group; with states all tokens but the last.
        let len = tokens.len() as u32 - 1;
        let has_states = !self.spec.states().is_empty();
        let whole = if has_states { len } else { len / COMMON * COMMON };
        match state {
            State::Gone => assert!(reused <= COMMON, "text {number}: {reused} tokens came back"),
            State::Unknown | State::Fresh => {}
            State::Written => {
                assert!(reused >= whole, "text {number}: {reused} of {whole} tokens are found");
            }
        }
        self.checked[0] += u32::from(state == State::Written);
        self.checked[1] += u32::from(state == State::Gone);
        if state != State::Written {
            self.texts[number] = State::Fresh;
        }
        self.set_faults(true);
    }

    fn flush(&mut self) {
        let Engine { cache, .. } = self.engine();
        let left = cache.flush(soon()).unwrap();
        self.log.push(format!("left {left:?}"));
        if left.is_empty() {
            self.note_fresh(State::Written);
        }
    }

    /// Notes what became of the texts that this process has computed.
    fn note_fresh(&mut self, state: State) {
        let fresh = self.texts.iter_mut().filter(|text| **text == State::Fresh);
        fresh.for_each(|text| *text = state);
    }

    /// Forgets until every store has confirmed it.
    fn forget(&mut self, forget: impl Fn(&mut Engine, Instant) -> Result<Forgotten, TierError>) {
        let end = soon();
        while !forget(self.engine(), end).unwrap().is_complete() {
            assert!(Instant::now() < end, "a store never confirms");
        }
    }
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(30)
}

#[test]
fn what_was_flushed_is_found_and_what_was_forgotten_is_not() {
    let (mut written, mut gone) = (0, 0);
    for seed in 1..=25 {
        let folder = tempfile::tempdir().unwrap();
        let mut run = Run::new(seed, folder.path());
        let done = catch_unwind(AssertUnwindSafe(|| (0..40).for_each(|_| run.act())));
        if let Err(panic) = done {
            println!("seed {seed}: {}", run.log.join(", "));
            resume_unwind(panic);
        }
        written += run.checked[0];
        gone += run.checked[1];
    }
    assert!(written > 100 && gone > 50, "{written} written, {gone} gone");
}
