//! A cache with tiers whose rows follow from their tokens, so that a wrong row is found.
use std::path::Path;
use std::time::{Duration, Instant};

use kv_core::backend::{Backend, Plane};
use kv_core::spec::CacheSpecBuilder;
use kv_core::{
    Axes, CacheSpec, GroupId, KvCache, KvFormat, LayerId, SequenceId, StartOptions, StepInput,
    TensorView, TensorViewMut,
};
use kv_cpu::{CpuBackend, CpuOptions};
use kv_testkit::LateDevice;
use kv_tier::{
    BlockStore, ChunkAddress, ChunkSpec, Identity, ModelDigest, PrefetchId, Session, SessionError,
    SessionInfo, StoreOptions, TierError, TierOptions, TieredCache, session,
};

/// Layers of the caches here, KV heads, and values of a head.
pub(crate) const LAYERS: u16 = 2;
const HEADS: u32 = 2;
const DIM: u32 = 8;
const WIDTH: usize = (HEADS * DIM) as usize;

use crate::recurrence::advance;

/// The CPU, with copies that are done when they are waited for.
pub(crate) type Late = LateDevice<CpuBackend>;

/// Opens the CPU; copies are pending for up to two polls.
pub(crate) fn late() -> Late {
    LateDevice::new(CpuBackend::open(CpuOptions::default().with_threads(1)).unwrap(), 2)
}

/// A cache, its tiers, and what they have computed and reused.
pub(crate) struct Engine<B: Backend = Late> {
    pub(crate) cache: TieredCache<B>,
    identity: Identity,
    next: u64,
}

/// Returns the spec of a small cache whose blocks have 4 tokens.
pub(crate) fn spec(blocks: u32) -> CacheSpec {
    builder().paged(4, blocks).changes(256).events(64).build().unwrap()
}

/// Returns a spec without blocks.
pub(crate) fn builder() -> CacheSpecBuilder {
    let spec = CacheSpec::builder().layers(LAYERS).kv_heads(HEADS).head_dim(DIM);
    spec.format(KvFormat::F32)
}

pub(crate) fn identity() -> Identity {
    Identity::new(ModelDigest::of_bytes(b"weights"))
}

/// Returns options of a store that is waited for on the busiest machine.
pub(crate) fn patient(store: &impl BlockStore) -> StoreOptions {
    let long = Duration::from_secs(20);
    let options = StoreOptions::new(store.tier()).with_lookup_deadline(long);
    options.with_read_deadline(long).with_write_deadline(long)
}

impl Engine {
    pub(crate) fn new(spec: CacheSpec, identity: Identity, options: TierOptions) -> Self {
        Self::over(late(), spec, identity, options)
    }

    pub(crate) fn try_new(spec: CacheSpec, options: TierOptions) -> Result<(), TierError> {
        let cache = KvCache::new(late(), spec).unwrap();
        TieredCache::new(cache, identity(), options).map(drop)
    }
}

impl<B: Backend> Engine<B> {
    pub(crate) fn over(
        backend: B,
        spec: CacheSpec,
        identity: Identity,
        options: TierOptions,
    ) -> Self {
        let cache = KvCache::new(backend, spec).unwrap();
        let cache = TieredCache::new(cache, identity.clone(), options).unwrap();
        Self { cache, identity, next: 0 }
    }

    pub(crate) fn dump(
        &mut self,
        sequence: SequenceId,
        note: &[u8],
        to: &Path,
    ) -> Result<SessionInfo, SessionError> {
        session::dump(self.cache.cache_mut(), &self.identity, sequence, note, to)
    }

    pub(crate) fn load(
        &mut self,
        from: &Path,
        options: &StartOptions<'_>,
    ) -> Result<Session, SessionError> {
        session::load(self.cache.cache_mut(), &self.identity, from, options)
    }

    /// Starts a prompt after everything has come that can, computes the rest, checks every row of
    /// it, and returns sequence and reused tokens.
    pub(crate) fn run(&mut self, prompt: &[u32], options: StartOptions<'_>) -> (SequenceId, u32) {
        let prefetch = self.cache.prefetch(prompt, &options);
        self.wait(prefetch);
        self.start(prefetch, prompt, options)
    }

    pub(crate) fn wait(&mut self, prefetch: PrefetchId) {
        while !self.cache.is_ready(prefetch) {
            self.cache.poll().unwrap();
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    pub(crate) fn start(
        &mut self,
        prefetch: PrefetchId,
        prompt: &[u32],
        options: StartOptions<'_>,
    ) -> (SequenceId, u32) {
        let sequence = SequenceId(self.next);
        self.next += 1;
        let reused = self.cache.start(prefetch, sequence, options).unwrap();
        assert_eq!(self.cache.state().seq_len(sequence), Some(reused));
        self.compute(sequence, prompt, reused);
        self.check(sequence, prompt);
        self.cache.poll().unwrap();
        (sequence, reused)
    }

    /// Does what [`Self::start`] does with what is on the device.
    pub(crate) fn start_alone(
        &mut self,
        prompt: &[u32],
        options: StartOptions<'_>,
    ) -> (SequenceId, u32) {
        let sequence = SequenceId(self.next);
        self.next += 1;
        let reused = self.cache.cache_mut().start(sequence, prompt, options).unwrap();
        self.compute(sequence, prompt, reused);
        self.check(sequence, prompt);
        (sequence, reused)
    }

    /// Writes the rows of `prompt[done..]` and the states behind them, in steps that end at stops.
    pub(crate) fn compute(&mut self, sequence: SequenceId, prompt: &[u32], done: u32) {
        let mut done = done as usize;
        while done < prompt.len() {
            let stop = self.cache.state().next_stop(sequence);
            let end = stop.map_or(prompt.len(), |stop| prompt.len().min(stop as usize));
            self.compute_to(sequence, &prompt[..end], done as u32);
            done = end;
        }
    }

    /// Writes the rows of `prompt[done..]` in one step.
    fn compute_to(&mut self, sequence: SequenceId, prompt: &[u32], done: u32) {
        let (before, new) = prompt.split_at(done as usize);
        let layers = layers(self.cache.state().spec());
        let mut step = self.cache.begin_step(&[StepInput::tokens(sequence, new)]).unwrap();
        let dims = [u32::try_from(new.len()).unwrap(), HEADS, DIM];
        advance(&mut step, (&[], before, new)).unwrap();
        for layer in layers {
            let [k, v] = [Plane::Key, Plane::Value]
                .map(|plane| rows(prompt, layer, plane).split_off(done as usize * WIDTH));
            let (k, v) = (TensorView::host(&k, &dims), TensorView::host(&v, &dims));
            step.write(layer, k, v, Axes::Thd).unwrap();
        }
        step.commit().unwrap();
    }

    /// Checks all rows of a sequence that have not left a window.
    #[track_caller]
    pub(crate) fn check(&mut self, sequence: SequenceId, tokens: &[u32]) {
        let len = u32::try_from(tokens.len()).unwrap();
        assert_eq!(self.cache.state().seq_len(sequence), Some(len));
        for layer in layers(self.cache.state().spec()) {
            let (group, _) = self.cache.state().spec().locate(LayerId(layer)).unwrap();
            let vacant = self.cache.state().vacant_entries(sequence, group).unwrap();
            let map = self.cache.state().spec().groups()[usize::from(group.0)].slot_map();
            let first = if vacant.is_empty() { 0 } else { map.tokens(vacant.end) };
            for plane in [Plane::Key, Plane::Value] {
                let expected = rows(tokens, layer, plane).split_off(first as usize * WIDTH);
                let mut got = vec![0.0_f32; expected.len()];
                let out = TensorViewMut::host(&mut got, &[1, len - first, HEADS, DIM]);
                let ranges = [(sequence, first, len - first)];
                self.cache.cache_mut().gather(layer, plane, &ranges, out, Axes::Bshd).unwrap();
                let wrong = got.iter().zip(&expected).position(|(a, b)| a != b);
                assert_eq!(wrong.map(|at| at / WIDTH), None, "layer {layer}, {plane:?}");
            }
        }
    }

    pub(crate) fn flush(&mut self) {
        let deadline = Instant::now() + Duration::from_secs(30);
        let left = self.cache.flush(deadline).unwrap();
        assert!(left.is_empty(), "{left:?} of {:?}", self.cache);
    }

    /// Ends all sequences and removes everything reusable from the device.
    pub(crate) fn forget(&mut self) {
        let live: Vec<_> = self.cache.state().sequences().collect();
        for sequence in live {
            self.cache.cache_mut().release(sequence).unwrap();
        }
        self.flush();
        assert!(self.cache.cache_mut().reset_prefixes().unwrap(), "something is held");
    }

    /// Checks that nothing is held for the tiers.
    pub(crate) fn assert_nothing_held(&self) {
        assert_eq!((self.cache.state().num_holds(), self.cache.state().num_imports()), (0, 0));
        assert_eq!(self.cache.state().usage().blocks_used, 0, "a block is leaked");
    }
}

/// Lists the layers with rows.
fn layers(spec: &CacheSpec) -> Vec<u16> {
    let layers = 0..spec.num_layers();
    layers.filter(|layer| spec.locate(LayerId(*layer)).is_some()).collect()
}

/// Returns the rows of a sequence. A row follows from all tokens up to its own.
fn rows(tokens: &[u32], layer: u16, plane: Plane) -> Vec<f32> {
    let mut state =
        0x9e37_79b9_u32.wrapping_add(u32::from(layer) * 2 + u32::from(plane == Plane::Key));
    let mut rows = Vec::with_capacity(tokens.len() * WIDTH);
    for token in tokens {
        state = (state ^ token).wrapping_mul(0x85eb_ca6b).rotate_left(13);
        rows.extend((0..WIDTH as u32).map(|at| (state.wrapping_add(at * 977) >> 8) as f32));
    }
    rows
}

/// Returns the first `len` tokens of a text.
pub(crate) fn text(number: u32, len: u32) -> Vec<u32> {
    (0..len).map(|at| if at < 8 { at } else { at + 1000 * number }).collect()
}

/// Returns the addresses of a prompt's whole chunks.
pub(crate) fn names(prompt: &[u32], identity: &Identity) -> Vec<ChunkAddress> {
    let spec = spec(8);
    let chunks = ChunkSpec::new(&spec, GroupId(0)).unwrap();
    let cache = KvCache::new(late(), spec).unwrap();
    let root = identity.root(&chunks, cache.state().encoding_key(), b"", None).unwrap();
    let mut parent = root.name();
    let tokens = chunks.span(0).end as usize;
    let names = prompt.chunks_exact(tokens).enumerate().map(|(index, tokens)| {
        parent = root.chunk_name(index as u32, &parent, tokens, &[]);
        ChunkAddress { root: root.name(), name: parent }
    });
    names.collect()
}
