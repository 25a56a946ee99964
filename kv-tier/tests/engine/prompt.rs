//! Prompts of random operation sequences, and the rows that follow from them.
use std::time::Duration;

use kv_core::StartOptions;
use kv_core::backend::Plane;
use kv_core::eviction::{Priority, Retention, RetentionRange, Return};
use kv_core::reuse::ContentSpan;
use kv_testkit::rng::Rng;

/// A prompt with its start options.
#[derive(Debug, Clone)]
pub(crate) struct Asked {
    pub(crate) prompt: Vec<u32>,
    pub(crate) salt: &'static [u8],
    pub(crate) adapter: Option<u64>,
    pub(crate) spans: Vec<ContentSpan>,
    pub(crate) retention: Option<Retention>,
    pub(crate) backoff: u32,
    pub(crate) reserve: u32,
    pub(crate) reuse: bool,
    pub(crate) hint: Option<Return>,
}

impl Asked {
    /// Chooses one; prompts share beginnings of few texts.
    pub(crate) fn choose(rng: &mut Rng) -> Self {
        let len = 1 + rng.pick(&[3, 20, 60, 90, 210]);
        let len = 1 + rng.below(len);
        let (family, other, fork) = (rng.below(2), rng.below(2), rng.pick(&[10, 40, 200]));
        let prompt =
            (0..len).map(|at| if at < fork { at * 10 + family } else { at * 10 + other }).collect();
        let spans = match rng.below(4) {
            0 => vec![ContentSpan { begin: 5, len: 9, id: u128::from(rng.below(2)) }],
            _ => Vec::new(),
        };
        let low = Priority { level: 0, duration: None };
        let retention = rng.one_in(8).then(|| {
            let range = RetentionRange { begin: 0, end: None, priority: low };
            Retention::new(vec![range]).unwrap()
        });
        Self {
            prompt,
            salt: rng.pick(&[&[], &[], &[], &b"a"[..], b"b"]),
            adapter: rng.pick(&[None, None, None, None, None, Some(1), Some(2), Some(3), Some(4)]),
            spans,
            retention,
            backoff: rng.pick(&[0, 0, 0, 1]),
            reserve: rng.pick(&[0, 0, 20, 60]),
            reuse: !rng.one_in(12),
            hint: rng.pick(&[
                None,
                None,
                Some(Return::Ended),
                Some(Return::ToolCall),
                Some(Return::Within(Duration::from_secs(20))),
            ]),
        }
    }

    pub(crate) fn options(&self) -> StartOptions<'_> {
        let options = StartOptions::default()
            .with_salt(self.salt)
            .with_contents(&self.spans)
            .with_backoff_blocks(self.backoff)
            .with_reserve(self.reserve)
            .with_reuse(self.reuse);
        let options = match &self.retention {
            Some(retention) => options.with_retention(retention),
            None => options,
        };
        let options = self.hint.map_or(options, |hint| options.with_hint(hint));
        self.adapter.map_or(options, |adapter| options.with_adapter(adapter))
    }

    /// Returns the words that rows follow from: a placeholder stands for its content, and other
    /// tenants and adapters have other rows, so that a block of theirs is seen.
    pub(crate) fn words(&self, tokens: &[u32]) -> Vec<u32> {
        let salt = self.salt.iter().fold(1_u32, |sum, byte| sum * 31 + u32::from(*byte));
        // Adapters 3 and 4 are one.
        let adapter = self.adapter.map_or(0, |number| if number == 4 { 3 } else { number as u32 });
        let mut words = vec![salt, adapter];
        words.extend_from_slice(tokens);
        for span in &self.spans {
            for at in span.begin..(span.begin + span.len).min(tokens.len() as u32) {
                words[at as usize + 2] = (span.id as u32) * 1000 + at - span.begin + 500_000;
            }
        }
        words
    }
}

/// Returns rows that follow from all words up to their own; the first two words have none.
pub(crate) fn rows(words: &[u32], (layer, plane): (u16, Plane), width: usize) -> Vec<f32> {
    let mut state =
        0x9e37_79b9_u32.wrapping_add(u32::from(layer) * 2 + u32::from(plane == Plane::Key));
    let mut rows = Vec::with_capacity(words.len() * width);
    for (at, word) in words.iter().enumerate() {
        state = (state ^ word).wrapping_mul(0x85eb_ca6b).rotate_left(13);
        if at < 2 {
            continue;
        }
        let value = |at: usize| {
            let bits = state.wrapping_add(at as u32 * 977).wrapping_mul(0x9e37_79b1) >> 24;
            bits as f32 - 127.0
        };
        rows.extend((0..width).map(value));
    }
    rows
}
