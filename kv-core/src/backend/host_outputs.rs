//! Outputs in host memory, for backends whose devices write only their own memory.
//!
//! Such a backend replaces the outputs by rows of its own buffer, runs the call, and copies the
//! rows to the host before the call returns:
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
use crate::invariant::Invariant;
use crate::num::{to_offset, to_u64};
use crate::tensor::{HostRows, TokenTensorMut};

/// Alignment of the rows of each output.
const ALIGN: u64 = 256;

/// The outputs of a call that lie in host memory, while the device fills a buffer instead.
#[derive(Debug)]
pub struct HostOutputs<'a> {
    /// Offset of each output's rows in the buffer.
    parts: [Option<(u64, HostRows<'a>)>; 2],
    bytes: u64,
}

impl<'a> HostOutputs<'a> {
    /// Returns the size of the buffer that [`Self::take`] needs, `None` if all outputs lie in
    /// device memory.
    pub fn bytes<Buf>(outputs: [Option<&mut TokenTensorMut<'_, Buf>>; 2]) -> Option<u64> {
        outputs
            .into_iter()
            .flatten()
            .filter_map(|output| output.host_bytes())
            .reduce(|end, bytes| end.next_multiple_of(ALIGN) + bytes)
    }

    /// Replaces each output in host memory by rows of `buffer`, without gaps between them.
    ///
    /// # Panics
    /// If there is such an output and no buffer.
    pub fn take<Buf>(
        outputs: [Option<&mut TokenTensorMut<'a, Buf>>; 2],
        buffer: Option<&'a Buf>,
    ) -> Self {
        let mut bytes = 0_u64;
        let parts = outputs.map(|output| {
            let output = output?;
            let len = output.host_bytes()?;
            let begin = bytes.next_multiple_of(ALIGN);
            let buffer = buffer.invariant("a buffer was reserved for outputs in host memory");
            let host = output.exchange(buffer, begin)?;
            bytes = begin + len;
            Some((begin, host))
        });
        Self { parts, bytes }
    }

    /// Waits for the device and copies the rows to the host; does nothing without host outputs.
    /// After an error nothing was copied.
    ///
    /// # Errors
    /// Those of [`Queue::download`] and [`Readback::wait`].
    ///
    /// # Panics
    /// If a download has fewer bytes than requested.
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
            let begin = to_offset(begin);
            host.fill(&staged[begin..]);
        }
        Ok(())
    }
}
