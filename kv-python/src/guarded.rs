//! What the lock of a cache guards: who runs its sequences, and which step is open.
use kv::KvCache;
use kv::backend::AnyBackend;
use kv::engine::{Engine, Limits};
use kv::tier::{Identity, TieredCache};
use pyo3::exceptions::PyTypeError;

use crate::report::Failure;
use crate::step::ENDED;

/// A cache, with or without tiers below it.
#[derive(Debug)]
pub(crate) enum Memory {
    Device(Box<KvCache>),
    Tiered(Box<TieredCache>),
}

impl Memory {
    pub(crate) fn cache(&self) -> &KvCache {
        match self {
            Self::Device(cache) => cache,
            Self::Tiered(cache) => cache.cache(),
        }
    }

    pub(crate) fn cache_mut(&mut self) -> &mut KvCache {
        match self {
            Self::Device(cache) => cache,
            Self::Tiered(cache) => cache.cache_mut(),
        }
    }
}

/// Who runs the sequences of a cache.
#[derive(Debug)]
pub(crate) enum Owner {
    /// The caller, sequence by sequence.
    Caller(Memory),
    /// An engine, for its requests.
    Engine(Box<Engine>),
    /// Nobody: the blocks are freed.
    Closed,
}

/// What a cache's lock guards.
#[derive(Debug)]
pub(crate) struct Guarded {
    pub(crate) owner: Owner,
    pub(crate) identity: Option<Identity>,
    /// Number of the step that is open, and of the last one.
    pub(crate) open: Option<u64>,
    pub(crate) steps: u64,
}

pub(crate) const CLOSED: Failure = Failure::State("the cache is closed");

impl Guarded {
    /// Returns the cache, to read it.
    pub(crate) fn cache(&self) -> Result<&KvCache, Failure> {
        match &self.owner {
            Owner::Caller(memory) => Ok(memory.cache()),
            Owner::Engine(engine) => Ok(engine.cache()),
            Owner::Closed => Err(CLOSED),
        }
    }

    /// Returns the cache for a call that changes it: refused while a step is open.
    pub(crate) fn idle(&mut self) -> Result<&mut Memory, Failure> {
        match (&mut self.owner, self.open) {
            (Owner::Caller(memory), None) => Ok(memory),
            (Owner::Caller(_), Some(_)) => Err(Failure::State(
                "a step is open: commit it or roll it back before any other change of the cache",
            )),
            (Owner::Engine(_), _) => {
                Err(Failure::State("an engine runs this cache: its requests make the sequences"))
            }
            (Owner::Closed, _) => Err(CLOSED),
        }
    }

    /// Returns the engine that runs the cache.
    pub(crate) fn engine(&mut self) -> Result<&mut Engine, Failure> {
        match &mut self.owner {
            Owner::Engine(engine) => Ok(engine),
            Owner::Caller(_) => Err(Failure::State("no engine runs this cache")),
            Owner::Closed => Err(CLOSED),
        }
    }

    /// Gives the cache to an engine.
    pub(crate) fn run_by(&mut self, limits: Limits) -> Result<(), Failure> {
        self.idle()?;
        self.owner = match std::mem::replace(&mut self.owner, Owner::Closed) {
            Owner::Caller(Memory::Device(cache)) => {
                Owner::Engine(Box::new(Engine::new(*cache, limits)))
            }
            Owner::Caller(Memory::Tiered(cache)) => {
                Owner::Engine(Box::new(Engine::tiered(*cache, limits)))
            }
            other => other,
        };
        Ok(())
    }

    /// Notes that a step is open, and returns its number.
    pub(crate) fn opened(&mut self) -> u64 {
        self.steps += 1;
        self.open = Some(self.steps);
        self.steps
    }

    /// Runs a call with the open step.
    pub(crate) fn with_step<T>(
        &mut self,
        number: u64,
        call: impl FnOnce(&mut kv::Step<'_, AnyBackend>) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        if let Owner::Engine(engine) = &mut self.owner {
            if self.open != Some(number) {
                return Err(Failure::State(ENDED));
            }
            return engine.with_step(|step, _| call(step))?;
        }
        let mut step = self.held(number)?;
        let done = call(&mut step);
        step.hold();
        done
    }

    /// Ends the open step by a call that takes it.
    pub(crate) fn end_step(
        &mut self,
        number: u64,
        call: impl FnOnce(kv::Step<'_, AnyBackend>) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let ended = call(self.held(number)?);
        self.open = None;
        ended
    }

    fn held(&mut self, number: u64) -> Result<kv::Step<'_, AnyBackend>, Failure> {
        if self.open != Some(number) {
            return Err(Failure::State(ENDED));
        }
        match &mut self.owner {
            Owner::Caller(memory) => memory.cache_mut().held().ok_or(Failure::State(ENDED)),
            Owner::Engine(_) => {
                Err(Failure::State("an engine has this step: its end_step or roll_back ends it"))
            }
            Owner::Closed => Err(CLOSED),
        }
    }

    /// Rolls the open step back.
    pub(crate) fn roll_back(&mut self) {
        self.open = None;
        match &mut self.owner {
            Owner::Caller(memory) => drop(memory.cache_mut().held()),
            Owner::Engine(engine) => engine.roll_back(),
            Owner::Closed => {}
        }
    }

    pub(crate) fn identity(&self) -> Result<&Identity, Failure> {
        let missing = || {
            PyTypeError::new_err(
                "sessions need a cache with model=: bytes or text that name the weights, so that \
                 no other model's rows are loaded",
            )
        };
        Ok(self.identity.as_ref().ok_or_else(missing)?)
    }
}
