//! A device with its queue, and what becomes of errors.
//!
//! wgpu reports errors to scopes and to callbacks, never from the call that failed, and an error
//! that nobody waits for ends the program. So everything that may fail runs inside
//! [`Shared::watch`], and the loss of the device is remembered where its callback leaves it.
use std::fmt;
use std::sync::{Arc, OnceLock};

pub(crate) use kv_core::backend::kernels::unsupported;
use kv_core::{DeviceError, DeviceErrorKind};

use crate::pipelines::Pipelines;
use crate::signal::Waiter;

/// What buffers, queues and fences of one device have in common.
pub(crate) struct Shared {
    pub(crate) device: wgpu::Device,
    pub(crate) queue: wgpu::Queue,
    pub(crate) limits: wgpu::Limits,
    pub(crate) pipelines: Pipelines,
    pub(crate) waiter: Waiter,
    /// Whether subgroups may be used, and whether neighbours were found in them.
    pub(crate) may_use_subgroups: bool,
    /// Whether a thread may block until work is done.
    pub(crate) may_wait: bool,
    pub(crate) neighbours: OnceLock<bool>,
    fate: Arc<Fate>,
}

/// Whether the device is gone, and why.
#[derive(Debug, Default)]
pub(crate) struct Fate(OnceLock<String>);

impl Fate {
    /// Remembers the first loss.
    pub(crate) fn lose(&self, reason: String) {
        let _ = self.0.set(reason);
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shared = f.debug_struct("Shared");
        shared.field("device", &self.device).field("lost", &self.fate.0.get());
        shared.finish_non_exhaustive()
    }
}

impl Shared {
    pub(crate) fn new(device: wgpu::Device, queue: wgpu::Queue, may_use_subgroups: bool) -> Self {
        let fate = Arc::new(Fate::default());
        let noticed = Arc::clone(&fate);
        device.set_device_lost_callback(move |reason, words| {
            noticed.lose(format!("{reason:?}: {words}"));
        });
        let waiter = Waiter::new(&device);
        let limits = device.limits();
        Self {
            device,
            queue,
            limits,
            pipelines: Pipelines::default(),
            waiter,
            may_use_subgroups,
            may_wait: cfg!(not(target_family = "wasm")),
            neighbours: OnceLock::new(),
            fate,
        }
    }

    /// Does work of which wgpu tells the errors afterwards.
    ///
    /// # Errors
    /// The first error, `Lost` before all.
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
        // Native devices have the answers at once.
        let mut errors = [inner, middle, outer].map(|scope| pollster::block_on(scope.pop()));
        self.require(operation)?;
        match errors.iter_mut().find_map(Option::take) {
            None => Ok(done),
            Some(error) => Err(told(operation, error)),
        }
    }

    /// Asks whether the device is still there: wgpu tells of a loss only while it is polled, and
    /// until then takes calls that do nothing.
    ///
    /// # Errors
    /// `Lost`, or `Driver`.
    pub(crate) fn notice(&self, operation: &'static str) -> Result<(), DeviceError> {
        self.require(operation)?;
        self.poll(wgpu::PollType::Poll, operation)
    }

    /// # Errors
    /// `Lost`, as far as it was noticed.
    pub(crate) fn require(&self, operation: &'static str) -> Result<(), DeviceError> {
        match self.fate.0.get() {
            None => Ok(()),
            Some(why) => {
                Err(DeviceError::new(DeviceErrorKind::Lost, operation).with_detail(why.as_str()))
            }
        }
    }

    /// Lets the device run callbacks, and notices that it is gone.
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

    /// Multiple of bytes at which a binding may begin.
    pub(crate) fn alignment(&self) -> u64 {
        let limits = &self.limits;
        let least = limits.min_storage_buffer_offset_alignment;
        u64::from(least.max(limits.min_uniform_buffer_offset_alignment).max(4))
    }
}

fn told(operation: &'static str, error: wgpu::Error) -> DeviceError {
    let kind = match error {
        wgpu::Error::OutOfMemory { .. } => DeviceErrorKind::OutOfMemory,
        wgpu::Error::Validation { .. } | wgpu::Error::Internal { .. } => DeviceErrorKind::Driver,
    };
    // wgpu's words are those of the source below them.
    let words = match &error {
        wgpu::Error::OutOfMemory { source } => source.to_string(),
        wgpu::Error::Validation { description, .. } | wgpu::Error::Internal { description, .. } => {
            description.clone()
        }
    };
    DeviceError::new(kind, operation).with_detail(words).with_source(error)
}
