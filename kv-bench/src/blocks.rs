//! Block management without a device: the cost of every step and every prompt to a scheduler.
use std::time::{Duration, Instant};

use kv::backend::NullBackend;
use kv::eviction::Eviction;
use kv::{Axes, CacheSpec, Error, KvCache, SequenceId, StartOptions, StepInput, TensorView};

use crate::num::to_u32;
use crate::{BLOCK_SIZE, values};

/// Makes a cache of one layer on the null backend.
fn cache(num_blocks: u32, eviction: Eviction) -> Result<KvCache<NullBackend>, Error> {
    let spec = CacheSpec::builder().layers(1).kv_heads(1).head_dim(2).eviction(eviction);
    Ok(KvCache::new(NullBackend::new(), spec.paged(BLOCK_SIZE, num_blocks).build()?)?)
}

/// Runs a step with the tokens of a prompt that are not cached.
fn append(
    cache: &mut KvCache<NullBackend>,
    sequence: SequenceId,
    prompt: &[u32],
) -> Result<(), Error> {
    let mut step = cache.begin_step(&[StepInput::prompt(sequence, prompt)])?;
    let count = to_u32(step.positions().len());
    let rows = values(u64::from(count) * 2);
    let rows = TensorView::host(&rows, &[count, 1, 2]);
    step.write(0, rows, rows, Axes::Thd)?;
    Ok(step.commit()?)
}

/// Sequences that grow by one token a step.
#[derive(Debug)]
pub struct Decode {
    cache: KvCache<NullBackend>,
    num_blocks: u32,
    eviction: Eviction,
    ids: Vec<SequenceId>,
    rows: Vec<f32>,
    context: u32,
    steps: u32,
}

impl Decode {
    /// Makes `sequences` sequences of `context` tokens, less a few that differ from one to the
    /// next.
    ///
    /// # Errors
    /// Those of the cache.
    pub fn new(sequences: u32, context: u32, eviction: Eviction) -> Result<Self, Error> {
        // Room for twice the context, before the sequences start again.
        let blocks = (context * 2).div_ceil(BLOCK_SIZE) + 1;
        let num_blocks = blocks * sequences;
        let mut decode = Self {
            cache: cache(num_blocks, eviction)?,
            num_blocks,
            eviction,
            ids: (0..u64::from(sequences)).map(SequenceId).collect(),
            rows: values(u64::from(sequences) * 2),
            context,
            steps: 0,
        };
        decode.restart()?;
        Ok(decode)
    }

    fn restart(&mut self) -> Result<(), Error> {
        // An empty pool, because evictions are measured separately.
        self.cache = cache(self.num_blocks, self.eviction)?;
        let prompt: Vec<u32> = (0..self.context).collect();
        for (id, short) in self.ids.iter().zip((0..16_usize).cycle()) {
            // Every prompt has its own salt, so nothing is shared.
            let prompt = &prompt[short..];
            let salt = id.0.to_le_bytes();
            let options = StartOptions::default().with_salt(&salt);
            self.cache.start(*id, prompt, options)?;
            append(&mut self.cache, *id, prompt)?;
        }
        self.steps = 0;
        Ok(())
    }

    /// Runs one step with a token for every sequence, from begin to commit.
    ///
    /// # Errors
    /// Those of the cache.
    pub fn step(&mut self) -> Result<Duration, Error> {
        if self.steps >= self.context {
            self.restart()?;
        }
        self.steps += 1;
        let tokens = [self.steps];
        let count = to_u32(self.ids.len());
        let inputs: Vec<_> = self.ids.iter().map(|id| StepInput::tokens(*id, &tokens)).collect();
        let rows = TensorView::host(&self.rows, &[count, 1, 2]);
        let begin = Instant::now();
        let mut step = self.cache.begin_step(&inputs)?;
        step.write(0, rows, rows, Axes::Thd)?;
        step.commit()?;
        Ok(begin.elapsed())
    }
}

/// A prompt whose blocks are all cached.
#[derive(Debug)]
pub struct Hit {
    cache: KvCache<NullBackend>,
    prompt: Vec<u32>,
}

impl Hit {
    /// Caches a prompt of `blocks` full blocks and one more token, among `others` prompts of the
    /// same length.
    ///
    /// # Errors
    /// Those of the cache.
    pub fn new(blocks: u32, others: u32, eviction: Eviction) -> Result<Self, Error> {
        let all = (blocks + 1) * (others + 1);
        let mut cache = cache(all, eviction)?;
        let len = blocks * BLOCK_SIZE + 1;
        let prompts = (0..=others).map(|n| n.wrapping_mul(65_537));
        let prompts = prompts.map(|first| (first..first + len).collect::<Vec<_>>());
        let mut last = Vec::new();
        for prompt in prompts {
            cache.start(SequenceId(0), &prompt, StartOptions::default())?;
            append(&mut cache, SequenceId(0), &prompt)?;
            cache.release(SequenceId(0))?;
            last = prompt;
        }
        Ok(Self { cache, prompt: last })
    }

    /// Starts a sequence on the prompt: hashes, finds, confirms and holds its blocks. The release
    /// is not timed.
    ///
    /// # Errors
    /// Those of the cache.
    pub fn start(&mut self) -> Result<(Duration, u32), Error> {
        let begin = Instant::now();
        let hit = self.cache.start(SequenceId(1), &self.prompt, StartOptions::default())?;
        let took = begin.elapsed();
        self.cache.release(SequenceId(1))?;
        Ok((took, hit))
    }
}

/// A pool full of idle cached blocks.
#[derive(Debug)]
pub struct Full {
    cache: KvCache<NullBackend>,
    next: u32,
}

impl Full {
    /// Fills a pool of `num_blocks` blocks.
    ///
    /// # Errors
    /// Those of the cache.
    pub fn new(num_blocks: u32, eviction: Eviction) -> Result<Self, Error> {
        let mut full = Self { cache: cache(num_blocks, eviction)?, next: 0 };
        for _ in 0..=num_blocks.div_ceil(64) {
            full.request()?;
        }
        Ok(full)
    }

    /// Computes a new prompt of 64 blocks that evicts others; returns the time per block.
    ///
    /// # Errors
    /// Those of the cache.
    pub fn request(&mut self) -> Result<Duration, Error> {
        let len = BLOCK_SIZE * 64;
        let prompt: Vec<u32> = (self.next..self.next + len).collect();
        self.next = self.next.wrapping_add(len) % (u32::MAX >> 1);
        let rows = values(u64::from(len) * 2);
        let rows = TensorView::host(&rows, &[len, 1, 2]);
        let begin = Instant::now();
        self.cache.start(SequenceId(0), &prompt, StartOptions::default())?;
        let mut step = self.cache.begin_step(&[StepInput::tokens(SequenceId(0), &prompt)])?;
        step.write(0, rows, rows, Axes::Thd)?;
        step.commit()?;
        self.cache.release(SequenceId(0))?;
        Ok(begin.elapsed().checked_div(64).unwrap_or_default())
    }
}

/// One prompt that is requested again and again, as by a health check.
#[derive(Debug)]
pub struct Repeat {
    cache: KvCache<NullBackend>,
    prompt: Vec<u32>,
}

impl Repeat {
    /// Makes a prompt of `len` tokens in a pool of 65,536 blocks, after `repeats` requests for it.
    ///
    /// # Errors
    /// Those of the cache.
    pub fn new(len: u32, repeats: u32, eviction: Eviction) -> Result<Self, Error> {
        let cache = cache(1 << 16, eviction)?;
        let mut repeat = Self { cache, prompt: (0..len).collect() };
        for _ in 0..repeats {
            repeat.request()?;
        }
        Ok(repeat)
    }

    /// Returns the number of blocks with reusable content.
    pub fn cached(&self) -> u32 {
        self.cache.state().usage().blocks_cached
    }

    /// Runs one request: start, prefill, release.
    ///
    /// # Errors
    /// Those of the cache.
    pub fn request(&mut self) -> Result<Duration, Error> {
        let begin = Instant::now();
        let sequence = SequenceId(0);
        self.cache.start(sequence, &self.prompt, StartOptions::default())?;
        append(&mut self.cache, sequence, &self.prompt)?;
        self.cache.release(sequence)?;
        Ok(begin.elapsed())
    }
}
