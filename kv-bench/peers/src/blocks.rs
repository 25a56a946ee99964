//! Block management beside other crates.
//!
//! The contenders run interleaved, some rounds at a time, so that other load on the machine affects
//! all of them and each runs warm; the median and the fastest of the rounds and the ratio of
//! medians are printed. All do the same work: 1,000 sequences that each grow by a token, with
//! blocks of 16; and a prompt of 1,025 tokens of which 64 blocks are cached, from its token ids to
//! held blocks.
use std::fmt::Write;
use std::time::{Duration, Instant};

use kv_bench::Eviction;
use kv_bench::blocks::{Decode, Hit};
use kvbm_logical::{BlockManager, BlockRegistry, SchedulableSequence};
use serde::Serialize;

const SEQUENCES: u32 = 1000;
const CONTEXT: u32 = 256;
const BLOCK_SIZE: u32 = 16;
/// Interleaved turns of each contender, and rounds per turn.
const TURNS: usize = 20;
const ROUNDS: usize = 50;

/// One comparison.
#[derive(Debug, Serialize)]
pub(crate) struct Compared {
    what: String,
    ours: Timed,
    kvbm_logical: Timed,
    /// The peer's median over ours: above 1, ours is faster.
    ratio: f64,
}

#[derive(Debug, Serialize)]
struct Timed {
    median_ns: u128,
    best_ns: u128,
}

/// Measures everything that both libraries do.
pub(crate) fn run() -> anyhow::Result<Vec<Compared>> {
    let mut all = Vec::new();
    for eviction in [Eviction::Lru, Eviction::ReuseRate] {
        let mut ours = Decode::new(SEQUENCES, CONTEXT, eviction)?;
        let mut theirs = Kvbm::new(SEQUENCES)?;
        let (mut a, mut b) = (Vec::new(), Vec::new());
        for _ in 0..TURNS {
            for _ in 0..ROUNDS {
                a.push(ours.step()? / SEQUENCES);
            }
            for _ in 0..ROUNDS {
                b.push(theirs.step()? / SEQUENCES);
            }
        }
        all.push(Compared::new(format!("decode step, per sequence, {eviction}"), a, b));

        let mut ours = Hit::new(64, 100, eviction)?;
        let theirs = KvbmHit::new(64)?;
        let (mut a, mut b) = (Vec::new(), Vec::new());
        for _ in 0..TURNS {
            for _ in 0..ROUNDS * 10 {
                let (took, hit) = ours.start()?;
                anyhow::ensure!(hit == 1024, "{hit} tokens hit");
                a.push(took);
            }
            for _ in 0..ROUNDS * 10 {
                b.push(theirs.start()?);
            }
        }
        all.push(Compared::new(format!("look up and hold 64 cached blocks, {eviction}"), a, b));
    }
    Ok(all)
}

impl Compared {
    fn new(what: String, ours: Vec<Duration>, theirs: Vec<Duration>) -> Self {
        let [(ours, a), (kvbm_logical, b)] = [ours, theirs].map(|mut times| {
            times.sort();
            let [best, median] = [0, times.len() / 2].map(|at| times.get(at).copied());
            let [best, median] = [best, median].map(Option::unwrap_or_default);
            let timed = Timed { median_ns: median.as_nanos(), best_ns: best.as_nanos() };
            (timed, median.as_secs_f64())
        });
        Self { what, ours, kvbm_logical, ratio: b / a }
    }

    pub(crate) fn text(&self) -> String {
        let Self { what, ours, kvbm_logical, ratio } = self;
        let mut text = format!("{what}: {ratio:.1} times kvbm-logical\n");
        for (name, timed) in [("kv", ours), ("kvbm-logical", kvbm_logical)] {
            let Timed { median_ns, best_ns } = timed;
            let _ = writeln!(text, "    {name:<14}{median_ns:>14} ns, at best {best_ns}");
        }
        text
    }
}

#[derive(Clone)]
struct Device;

fn manager(blocks: u32) -> anyhow::Result<BlockManager<Device>> {
    let builder = BlockManager::<Device>::builder().block_count(usize::try_from(blocks)?);
    let builder = builder.block_size(usize::try_from(BLOCK_SIZE)?);
    Ok(builder.registry(BlockRegistry::new()).with_lru_backend().build()?)
}

/// Sequences of the peer that grow by one token per step.
struct Kvbm {
    manager: BlockManager<Device>,
    sequences: Vec<SchedulableSequence<Device>>,
    count: u32,
    steps: u32,
}

impl Kvbm {
    fn new(count: u32) -> anyhow::Result<Self> {
        let blocks = (CONTEXT * 2).div_ceil(BLOCK_SIZE) + 2;
        let mut all =
            Self { manager: manager(blocks * count)?, sequences: Vec::new(), count, steps: 0 };
        all.restart()?;
        Ok(all)
    }

    fn restart(&mut self) -> anyhow::Result<()> {
        self.sequences.clear();
        for id in 0..self.count {
            let len = CONTEXT - id % 16;
            let tokens: Vec<u32> = (0..len).map(|n| n + id * 65_537).collect();
            let mut sequence = SchedulableSequence::<Device>::builder()
                .tokens(tokens)
                .max_output_tokens(usize::try_from(CONTEXT)? + 1)
                .block_size(BLOCK_SIZE)
                .build()?;
            sequence.match_and_add_prefix(&self.manager)?;
            let rest = usize::try_from(len)? - sequence.prefill_position();
            if rest > 0 {
                sequence.schedule_prefill(rest, &self.manager)?;
                sequence.apply_prefill(Some(0), &self.manager)?;
            }
            self.sequences.push(sequence);
        }
        self.steps = 0;
        Ok(())
    }

    fn step(&mut self) -> anyhow::Result<Duration> {
        if self.steps >= CONTEXT {
            self.manager =
                manager((CONTEXT * 2).div_ceil(BLOCK_SIZE).wrapping_add(2) * self.count)?;
            self.restart()?;
        }
        self.steps += 1;
        let begin = Instant::now();
        for sequence in &mut self.sequences {
            sequence.schedule_decode(&self.manager)?;
        }
        for sequence in &mut self.sequences {
            sequence.apply_decode(self.steps, &self.manager)?;
        }
        Ok(begin.elapsed())
    }
}

/// A prompt whose blocks the peer has cached.
struct KvbmHit {
    manager: BlockManager<Device>,
    prompt: Vec<u32>,
}

impl KvbmHit {
    fn new(blocks: u32) -> anyhow::Result<Self> {
        let prompt: Vec<u32> = (0..blocks * BLOCK_SIZE + 1).collect();
        let all = Self { manager: manager(blocks * 100)?, prompt };
        let mut sequence = all.sequence()?;
        sequence.schedule_prefill(all.prompt.len(), &all.manager)?;
        sequence.apply_prefill(Some(0), &all.manager)?;
        drop(sequence);
        Ok(all)
    }

    fn sequence(&self) -> anyhow::Result<SchedulableSequence<Device>> {
        let builder = SchedulableSequence::<Device>::builder().tokens(self.prompt.clone());
        builder.max_output_tokens(2).block_size(BLOCK_SIZE).build()
    }

    /// Measures the time from token ids to held blocks; their release is not timed.
    fn start(&self) -> anyhow::Result<Duration> {
        let begin = Instant::now();
        let mut sequence = self.sequence()?;
        let blocks = sequence.match_and_add_prefix(&self.manager)?;
        let took = begin.elapsed();
        anyhow::ensure!(blocks == 64, "{blocks} blocks hit");
        Ok(took)
    }
}
