//! A scheduler's requests on this cache, through the calls of vLLM's `KVCacheManager`.
use std::collections::BTreeMap;

use kv_core::backend::AnyBackend;
use kv_core::block::BlockPool;
use kv_core::eviction::Eviction;
use kv_core::scheduling::Admission;
use kv_core::spec::{PrefixReuse, PublishAt};
use kv_core::{
    CacheError, CacheSpec, GroupId, KvCache, KvFormat, SequenceId, StartOptions, Stats, StepInput,
};

use super::vllm::Config;
use crate::case::{At, CaseError, ensure, same};
use crate::device::dim;
use crate::provenance::{self, PrefixHash};

/// One request, running or waiting.
#[derive(Debug)]
struct Request {
    sequence: SequenceId,
    tokens: Vec<u32>,
    salt: Vec<u8>,
    adapter: Option<u64>,
    is_running: bool,
    was_preempted: bool,
}

impl Request {
    fn options(&self, backoff: u32) -> StartOptions<'_> {
        options(&self.salt, self.adapter, backoff).with_resumed(self.was_preempted)
    }
}

fn options(salt: &[u8], adapter: Option<u64>, backoff: u32) -> StartOptions<'_> {
    let options = StartOptions::default().with_salt(salt).with_backoff_blocks(backoff);
    adapter.map_or(options, |adapter| options.with_adapter(adapter))
}

/// The conditions of one admission.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct AdmissionTerms {
    pub(super) chunk: Option<u32>,
    pub(super) lookahead: u32,
    pub(super) must_fit: bool,
    /// Blocks that must stay free.
    pub(super) watermark: u32,
}

/// The result of an admission.
#[derive(Debug)]
pub(super) struct Admitted {
    pub(super) computed: u32,
    pub(super) is_in: bool,
    /// New blocks by group.
    pub(super) new_blocks: Vec<u32>,
}

/// A cache, its requests and their blocks.
#[derive(Debug)]
pub(super) struct Engine {
    backend: AnyBackend,
    pub(super) cache: KvCache,
    block_size: u32,
    windows: Vec<Option<u32>>,
    /// Blocks of the pool that vLLM shares among groups.
    capacity: u32,
    backoff: u32,
    requests: BTreeMap<String, Request>,
    adapters: Vec<String>,
    next: u64,
    /// Lookups of admissions that this cache started and that vLLM's shared pool refuses.
    uncounted: [u64; 3],
    /// Whether vLLM's shared pool would have evicted blocks that the pools here keep.
    pub(super) is_pressed: bool,
}

impl Engine {
    /// Creates a cache with one layer per group.
    pub(super) fn new(backend: &AnyBackend, config: &Config) -> Result<Self, CaseError> {
        let windows = config.windows()?;
        let capacity = config.num_blocks.saturating_sub(1);
        let layers = windows.len() as u16;
        let mut spec = CacheSpec::builder().layers(layers).kv_heads(1).head_dim(dim(backend, 2));
        spec = spec.format(KvFormat::F32).paged(config.block_size, capacity);
        for (layer, window) in (0..).zip(&windows) {
            if let Some(left) = window {
                spec = spec.group([layer], |group| group.window_left(*left));
            } else if layer > 0 {
                spec = spec.group([layer], |group| group);
            }
        }
        let spec = spec
            .prefix_reuse(PrefixReuse::FullBlocks)
            .publish_at(PublishAt::Begin)
            .eviction(Eviction::Lru);
        let spec = spec.events(if config.events { 1 << 16 } else { 0 });
        let spec = spec.build()?;
        // Groups that list their layers come after the others.
        let order = spec.groups().iter().map(|group| windows[usize::from(group.layers()[0].0)]);
        let windows = order.collect();
        Ok(Self {
            backend: backend.clone(),
            cache: KvCache::new(backend.clone(), spec)?,
            block_size: config.block_size,
            windows,
            capacity,
            backoff: u32::from(config.use_eagle),
            requests: BTreeMap::new(),
            adapters: Vec::new(),
            next: 0,
            uncounted: [0; 3],
            is_pressed: false,
        })
    }

    /// Returns whether any request holds blocks.
    pub(super) fn is_any_running(&self) -> bool {
        self.requests.values().any(|request| request.is_running)
    }

    fn groups(&self) -> impl Iterator<Item = GroupId> + use<> {
        (0..self.windows.len() as u8).map(GroupId)
    }

    /// Returns the number of free blocks, counted as one pool for all groups.
    pub(super) fn free(&self) -> u32 {
        let pools = self.groups().filter_map(|group| self.cache.state().pool(group));
        self.capacity.saturating_sub(pools.map(BlockPool::num_used).sum())
    }

    /// Notes whether held and cached blocks of all groups no longer fit into one pool.
    fn note_pressure(&mut self) {
        let pools = self.groups().filter_map(|group| self.cache.state().pool(group));
        let filled: u32 = pools.map(|pool| pool.num_blocks() - pool.num_empty()).sum();
        self.is_pressed |= self.windows.len() > 1 && filled > self.capacity;
    }

    pub(super) fn adapter(&mut self, name: Option<&str>) -> Option<u64> {
        let name = name?;
        let known = self.adapters.iter().position(|known| known == name);
        let number = known.unwrap_or_else(|| {
            self.adapters.push(name.to_owned());
            self.adapters.len() - 1
        });
        Some(number as u64)
    }

    /// Adds a request.
    pub(super) fn arrive(
        &mut self,
        id: &str,
        tokens: Vec<u32>,
        (salt, lora): (Option<&str>, Option<&str>),
    ) -> Result<(), CaseError> {
        ensure(!self.requests.contains_key(id), || format!("request {id} is there already"))?;
        let salt = salt.unwrap_or_default().as_bytes().to_vec();
        let adapter = self.adapter(lora);
        let sequence = SequenceId(self.next);
        self.next += 1;
        let (is_running, was_preempted) = (false, false);
        let request = Request { sequence, tokens, salt, adapter, is_running, was_preempted };
        self.requests.insert(id.to_owned(), request);
        Ok(())
    }

    fn request(&self, id: &str) -> Result<&Request, CaseError> {
        self.requests.get(id).ok_or_else(|| CaseError::from(format!("no request {id}")))
    }
    fn running(&self, id: &str) -> Result<&Request, CaseError> {
        let request = self.request(id)?;
        ensure(request.is_running, || format!("request {id} does not run"))?;
        Ok(request)
    }
    pub(super) fn computed(&self, id: &str) -> Result<u32, CaseError> {
        let sequence = self.running(id)?.sequence;
        Ok(self.cache.state().seq_len(sequence).unwrap_or(0))
    }
    /// Returns the number of tokens that are not computed yet.
    pub(super) fn pending(&self, id: &str) -> Result<u32, CaseError> {
        Ok(self.running(id)?.tokens.len() as u32 - self.computed(id)?)
    }
    pub(super) fn append(&mut self, id: &str, tokens: &[u32]) -> Result<(), CaseError> {
        self.request(id)?;
        self.requests.entry(id.to_owned()).and_modify(|request| request.tokens.extend(tokens));
        Ok(())
    }
    pub(super) fn take_back(&mut self, id: &str) {
        if let Some(request) = self.requests.get_mut(id) {
            request.tokens.pop();
        }
    }

    /// Returns the lengths of the request's block tables, by group.
    pub(super) fn table_lens(&self, id: &str) -> Result<Vec<u32>, CaseError> {
        let sequence = self.running(id)?.sequence;
        let len =
            |group| self.cache.state().block_table(sequence, group).map_or(0, <[_]>::len) as u32;
        Ok(self.groups().map(len).collect())
    }

    /// Returns the number of cached tokens of a prompt.
    pub(super) fn look_up(&self, tokens: &[u32], salt: Option<&str>, adapter: Option<u64>) -> u32 {
        let options = options(salt.unwrap_or_default().as_bytes(), adapter, self.backoff);
        self.cache.state().probe(tokens, options)
    }

    /// Admits a request, or changes nothing.
    pub(super) fn admit(&mut self, id: &str, terms: AdmissionTerms) -> Result<Admitted, CaseError> {
        let Some(request) = self.requests.get(id).filter(|request| !request.is_running) else {
            return Err(CaseError::from(format!("request {id} is unknown or runs already")));
        };
        // Tokens beyond the longest sequence are left out.
        let most = request.tokens.len().min(self.cache.state().spec().max_seq_len() as usize);
        let prompt = request.tokens[..most].to_vec();
        let options = request.options(self.backoff);
        let computed = self.cache.state().probe(&request.tokens, options);
        let refused = Admitted { computed, is_in: false, new_blocks: Vec::new() };
        let rest = prompt.len() as u32 - computed;
        let chunk = terms.chunk.unwrap_or(rest).min(rest);
        let admission = Admission::default().with_chunk(chunk).with_lookahead(terms.lookahead);
        let admission = admission.with_watermark(terms.watermark);
        let admission = admission.with_must_fit(terms.must_fit);
        match self.cache.state().check_admission(&request.tokens, options, &admission) {
            Ok(tokens) => same("check_admission and probe", tokens, computed)?,
            Err(CacheError::Exhausted(_)) => return Ok(refused),
            Err(other) => return Err(other.into()),
        }
        let sequence = request.sequence;
        let hashes = provenance::prefix_hashes(&prompt, &options);
        let before = (self.free(), self.cache.state().stats());
        let started = self.cache.start(sequence, &prompt, options)?;
        same("start and probe", started, computed)?;
        let first = &prompt[computed as usize..(computed + chunk) as usize];
        let input = StepInput::tokens(sequence, first).with_lookahead(terms.lookahead);
        let spec = self.cache.state().spec().clone();
        let mut step = self.cache.begin_step(&[input]).at("a step that was said to fit")?;
        provenance::write(
            &mut step,
            &spec,
            &hashes[computed as usize..(computed + chunk) as usize],
        )?;
        step.commit()?;
        if let Some(request) = self.requests.get_mut(id) {
            request.is_running = true;
        }
        if self.windows.len() > 1 && before.0 < self.free_needed(before.0) + terms.watermark {
            self.refuse_late(id, &before.1)?;
            return Ok(refused);
        }
        self.note_pressure();
        self.check_rows(id, computed, &hashes).at(format!("{computed} reused tokens"))?;
        let hit = computed / self.block_size;
        let new_blocks = self.table_lens(id)?.into_iter().map(|len| len - hit).collect();
        Ok(Admitted { computed, is_in: true, new_blocks })
    }

    /// Returns the number of free blocks that an admission took, of `before`.
    fn free_needed(&self, before: u32) -> u32 {
        let pools = self.groups().filter_map(|group| self.cache.state().pool(group));
        let used: u32 = pools.map(BlockPool::num_used).sum();
        used + before - self.capacity
    }

    /// Undoes an admission that fits into the pools here, which are larger, but not into vLLM's
    /// shared pool.
    fn refuse_late(&mut self, id: &str, before: &Stats) -> Result<(), CaseError> {
        let sequence = self.running(id)?.sequence;
        self.cache.forget_sequence(sequence)?;
        self.cache.release(sequence)?;
        let now = counts(&self.cache.state().stats(), self.request(id)?.was_preempted);
        let before = counts(before, self.request(id)?.was_preempted);
        if !self.request(id)?.was_preempted {
            (0..3).for_each(|i| self.uncounted[i] += now[i] - before[i]);
        }
        if let Some(request) = self.requests.get_mut(id) {
            request.is_running = false;
        }
        Ok(())
    }

    /// Checks rows of the first `len` tokens, except those that left a window.
    fn check_rows(&mut self, id: &str, len: u32, hashes: &[PrefixHash]) -> Result<(), CaseError> {
        let sequence = self.running(id)?.sequence;
        for (group, window) in self.windows.clone().into_iter().enumerate() {
            let begin = window.map_or(0, |left| len.saturating_sub(left)).min(len);
            let seen = &hashes[begin as usize..len as usize];
            provenance::check(&self.backend, &mut self.cache, (sequence, group), begin, seen)?;
        }
        Ok(())
    }

    /// Computes the next `tokens` of a request, and `drafts`, the first `accepted` of which stay.
    /// Returns false and changes nothing if blocks are exhausted.
    pub(super) fn step(
        &mut self,
        id: &str,
        tokens: u32,
        (drafts, accepted): (&[u32], u32),
        lookahead: u32,
    ) -> Result<bool, CaseError> {
        let (request, begin) = (self.running(id)?, self.computed(id)? as usize);
        let end = begin + tokens as usize;
        ensure(end <= request.tokens.len(), || {
            format!("request {id} has {} tokens, {end} are requested", request.tokens.len())
        })?;
        let all: Vec<_> = request.tokens[..end].iter().chain(drafts).copied().collect();
        let hashes = provenance::prefix_hashes(&all, &request.options(0));
        let sequence = request.sequence;
        let input = StepInput::tokens(sequence, &all[begin..]);
        let input = input.with_drafts(drafts.len() as u32).with_lookahead(lookahead);
        if self.windows.len() > 1 && !self.fits_together(&input)? {
            return Ok(false);
        }
        let spec = self.cache.state().spec().clone();
        let mut step = match self.cache.begin_step(&[input]) {
            Ok(step) => step,
            Err(CacheError::Exhausted(_)) => return Ok(false),
            Err(other) => return Err(other.into()),
        };
        provenance::write(&mut step, &spec, &hashes[begin..])?;
        if drafts.is_empty() {
            step.commit()?;
        } else {
            step.commit_accepted(&[tokens + accepted])?;
        }
        self.note_pressure();
        let len = self.computed(id)?;
        self.check_rows(id, len, &hashes)?;
        Ok(true)
    }

    /// Returns whether the blocks that all groups need fit into one pool.
    fn fits_together(&self, input: &StepInput<'_>) -> Result<bool, CaseError> {
        let (mut needed, mut free) = (0, self.free());
        for group in self.groups() {
            let demand = self.cache.state().blocks_for_step(group, &[*input])?;
            needed += demand.needed;
            free += demand.free - self.cache.state().free_blocks(group);
        }
        Ok(needed <= free)
    }

    pub(super) fn preempt(&mut self, id: &str) -> Result<(), CaseError> {
        let sequence = self.running(id)?.sequence;
        self.cache.preempt(sequence)?;
        if let Some(request) = self.requests.get_mut(id) {
            (request.is_running, request.was_preempted) = (false, true);
        }
        Ok(())
    }

    /// Ends a request, running or waiting.
    pub(super) fn free_request(&mut self, id: &str) -> Result<(), CaseError> {
        let request = self.request(id)?;
        if request.is_running {
            self.cache.release(request.sequence)?;
        }
        self.requests.remove(id);
        Ok(())
    }

    /// Returns requests, tokens looked up and tokens found so far; first of new requests, then of
    /// preempted ones.
    pub(super) fn counts(&self) -> [[u64; 3]; 2] {
        let mut new = counts(&self.cache.state().stats(), false);
        (0..3).for_each(|i| new[i] -= self.uncounted[i]);
        [new, counts(&self.cache.state().stats(), true)]
    }
}

fn counts(stats: &Stats, preempted: bool) -> [u64; 3] {
    if preempted {
        [stats.resumed_requests, stats.resumed_query_tokens, stats.resumed_hit_tokens]
    } else {
        [stats.requests, stats.query_tokens, stats.hit_tokens]
    }
}
