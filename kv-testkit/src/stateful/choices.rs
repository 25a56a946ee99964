//! Random choices, read from bytes.
use std::time::Duration;

use kv_core::StartOptions;
use kv_core::eviction::{Priority, Retention, RetentionRange, Return};
use kv_core::reuse::ContentSpan;

/// A string of bytes that is consumed from the front; zeros follow its end.
#[derive(Debug)]
pub(super) struct Choices<'b>(&'b [u8]);

impl<'b> Choices<'b> {
    pub(super) fn new(bytes: &'b [u8]) -> Self {
        Self(bytes)
    }
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
    pub(super) fn next(&mut self) -> u8 {
        let (first, rest) = self.0.split_first().unwrap_or((&0, &[]));
        self.0 = rest;
        *first
    }
    /// A number below `n`, which is at most 256 and not 0.
    pub(super) fn below(&mut self, n: u32) -> u32 {
        u32::from(self.next()) % n
    }
    pub(super) fn one_in(&mut self, n: u32) -> bool {
        self.below(n) == n - 1
    }
    pub(super) fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len() as u32) as usize]
    }
    /// An index below `len`, which is not 0.
    pub(super) fn index(&mut self, len: usize) -> usize {
        usize::from(self.next()) % len
    }
    /// A token id of a small vocabulary, so that prompts have common prefixes.
    pub(super) fn token(&mut self) -> u32 {
        self.below(3)
    }

    /// A prompt that shares its beginning with others.
    pub(super) fn prompt(&mut self) -> Vec<u32> {
        let (len, kind) = (self.below(15), u32::from(self.next()));
        let token = |at: u32| {
            if at < kind & 7 { 0 } else { ((kind >> 3) + at / 4) & 3 }
        };
        (0..len).map(token).collect()
    }

    pub(super) fn options(&mut self) -> Options {
        let mut options = Options::default();
        let kind = self.next();
        match kind & 15 {
            5 | 6 => options.hint = hint(kind >> 4),
            7 | 8 => options.retention = Some(self.retention()),
            9 => options.salt = b"a".to_vec(),
            10 => options.salt = b"b".to_vec(),
            11 => options.adapter = Some(0),
            12 | 13 => {
                let (begin, id) = (u32::from(kind >> 5), u128::from((kind >> 4) & 1));
                options.contents.push(ContentSpan { begin, len: 3, id });
            }
            14 => options.backoff = 1 + u32::from(kind >> 7),
            15 if kind > 127 => options.no_reuse = true,
            15 => options.reserve = u32::from(kind >> 4),
            _ => {}
        }
        options
    }

    /// A priority, permanent or for a duration that a few operations of the clock exceed.
    pub(super) fn priority(&mut self) -> Priority {
        let (level, kind) = (self.next() % 101, self.next());
        let duration = (kind > 60).then(|| Duration::from_secs(u64::from(kind) % 50));
        Priority { level, duration }
    }

    /// Priorities for the beginning of a prompt, for its rest and for generated tokens.
    fn retention(&mut self) -> Retention {
        let (middle, kind) = (1 + self.below(9), self.next());
        let mut ranges =
            vec![RetentionRange { begin: 0, end: Some(middle), priority: self.priority() }];
        if kind & 1 == 1 {
            ranges.push(RetentionRange { begin: middle, end: None, priority: self.priority() });
        }
        // Two adjacent ranges, with levels up to 100.
        let mut retention = Retention::new(ranges).unwrap_or_default();
        if kind & 2 == 2 {
            retention = retention.clone().with_decode(self.priority()).unwrap_or(retention);
        }
        retention
    }
}

/// Owned options of a start.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Options {
    pub(super) salt: Vec<u8>,
    pub(super) adapter: Option<u64>,
    pub(super) contents: Vec<ContentSpan>,
    pub(super) backoff: u32,
    pub(super) no_reuse: bool,
    pub(super) reserve: u32,
    pub(super) retention: Option<Retention>,
    pub(super) hint: Option<Return>,
}

/// Returns one of all hints, or none.
pub(super) fn hint(kind: u8) -> Option<Return> {
    match kind % 8 {
        1 => Some(Return::Ended),
        2 => Some(Return::Idle),
        3 => Some(Return::ToolCall),
        4 | 5 => Some(Return::Within(Duration::from_secs(u64::from(kind)))),
        _ => None,
    }
}

impl Options {
    /// Returns the options of a start.
    pub(super) fn start_options(&self) -> StartOptions<'_> {
        let options =
            self.key_options().with_backoff_blocks(self.backoff).with_reserve(self.reserve);
        let options = match &self.retention {
            Some(retention) => options.with_retention(retention),
            None => options,
        };
        let options = self.hint.map_or(options, |hint| options.with_hint(hint));
        options.with_reuse(!self.no_reuse)
    }
    /// Returns the options that are part of a block's key.
    pub(super) fn key_options(&self) -> StartOptions<'_> {
        let options = StartOptions::default().with_salt(&self.salt).with_contents(&self.contents);
        self.adapter.map_or(options, |adapter| options.with_adapter(adapter))
    }
    /// Returns the content id of the token at a position, if it is a placeholder.
    pub(super) fn content_id(&self, at: u32) -> Option<u128> {
        let covers = |span: &&ContentSpan| at >= span.begin && at - span.begin < span.len;
        self.contents.iter().find(covers).map(|span| span.id)
    }
}
