//! Compiled pipelines, one for each specialisation.
use std::sync::{Arc, Mutex, PoisonError};

use hashbrown::HashMap;
use kv_core::error::{DeviceError, DeviceErrorKind};

use crate::device::Shared;
use crate::{shaders, subgroups};

/// A shader and its specialisation.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Kernel {
    /// Its file name.
    pub(crate) shader: &'static str,
    /// Flags of `if` lines that are set.
    pub(crate) flags: &'static [&'static str],
    /// Values of `override` constants.
    pub(crate) constants: Vec<(&'static str, u32)>,
}

impl Kernel {
    /// Names a shader without flags and constants.
    pub(crate) fn new(shader: &'static str) -> Self {
        Self { shader, flags: &[], constants: Vec::new() }
    }
    /// Sets the flags.
    #[must_use]
    pub(crate) fn flags(mut self, flags: &'static [&'static str]) -> Self {
        self.flags = flags;
        self
    }
    /// Adds a constant.
    #[must_use]
    pub(crate) fn with(mut self, name: &'static str, value: u32) -> Self {
        self.constants.push((name, value));
        self
    }
}

/// A compiled kernel.
#[derive(Debug)]
pub(crate) struct Pipeline {
    pub(crate) pipeline: wgpu::ComputePipeline,
    pub(crate) layout: wgpu::BindGroupLayout,
}

#[derive(Debug, Default)]
pub(crate) struct Pipelines(Mutex<HashMap<Kernel, Arc<Pipeline>>>);

impl Shared {
    /// Returns the pipeline of a kernel, and compiles it on first use.
    ///
    /// # Errors
    /// `Driver` if the device's compiler refuses it; `Lost`.
    pub(crate) fn pipeline(&self, kernel: &Kernel) -> Result<Arc<Pipeline>, DeviceError> {
        let known = &self.pipelines.0;
        if let Some(pipeline) = known.lock().unwrap_or_else(PoisonError::into_inner).get(kernel) {
            return Ok(Arc::clone(pipeline));
        }
        // Compiled without the lock: it may take seconds, and compiling twice does no harm.
        let pipeline = Arc::new(self.compile(kernel)?);
        let mut known = known.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(Arc::clone(known.entry(kernel.clone()).or_insert(pipeline)))
    }

    fn compile(&self, kernel: &Kernel) -> Result<Pipeline, DeviceError> {
        const COMPILE: &str = "compile a shader";
        let mut flags = kernel.flags.to_vec();
        if self.has_neighbours()? {
            flags.push(subgroups::FLAG);
        }
        let source = shaders::source(kernel.shader, &flags)
            .map_err(|why| DeviceError::new(DeviceErrorKind::Driver, COMPILE).with_detail(why))?;
        let constants: Vec<_> =
            kernel.constants.iter().map(|(name, value)| (*name, f64::from(*value))).collect();
        let compilation_options = wgpu::PipelineCompilationOptions {
            constants: &constants,
            // Shaders write shared memory before they read it.
            zero_initialize_workgroup_memory: false,
        };
        self.watch(COMPILE, |shared| {
            let module = shared.device.create_shader_module(wgpu::ShaderModuleDescriptor {
                label: Some(kernel.shader),
                source: wgpu::ShaderSource::Wgsl(source.into()),
            });
            let descriptor = wgpu::ComputePipelineDescriptor {
                label: Some(kernel.shader),
                layout: None,
                module: &module,
                entry_point: None,
                compilation_options,
                cache: None,
            };
            let pipeline = shared.device.create_compute_pipeline(&descriptor);
            let layout = pipeline.get_bind_group_layout(0);
            Pipeline { pipeline, layout }
        })
    }
}
