//! Opening a cache.
use crate::backend::Backend;
use crate::cache::{KvCache, constants, open, reads, state};
use crate::calibration::Calibration;
use crate::error::CacheError;
use crate::plan::PlanBuffers;
use crate::spec::{CacheSpec, GroupSpec, StatesSpec};
use crate::storage::KvStorage;

/// A cache that is about to be allocated, on a queue of its own and without a calibration unless
/// they are given.
///
/// ```
/// use kv::backend::{AnyBackend, AnyQueue, Backend, NullBackend};
/// use kv::{CacheSpec, KvCache};
///
/// let spec = CacheSpec::builder().layers(1).kv_heads(1).head_dim(4).paged(16, 8).build()?;
/// let device = NullBackend::new();
/// let queue = AnyQueue::new(device.queue()?);
/// let cache = KvCache::builder(AnyBackend::new(device), spec).queue(queue).build()?;
/// assert_eq!(cache.state().spec().groups()[0].num_blocks(), 8);
/// # Ok::<(), kv::CacheError>(())
/// ```
#[derive(Debug)]
#[must_use = "nothing is allocated before `build`"]
pub struct KvCacheBuilder<B: Backend> {
    backend: B,
    spec: CacheSpec,
    queue: Option<B::Queue>,
    calibration: Option<Calibration>,
}

impl<B: Backend> KvCacheBuilder<B> {
    pub(super) fn new(backend: B, spec: CacheSpec) -> Self {
        Self { backend, spec, queue: None, calibration: None }
    }

    /// Sets the queue on which all work of the cache is recorded: one of the caller, on a stream of
    /// its own or with options. [`KvCache::queue_mut`] gives access to it;
    /// [`AnyQueue::new`](crate::backend::AnyQueue::new) erases one for an erased backend.
    pub fn queue(self, queue: impl Into<Option<B::Queue>>) -> Self {
        Self { queue: queue.into(), ..self }
    }

    /// Sets the scales and the constants of transforms that were measured for a model. Without
    /// them, transforms have neither mean nor balance.
    pub fn calibration(self, calibration: impl Into<Option<Calibration>>) -> Self {
        Self { calibration: calibration.into(), ..self }
    }

    /// Allocates all memory of the cache; layers on demand are allocated later.
    ///
    /// # Errors
    /// Those of [`KvCache::new`]; [`CacheError::Calibration`] if the calibration does not fit the
    /// spec; the device's `ForeignHandle` for a queue of another device.
    pub fn build(self) -> Result<KvCache<B>, CacheError> {
        let Self { backend, spec, queue, calibration } = self;
        let constants = constants::Constants::new(&spec, calibration)?;
        // Every group is checked before the first one allocates memory.
        let cut = |group: &GroupSpec| KvStorage::new(&backend, *group.layouts());
        let mut storages = spec.groups().iter().map(cut).collect::<Result<Vec<_>, _>>()?;
        let cut = |of: &StatesSpec| KvStorage::new(&backend, *of.planes());
        let mut states = spec.states().iter().map(cut).collect::<Result<Vec<_>, _>>()?;
        let cut = |of: &StatesSpec| {
            of.snapshots().map(|of| KvStorage::new(&backend, *of.planes())).transpose()
        };
        let mut snapshots = spec.states().iter().map(cut).collect::<Result<Vec<_>, _>>()?;
        let mut reserved = Vec::new();
        if !spec.layers_on_demand() {
            reserved.push(backend.reserve_planes(spec.memory().all_bytes())?);
        }
        let mut queue = match queue {
            Some(queue) => queue,
            None => backend.queue()?,
        };
        for (group, storage) in spec.groups().iter().zip(&mut storages) {
            for (layer, index) in group.layers().iter().zip(0..) {
                let constants = constants.layer(*layer, group.layouts())?;
                let constants = constants.each_ref().map(Option::as_ref);
                storage.allocate_with((&backend, &mut queue), index, constants)?;
            }
        }
        for ((of, slots), snapshots) in spec.states().iter().zip(&mut states).zip(&mut snapshots) {
            for storage in std::iter::once(slots).chain(snapshots) {
                for index in 0..of.layers().len() {
                    storage.allocate(&backend, index)?;
                }
            }
        }
        let mut state = state::CacheState::new(spec, constants.key());
        state.set_layouts(storages.iter().map(|storage| *storage.layouts().first()));
        Ok(KvCache {
            backend,
            queue,
            state,
            storages,
            states,
            snapshots,
            taken: Vec::new(),
            reserved,
            constants,
            is_held: false,
            written: open::Written::default(),
            scratch: PlanBuffers::default(),
            reads: reads::Reads::default(),
            is_unprepared: false,
            unrestored: Vec::new(),
        })
    }
}
