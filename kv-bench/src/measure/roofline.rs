//! The rooflines of operations: the rate of reading memory, and the rate of copying it.
//!
//! On a CPU both use the threads of the operation, each on its own memory. A roofline that is too
//! low flatters the operation, so reading tries which number of streams per thread is fastest.
use std::hint::black_box;
use std::time::Instant;

use kv::backend::Backend;
use kv::cpu::{CpuBackend, CpuBuffer};
#[cfg(feature = "cuda")]
use kv::cuda::CudaBackend;
use kv::error::{DeviceError, DeviceErrorKind};
#[cfg(feature = "wgpu")]
use kv::wgpu::WgpuBackend;
use rayon::ThreadPool;
use rayon::iter::{IndexedParallelIterator, IntoParallelRefMutIterator, ParallelIterator};

use super::plain::PlainCopy;
#[cfg(any(feature = "cuda", feature = "wgpu"))]
use super::workload::drain;
use crate::num::{to_offset, to_u64, to_usize};

/// Bytes of a copy's source: more than CPU caches hold.
const COPIED: u64 = 1 << 28;
/// Smallest share of a copy for one thread.
const PART: u64 = 1 << 17;
/// Words of four cache lines.
const STRIDE: usize = 32;
/// Attempts per number of streams.
const TRIES: usize = 3;

/// A copy that moves the bytes of an operation in the same way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Walk {
    /// Bytes per layer, in one direction.
    pub(super) bytes: u64,
    pub(super) layers: u64,
    /// Whether each layer is read from its own place; otherwise all layers read the same one.
    pub(super) from_moves: bool,
    pub(super) to_moves: bool,
}

/// A backend whose memory bandwidth can be measured.
pub(super) trait Roofline: PlainCopy {
    /// Memory that is read and copied.
    type Arena;

    /// Returns the instruction set and the number of threads, if there is a choice.
    fn choice(&self) -> Option<(String, u32)>;
    /// Reserves memory, `bytes` of it for reading.
    ///
    /// # Errors
    /// Those of [`Backend::alloc`].
    fn arena(&self, bytes: u64) -> Result<Self::Arena, DeviceError>;
    /// Reads all of the memory; returns the number of bytes and the seconds. On a device that
    /// cannot read without writing it is a copy, whose bytes count twice.
    ///
    /// # Errors
    /// The device's own.
    fn read(&self, arena: &mut Self::Arena) -> Result<(u64, f64), DeviceError>;
    /// Runs `runs` copies; returns the seconds.
    ///
    /// # Errors
    /// The device's own.
    fn walk(&self, arena: &mut Self::Arena, walk: Walk, runs: u32) -> Result<f64, DeviceError>;
}

/// The memory of all threads.
pub(super) struct CpuArena {
    /// The backend's thread pool, if it has its own.
    pool: Option<ThreadPool>,
    parts: Vec<Part>,
    streams: Streams,
}

/// The memory of one thread, allocated like a cache's, because the page size matters.
struct Part {
    read: CpuBuffer,
    from: CpuBuffer,
    to: CpuBuffer,
}

/// Number of places that a thread reads alternately.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Streams {
    One,
    Two,
    Four,
    Eight,
}

impl Streams {
    const ALL: [Self; 4] = [Self::One, Self::Two, Self::Four, Self::Eight];

    fn read(self, words: &[u64]) -> u64 {
        match self {
            Self::One => read::<1>(words),
            Self::Two => read::<2>(words),
            Self::Four => read::<4>(words),
            Self::Eight => read::<8>(words),
        }
    }
}

/// Reads whole strides of `N` places alternately. The result depends on every word.
#[expect(clippy::needless_range_loop, reason = "adapters of iterators may stay calls")]
fn read<const N: usize>(words: &[u64]) -> u64 {
    let each = words.len().checked_div(N).unwrap_or(0).max(STRIDE);
    let mut chunks = words.chunks_exact(each);
    let streams: [&[[u64; STRIDE]]; N] =
        std::array::from_fn(|_| chunks.next().unwrap_or_default().as_chunks().0);
    let strides = streams.iter().map(|stream| stream.len()).min().unwrap_or(0);
    let mut sums = [[0_u64; 4]; N];
    for i in 0..strides {
        for n in 0..N {
            let stride = &streams[n][i];
            for word in 0..STRIDE {
                sums[n][word % 4] ^= stride[word];
            }
        }
    }
    sums.iter().flatten().fold(0, |all, sum| all ^ sum)
}

impl CpuArena {
    fn each(&mut self, threads: usize, work: impl Fn(&mut Part) + Send + Sync) {
        let Some(parts) = self.parts.get_mut(..threads.max(1)) else { return };
        match (&self.pool, parts) {
            (_, [part]) => work(part),
            (None, parts) => parts.par_iter_mut().with_max_len(1).for_each(work),
            (Some(pool), parts) => {
                pool.install(|| parts.par_iter_mut().with_max_len(1).for_each(work));
            }
        }
    }

    fn read_by(&mut self, streams: Streams) -> f64 {
        let begin = Instant::now();
        self.each(self.parts.len(), |part| {
            part.read.read(|bytes| black_box(streams.read(black_box(bytemuck::cast_slice(bytes)))));
        });
        begin.elapsed().as_secs_f64()
    }
}

impl Roofline for CpuBackend {
    type Arena = CpuArena;

    fn choice(&self) -> Option<(String, u32)> {
        Some((self.isa().to_string(), self.capabilities().workers))
    }

    fn arena(&self, bytes: u64) -> Result<CpuArena, DeviceError> {
        let threads = to_usize(self.capabilities().workers).max(1);
        let refuse = || DeviceError::new(DeviceErrorKind::OutOfMemory, "reserve to read");
        let pool = if threads == 1 || threads == rayon::current_num_threads() {
            None
        } else {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
            Some(pool.map_err(|error| refuse().with_source(error))?)
        };
        // Whole strides of every stream.
        let strides = to_u64(STRIDE) * 8 * 8;
        let read = bytes.max(1).div_ceil(to_u64(threads)).next_multiple_of(strides);
        let copied = COPIED.min(bytes).div_ceil(to_u64(threads));
        let mut parts = Vec::new();
        for _ in 0..threads {
            let [read, from, to] = [read, copied, copied].map(|bytes| self.alloc(bytes));
            parts.push(Part { read: read?, from: from?, to: to? });
        }
        let mut arena = CpuArena { pool, parts, streams: Streams::One };
        // Pages that were never written may share one physical page.
        arena.each(threads, |part| {
            part.read.write(|bytes| bytes.fill(0x5A));
            part.from.write(|bytes| bytes.fill(0x5A));
            part.to.write(|bytes| bytes.fill(0xA5));
        });
        let mut fastest = f64::INFINITY;
        for _ in 0..TRIES {
            for streams in Streams::ALL {
                let seconds = arena.read_by(streams);
                if seconds < fastest {
                    (fastest, arena.streams) = (seconds, streams);
                }
            }
        }
        Ok(arena)
    }

    fn read(&self, arena: &mut CpuArena) -> Result<(u64, f64), DeviceError> {
        let bytes: usize = arena.parts.iter().map(|part| part.read.len()).sum();
        Ok((to_u64(bytes), arena.read_by(arena.streams)))
    }

    fn walk(&self, arena: &mut CpuArena, walk: Walk, runs: u32) -> Result<f64, DeviceError> {
        let worth = (walk.bytes * walk.layers).div_ceil(PART);
        let threads = to_offset(worth).clamp(1, arena.parts.len());
        let begin = Instant::now();
        arena.each(threads, |part| {
            let bytes = walk.bytes.div_ceil(to_u64(threads));
            let walk = Walk { bytes, ..walk };
            part.from.read(|from| {
                part.to.write(|to| (0..runs).for_each(|_| copy_layers(from, to, walk)));
            });
        });
        Ok(begin.elapsed().as_secs_f64())
    }
}

/// Copies a thread's share of every layer; places that move start again at the end of the memory.
fn copy_layers(from: &[u8], to: &mut [u8], walk: Walk) {
    let bytes = to_offset(walk.bytes);
    let (mut from_at, mut to_at) = (0, 0);
    for _ in 0..walk.layers {
        let mut left = bytes;
        while left > 0 {
            let len = left.min(from.len());
            let [source, target] = [from_at, to_at].map(|at: usize| {
                let end = at + len;
                if end > from.len() { 0..len } else { at..end }
            });
            let ends = [source.end, target.end];
            let (Some(source), Some(target)) = (from.get(source), to.get_mut(target)) else {
                return;
            };
            target.copy_from_slice(source);
            black_box(target);
            [from_at, to_at] = ends;
            left -= len;
            if len == 0 {
                return;
            }
        }
        from_at = if walk.from_moves { from_at } else { 0 };
        to_at = if walk.to_moves { to_at } else { 0 };
    }
}

/// Memory of a device that can only copy.
#[cfg(any(feature = "cuda", feature = "wgpu"))]
pub(super) struct CopyArena<M, Q> {
    memory: M,
    queue: Q,
    bytes: u64,
}

#[cfg(any(feature = "cuda", feature = "wgpu"))]
fn copy_arena<B: PlainCopy>(
    backend: &B,
    bytes: u64,
) -> Result<CopyArena<B::Memory, B::Queue>, DeviceError> {
    let bytes = bytes.next_multiple_of(4);
    Ok(CopyArena { memory: backend.reserve(bytes)?, queue: backend.queue()?, bytes })
}

#[cfg(any(feature = "cuda", feature = "wgpu"))]
fn copy_all<B: PlainCopy>(
    backend: &B,
    arena: &mut CopyArena<B::Memory, B::Queue>,
    (bytes, times): (u64, u64),
) -> Result<f64, DeviceError> {
    let begin = Instant::now();
    for _ in 0..times {
        let mut left = bytes.next_multiple_of(4);
        while left > 0 {
            let now = left.min(arena.bytes).max(4);
            backend.copy(&mut arena.queue, &mut arena.memory, now)?;
            left -= now;
        }
    }
    drain(&mut arena.queue)?;
    Ok(begin.elapsed().as_secs_f64())
}

/// Implements both rooflines as a plain copy, see [`PlainCopy`].
#[cfg(any(feature = "cuda", feature = "wgpu"))]
macro_rules! roofline_by_copy {
    ($backend:ty) => {
        impl Roofline for $backend {
            type Arena = CopyArena<<Self as PlainCopy>::Memory, <Self as Backend>::Queue>;

            fn choice(&self) -> Option<(String, u32)> {
                None
            }
            fn arena(&self, bytes: u64) -> Result<Self::Arena, DeviceError> {
                copy_arena(self, bytes)
            }
            fn read(&self, arena: &mut Self::Arena) -> Result<(u64, f64), DeviceError> {
                let bytes = arena.bytes;
                let seconds = copy_all(self, arena, (bytes, 1))?;
                Ok((bytes * 2, seconds))
            }
            fn walk(
                &self,
                arena: &mut Self::Arena,
                walk: Walk,
                runs: u32,
            ) -> Result<f64, DeviceError> {
                let times = walk.layers * u64::from(runs);
                copy_all(self, arena, (walk.bytes, times))
            }
        }
    };
}
#[cfg(feature = "wgpu")]
roofline_by_copy!(WgpuBackend);
#[cfg(feature = "cuda")]
roofline_by_copy!(CudaBackend);

#[cfg(test)]
mod tests {
    use super::*;
    use kv::cpu::CpuOptions;

    #[test]
    fn every_word_is_read_whatever_the_streams() {
        let words: Vec<u64> =
            (0..2048).map(|n: u64| n.wrapping_mul(0x9E37_79B9_7F4A_7C15)).collect();
        let expected = words.iter().fold(0, |all, word| all ^ word);
        for streams in Streams::ALL {
            assert_eq!(streams.read(&words), expected, "{streams:?}");
            let mut other = words.clone();
            for index in [0, 31, 1024, 2047] {
                other[index] ^= 1 << 17;
                assert_eq!(streams.read(&other), expected ^ (1 << 17), "{streams:?}: {index}");
                other[index] ^= 1 << 17;
            }
            assert_eq!(streams.read(&[]), 0);
        }
    }

    #[test]
    fn the_cpu_reads_as_much_as_was_reserved() {
        for threads in [1, 3] {
            let cpu = CpuBackend::open(CpuOptions::default().with_threads(threads)).expect("cpu");
            let mut arena = cpu.arena(3 << 20).expect("memory");
            let (bytes, seconds) = cpu.read(&mut arena).expect("no device fails");
            assert_eq!(bytes, 3 << 20);
            assert!(seconds > 0.0);
            assert_eq!(cpu.choice().expect("a choice").1, u32::try_from(threads).expect("few"));
        }
    }

    #[test]
    fn places_move_or_stay() {
        let walk = |bytes, layers, from_moves, to_moves| {
            let mut to = [0; 8];
            let walk = Walk { bytes, layers, from_moves, to_moves };
            copy_layers(&[1, 2, 3, 4, 5, 6, 7, 8], &mut to, walk);
            to
        };
        assert_eq!(walk(2, 3, true, true), [1, 2, 3, 4, 5, 6, 0, 0]);
        assert_eq!(walk(2, 3, false, true), [1, 2, 1, 2, 1, 2, 0, 0]);
        assert_eq!(walk(2, 3, true, false), [5, 6, 0, 0, 0, 0, 0, 0]);
        // At the end it starts again; a layer larger than the memory is copied in pieces.
        assert_eq!(walk(3, 3, true, true), [1, 2, 3, 4, 5, 6, 0, 0]);
        assert_eq!(walk(11, 1, true, true), [1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(walk(0, 3, true, true), [0; 8]);
    }
}
