//! Chooses the next operation.
use super::Pair;
use super::geometry::{LEN_MAX, SEQUENCES};
use crate::device::{Device, Place};
use crate::lab::{Brings, DTYPES, FORMATS, Finish, How};
use crate::rng::Rng;
use crate::suite::{End, Form};
use crate::tokens::Room;

/// One operation; numbers are indices into [`DevicePair::sequences`].
#[derive(Debug, Clone)]
pub(super) enum Operation {
    Start { prompt: Vec<u32> },
    Step { entries: Vec<(usize, Brings)>, how: Box<How> },
    Fork(usize),
    Truncate(usize, u32),
    Release(usize),
    Gather { layer: usize, ranges: Vec<(usize, u32, u32)>, form: Form },
    Convert { lens: Vec<usize>, heads_dim: [usize; 2], ends: [End; 2] },
    Recalibrate(u64),
    Nothing,
}

impl<A: Device, B: Device> Pair<A, B> {
    /// Chooses the next operation.
    pub(super) fn choose(&mut self) -> Operation {
        let rng = &mut self.rng;
        let live = self.sequences.len();
        let room = live < SEQUENCES as usize;
        let kind = if live == 0 { 0 } else { rng.below(25) };
        let which = rng.below(live.max(1) as u32) as usize;
        match kind {
            0..=4 if room => Operation::Start { prompt: prompt(rng) },
            5..=13 => self.choose_step(),
            14 | 15 if room => Operation::Fork(which),
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
        let mut entries: Vec<(usize, Brings)> = Vec::new();
        for _ in 0..=rng.below(3) {
            let which = rng.below(self.sequences.len() as u32) as usize;
            let known = &self.sequences[which];
            let (room, prompt) = (LEN_MAX - known.tokens.len() as u32, known.prompt.len() as u32);
            let brings = match rng.below(8) {
                0 => Brings::Idle,
                1 => Brings::Query(rng.within(1, 3)),
                2..=4 if prompt > 0 => Brings::Tokens(prompt),
                2..=4 => Brings::Tokens(1),
                _ => Brings::Tokens(rng.within(1, 11)),
            };
            let fits = !matches!(brings, Brings::Tokens(n) if n > room);
            if fits && entries.iter().all(|(known, _)| *known != which) {
                entries.push((which, brings));
            }
        }
        let finish = if rng.one_in(6) { Finish::Drop } else { Finish::Commit };
        let how = How { finish, kv_dtype: self.geometry.dtype, ..How::random(rng) };
        Operation::Step { entries, how: Box::new(how) }
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
        let End { format, dtype, room, place } = end(rng);
        Operation::Gather { layer, ranges, form: Form { format, dtype, room, place } }
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
    let room = Room { batch: rng.below(3) as usize, tokens: rng.below(3) as usize, gap: 0 };
    let room = Room { gap: rng.pick(&[0, 0, 2, 6]), ..room };
    let place = rng.pick(&[Place::Host, Place::Device]);
    End { format: rng.pick(&FORMATS), dtype: rng.pick(&DTYPES), room, place }
}

fn choose_convert(rng: &mut Rng) -> Operation {
    let lens = (0..=rng.below(3)).map(|_| rng.below(7) as usize).collect();
    let heads_dim = [rng.within(1, 3) as usize, rng.within(1, 40) as usize];
    Operation::Convert { lens, heads_dim, ends: [end(rng), end(rng)] }
}
