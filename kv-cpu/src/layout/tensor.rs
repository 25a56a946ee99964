//! Rows of the caller's tensors: q, k, v, out and log-sum-exp.
//!
//! Turns the core's checked shapes into byte slices. A plan and arguments may have been checked at
//! different times, so their agreement is compared here once per call; rows are cut with real
//! bounds checks all the same, one per row.
use std::marker::PhantomData;

use kv_core::Axes;
use kv_core::backend::TokenRows;
use kv_core::error::DeviceError;
use kv_core::invariant::Invariant;
use kv_core::num::to_usize;
use kv_cpu_kernels::Element;

use super::{element, unsupported};
use crate::access::{Locked, Span};

/// The rows that a plan requires of a tensor.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Room {
    pub(crate) entries: usize,
    pub(crate) longest: u32,
    pub(crate) total: u32,
}

fn check_room(rows: &TokenRows, room: Room, operation: &'static str) -> Result<(), DeviceError> {
    let fits = match rows.axes() {
        Axes::Thd => rows.tokens() >= room.total,
        _ => to_usize(rows.batch()) >= room.entries && rows.tokens() >= room.longest,
    };
    if fits {
        return Ok(());
    }
    Err(unsupported(operation, "the arguments were checked against another plan"))
}

/// Rows of a locked input.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RowsIn<'a> {
    bytes: &'a [u8],
    rows: TokenRows,
    element: Element,
}

impl<'a> RowsIn<'a> {
    /// Rows in the bytes of `span`.
    ///
    /// # Safety
    /// 1. `span` was entered in `locked`, or comes from a host slice that is valid for `'a`.
    pub(crate) unsafe fn new(
        _locked: &'a Locked<'_>,
        span: Span,
        rows: TokenRows,
        room: Room,
        operation: &'static str,
    ) -> Result<Self, DeviceError> {
        check_room(&rows, room, operation)?;
        let element = element(rows.dtype(), operation)?;
        // SAFETY: the span lies in live memory that is not written while the gates are held, by
        // condition 1; overlaps with this operation's own outputs were refused when they were
        // passed.
        let bytes = unsafe { std::slice::from_raw_parts(span.base().cast_const(), span.len()) };
        Ok(Self { bytes, rows, element })
    }
    pub(crate) fn rows(&self) -> &TokenRows {
        &self.rows
    }
    pub(crate) fn element(&self) -> Element {
        self.element
    }
    /// Heads `head..head + heads` of token `i` of an entry.
    ///
    /// # Panics
    /// Outside the tensor, which has room for the plan.
    pub(crate) fn get(&self, at: RowAt, head: u32, heads: u32) -> &'a [u8] {
        self.find(at, head, heads).invariant("a tensor has room for its plan")
    }
    /// Tokens `at.token..at.token + tokens` of an entry with all heads, as one slice; `None` if
    /// other bytes lie between them.
    ///
    /// # Panics
    /// Outside the tensor, which has room for the plan.
    pub(crate) fn run(&self, at: RowAt, tokens: u32) -> Option<&'a [u8]> {
        let (begin, len) = at.run_bytes(&self.rows, self.element, tokens)?;
        let run = self.bytes.get(begin..begin.saturating_add(len));
        Some(run.invariant("a tensor has room for its plan"))
    }
    /// The same for rows that are prefetched; empty after the end of the tensor.
    pub(crate) fn ahead(&self, at: RowAt, head: u32, heads: u32) -> &'a [u8] {
        self.find(at, head, heads).unwrap_or_default()
    }
    fn find(&self, at: RowAt, head: u32, heads: u32) -> Option<&'a [u8]> {
        let (begin, len) = at.bytes(&self.rows, self.element, head, heads);
        // The strides are the caller's, see `TokenRows::offset`.
        self.bytes.get(begin..begin.saturating_add(len))
    }
}

/// A token of a batch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RowAt {
    pub(crate) entry: usize,
    /// First ragged row of the entry.
    pub(crate) start: u32,
    pub(crate) token: u32,
}

impl RowAt {
    fn bytes(self, rows: &TokenRows, element: Element, head: u32, heads: u32) -> (usize, usize) {
        let dim = to_usize(rows.dim());
        let size = element.size();
        let begin = rows
            .offset(self.entry, self.start, self.token)
            .saturating_add(to_usize(head) * dim)
            .saturating_mul(size);
        let len = to_usize(heads) * dim * size;
        (begin, len)
    }

    /// Returns the place of this and the next tokens, `tokens` in all, if they follow each other
    /// without a gap.
    fn run_bytes(self, rows: &TokenRows, element: Element, tokens: u32) -> Option<(usize, usize)> {
        let (begin, row) = self.bytes(rows, element, 0, rows.heads());
        let values = u64::from(rows.heads()) * u64::from(rows.dim());
        (rows.token_stride() == values).then(|| (begin, row * to_usize(tokens)))
    }
}

/// Rows of a locked output, written from several threads.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RowsOut<'a> {
    span: Span,
    rows: TokenRows,
    element: Element,
    held: PhantomData<&'a Locked<'a>>,
}

impl<'a> RowsOut<'a> {
    /// Rows in the bytes of `span`.
    ///
    /// # Safety
    /// 1. `span` was entered for writing in `locked`, or comes from a host slice lent for writing
    ///    that is valid for `'a` and is not used meanwhile.
    pub(crate) unsafe fn new(
        _locked: &'a Locked<'_>,
        span: Span,
        rows: TokenRows,
        room: Room,
        operation: &'static str,
    ) -> Result<Self, DeviceError> {
        check_room(&rows, room, operation)?;
        let element = element(rows.dtype(), operation)?;
        Ok(Self { span, rows, element, held: PhantomData })
    }
    pub(crate) fn rows(&self) -> &TokenRows {
        &self.rows
    }
    pub(crate) fn element(&self) -> Element {
        self.element
    }

    /// Returns heads `head..head + heads` of token `i` of an entry.
    ///
    /// # Panics
    /// Outside the tensor, which has room for the plan.
    ///
    /// # Safety
    /// 1. No two live slices share a head of a token.
    pub(crate) unsafe fn get_mut(&self, at: RowAt, head: u32, heads: u32) -> &'a mut [u8] {
        let (begin, len) = at.bytes(&self.rows, self.element, head, heads);
        let end = begin.checked_add(len).filter(|end| *end <= self.span.len());
        end.invariant("a tensor has room for its plan");
        let first = self.span.base().wrapping_add(begin);
        // SAFETY: inside the span, which is locked for writing or lent (condition 1 of `new`); rows
        // of an output do not overlap, by the core's check, and heads of a row follow each other,
        // so condition 1 makes the slice the only one of its bytes.
        unsafe { std::slice::from_raw_parts_mut(first, len) }
    }

    /// Returns tokens `at.token..at.token + tokens` of an entry with all heads, as one slice;
    /// `None` if other bytes lie between them.
    ///
    /// # Panics
    /// Outside the tensor, which has room for the plan.
    ///
    /// # Safety
    /// 1. No two live slices share a token.
    pub(crate) unsafe fn run_mut(&self, at: RowAt, tokens: u32) -> Option<&'a mut [u8]> {
        let (begin, len) = at.run_bytes(&self.rows, self.element, tokens)?;
        let end = begin.checked_add(len).filter(|end| *end <= self.span.len());
        end.invariant("a tensor has room for its plan");
        let first = self.span.base().wrapping_add(begin);
        // SAFETY: inside the span, which is locked for writing or lent (condition 1 of `new`);
        // tokens follow each other without a gap, by `run_bytes`, so condition 1 makes the slice
        // the only one of its bytes.
        Some(unsafe { std::slice::from_raw_parts_mut(first, len) })
    }

    /// Calls `fill` with every row that no entry owns, where entry `i` has `len(i)` tokens.
    pub(crate) fn for_padding(
        &self,
        room: Room,
        len: impl Fn(usize) -> u32,
        mut fill: impl FnMut(&mut [u8]),
    ) {
        let entries = match self.rows.axes() {
            Axes::Thd => 1,
            _ => to_usize(self.rows.batch()),
        };
        for entry in 0..entries {
            let used = match self.rows.axes() {
                Axes::Thd => room.total,
                _ if entry < room.entries => len(entry),
                _ => 0,
            };
            for token in used..self.rows.tokens() {
                let at = RowAt { entry, start: 0, token };
                // SAFETY: one slice at a time exists here, of a token that no entry owns.
                fill(unsafe { self.get_mut(at, 0, self.rows.heads()) });
            }
        }
    }
}
