//! Device memory as vectors.
use bytemuck::Pod;
use kv_core::DeviceError;

use crate::emulated::{Emulator, EmulatorOptions};
use crate::gpu::{Gpu, Launch, Stream};
use crate::params::Address;

/// An emulated GPU whose memory is freed with it.
#[derive(Debug)]
pub(super) struct Device {
    gpu: Emulator,
    stream: Box<dyn Stream>,
    taken: Vec<Address>,
}

impl Device {
    /// Threads and blocks in an order that depends on `seed`.
    pub(super) fn open(seed: u32) -> Self {
        let gpu = Emulator::open(&EmulatorOptions::default().with_seed(seed)).unwrap();
        let stream = gpu.stream().unwrap();
        Self { gpu, stream, taken: Vec::new() }
    }

    /// Memory with these values, `offset` bytes behind a multiple of 256; 0 for none.
    pub(super) fn put_at<T: Pod>(&mut self, offset: u64, values: &[T]) -> Address {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        if bytes.is_empty() {
            return 0;
        }
        let address = self.gpu.alloc(bytes.len() as u64 + offset).unwrap();
        self.taken.push(address);
        // SAFETY: allocated above for so many bytes; the emulator is done when it returns.
        unsafe { self.stream.upload(address + offset, bytes.as_ptr(), bytes.len()) }.unwrap();
        address + offset
    }

    pub(super) fn put<T: Pod>(&mut self, values: &[T]) -> Address {
        self.put_at(0, values)
    }

    /// Bytes at an address that [`Self::put_at`] gave.
    pub(super) fn bytes(&mut self, address: Address, bytes: usize) -> Vec<u8> {
        let mut read = vec![0; bytes];
        // SAFETY: `read` has so many bytes; what the device lacks is refused.
        unsafe { self.stream.download(read.as_mut_ptr(), address, bytes) }.unwrap();
        read
    }

    /// Starts a kernel of 128 threads, or of 256 if it copies blocks.
    pub(super) fn launch<T: Pod>(
        &mut self,
        kernel: &'static str,
        grid: [u32; 3],
        shared: u32,
        params: &T,
    ) {
        self.try_launch(kernel, grid, shared, params).unwrap();
    }

    /// As [`Self::launch`]; what the emulator reports.
    pub(super) fn try_launch<T: Pod>(
        &mut self,
        kernel: &'static str,
        grid: [u32; 3],
        shared: u32,
        params: &T,
    ) -> Result<(), DeviceError> {
        let threads = if kernel == "copy_blocks" { 256 } else { 128 };
        let launch = Launch { kernel, grid, threads, shared_bytes: shared };
        // SAFETY: tests name addresses of memory they have put, as large as what they say of it.
        unsafe { self.stream.launch(&launch, bytemuck::bytes_of(params)) }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        for address in self.taken.drain(..) {
            // SAFETY: from `alloc`, freed once; nothing runs.
            unsafe { self.gpu.free(address) };
        }
    }
}

/// `bytes` rounded up to whole sixteens.
pub(super) fn round16(bytes: u32) -> u32 {
    bytes.next_multiple_of(16)
}
