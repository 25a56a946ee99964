//! Page-locked staging memory for uploads.
//!
//! Bytes are copied here before a call returns, and from here to the device when the stream reaches
//! the copy. A chunk is reused once the stream has passed the event after its last copy. [`Pins`]
//! bounds how much is kept.
use std::sync::Arc;

use kv_core::error::DeviceError;

use crate::gpu::{Event, Stream};
use crate::params::Address;
use crate::pins::{PinnedBuffer, Pins};

/// Bytes of a chunk, unless one upload needs more.
const CHUNK: usize = 1 << 20;

#[derive(Debug)]
pub(crate) struct Staging {
    pins: Pins,
    /// Used bytes of the current chunk, and that chunk.
    current: Option<(usize, PinnedBuffer)>,
    /// Chunks whose copies are pending.
    sent: Vec<(Arc<dyn Event>, PinnedBuffer)>,
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
        // SAFETY: `put` returned page-locked bytes that are not written again before a later event
        // of this stream is done; condition 1 for the rest.
        unsafe { stream.upload(to, at, bytes.len()) }
    }

    /// Copies `bytes` into a chunk.
    fn put(&mut self, stream: &mut dyn Stream, bytes: &[u8]) -> Result<*const u8, DeviceError> {
        let fits = |used: usize, len: usize| used + bytes.len() <= len;
        if !self.current.as_ref().is_some_and(|(used, chunk)| fits(*used, chunk.len())) {
            self.next_chunk(stream, bytes.len())?;
        }
        let Some((used, chunk)) = self.current.as_mut().filter(|(u, c)| fits(*u, c.len())) else {
            return Err(DeviceError::new(kv_core::error::DeviceErrorKind::OutOfMemory, "stage"));
        };
        let to = chunk.base().wrapping_add(*used);
        // SAFETY: `used + len` is within the chunk, as checked above. Nothing else uses these
        // bytes: earlier copies from them are done, and `used` only grows until the chunk is
        // reused.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
        // Align later bytes to 16 for fast uploads.
        *used = (*used + bytes.len()).next_multiple_of(16);
        Ok(to.cast_const())
    }

    /// Makes a chunk with `len` free bytes current.
    fn next_chunk(&mut self, stream: &mut dyn Stream, len: usize) -> Result<(), DeviceError> {
        self.pass(stream)?;
        // Events of one stream complete in order.
        let done = self.sent.iter().map(|(event, _)| event.is_done());
        let done = done.take_while(|done| !matches!(done, Ok(false)));
        let done = done.collect::<Result<Vec<_>, _>>()?.len();
        self.sent.drain(..done);
        self.current = Some((0, self.pins.take(len.max(CHUNK))?));
        Ok(())
    }

    /// Records an event after the current chunk's copies.
    fn pass(&mut self, stream: &mut dyn Stream) -> Result<(), DeviceError> {
        if let Some((used, chunk)) = self.current.take() {
            if used == 0 {
                self.current = Some((0, chunk));
                return Ok(());
            }
            match stream.record() {
                Ok(event) => self.sent.push((event, chunk)),
                Err(error) => {
                    // Leak the chunk rather than free it under a copy.
                    chunk.leak();
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Waits until no copy is pending.
    pub(crate) fn drain(&mut self, stream: &mut dyn Stream) {
        if self.pass(stream).is_err() {
            return;
        }
        for (event, chunk) in self.sent.drain(..) {
            if event.wait().is_err() {
                // The device is gone and may still read the bytes: leak them.
                chunk.leak();
            }
        }
    }
}
