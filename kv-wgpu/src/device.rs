//! A device with its queue, and the conversion of wgpu's errors.
//!
//! wgpu reports errors to scopes and callbacks, never from the call that failed, and an error that
//! no scope catches ends the program. Everything that may fail therefore runs inside
//! [`Shared::watch`], and [`Loss`] records that the device was lost.
use std::fmt;
use std::sync::{Arc, OnceLock};

pub(crate) use kv_core::backend::kernels::unsupported;
use kv_core::error::{DeviceError, DeviceErrorKind};

use crate::pipelines::Pipelines;
use crate::signal::Poller;

/// The most bytes that are bound at once: shaders count them in 32 bits, while Metal binds whole
/// buffers of any size.
const BINDING_MAX: u64 = (1 << 32) - 4;

/// State that the buffers, queues and fences of one device share.
pub(crate) struct Shared {
    pub(crate) device: wgpu::Device,
    pub(crate) queue: wgpu::Queue,
    pub(crate) limits: wgpu::Limits,
    pub(crate) pipelines: Pipelines,
    pub(crate) poller: Poller,
    /// Whether subgroups may be used, and whether [`Shared::has_neighbours`] found them usable.
    pub(crate) may_use_subgroups: bool,
    /// Whether threads may block until work is done.
    pub(crate) may_wait: bool,
    pub(crate) neighbours: OnceLock<bool>,
    loss: Arc<Loss>,
}

/// The reason for which the device was lost, if it was.
#[derive(Debug, Default)]
pub(crate) struct Loss(OnceLock<String>);

impl Loss {
    /// Records the first loss.
    pub(crate) fn lose(&self, reason: String) {
        let _ = self.0.set(reason);
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shared = f.debug_struct("Shared");
        shared.field("device", &self.device).field("lost", &self.loss.0.get());
        shared.finish_non_exhaustive()
    }
}

impl Shared {
    pub(crate) fn new(device: wgpu::Device, queue: wgpu::Queue, may_use_subgroups: bool) -> Self {
        let loss = Arc::new(Loss::default());
        let noticed = Arc::clone(&loss);
        device.set_device_lost_callback(move |reason, words| {
            noticed.lose(format!("{reason:?}: {words}"));
        });
        let poller = Poller::new(&device);
        let mut limits = device.limits();
        let most = limits.max_storage_buffer_binding_size.min(BINDING_MAX);
        limits.max_storage_buffer_binding_size = most;
        Self {
            device,
            queue,
            limits,
            pipelines: Pipelines::default(),
            poller,
            may_use_subgroups,
            may_wait: cfg!(not(target_family = "wasm")),
            neighbours: OnceLock::new(),
            loss,
        }
    }

    /// Runs `work` inside error scopes and returns the errors that wgpu reports to them.
    ///
    /// # Errors
    /// The first error; `Lost` takes precedence.
    pub(crate) fn watch<T>(
        &self,
        operation: &'static str,
        work: impl FnOnce(&Self) -> T,
    ) -> Result<T, DeviceError> {
        use wgpu::ErrorFilter::{Internal, OutOfMemory, Validation};
        self.require(operation)?;
        let outer = self.device.push_error_scope(OutOfMemory);
        let middle = self.device.push_error_scope(Internal);
        let inner = self.device.push_error_scope(Validation);
        let done = work(self);
        // Native devices resolve these futures at once.
        let mut errors = [inner, middle, outer].map(|scope| pollster::block_on(scope.pop()));
        self.require(operation)?;
        match errors.iter_mut().find_map(Option::take) {
            None => Ok(done),
            Some(error) => Err(device_error(operation, error)),
        }
    }

    /// Polls the device to detect a loss. wgpu reports a loss only when polled; until then it
    /// accepts calls and ignores them.
    ///
    /// # Errors
    /// `Lost`, or `Driver`.
    pub(crate) fn notice(&self, operation: &'static str) -> Result<(), DeviceError> {
        self.require(operation)?;
        self.poll(wgpu::PollType::Poll, operation)
    }

    /// Fails if the device is known to be lost.
    ///
    /// # Errors
    /// `Lost`.
    pub(crate) fn require(&self, operation: &'static str) -> Result<(), DeviceError> {
        match self.loss.0.get() {
            None => Ok(()),
            Some(why) => {
                Err(DeviceError::new(DeviceErrorKind::Lost, operation).with_detail(why.as_str()))
            }
        }
    }

    /// Runs the device's callbacks, and detects a loss.
    ///
    /// # Errors
    /// `Lost`, or `Driver`.
    pub(crate) fn poll(
        &self,
        how: wgpu::PollType,
        operation: &'static str,
    ) -> Result<(), DeviceError> {
        let polled = self.device.poll(how);
        self.require(operation)?;
        match polled {
            Ok(_) => Ok(()),
            Err(error) => {
                Err(DeviceError::new(DeviceErrorKind::Driver, operation).with_source(error))
            }
        }
    }

    /// Returns the alignment of bindings, in bytes.
    pub(crate) fn alignment(&self) -> u64 {
        let limits = &self.limits;
        let least = limits.min_storage_buffer_offset_alignment;
        u64::from(least.max(limits.min_uniform_buffer_offset_alignment).max(4))
    }
}

fn device_error(operation: &'static str, error: wgpu::Error) -> DeviceError {
    let kind = match error {
        wgpu::Error::OutOfMemory { .. } => DeviceErrorKind::OutOfMemory,
        wgpu::Error::Validation { .. } | wgpu::Error::Internal { .. } => DeviceErrorKind::Driver,
    };
    // The Display text of wgpu::Error says less than the source and the description.
    let words = match &error {
        wgpu::Error::OutOfMemory { source } => source.to_string(),
        wgpu::Error::Validation { description, .. } | wgpu::Error::Internal { description, .. } => {
            description.clone()
        }
    };
    DeviceError::new(kind, operation).with_detail(words).with_source(error)
}
