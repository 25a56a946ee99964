//! The plain copy that operations are compared with: memory to memory, by the device's own means.
use std::hint::black_box;

use kv::backend::Backend;
#[cfg(any(feature = "cuda", feature = "wgpu"))]
use kv::backend::{Fence, Queue};
use kv::cpu::CpuBackend;
#[cfg(feature = "cuda")]
use kv::cuda::CudaBackend;
use kv::error::{DeviceError, DeviceErrorKind};
#[cfg(feature = "wgpu")]
use kv::wgpu::WgpuBackend;
use rayon::iter::{IndexedParallelIterator, ParallelIterator};
use rayon::slice::{ParallelSlice, ParallelSliceMut};

use super::report::{Facts, RunsOn};
use crate::num::to_offset;

/// A backend that can copy memory without a cache.
pub(super) trait PlainCopy: Backend {
    /// Source and destination of the copy.
    type Memory;

    /// Returns facts about the device for the report.
    fn describe(&self) -> Facts;
    /// Reserves memory for a copy of `bytes` bytes and fills the source: pages that were never
    /// written may share one physical page.
    ///
    /// # Errors
    /// Those of [`Backend::alloc`].
    fn reserve(&self, bytes: u64) -> Result<Self::Memory, DeviceError>;
    /// Copies the first `bytes` bytes, a multiple of 4.
    ///
    /// # Errors
    /// `OutOfRange` for more than were reserved, else the device's own.
    fn copy(
        &self,
        queue: &mut Self::Queue,
        memory: &mut Self::Memory,
        bytes: u64,
    ) -> Result<(), DeviceError>;
}

const OPERATION: &str = "plain copy";
/// Smallest share of a copy for one thread.
const PART: usize = 1 << 20;
/// Size of the largest buffer.
#[cfg(any(feature = "cuda", feature = "wgpu"))]
const PIECE: u64 = 1 << 30;
/// Bytes per upload to a device.
#[cfg(any(feature = "cuda", feature = "wgpu"))]
const SENT: usize = 1 << 24;

/// Copies with all threads that the backend's kernels use.
impl PlainCopy for CpuBackend {
    type Memory = [Vec<u8>; 2];

    fn describe(&self) -> Facts {
        Facts {
            device: format!("{} kernels, {} threads", self.isa(), self.capabilities().workers),
            kind: "CPU".to_owned(),
            driver: None,
            runs_on: RunsOn::Cpu,
        }
    }

    fn reserve(&self, bytes: u64) -> Result<Self::Memory, DeviceError> {
        let refuse = || DeviceError::new(DeviceErrorKind::OutOfMemory, OPERATION);
        let bytes = usize::try_from(bytes).map_err(|_| refuse())?;
        let fill = |byte: u8| {
            let mut memory = Vec::new();
            memory.try_reserve_exact(bytes).map_err(|error| refuse().with_source(error))?;
            memory.resize(bytes, byte);
            Ok(memory)
        };
        Ok([fill(0x5A)?, fill(0xA5)?])
    }

    fn copy(
        &self,
        _queue: &mut Self::Queue,
        [from, to]: &mut Self::Memory,
        bytes: u64,
    ) -> Result<(), DeviceError> {
        let len = to_offset(bytes);
        let (Some(from), Some(to)) = (from.get(..len), to.get_mut(..len)) else {
            return Err(out_of_range());
        };
        let workers = usize::try_from(self.capabilities().workers).unwrap_or(1).max(1);
        let part = len.div_ceil(workers).max(PART);
        if len <= part {
            to.copy_from_slice(from);
        } else {
            let parts = to.par_chunks_mut(part).zip(from.par_chunks(part));
            parts.for_each(|(to, from)| to.copy_from_slice(from));
        }
        black_box(to);
        Ok(())
    }
}

/// `copy_buffer_to_buffer`.
#[cfg(feature = "wgpu")]
impl PlainCopy for WgpuBackend {
    type Memory = Vec<Piece<Self::Buffer>>;

    fn describe(&self) -> Facts {
        let facts = self.facts();
        let is_software = facts.is_some_and(|facts| facts.is_cpu);
        let say = |of: fn(&kv::wgpu::AdapterFacts) -> String| facts.map_or_else(String::new, of);
        Facts {
            device: say(|facts| facts.name.clone()),
            kind: say(|facts| format!("{}, {}", facts.api, facts.kind)),
            driver: facts.map(|facts| facts.driver.clone()),
            runs_on: if is_software { RunsOn::Software } else { RunsOn::Card },
        }
    }
    fn reserve(&self, bytes: u64) -> Result<Self::Memory, DeviceError> {
        pieces(self, bytes)
    }
    fn copy(
        &self,
        queue: &mut Self::Queue,
        memory: &mut Self::Memory,
        bytes: u64,
    ) -> Result<(), DeviceError> {
        each(memory, bytes, |piece, len| queue.copy((&piece.from, 0), (&piece.to, 0), len))
    }
}

/// The driver's copy.
#[cfg(feature = "cuda")]
impl PlainCopy for CudaBackend {
    type Memory = Vec<Piece<Self::Buffer>>;

    fn describe(&self) -> Facts {
        let processors = self.capabilities().workers;
        Facts {
            device: self.card().to_owned(),
            kind: format!("CUDA, {processors} multiprocessors"),
            driver: None,
            runs_on: RunsOn::Card,
        }
    }
    fn reserve(&self, bytes: u64) -> Result<Self::Memory, DeviceError> {
        pieces(self, bytes)
    }
    fn copy(
        &self,
        queue: &mut Self::Queue,
        memory: &mut Self::Memory,
        bytes: u64,
    ) -> Result<(), DeviceError> {
        each(memory, bytes, |piece, len| queue.copy((&piece.from, 0), (&piece.to, 0), len))
    }
}

/// A source and a destination buffer, as large as one buffer may be.
#[cfg(any(feature = "cuda", feature = "wgpu", test))]
#[derive(Debug)]
#[cfg_attr(
    not(any(feature = "cuda", feature = "wgpu")),
    expect(dead_code, reason = "only devices other than the CPU copy pieces")
)]
pub(super) struct Piece<Buf> {
    from: Buf,
    to: Buf,
    bytes: u64,
}

/// Allocates buffers of `bytes` bytes in total, with the sources filled.
#[cfg(any(feature = "cuda", feature = "wgpu"))]
fn pieces<B: Backend>(backend: &B, bytes: u64) -> Result<Vec<Piece<B::Buffer>>, DeviceError> {
    let most = backend.capabilities().buffer_bytes_max.min(PIECE);
    // Whole words.
    let most = (most - most % 4).max(4);
    let content: Vec<u8> = (0..=250).cycle().take(SENT).collect();
    let mut queue = backend.queue()?;
    let (mut pieces, mut left) = (Vec::new(), bytes);
    while left > 0 {
        let bytes = left.min(most);
        let [from, to] = [backend.alloc(bytes)?, backend.alloc(bytes)?];
        let mut at = 0;
        while at < bytes {
            let rest = to_offset(bytes - at);
            let part = content.get(..rest.min(SENT)).unwrap_or(&content);
            queue.upload(&from, at, part)?;
            queue.submit()?.wait()?;
            at += crate::num::to_u64(part.len());
        }
        pieces.push(Piece { from, to, bytes });
        left -= bytes;
    }
    Ok(pieces)
}

/// Copies the first `bytes` bytes piece by piece.
#[cfg(any(feature = "cuda", feature = "wgpu", test))]
fn each<Buf>(
    pieces: &[Piece<Buf>],
    bytes: u64,
    mut copy: impl FnMut(&Piece<Buf>, u64) -> Result<(), DeviceError>,
) -> Result<(), DeviceError> {
    let mut left = bytes;
    for piece in pieces {
        let len = left.min(piece.bytes);
        copy(piece, len)?;
        left -= len;
    }
    if left == 0 { Ok(()) } else { Err(out_of_range()) }
}

fn out_of_range() -> DeviceError {
    DeviceError::new(DeviceErrorKind::OutOfRange, OPERATION)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kv::cpu::CpuOptions;

    #[test]
    fn a_copy_has_the_requested_size() {
        for threads in [1, 3] {
            let cpu = CpuBackend::open(CpuOptions::default().with_threads(threads)).expect("cpu");
            let mut queue = cpu.queue().expect("a queue");
            let mut memory = cpu.reserve(4 * 1024 * 1024).expect("memory");
            let len = 3 * 1024 * 1024 + 4;
            cpu.copy(&mut queue, &mut memory, len).expect("a copy");
            let is_copied = |byte: &u8| *byte == 0x5A;
            let copied = memory[1].iter().position(|byte| !is_copied(byte));
            assert_eq!(copied.map(crate::num::to_u64), Some(len));
            assert!(!memory[1][3 * 1024 * 1024 + 4..].iter().any(is_copied));
            let error = cpu.copy(&mut queue, &mut memory, 1 << 30).expect_err("too much");
            assert_eq!(error.kind(), DeviceErrorKind::OutOfRange);
        }
    }

    #[test]
    fn bytes_are_spread_over_pieces() {
        let piece = |bytes| Piece { from: (), to: (), bytes };
        let pieces = [piece(8), piece(8), piece(4)];
        let lens = |bytes| {
            let mut lens = Vec::new();
            let done = each(&pieces, bytes, |_, len| {
                lens.push(len);
                Ok(())
            });
            done.map(|()| lens).map_err(|error| error.kind())
        };
        assert_eq!(lens(20), Ok(vec![8, 8, 4]));
        assert_eq!(lens(12), Ok(vec![8, 4, 0]));
        assert_eq!(lens(24), Err(DeviceErrorKind::OutOfRange));
    }
}
