//! Steps that are planned but not run: the cost before any byte of K or V moves.
use std::hint::black_box;
use std::time::Instant;

use kv::backend::{Backend, Capabilities, NullBackend};
use kv::{KvCache, SequenceId, StartOptions, StepInput};

use super::error::Error;
use super::grid::Case;
use super::work;

/// Sequences on the null backend, for steps that are planned but not run.
pub(super) struct Planned {
    cache: KvCache<NullBackend>,
    batch: u32,
}

impl Planned {
    /// Makes the sequences. Contexts differ by up to a block, so that some sequences need a new
    /// one; they are split as on the device.
    pub(super) fn new(case: &Case, device: &Capabilities) -> Result<Self, Error> {
        let backend = NullBackend::new();
        let mut capabilities = backend.capabilities().clone().with_workers(device.workers);
        capabilities.heads_together = device.heads_together;
        let backend = backend.with_capabilities(capabilities);
        let shape = &case.shape;
        let mut cache = KvCache::new(backend, work::spec(shape, case.stored)?)?;
        let spread = case.block_size.min(shape.context);
        for (sequence, short) in sequences(shape.batch).zip((1..=spread).cycle()) {
            cache.start(sequence, &[], StartOptions::default())?;
            let tokens = shape.context - short;
            if tokens > 0 {
                let mut step = cache.begin_step(&[StepInput::count(sequence, tokens)])?;
                step.mark_written();
                step.commit()?;
            }
        }
        Ok(Self { cache, batch: shape.batch })
    }

    /// Plans and drops `runs` steps with one token per sequence; returns the seconds.
    pub(super) fn run(&mut self, runs: u32) -> Result<f64, Error> {
        let input = |sequence| StepInput::tokens(sequence, &[7]);
        let inputs: Vec<_> = sequences(self.batch).map(input).collect();
        let begin = Instant::now();
        for _ in 0..runs {
            let step = self.cache.begin_step(&inputs)?;
            black_box(step.positions());
        }
        Ok(begin.elapsed().as_secs_f64())
    }
}

fn sequences(count: u32) -> impl Iterator<Item = SequenceId> {
    (0..u64::from(count)).map(SequenceId)
}

#[cfg(test)]
mod tests {
    use super::super::grid;
    use super::super::options::{Options, Suite};
    use super::super::report::RunsOn;
    use super::*;

    #[test]
    fn steps_are_planned_and_dropped() {
        let few = Options {
            suites: vec![Suite::Plan],
            batch: vec![5],
            context: vec![40],
            ..Options::default()
        };
        let cases = grid::cases(&few, RunsOn::Cpu).expect("cases");
        assert_eq!(cases.len(), 3, "blocks");
        for case in &cases {
            let mut planned =
                Planned::new(case, &Capabilities::minimal().with_workers(2)).expect("sequences");
            let lens: Vec<_> = sequences(5).map(|id| planned.cache.state().seq_len(id)).collect();
            assert_eq!(lens, [39, 38, 37, 36, 35].map(Some));
            assert!(planned.run(3).expect("steps") > 0.0);
            assert_eq!(
                sequences(5).map(|id| planned.cache.state().seq_len(id)).collect::<Vec<_>>(),
                lens
            );
        }
    }
}
