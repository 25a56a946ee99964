//! Recording: calls become dispatches and copies, kept in order until they are submitted.
use std::sync::Arc;

use kv_core::error::DeviceError;
use kv_core::num::{to_offset, to_u32};

use crate::arena::{Arena, ArenaRange};
use crate::buffer::WgpuBuffer;
use crate::device::{Shared, unsupported};
use crate::pipelines::{Kernel, Pipeline};
use crate::scratch::Scratch;

/// A range of a buffer that a dispatch uses.
#[derive(Debug, Clone)]
pub(crate) struct Slot {
    pub(crate) buffer: wgpu::Buffer,
    /// A multiple of [`Shared::alignment`].
    pub(crate) offset: u64,
    /// A multiple of 4.
    pub(crate) size: u64,
    /// Whether the shader declares it `read_write`.
    pub(crate) is_written: bool,
}

impl From<ArenaRange> for Slot {
    fn from(range: ArenaRange) -> Self {
        let ArenaRange { buffer, offset, size } = range;
        Self { buffer, offset, size, is_written: false }
    }
}

/// Commands that are not submitted yet, and the host data they read.
#[derive(Debug)]
pub(crate) struct Recorder {
    pub(crate) shared: Arc<Shared>,
    /// Operation that is being recorded, for errors.
    pub(crate) operation: &'static str,
    arena: Arena,
    encoder: Option<wgpu::CommandEncoder>,
    pass: Option<wgpu::ComputePass<'static>>,
    /// Copies of inputs that share a buffer with an output, by index of their slot.
    copies: Vec<Scratch>,
}

impl Recorder {
    pub(crate) fn new(shared: &Arc<Shared>) -> Self {
        Self {
            shared: Arc::clone(shared),
            operation: "record",
            arena: Arena::default(),
            encoder: None,
            pass: None,
            copies: Vec::new(),
        }
    }

    /// Stages values for the commands recorded from here on.
    ///
    /// # Errors
    /// `OutOfMemory` or `Lost`.
    pub(crate) fn push<T: bytemuck::NoUninit>(
        &mut self,
        values: &[T],
    ) -> Result<ArenaRange, DeviceError> {
        self.arena.push(&self.shared, values)
    }

    /// Returns the encoder, outside of any pass.
    ///
    /// # Errors
    /// `OutOfMemory` or `Lost`.
    pub(crate) fn encoder(&mut self) -> Result<&mut wgpu::CommandEncoder, DeviceError> {
        self.pass = None;
        let encoder = match self.encoder.take() {
            Some(encoder) => encoder,
            None => self.shared.watch(self.operation, |shared| {
                let descriptor = wgpu::CommandEncoderDescriptor::default();
                shared.device.create_command_encoder(&descriptor)
            })?,
        };
        Ok(self.encoder.insert(encoder))
    }

    fn pass(&mut self) -> Result<&mut wgpu::ComputePass<'static>, DeviceError> {
        let pass = if let Some(pass) = self.pass.take() {
            pass
        } else {
            let descriptor = wgpu::ComputePassDescriptor::default();
            self.encoder()?.begin_compute_pass(&descriptor).forget_lifetime()
        };
        Ok(self.pass.insert(pass))
    }

    /// Binds a range of a buffer: returns the binding, which begins where the device allows, and
    /// the bytes from there to the range.
    ///
    /// # Errors
    /// `ForeignHandle`, `OutOfRange`, or `Unsupported` for a range beyond the binding limit.
    pub(crate) fn slot(
        &self,
        buffer: &WgpuBuffer,
        range: (u64, u64),
        (is_written, operation): (bool, &'static str),
    ) -> Result<(Slot, u32), DeviceError> {
        let begin = buffer.on(&self.shared, range, operation)?;
        let whole = buffer.buffer().size();
        // An empty range at the very end of a buffer still needs a word to bind.
        let inside = begin.min(whole.saturating_sub(4));
        let step = self.shared.alignment();
        let offset = inside - inside % step;
        let skip = begin - offset;
        let size = (skip + range.1).max(4).next_multiple_of(4);
        let size = size.min(whole - offset);
        let most = self.shared.limits.max_storage_buffer_binding_size;
        if size > most {
            let why = format!("{size} bytes; a binding covers at most {most}");
            return Err(unsupported(operation, why));
        }
        let slot = Slot { buffer: buffer.buffer().clone(), offset, size, is_written };
        Ok((slot, to_u32(to_offset(skip))))
    }

    /// Records a dispatch: `params` is binding 0, the slots follow.
    ///
    /// # Errors
    /// `Driver` if the device refuses it; `OutOfMemory` or `Lost`.
    pub(crate) fn dispatch<P: bytemuck::NoUninit>(
        &mut self,
        kernel: &Kernel,
        params: &P,
        slots: &[Slot],
        groups: [u32; 3],
    ) -> Result<(), DeviceError> {
        if groups.contains(&0) {
            return Ok(());
        }
        let most = self.shared.limits.max_compute_workgroups_per_dimension;
        if let Some(many) = groups.iter().find(|count| **count > most) {
            return Err(unsupported(self.operation, format!("{many} workgroups, of {most}")));
        }
        let pipeline = self.shared.pipeline(kernel)?;
        let params = self.push(std::slice::from_ref(params))?;
        let slots = self.separate(slots)?;
        let group = self.bind(&pipeline, (&params, &slots))?;
        let [x, y, z] = groups;
        let pass = self.pass()?;
        pass.set_pipeline(&pipeline.pipeline);
        pass.set_bind_group(0, &group, &[]);
        pass.dispatch_workgroups(x, y, z);
        Ok(())
    }

    fn bind(
        &self,
        pipeline: &Pipeline,
        (params, slots): (&ArenaRange, &[Slot]),
    ) -> Result<wgpu::BindGroup, DeviceError> {
        let first = (&params.buffer, params.offset, params.size);
        let others = slots.iter().map(|slot| (&slot.buffer, slot.offset, slot.size));
        let ranges = std::iter::once(first).chain(others).zip(0..);
        let entries: Vec<_> = ranges
            .map(|((buffer, offset, size), binding)| {
                let size = wgpu::BufferSize::new(size);
                let range = wgpu::BufferBinding { buffer, offset, size };
                wgpu::BindGroupEntry { binding, resource: wgpu::BindingResource::Buffer(range) }
            })
            .collect();
        self.shared.watch(self.operation, |shared| {
            shared.device.create_bind_group(&wgpu::BindGroupDescriptor {
                label: Some(self.operation),
                layout: &pipeline.layout,
                entries: &entries,
            })
        })
    }

    /// Copies inputs that share a buffer with an output. WebGPU lets no dispatch read a buffer that
    /// it also writes, even in disjoint ranges.
    fn separate(&mut self, slots: &[Slot]) -> Result<Vec<Slot>, DeviceError> {
        let mut copies = slots.to_vec();
        for (index, slot) in copies.iter_mut().enumerate() {
            let is_shared =
                |other: &Slot| other.is_written && !slot.is_written && other.buffer == slot.buffer;
            if !slots.iter().any(is_shared) {
                continue;
            }
            if self.copies.len() <= index {
                self.copies.resize_with(index + 1, Scratch::default);
            }
            let copy = self.copies[index].reserve(&self.shared, slot.size, self.operation)?;
            let (from, at, size) = (&slot.buffer, slot.offset, slot.size);
            self.encoder()?.copy_buffer_to_buffer(from, at, copy.buffer(), 0, size);
            *slot = Slot { buffer: copy.buffer().clone(), offset: 0, ..slot.clone() };
        }
        Ok(copies)
    }

    /// Submits the recorded commands and returns the index of the submission.
    ///
    /// # Errors
    /// `Lost`, `OutOfMemory`, or `Driver` for commands that the device refuses. None of them runs
    /// then.
    pub(crate) fn submit(
        &mut self,
        operation: &'static str,
    ) -> Result<wgpu::SubmissionIndex, DeviceError> {
        self.pass = None;
        let encoder = self.encoder.take();
        let finished = self.shared.watch(operation, |_| encoder.map(wgpu::CommandEncoder::finish));
        let commands = match finished {
            Ok(commands) => commands,
            Err(error) => {
                self.arena.clear();
                return Err(error);
            }
        };
        let arena = &mut self.arena;
        self.shared.watch(operation, |shared| {
            arena.send(&shared.queue);
            shared.queue.submit(commands)
        })
    }

    /// Folds `units` workgroups into two dimensions. A shader computes its index as `x + y *
    /// num_workgroups.x` and returns if it is past the last unit.
    pub(crate) fn groups(&self, units: u64) -> Result<[u32; 3], DeviceError> {
        let most = u64::from(self.shared.limits.max_compute_workgroups_per_dimension);
        let rows = units.div_ceil(most);
        let narrow = |n: u64| to_u32(to_offset(n));
        if rows > most {
            return Err(unsupported(self.operation, format!("{units} workgroups")));
        }
        let columns = units.div_ceil(rows.max(1));
        Ok([narrow(columns), narrow(rows), 1])
    }
}
