//! Chooses the next operation.
use super::DevicePair;
use super::geometry::{LEN_MAX, SEQUENCES};
use crate::device::Place;
use crate::fixture::{AXES, DTYPES, Finish, StepConfig, StepKind};
use crate::rng::Rng;
use crate::suite::{End, Form};
use crate::tokens::Padding;

/// One operation; numbers are indices into [`DevicePair::sequences`].
#[derive(Debug, Clone)]
pub(super) enum Operation {
    Start { prompt: Vec<u32> },
    Step { entries: Vec<(usize, StepKind)>, config: Box<StepConfig> },
    Fork(usize),
    Truncate(usize, u32),
    Release(usize),
    Gather { layer: usize, ranges: Vec<(usize, u32, u32)>, form: Form },
    Convert { lens: Vec<usize>, heads_dim: [usize; 2], ends: [End; 2] },
    Recalibrate(u64),
    Nothing,
}

impl DevicePair {
    /// Chooses the next operation.
    pub(super) fn choose(&mut self) -> Operation {
        let rng = &mut self.rng;
        let count = self.sequences.len();
        let has_room = count < SEQUENCES as usize;
        let kind = if count == 0 { 0 } else { rng.below(25) };
        let which = rng.below(count.max(1) as u32) as usize;
        match kind {
            0..=4 if has_room => Operation::Start { prompt: prompt(rng) },
            5..=13 => self.choose_step(),
            14 | 15 if has_room => Operation::Fork(which),
            16 | 17 => {
                let len = self.sequences[which].tokens.len() as u32;
                Operation::Truncate(which, rng.below(len + 1))
            }
            18 => Operation::Release(which),
            19..=21 => self.choose_gather(),
            22 | 23 => choose_convert(rng),
            24 if self.geometry.recalibrates => Operation::Recalibrate(rng.bits()),
            _ => Operation::Nothing,
        }
    }

    fn choose_step(&mut self) -> Operation {
        let rng = &mut self.rng;
        let mut entries: Vec<(usize, StepKind)> = Vec::new();
        for _ in 0..=rng.below(3) {
            let which = rng.below(self.sequences.len() as u32) as usize;
            let sequence = &self.sequences[which];
            let (room, prompt) =
                (LEN_MAX - sequence.tokens.len() as u32, sequence.prompt.len() as u32);
            let kind = match rng.below(8) {
                0 => StepKind::Idle,
                1 => StepKind::Query(rng.pick(&[1, 2, 3, 9, 40])),
                2..=4 if prompt > 0 => StepKind::Tokens(prompt),
                2..=4 => StepKind::Tokens(1),
                _ => StepKind::Tokens(rng.within(1, 11)),
            };
            let fits = !matches!(kind, StepKind::Tokens(n) if n > room);
            if fits && entries.iter().all(|(sequence, _)| *sequence != which) {
                entries.push((which, kind));
            }
        }
        let finish = if rng.one_in(6) { Finish::Drop } else { Finish::Commit };
        let config =
            StepConfig { finish, kv_dtype: self.geometry.dtype, ..StepConfig::random(rng) };
        Operation::Step { entries, config: Box::new(config) }
    }

    fn choose_gather(&mut self) -> Operation {
        let rng = &mut self.rng;
        let mut ranges = Vec::new();
        for _ in 0..=rng.below(3) {
            let which = rng.below(self.sequences.len() as u32) as usize;
            let len = self.sequences[which].tokens.len() as u32;
            let begin = rng.below(len + 1);
            ranges.push((which, begin, rng.below(len - begin + 1)));
        }
        let layer = rng.below(self.shapes.len() as u32) as usize;
        let End { axes, dtype, padding, place } = end(rng);
        Operation::Gather { layer, ranges, form: Form { axes, dtype, padding, place } }
    }
}

/// Makes a prompt: the beginning of one of a few texts, and at most one other token.
fn prompt(rng: &mut Rng) -> Vec<u32> {
    let text = rng.below(2) * 1000;
    let mut prompt: Vec<_> = (text..text + rng.within(6, LEN_MAX - 6)).collect();
    if rng.one_in(3) {
        prompt.push(rng.below(1 << 20));
    }
    prompt
}

/// Chooses the form of a tensor.
fn end(rng: &mut Rng) -> End {
    let padding = Padding { batch: rng.below(3) as usize, tokens: rng.below(3) as usize, gap: 0 };
    let padding = Padding { gap: rng.pick(&[0, 0, 2, 6]), ..padding };
    let place = rng.pick(&[Place::Host, Place::Device]);
    End { axes: rng.pick(&AXES), dtype: rng.pick(&DTYPES), padding, place }
}

fn choose_convert(rng: &mut Rng) -> Operation {
    let lens = (0..=rng.below(3)).map(|_| rng.below(7) as usize).collect();
    let heads_dim = [rng.within(1, 3) as usize, rng.within(1, 40) as usize];
    Operation::Convert { lens, heads_dim, ends: [end(rng), end(rng)] }
}
