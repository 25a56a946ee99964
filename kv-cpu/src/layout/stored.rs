//! Rows in a stored format that follow each other without gaps: one end of a conversion.
use std::marker::PhantomData;

use kv_core::KvFormat;
use kv_core::error::DeviceError;
use kv_core::invariant::Invariant;
use kv_core::num::to_usize;
use kv_core::plan::StoredRows;
use kv_cpu_kernels::RowLayout;

use super::{Room, unsupported};
use crate::access::{Locked, Span};
use crate::buffer::CpuBuffer;

/// The places of rows in the bytes of a span.
#[derive(Debug, Clone, Copy)]
struct Places {
    format: KvFormat,
    layout: RowLayout,
    heads: u32,
}

impl Places {
    fn new(
        rows: &StoredRows<'_, CpuBuffer>,
        room: Room,
        operation: &'static str,
    ) -> Result<Self, DeviceError> {
        if rows.tokens() < room.total {
            return Err(unsupported(operation, "the arguments were checked against another plan"));
        }
        let format = rows.format();
        let layout = RowLayout::of(format, rows.dim())
            .ok_or_else(|| unsupported(operation, format!("stored format {format}")))?;
        Ok(Self { format, layout, heads: rows.heads() })
    }
    /// Returns where the row of a head of ragged token `token` begins.
    fn begin(&self, token: u32, head: u32) -> usize {
        (to_usize(token) * to_usize(self.heads) + to_usize(head)) * self.layout.bytes()
    }
}

/// Stored rows of a locked input.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StoredIn<'a> {
    bytes: &'a [u8],
    places: Places,
}

impl<'a> StoredIn<'a> {
    /// Rows in the bytes of `span`.
    ///
    /// # Safety
    /// 1. `span` was entered in `locked`.
    pub(crate) unsafe fn new(
        _locked: &'a Locked<'_>,
        span: Span,
        rows: &StoredRows<'_, CpuBuffer>,
        room: Room,
        operation: &'static str,
    ) -> Result<Self, DeviceError> {
        let places = Places::new(rows, room, operation)?;
        // SAFETY: the span lies in live memory that is not written while the gates are held, by
        // condition 1; overlaps with this operation's own outputs were refused when they were
        // passed.
        let bytes = unsafe { std::slice::from_raw_parts(span.base().cast_const(), span.len()) };
        Ok(Self { bytes, places })
    }
    pub(crate) fn layout(&self) -> &RowLayout {
        &self.places.layout
    }
    /// The row of a head of ragged token `token`.
    ///
    /// # Panics
    /// Past the last row.
    pub(crate) fn row(&self, token: u32, head: u32) -> &'a [u8] {
        let begin = self.places.begin(token, head);
        let row = self.bytes.get(begin..begin + self.places.layout.bytes());
        row.invariant("stored rows have room for their plan")
    }
}

/// Stored rows of a locked output, written from several threads.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StoredOut<'a> {
    span: Span,
    places: Places,
    held: PhantomData<&'a Locked<'a>>,
}

impl<'a> StoredOut<'a> {
    /// Rows in the bytes of `span`.
    ///
    /// # Safety
    /// 1. `span` was entered for writing in `locked`.
    pub(crate) unsafe fn new(
        _locked: &'a Locked<'_>,
        span: Span,
        rows: &StoredRows<'_, CpuBuffer>,
        room: Room,
        operation: &'static str,
    ) -> Result<Self, DeviceError> {
        Ok(Self { span, places: Places::new(rows, room, operation)?, held: PhantomData })
    }
    pub(crate) fn format(&self) -> KvFormat {
        self.places.format
    }
    /// The row of a head of ragged token `token`.
    ///
    /// # Panics
    /// Past the last row.
    ///
    /// # Safety
    /// 1. No two live slices are of the same row.
    pub(crate) unsafe fn row_mut(&self, token: u32, head: u32) -> &'a mut [u8] {
        let (begin, len) = (self.places.begin(token, head), self.places.layout.bytes());
        let end = begin.checked_add(len).filter(|end| *end <= self.span.len());
        end.invariant("stored rows have room for their plan");
        let first = self.span.base().wrapping_add(begin);
        // SAFETY: inside the span, which is locked for writing (condition 1 of `new`); rows follow
        // each other, so condition 1 makes the slice the only one of its bytes.
        unsafe { std::slice::from_raw_parts_mut(first, len) }
    }
}
