//! Detection of subgroups that suit the shaders.
//!
//! Shaders that sum over eight neighbouring invocations have a variant without barriers. It needs
//! the subgroup feature, subgroups of at least eight, and neighbours of a workgroup that are
//! neighbours in a subgroup. Drivers do the last, but no standard guarantees it, so a shader tests
//! it once per device.
use kv_core::error::{DeviceError, DeviceErrorKind};

use crate::device::Shared;
use crate::shaders;

/// The shader flag of the variant.
pub(crate) const FLAG: &str = "SUBGROUPS";
/// The shader that tests the device.
pub(crate) const PROBE: &str = "neighbours.wgsl";
const INVOCATIONS: usize = 128;
const BYTES: u64 = 4 * 128;

impl Shared {
    /// Returns whether eight neighbours can exchange values without barriers; tested once.
    ///
    /// # Errors
    /// `Lost`. A test that fails otherwise counts as no.
    pub(crate) fn has_neighbours(&self) -> Result<bool, DeviceError> {
        if let Some(known) = self.neighbours.get() {
            return Ok(*known);
        }
        let is_possible = self.may_use_subgroups
            && self.device.features().contains(wgpu::Features::SUBGROUP)
            && self.device.adapter_info().subgroup_min_size >= 8;
        let found = is_possible && self.probe().unwrap_or(false);
        self.require("test subgroups")?;
        Ok(*self.neighbours.get_or_init(|| found))
    }

    fn probe(&self) -> Result<bool, DeviceError> {
        const PROBING: &str = "test subgroups";
        let source = shaders::source(PROBE, &[])
            .map_err(|why| DeviceError::new(DeviceErrorKind::Driver, PROBING).with_detail(why))?;
        let staging = self.watch(PROBING, |shared| {
            let device = &shared.device;
            let module = device.create_shader_module(wgpu::ShaderModuleDescriptor {
                label: Some(PROBE),
                source: wgpu::ShaderSource::Wgsl(source.into()),
            });
            let pipeline = device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
                label: Some(PROBE),
                layout: None,
                module: &module,
                entry_point: None,
                compilation_options: wgpu::PipelineCompilationOptions::default(),
                cache: None,
            });
            let buffer = |usage| {
                device.create_buffer(&wgpu::BufferDescriptor {
                    label: Some(PROBE),
                    size: BYTES,
                    usage,
                    mapped_at_creation: false,
                })
            };
            let answers = buffer(wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC);
            let staging = buffer(wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST);
            let entry = wgpu::BindGroupEntry { binding: 0, resource: answers.as_entire_binding() };
            let group = device.create_bind_group(&wgpu::BindGroupDescriptor {
                label: Some(PROBE),
                layout: &pipeline.get_bind_group_layout(0),
                entries: &[entry],
            });
            let mut encoder =
                device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
            {
                let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
                pass.set_pipeline(&pipeline);
                pass.set_bind_group(0, &group, &[]);
                pass.dispatch_workgroups(1, 1, 1);
            }
            encoder.copy_buffer_to_buffer(&answers, 0, &staging, 0, BYTES);
            shared.queue.submit([encoder.finish()]);
            staging.map_async(wgpu::MapMode::Read, .., |_| {});
            staging
        })?;
        self.poll(wgpu::PollType::wait_indefinitely(), PROBING)?;
        let Ok(bytes) = staging.get_mapped_range(..) else { return Ok(false) };
        let yes = bytes.chunks_exact(4).filter(|word| **word == 1_u32.to_le_bytes()).count();
        Ok(yes == INVOCATIONS)
    }
}
