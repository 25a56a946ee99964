//! Generated request traces, for policies of eviction: one for each kind of reuse that a service
//! may have, and those for which the least recently used block is the right one.
use std::collections::BTreeMap;

use crate::rng::Rng;

/// The blocks of a prompt. A number stands for a content and all before it.
pub type Prompt = Vec<u32>;

/// A range of lengths, in blocks.
type Length = (u32, u32);

/// Conversations that begin at random times, and pause between their turns. The unit of time is the
/// mean time from a beginning to the next, times [`Talk::starts`].
#[derive(Debug, Clone, Copy)]
struct Talk {
    starts: f64,
    /// Blocks that all share.
    root: u32,
    /// Median pause, its spread, and the spread of the medians of users, both lognormal.
    pause: (f64, f64, f64),
    first: Length,
    later: Length,
    /// Share of prompts that nobody continues.
    once: f64,
    /// The chance of another turn, by the turn and the number of phases so far.
    goes_on: fn(u32, usize) -> f64,
    /// Requests of a phase.
    phase: usize,
}

const CHAT: Talk = Talk {
    starts: 0.4,
    root: 2,
    pause: (150.0, 0.8, 0.7),
    first: (2, 24),
    later: (1, 8),
    once: 0.3,
    goes_on: |turn, _| if turn == 1 { 0.45 } else { 0.75 },
    phase: usize::MAX,
};

const AGENT: Talk = Talk {
    starts: 0.08,
    root: 6,
    pause: (12.0, 0.9, 0.6),
    first: (4, 30),
    later: (1, 4),
    once: 0.3,
    goes_on: |turn, _| if turn < 4 { 0.9 } else { 0.95 },
    phase: usize::MAX,
};

const CHAT_SLOW: Talk = Talk {
    starts: 0.5,
    root: 0,
    pause: (600.0, 1.0, 0.5),
    first: (2, 16),
    later: (1, 6),
    once: 0.2,
    goes_on: |_, _| 0.5,
    ..CHAT
};

const AGENT_MIX: Talk = Talk {
    starts: 0.25,
    root: 4,
    pause: (30.0, 1.6, 1.0),
    once: 0.2,
    goes_on: |turn, _| if turn == 1 { 0.5 } else { 0.9 },
    ..AGENT
};

/// First turns and later ones swap what they mean for another.
const FLIP: Talk = Talk {
    starts: 0.45,
    root: 0,
    pause: (120.0, 0.6, 0.5),
    first: (3, 20),
    later: (1, 5),
    once: 0.0,
    goes_on: |turn, phase| match (phase % 2, turn) {
        (0, 1) => 0.2,
        (0, _) => 0.9,
        (_, 1) => 0.7,
        _ => 0.05,
    },
    phase: 1500,
};

/// The same of even and odd turns, whose gaps do not differ.
const GAP_FLIP: Talk = Talk {
    starts: 0.35,
    pause: (80.0, 1.2, 0.0),
    once: 0.1,
    goes_on: |turn, phase| if (turn as usize + phase).is_multiple_of(2) { 0.75 } else { 0.5 },
    phase: 1000,
    ..FLIP
};

/// Adds the requests of a trace.
type Make = fn(&mut Requests);

/// Every trace: its name, and how it is made.
const TRACES: [(&str, Make); 18] = [
    ("loop", |all| all.cycle(400, 8000)),
    ("loops2", Requests::two_loops),
    ("scanhot", |all| all.scans((300, 0.8), (5, 60), 10_000, |rng, _| rng.one_in(2))),
    ("burstscan", |all| all.scans((120, 0.6), (20, 60), 12_000, |_, at| at % 1500 < 300)),
    ("phases", |all| (0..2).for_each(|_| all.phases(1500))),
    ("zipfsys", |all| all.templates(600, 1.0, (1, 8), 12_000)),
    ("zipfdrift", |all| all.drift(12_000)),
    ("chat", |all| all.talk(12_000, CHAT)),
    ("chatslow", |all| all.talk(12_000, CHAT_SLOW)),
    ("agent", |all| all.talk(12_000, AGENT)),
    ("agentmix", |all| all.talk(12_000, AGENT_MIX)),
    ("flip", |all| all.talk(12_000, FLIP)),
    ("gapflip", |all| all.talk(12_000, GAP_FLIP)),
    ("mix", Requests::mix),
    ("rag", |all| all.questions(12_000)),
    ("unique", |all| (0..4000).for_each(|_| all.scan((1, 40)))),
    ("recency", |all| all.walk(0.8, 0.0, |at| at.powf(-1.3))),
    ("recexp", |all| all.walk(0.6, 0.5, |at| 1.0 - 40.0 * at.ln())),
];

/// Returns the names of the traces, for [`generate`].
pub fn kinds() -> impl Iterator<Item = &'static str> {
    TRACES.iter().map(|(name, _)| *name)
}

/// Returns the requests of a trace, none if there is no such kind: the same for the same seed.
pub fn generate(kind: &str, seed: u64) -> Vec<Prompt> {
    let mut all = Requests { rng: Rng::new(seed), next: 0, prompts: Vec::new() };
    if let Some((_, make)) = TRACES.iter().find(|(name, _)| *name == kind) {
        make(&mut all);
    }
    all.prompts
}

/// A popularity: the chance of the nth is proportional to a power of 1/n.
struct Zipf(Vec<f64>);

impl Zipf {
    fn new(count: u32, power: f64) -> Self {
        let mut sum = 0.0;
        let sums = (1..=count).map(|rank| {
            sum += f64::from(rank).powf(-power);
            sum
        });
        Self(sums.collect())
    }
    fn choose(&self, rng: &mut Rng) -> usize {
        let at = rng.unit() * self.0.last().copied().unwrap_or(0.0);
        self.0.partition_point(|sum| *sum <= at).min(self.0.len() - 1)
    }
}

/// A trace in the making.
struct Requests {
    rng: Rng,
    /// The next new content.
    next: u32,
    prompts: Vec<Prompt>,
}

impl Requests {
    fn fresh(&mut self, (low, high): Length) -> Prompt {
        let first = self.next;
        self.next += self.rng.within(low, high);
        (first..self.next).collect()
    }
    fn documents(&mut self, count: usize, length: Length) -> Vec<Prompt> {
        (0..count).map(|_| self.fresh(length)).collect()
    }
    /// Requests documents in turn.
    fn cycle(&mut self, documents: usize, requests: usize) {
        let documents = self.documents(documents, (4, 26));
        self.prompts.extend(documents.into_iter().cycle().take(requests));
    }
    fn two_loops(&mut self) {
        let loops = [90, 1500].map(|count| self.documents(count, (4, 26)));
        let mut loops = loops.map(|documents| documents.into_iter().cycle());
        for _ in 0..12_000 {
            let which = usize::from(self.rng.unit() >= 0.4);
            self.prompts.extend(loops[which].next());
        }
    }
    /// Requests popular documents, and scans where `is_scan` says so.
    fn scans(
        &mut self,
        (count, power): (u32, f64),
        scan: Length,
        requests: usize,
        is_scan: fn(&mut Rng, usize) -> bool,
    ) {
        let (hot, popularity) = (self.documents(count as usize, (5, 25)), Zipf::new(count, power));
        for at in 0..requests {
            if is_scan(&mut self.rng, at) {
                self.scan(scan);
            } else {
                self.ask(&hot, &popularity, (1, 2));
            }
        }
    }
    fn templates(&mut self, count: u32, power: f64, tail: Length, requests: usize) {
        let popularity = Zipf::new(count, power);
        let templates = self.documents(count as usize, (2, 20));
        (0..requests).for_each(|_| self.ask(&templates, &popularity, tail));
    }
    /// Requests templates of which one is replaced from time to time.
    fn drift(&mut self, requests: usize) {
        let (mut templates, popularity) = (self.documents(400, (2, 20)), Zipf::new(400, 0.9));
        for at in 0..requests {
            if at % 20 == 0 {
                let old = self.rng.below(400) as usize;
                templates[old] = self.fresh((2, 20));
            }
            self.ask(&templates, &popularity, (1, 4));
        }
    }
    /// Requests content that nobody has had.
    fn scan(&mut self, length: Length) {
        let prompt = self.fresh(length);
        self.prompts.push(prompt);
    }
    /// Requests a prompt with a new tail.
    fn extend(&mut self, prompt: &[u32], tail: Length) {
        let tail = self.fresh(tail);
        self.prompts.push([prompt, &tail].concat());
    }
    fn ask(&mut self, documents: &[Prompt], popularity: &Zipf, tail: Length) {
        let document = &documents[popularity.choose(&mut self.rng)];
        self.extend(document, tail);
    }
    fn lognormal(&mut self, median: f64, spread: f64) -> f64 {
        median * (spread * f64::from(self.rng.normal())).exp()
    }

    fn talk(&mut self, requests: usize, talk: Talk) {
        let root = if talk.root == 0 { Prompt::new() } else { self.fresh((talk.root, talk.root)) };
        let (begin, end) = (self.prompts.len(), self.prompts.len() + requests);
        // Turns to come by their time in thousandths, and their number.
        let mut due: BTreeMap<(u64, u32), (Prompt, u32, f64)> = BTreeMap::new();
        let (mut next_start, mut count) = (0.0, 0);
        while self.prompts.len() < end {
            count += 1;
            let start = (next_start * 1000.0) as u64;
            if due.first_key_value().is_none_or(|((time, _), _)| *time > start) {
                next_start -= (1.0 - self.rng.unit()).ln() / talk.starts;
                if self.rng.unit() < talk.once {
                    self.extend(&root, (talk.first.0, 2 * talk.first.1));
                    continue;
                }
                let prompt = [root.clone(), self.fresh(talk.first)].concat();
                let pause = self.lognormal(talk.pause.0, talk.pause.2);
                due.insert((start, count), (prompt, 1, pause));
            } else if let Some(((time, _), (prompt, turn, pause))) = due.pop_first() {
                self.prompts.push(prompt.clone());
                let phase = (self.prompts.len() - begin) / talk.phase;
                if self.rng.unit() < (talk.goes_on)(turn, phase) {
                    let later = [prompt, self.fresh(talk.later)].concat();
                    let wait = self.lognormal(pause, talk.pause.1) * 1000.0;
                    due.insert((time + wait as u64, count), (later, turn + 1, pause));
                }
            }
        }
    }

    /// Chats, a loop, templates and agents, one after another.
    fn phases(&mut self, requests: usize) {
        let (pause, first, later) = ((60.0, 0.6, 0.4), (3, 20), (1, 6));
        let goes_on = |_, _| 0.6;
        self.talk(requests, Talk { starts: 0.45, pause, first, later, goes_on, ..CHAT_SLOW });
        self.cycle(200, requests);
        self.templates(200, 1.0, (1, 8), requests);
        let (pause, first, later) = ((8.0, 0.5, 0.3), (6, 20), (1, 3));
        let goes_on = |turn, _| if turn < 30 { 0.95 } else { 0.2 };
        let once = 0.1;
        self.talk(requests, Talk { starts: 0.2, pause, first, later, once, goes_on, ..CHAT_SLOW });
    }

    /// Chats among requests with one of two templates.
    fn mix(&mut self) {
        let [long, short] = [12, 5].map(|length| self.fresh((length, length)));
        let goes_on = |turn, _| if turn == 1 { 0.4 } else { 0.75 };
        let pause = (200.0, 0.8, 0.6);
        self.talk(7000, Talk { root: 1, pause, first: (2, 40), goes_on, ..CHAT });
        for prompt in std::mem::take(&mut self.prompts) {
            while self.rng.one_in(2) {
                let template = if self.rng.unit() < 0.6 { &long } else { &short };
                self.extend(template, (1, 3));
            }
            self.prompts.push(prompt);
        }
    }

    /// Documents, half of them read once, the others with further questions.
    fn questions(&mut self, requests: usize) {
        let mut open: Vec<(Prompt, u32)> = Vec::new();
        for _ in 0..requests {
            if open.is_empty() || self.rng.unit() < 0.35 {
                let document = self.fresh((10, 60));
                self.extend(&document, (1, 1));
                if self.rng.one_in(2) {
                    open.push((document, self.rng.within(1, 6)));
                }
            } else {
                let at = self.rng.below(open.len() as u32) as usize;
                let (document, left) = open[at].clone();
                self.extend(&document, (1, 2));
                open[at].1 = left - 1;
                if left == 1 {
                    open.swap_remove(at);
                }
            }
        }
    }

    /// Repeats prompts by how recently they were used, some of them longer.
    fn walk(&mut self, again: f64, longer: f64, depth: fn(f64) -> f64) {
        let mut stack: Vec<Prompt> = Vec::new();
        for _ in 0..12_000 {
            let depth = depth(self.rng.unit().max(1e-9)) as usize;
            let mut prompt = if depth < stack.len() && self.rng.unit() < again {
                stack.remove(stack.len() - depth.max(1))
            } else {
                self.fresh((2, 24))
            };
            if self.rng.unit() < longer && prompt.len() < 60 {
                prompt.extend(self.fresh((1, 4)));
            }
            stack.push(prompt.clone());
            self.prompts.push(prompt);
        }
    }
}

#[cfg(test)]
mod tests;
