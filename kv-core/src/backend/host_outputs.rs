//! Outputs in host memory, for backends whose devices write their own memory alone.
//!
//! Such a backend exchanges them for rows of a buffer of its own, runs the call, and copies the
//! rows to the host before it returns:
//!
//! ```text
//! let buffer = HostOutputs::bytes(args.outputs()).map(|bytes| reserve(bytes)).transpose()?;
//! let mut args = args; // for as long as the buffer
//! let host = HostOutputs::take(args.outputs(), buffer.as_ref());
//! run(plan, args)?;
//! host.fetch(queue, buffer.as_ref())
//! ```
use crate::backend::{Queue, Readback};
use crate::error::DeviceError;
use crate::num::to_u64;
use crate::tensor::{HostRows, TokenTensorMut};

/// Multiple of bytes at which the rows of each output begin.
const ALIGN: u64 = 256;

/// The outputs of a call that lie in host memory, while the device fills a buffer in their place.
#[derive(Debug)]
pub struct HostOutputs<'a> {
    /// Where in the buffer the rows of each begin.
    parts: [Option<(u64, HostRows<'a>)>; 2],
    bytes: u64,
}

impl<'a> HostOutputs<'a> {
    /// Returns the size of the buffer that [`Self::take`] needs, `None` where all outputs lie in
    /// device memory.
    pub fn bytes<Buf>(outputs: [Option<&mut TokenTensorMut<'_, Buf>>; 2]) -> Option<u64> {
        outputs.into_iter().flatten().filter_map(|output| output.host_bytes()).reduce(
            |end, bytes| {
                end.checked_next_multiple_of(ALIGN).unwrap_or(u64::MAX).saturating_add(bytes)
            },
        )
    }

    /// Exchanges each output in host memory for rows of `buffer`, without gaps between them.
    ///
    /// # Panics
    /// If there is one and no buffer.
    pub fn take<Buf>(
        outputs: [Option<&mut TokenTensorMut<'a, Buf>>; 2],
        buffer: Option<&'a Buf>,
    ) -> Self {
        let mut bytes = 0_u64;
        let parts = outputs.map(|output| {
            let output = output?;
            let len = output.host_bytes()?;
            let begin = bytes.checked_next_multiple_of(ALIGN).unwrap_or(u64::MAX);
            assert!(buffer.is_some(), "a buffer was reserved for outputs in host memory");
            let host = output.exchange(buffer?, begin)?;
            bytes = begin.saturating_add(len);
            Some((begin, host))
        });
        Self { parts, bytes }
    }

    /// Waits for the device and copies the rows to the host; does nothing where no output is
    /// there. After an error nothing was copied.
    ///
    /// # Errors
    /// As [`Queue::download`] and [`Readback::wait`].
    ///
    /// # Panics
    /// If a download has fewer bytes than it was asked for.
    pub fn fetch<Q: Queue>(
        self,
        queue: &mut Q,
        buffer: Option<&Q::Buffer>,
    ) -> Result<(), DeviceError> {
        let Some(buffer) = buffer.filter(|_| self.parts.iter().any(Option::is_some)) else {
            return Ok(());
        };
        let staged = queue.download(buffer, 0, self.bytes)?;
        queue.flush()?;
        let staged = staged.wait()?;
        assert!(to_u64(staged.len()) >= self.bytes, "a download has the bytes asked for");
        for (begin, host) in self.parts.into_iter().flatten() {
            let begin = usize::try_from(begin).unwrap_or(usize::MAX);
            host.fill(staged.get(begin..).unwrap_or_default());
        }
        Ok(())
    }
}
