//! The life of blocks without a device: what a scheduler pays for every step and every prompt.
use std::time::{Duration, Instant};

use kv::backend::NullBackend;
use kv::eviction::Eviction;
use kv::{CacheSpec, Error, KvCache, QkvFormat, SequenceId, StartOptions, StepInput, TensorView};

use crate::{BLOCK_SIZE, values};

/// A cache of one layer that stores nothing.
fn cache(num_blocks: u32, eviction: Eviction) -> Result<KvCache<NullBackend>, Error> {
    let spec = CacheSpec::builder().layers(1).kv_heads(1).head_dim(2).eviction(eviction);
    Ok(KvCache::new(NullBackend::new(), spec.paged(BLOCK_SIZE, num_blocks).build()?)?)
}

/// Computes the tokens of a prompt after its first `reused`.
fn feed(
    cache: &mut KvCache<NullBackend>,
    sequence: SequenceId,
    (prompt, reused): (&[u32], u32),
) -> Result<(), Error> {
    let mut step = cache.begin_step(&[StepInput::prompt(sequence, prompt, reused)])?;
    let count = u32::try_from(step.positions().len()).unwrap_or(u32::MAX);
    let rows = values(u64::from(count).saturating_mul(2));
    let rows = TensorView::host(&rows, &[count, 1, 2]);
    step.write(0, rows, rows, QkvFormat::Thd)?;
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
    /// `sequences` sequences of `context` tokens, less a few that differ from one to the next.
    ///
    /// # Errors
    /// The cache's own.
    pub fn new(sequences: u32, context: u32, eviction: Eviction) -> Result<Self, Error> {
        // Room for as many tokens again before they start anew.
        let blocks = context.saturating_mul(2).div_ceil(BLOCK_SIZE).saturating_add(1);
        let num_blocks = blocks.saturating_mul(sequences);
        let mut decode = Self {
            cache: cache(num_blocks, eviction)?,
            num_blocks,
            eviction,
            ids: (0..u64::from(sequences)).map(SequenceId).collect(),
            rows: values(u64::from(sequences).saturating_mul(2)),
            context,
            steps: 0,
        };
        decode.restart()?;
        Ok(decode)
    }

    fn restart(&mut self) -> Result<(), Error> {
        // An empty pool: what evictions cost is measured apart.
        self.cache = cache(self.num_blocks, self.eviction)?;
        let prompt: Vec<u32> = (0..self.context).collect();
        for (id, short) in self.ids.iter().zip((0..16_usize).cycle()) {
            // Nothing is shared: every prompt has a salt of its own.
            let prompt = prompt.get(short..).unwrap_or_default();
            let salt = id.0.to_le_bytes();
            let options = StartOptions::default().with_salt(&salt);
            let reused = self.cache.start(*id, prompt, options)?;
            feed(&mut self.cache, *id, (prompt, reused))?;
        }
        self.steps = 0;
        Ok(())
    }

    /// One token for every sequence, from begin to commit.
    ///
    /// # Errors
    /// The cache's own.
    pub fn step(&mut self) -> Result<Duration, Error> {
        if self.steps >= self.context {
            self.restart()?;
        }
        self.steps = self.steps.saturating_add(1);
        let tokens = [self.steps];
        let count = u32::try_from(self.ids.len()).unwrap_or(u32::MAX);
        let inputs: Vec<_> = self.ids.iter().map(|id| StepInput::tokens(*id, &tokens)).collect();
        let rows = TensorView::host(&self.rows, &[count, 1, 2]);
        let begin = Instant::now();
        let mut step = self.cache.begin_step(&inputs)?;
        step.write(0, rows, rows, QkvFormat::Thd)?;
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
    /// A prompt of `blocks` full blocks and one token more, among `others` prompts as long.
    ///
    /// # Errors
    /// The cache's own.
    pub fn new(blocks: u32, others: u32, eviction: Eviction) -> Result<Self, Error> {
        let all = blocks.saturating_add(1).saturating_mul(others.saturating_add(1));
        let mut cache = cache(all, eviction)?;
        let len = blocks.saturating_mul(BLOCK_SIZE).saturating_add(1);
        let prompts = (0..=others).map(|n| n.wrapping_mul(65_537));
        let prompts = prompts.map(|first| (first..first.saturating_add(len)).collect::<Vec<_>>());
        let mut last = Vec::new();
        for prompt in prompts {
            let reused = cache.start(SequenceId(0), &prompt, StartOptions::default())?;
            feed(&mut cache, SequenceId(0), (&prompt, reused))?;
            cache.release(SequenceId(0))?;
            last = prompt;
        }
        Ok(Self { cache, prompt: last })
    }

    /// Starts a sequence on the prompt: hashes, finds, confirms and holds its blocks. Ends it again
    /// outside the time.
    ///
    /// # Errors
    /// The cache's own.
    pub fn start(&mut self) -> Result<(Duration, u32), Error> {
        let begin = Instant::now();
        let hit = self.cache.start(SequenceId(1), &self.prompt, StartOptions::default())?;
        let took = begin.elapsed();
        self.cache.release(SequenceId(1))?;
        Ok((took, hit))
    }
}

/// A pool full of cached blocks that nobody holds.
#[derive(Debug)]
pub struct Full {
    cache: KvCache<NullBackend>,
    next: u32,
}

impl Full {
    /// `num_blocks` cached blocks.
    ///
    /// # Errors
    /// The cache's own.
    pub fn new(num_blocks: u32, eviction: Eviction) -> Result<Self, Error> {
        let mut full = Self { cache: cache(num_blocks, eviction)?, next: 0 };
        for _ in 0..num_blocks.div_ceil(64).saturating_add(1) {
            full.turn()?;
        }
        Ok(full)
    }

    /// A new prompt of 64 blocks that takes the place of others, per block.
    ///
    /// # Errors
    /// The cache's own.
    pub fn turn(&mut self) -> Result<Duration, Error> {
        let len = BLOCK_SIZE.saturating_mul(64);
        let prompt: Vec<u32> = (self.next..self.next.saturating_add(len)).collect();
        self.next = self.next.wrapping_add(len) % (u32::MAX >> 1);
        let rows = values(u64::from(len).saturating_mul(2));
        let rows = TensorView::host(&rows, &[len, 1, 2]);
        let begin = Instant::now();
        self.cache.start(SequenceId(0), &prompt, StartOptions::default())?;
        let mut step = self.cache.begin_step(&[StepInput::tokens(SequenceId(0), &prompt)])?;
        step.write(0, rows, rows, QkvFormat::Thd)?;
        step.commit()?;
        self.cache.release(SequenceId(0))?;
        Ok(begin.elapsed().checked_div(64).unwrap_or_default())
    }
}

/// One prompt that comes again and again, as that of a health check does.
#[derive(Debug)]
pub struct Repeat {
    cache: KvCache<NullBackend>,
    prompt: Vec<u32>,
}

impl Repeat {
    /// A prompt of `len` tokens in a pool of 65,536 blocks, after `repeats` requests for it.
    ///
    /// # Errors
    /// The cache's own.
    pub fn new(len: u32, repeats: u32, eviction: Eviction) -> Result<Self, Error> {
        let cache = cache(1 << 16, eviction)?;
        let mut repeat = Self { cache, prompt: (0..len).collect() };
        for _ in 0..repeats {
            repeat.turn()?;
        }
        Ok(repeat)
    }

    /// Blocks with content that can be reused.
    pub fn cached(&self) -> u32 {
        self.cache.usage().blocks_cached
    }

    /// One request: started, computed, ended.
    ///
    /// # Errors
    /// The cache's own.
    pub fn turn(&mut self) -> Result<Duration, Error> {
        let begin = Instant::now();
        let sequence = SequenceId(0);
        let reused = self.cache.start(sequence, &self.prompt, StartOptions::default())?;
        feed(&mut self.cache, sequence, (&self.prompt, reused))?;
        self.cache.release(sequence)?;
        Ok(begin.elapsed())
    }
}
