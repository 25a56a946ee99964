//! Device memory for tests, as vectors.
use bytemuck::Pod;
use kv_core::error::DeviceError;

use crate::emulated::{Emulator, EmulatorOptions};
use crate::gpu::{Gpu, Launch, Stream};
use crate::params::Address;

/// An emulated GPU that frees its memory when dropped.
#[derive(Debug)]
pub(super) struct Device {
    gpu: Emulator,
    stream: Box<dyn Stream>,
    taken: Vec<Address>,
}

impl Device {
    /// Opens one whose order of threads and blocks depends on `seed`.
    pub(super) fn open(seed: u32) -> Self {
        let gpu = Emulator::open(&EmulatorOptions::default().with_seed(seed)).unwrap();
        let stream = gpu.stream().unwrap();
        Self { gpu, stream, taken: Vec::new() }
    }

    /// Allocates memory with these values, at `offset` bytes after a multiple of 256; 0 for no
    /// values.
    pub(super) fn put_at<T: Pod>(&mut self, offset: u64, values: &[T]) -> Address {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        if bytes.is_empty() {
            return 0;
        }
        let address = self.gpu.alloc(bytes.len() as u64 + offset).unwrap();
        self.taken.push(address);
        // SAFETY: allocated above with this length; an emulated call is done when it returns.
        unsafe { self.stream.upload(address + offset, bytes.as_ptr(), bytes.len()) }.unwrap();
        address + offset
    }

    pub(super) fn put<T: Pod>(&mut self, values: &[T]) -> Address {
        self.put_at(0, values)
    }

    /// Reads bytes at an address from [`Self::put_at`].
    pub(super) fn bytes(&mut self, address: Address, bytes: usize) -> Vec<u8> {
        let mut read = vec![0; bytes];
        // SAFETY: `read` has this length; ranges outside device memory are refused.
        unsafe { self.stream.download(read.as_mut_ptr(), address, bytes) }.unwrap();
        read
    }

    /// Launches a kernel with 128 threads, or 256 if it copies blocks.
    pub(super) fn launch<T: Pod>(
        &mut self,
        kernel: &'static str,
        grid: [u32; 3],
        shared: u32,
        params: &T,
    ) {
        self.try_launch(kernel, grid, shared, params).unwrap();
    }

    /// Does the same, and returns the emulator's error.
    pub(super) fn try_launch<T: Pod>(
        &mut self,
        kernel: &'static str,
        grid: [u32; 3],
        shared: u32,
        params: &T,
    ) -> Result<(), DeviceError> {
        let threads = if kernel == "copy_blocks" { 256 } else { 128 };
        let launch = Launch { kernel, grid, threads, shared_bytes: shared };
        // SAFETY: tests pass addresses of memory they have allocated, as large as their parameters
        // say.
        unsafe { self.stream.launch(&launch, bytemuck::bytes_of(params)) }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        for address in self.taken.drain(..) {
            // SAFETY: allocated by `alloc`, freed once; no work runs.
            unsafe { self.gpu.free(address) };
        }
    }
}

/// Rounds up to a multiple of 16.
pub(super) fn round16(bytes: u32) -> u32 {
    bytes.next_multiple_of(16)
}
