//! Host data that a submission carries: parameters, lists, inputs.
//!
//! An [`Arena`] keeps the bytes while calls are recorded and writes them into its buffers right
//! before the commands that read them are submitted. The device runs submissions in order, so the
//! next recording reuses the same buffers.
use kv_core::error::DeviceError;
use kv_core::invariant::Invariant;

use crate::device::Shared;
use kv_core::num::{to_offset, to_u64};

/// Bytes of a buffer, unless one push needs more.
const CHUNK: u64 = 1 << 18;
/// Bytes of the buffers that are kept for the next recording.
const KEPT: u64 = 1 << 26;

const USAGES: wgpu::BufferUsages = wgpu::BufferUsages::STORAGE
    .union(wgpu::BufferUsages::UNIFORM)
    .union(wgpu::BufferUsages::COPY_SRC)
    .union(wgpu::BufferUsages::COPY_DST);

/// The range of a buffer that pushed bytes will have on the device.
#[derive(Debug, Clone)]
pub(crate) struct ArenaRange {
    pub(crate) buffer: wgpu::Buffer,
    pub(crate) offset: u64,
    /// A multiple of 4, at least 16.
    pub(crate) size: u64,
}

#[derive(Debug)]
struct Chunk {
    buffer: wgpu::Buffer,
    bytes: Vec<u8>,
}

#[derive(Debug, Default)]
pub(crate) struct Arena {
    chunks: Vec<Chunk>,
}

impl Arena {
    /// Appends `values` to the data of the next submission.
    ///
    /// # Errors
    /// `OutOfMemory` or `Lost`.
    pub(crate) fn push<T: bytemuck::NoUninit>(
        &mut self,
        shared: &Shared,
        values: &[T],
    ) -> Result<ArenaRange, DeviceError> {
        let values: &[u8] = bytemuck::cast_slice(values);
        let (len, step) = (to_u64(values.len()), shared.alignment());
        let size = len.max(16).next_multiple_of(4);
        let begin_in = |chunk: &Chunk| {
            let begin = to_u64(chunk.bytes.len()).next_multiple_of(step);
            (begin + size <= chunk.buffer.size()).then_some(begin)
        };
        let found = self.chunks.iter().position(|chunk| begin_in(chunk).is_some());
        let index = match found {
            Some(index) => index,
            None => self.grow(shared, size)?,
        };
        let chunk = self.chunks.get_mut(index).invariant("a chunk was found or made");
        let offset = begin_in(chunk).invariant("a chunk that was found or made has room");
        chunk.bytes.resize(to_offset(offset), 0);
        chunk.bytes.extend_from_slice(values);
        chunk.bytes.resize(to_offset(offset + size), 0);
        Ok(ArenaRange { buffer: chunk.buffer.clone(), offset, size })
    }

    fn grow(&mut self, shared: &Shared, size: u64) -> Result<usize, DeviceError> {
        const GROW: &str = "stage host data";
        let most = shared.limits.max_buffer_size;
        if size > most {
            return Err(crate::device::unsupported(
                GROW,
                format!("{size} bytes; a buffer holds at most {most}"),
            ));
        }
        let descriptor = wgpu::BufferDescriptor {
            label: Some(GROW),
            size: size.max(CHUNK).next_power_of_two().min(most).max(size),
            usage: USAGES,
            mapped_at_creation: false,
        };
        let buffer = shared.watch(GROW, |shared| shared.device.create_buffer(&descriptor))?;
        self.chunks.push(Chunk { buffer, bytes: Vec::new() });
        Ok(self.chunks.len() - 1)
    }

    /// Writes all bytes to the device, for commands that are submitted next.
    pub(crate) fn send(&mut self, queue: &wgpu::Queue) {
        let mut kept = 0_u64;
        self.chunks.retain_mut(|chunk| {
            if !chunk.bytes.is_empty() {
                queue.write_buffer(&chunk.buffer, 0, &chunk.bytes);
                chunk.bytes.clear();
            }
            kept += chunk.buffer.size();
            kept <= KEPT
        });
    }

    /// Drops bytes whose commands were not submitted.
    pub(crate) fn clear(&mut self) {
        self.chunks.iter_mut().for_each(|chunk| chunk.bytes.clear());
    }
}
