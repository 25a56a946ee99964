//! What query rows meet at once: some tokens that follow each other in memory, of some kv heads.
#![expect(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    reason = "kernel code: rows and heads are counted by the callers and the types here"
)]
use super::super::Part;

/// Rows of K or V of some tokens that follow each other, of some kv heads.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HeadRows<'a> {
    /// From the first row of the first head to the end of the last one of the last head.
    pub(crate) rows: &'a [u8],
    /// Bytes from one token to the next, from one head to the next, and of a row.
    pub(crate) stride: usize,
    pub(crate) per_head: usize,
    pub(crate) bytes: usize,
}

impl<'a> HeadRows<'a> {
    /// Where a row begins.
    fn at(&self, (head, token): (usize, usize)) -> *const u8 {
        self.rows.as_ptr().wrapping_add(head * self.per_head + token * self.stride)
    }

    /// Of a head so many tokens from one on.
    pub(crate) fn part(&self, head: usize, (token, tokens): (usize, usize)) -> Part<'a> {
        let begin = head * self.per_head + token * self.stride;
        let rows = &self.rows[begin..][..(tokens - 1) * self.stride + self.bytes];
        Part { rows, stride: self.stride }
    }
}

/// K and V of some tokens that follow each other, of some kv heads.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Strip<'a> {
    pub(crate) heads: usize,
    pub(crate) tokens: usize,
    pub(crate) planes: [HeadRows<'a>; 2],
}

impl Strip<'_> {
    /// No tokens.
    pub(crate) const EMPTY: Self = Self {
        heads: 0,
        tokens: 0,
        planes: [HeadRows { rows: &[], stride: 0, per_head: 0, bytes: 0 }; 2],
    };

    /// Head and token of the piece behind one of so many tokens: those of a head follow each other,
    /// and the last one has a head behind it that there is not.
    pub(crate) fn behind(&self, (head, token): (usize, usize), length: usize) -> (usize, usize) {
        if token + length < self.tokens { (head, token + length) } else { (head + 1, 0) }
    }

    /// Where K and V of a piece begin.
    pub(super) fn begins(&self, place: (usize, usize)) -> [*const u8; 2] {
        [self.planes[0].at(place), self.planes[1].at(place)]
    }
}

/// Walks over the pieces of strips.
pub(super) struct Places<'a> {
    strips: [&'a Strip<'a>; 3],
    at: usize,
    /// Head and token.
    place: (usize, usize),
    /// Tokens of a piece.
    length: usize,
}

impl<'a> Places<'a> {
    pub(super) fn new(strips: [&'a Strip<'a>; 3], length: usize) -> Self {
        Self { strips, at: 0, place: (0, 0), length }
    }

    /// Where K and V of the next one begin.
    pub(super) fn next(&mut self) -> Option<[*const u8; 2]> {
        while self.place.0 >= self.strips.get(self.at)?.heads {
            (self.at, self.place) = (self.at + 1, (0, 0));
        }
        let strip = self.strips[self.at];
        let begins = strip.begins(self.place);
        self.place = strip.behind(self.place, self.length);
        Some(begins)
    }
}
