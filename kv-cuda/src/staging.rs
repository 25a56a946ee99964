//! Page-locked memory on the way to the device.
//!
//! Bytes are copied here before a call returns and go on from here when the stream gets to them. A
//! chunk is used again once the stream has passed the event behind its last copy. How much is kept
//! for that is bounded by [`Pins`].
use std::sync::Arc;

use kv_core::DeviceError;

use crate::gpu::{Event, Stream};
use crate::params::Address;
use crate::pins::{Piece, Pins};

/// Bytes of a chunk, unless more are asked for at once.
const CHUNK: usize = 1 << 20;

#[derive(Debug)]
pub(crate) struct Staging {
    pins: Pins,
    /// Bytes in use at the beginning of the first chunk, and that chunk.
    current: Option<(usize, Piece)>,
    /// Chunks whose copies are on their way.
    sent: Vec<(Arc<dyn Event>, Piece)>,
}

impl Staging {
    pub(crate) fn new(pins: &Pins) -> Self {
        Self { pins: pins.clone(), current: None, sent: Vec::new() }
    }

    /// Copies `bytes` to `to`, through page-locked memory.
    ///
    /// # Safety
    /// 1. `to..to + bytes.len()` lies in memory of the device.
    pub(crate) unsafe fn upload(
        &mut self,
        stream: &mut dyn Stream,
        to: Address,
        bytes: &[u8],
    ) -> Result<(), DeviceError> {
        if bytes.is_empty() {
            return Ok(());
        }
        let at = self.put(stream, bytes)?;
        // SAFETY: `put` gave page-locked bytes that are not written again before an event of this
        // stream that comes later is done; condition 1 for the rest.
        unsafe { stream.upload(to, at, bytes.len()) }
    }

    /// Copies `bytes` into a chunk.
    fn put(&mut self, stream: &mut dyn Stream, bytes: &[u8]) -> Result<*const u8, DeviceError> {
        let fits = |used: usize, len: usize| used.saturating_add(bytes.len()) <= len;
        if !self.current.as_ref().is_some_and(|(used, chunk)| fits(*used, chunk.len())) {
            self.next_chunk(stream, bytes.len())?;
        }
        let Some((used, chunk)) = self.current.as_mut().filter(|(u, c)| fits(*u, c.len())) else {
            return Err(DeviceError::new(kv_core::DeviceErrorKind::OutOfMemory, "stage"));
        };
        let to = chunk.base().wrapping_add(*used);
        // SAFETY: `used + len` is within the chunk, as was asked above; nobody else uses these
        // bytes of it: earlier copies from them are done, and `used` only grows until they are
        // again.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
        // Later bytes start at a multiple of 16, as uploads like it.
        *used = used.saturating_add(bytes.len()).next_multiple_of(16);
        Ok(to.cast_const())
    }

    /// Puts a chunk with room for `len` bytes in front.
    fn next_chunk(&mut self, stream: &mut dyn Stream, len: usize) -> Result<(), DeviceError> {
        self.pass(stream)?;
        // Events of one stream are done in their order.
        let done = self.sent.iter().map(|(event, _)| event.is_done());
        let done = done.take_while(|done| !matches!(done, Ok(false)));
        let done = done.collect::<Result<Vec<_>, _>>()?.len();
        self.sent.drain(..done);
        self.current = Some((0, self.pins.take(len.max(CHUNK))?));
        Ok(())
    }

    /// Lets the current chunk follow the work so far.
    fn pass(&mut self, stream: &mut dyn Stream) -> Result<(), DeviceError> {
        if let Some((used, chunk)) = self.current.take() {
            if used == 0 {
                self.current = Some((0, chunk));
                return Ok(());
            }
            match stream.record() {
                Ok(event) => self.sent.push((event, chunk)),
                Err(error) => {
                    // Kept for ever rather than freed under a copy.
                    chunk.leak();
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Waits until nothing is on its way any more.
    pub(crate) fn drain(&mut self, stream: &mut dyn Stream) {
        if self.pass(stream).is_err() {
            return;
        }
        for (event, chunk) in self.sent.drain(..) {
            if event.wait().is_err() {
                // The device is gone; whether it still reads the bytes nobody can tell.
                chunk.leak();
            }
        }
    }
}
