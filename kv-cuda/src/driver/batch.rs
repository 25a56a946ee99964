//! Many copies between host and device in one call of the driver.
//!
//! A block that moves between tiers has a range in every plane: tens to hundreds of copies, each of
//! which costs more to submit on its own than to carry out.
use cudarc::driver::sys::CUstream;
use kv_core::error::DeviceError;

use super::context::Context;
use super::facts::Driver;
use super::library::{CopyAttributes, CopyBatch, Location, STREAM_ORDER};
use crate::gpu::HostCopy;
use crate::params::Address;

/// Returns the driver's call if it has it, and enough copies make it worthwhile.
pub(super) fn call(driver: Driver, copies: usize) -> Option<CopyBatch> {
    driver.optional.copy_batch.filter(|_| copies >= COPIES_MIN)
}

/// Copies to the device.
///
/// # Safety
/// 1. Conditions of `Stream::upload` hold for every copy.
/// 2. `stream` is a live stream of the context, and not the legacy one.
pub(super) unsafe fn upload(
    context: &Context,
    (call, stream): (CopyBatch, CUstream),
    copies: &[HostCopy],
) -> Result<(), DeviceError> {
    let (host, device, sizes) = lists(copies);
    let locations = Locations { from: Location::HOST, to: Location::device(context.device()) };
    // SAFETY: both conditions; the lists have equal lengths.
    unsafe { submit(context, (call, stream), "upload a batch", device, host, sizes, &locations) }
}

/// Copies to the host.
///
/// # Safety
/// 1. Conditions of `Stream::download` hold for every copy.
/// 2. `stream` is a live stream of the context, and not the legacy one.
pub(super) unsafe fn download(
    context: &Context,
    (call, stream): (CopyBatch, CUstream),
    copies: &[HostCopy],
) -> Result<(), DeviceError> {
    let (host, device, sizes) = lists(copies);
    let locations = Locations { from: Location::device(context.device()), to: Location::HOST };
    // SAFETY: both conditions; the lists have equal lengths.
    unsafe { submit(context, (call, stream), "download a batch", host, device, sizes, &locations) }
}

/// Memory locations of all sources and all targets.
struct Locations {
    from: Location,
    to: Location,
}

/// Lists addresses on the host, addresses on the device, and lengths; skips empty copies.
fn lists(copies: &[HostCopy]) -> (Vec<Address>, Vec<Address>, Vec<usize>) {
    let pieces = copies.iter().filter(|copy| copy.bytes > 0);
    let host = pieces.clone().map(|copy| u64::try_from(copy.host.addr()).unwrap_or(0)).collect();
    let device = pieces.clone().map(|copy| copy.device).collect();
    (host, device, pieces.map(|copy| copy.bytes).collect())
}

/// # Safety
/// 1. All copies stay valid until an event recorded later is done.
/// 2. `stream` is a live stream of the context, and not the legacy one.
/// 3. The three lists have equal lengths.
unsafe fn submit(
    context: &Context,
    (call, stream): (CopyBatch, CUstream),
    operation: &'static str,
    mut to: Vec<Address>,
    mut from: Vec<Address>,
    mut sizes: Vec<usize>,
    locations: &Locations,
) -> Result<(), DeviceError> {
    if sizes.is_empty() {
        return Ok(());
    }
    let mut attributes = CopyAttributes {
        source_order: STREAM_ORDER,
        from: locations.from,
        to: locations.to,
        flags: 0,
    };
    // One set of attributes for all copies, from the first on.
    let mut first = 0_usize;
    let _current = context.enter(operation)?;
    // SAFETY: all three conditions; the driver copies the lists.
    let code = unsafe {
        call(
            to.as_mut_ptr(),
            from.as_mut_ptr(),
            sizes.as_mut_ptr(),
            sizes.len(),
            &raw mut attributes,
            &raw mut first,
            1,
            stream,
        )
    };
    context.check(operation, code)
}

/// Fewer copies are submitted one by one.
const COPIES_MIN: usize = 4;

#[cfg(test)]
mod tests {
    use cudarc::driver::sys::CUresult;

    use super::super::library::Optional;
    use super::*;

    #[test]
    fn lists_have_equal_lengths() {
        let mut bytes = [0_u8; 8];
        let host = bytes.as_mut_ptr();
        let copy = |device, bytes| HostCopy { host, device, bytes };
        let (hosts, devices, sizes) = lists(&[copy(256, 4), copy(512, 0), copy(768, 8)]);
        assert_eq!((devices, sizes), (vec![256, 768], vec![4, 8]));
        assert_eq!(hosts.len(), 2);
    }

    #[test]
    fn old_drivers_copy_one_by_one() {
        unsafe extern "C" fn copy_batch(
            _: *mut Address,
            _: *mut Address,
            _: *mut usize,
            _: usize,
            _: *mut CopyAttributes,
            _: *mut usize,
            _: usize,
            _: CUstream,
        ) -> CUresult {
            CUresult::CUDA_SUCCESS
        }
        let driver = Driver { version: 12060, pools: true, ..Driver::default() };
        assert!(call(driver, 100).is_none());
        let optional = Optional { copy_batch: Some(copy_batch), ..Optional::default() };
        let driver = Driver { version: 13000, optional, ..driver };
        assert!(call(driver, 100).is_some() && call(driver, 1).is_none());
    }
}
