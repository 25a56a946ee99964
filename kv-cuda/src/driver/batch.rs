//! Many copies between host and device in one call of the driver.
//!
//! A block that moves between tiers has a range in every plane: tens to hundreds of copies, each of
//! which costs more to submit on its own than to carry out.
use cudarc::driver::sys::{CUresult, CUstream};
use kv_core::error::DeviceError;

use super::context::Context;
use super::facts::Driver;
use super::library::{CopyAttributes, CopyBatch, Location, STREAM_ORDER};
use crate::gpu::HostCopy;
use crate::params::Address;

/// Returns the driver's call if it exists and enough copies make it worthwhile.
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
    to: Vec<Address>,
    from: Vec<Address>,
    sizes: Vec<usize>,
    locations: &Locations,
) -> Result<(), DeviceError> {
    if sizes.is_empty() {
        return Ok(());
    }
    let _current = context.enter(operation)?;
    // SAFETY: all three conditions; the context is current.
    let code = unsafe { make_calls((call, stream), (to, from, sizes), locations) };
    context.check(operation, code)
}

/// Calls the driver for up to [`COPIES_MAX`] copies at a time; returns the first failure.
///
/// # Safety
/// 1. Conditions of [`submit`], whose context is current.
unsafe fn make_calls(
    (call, stream): (CopyBatch, CUstream),
    (mut to, mut from, mut sizes): (Vec<Address>, Vec<Address>, Vec<usize>),
    locations: &Locations,
) -> CUresult {
    let mut attributes = CopyAttributes {
        source_order: STREAM_ORDER,
        from: locations.from,
        to: locations.to,
        flags: 0,
    };
    let ends = to.chunks_mut(COPIES_MAX).zip(from.chunks_mut(COPIES_MAX));
    for ((to, from), sizes) in ends.zip(sizes.chunks_mut(COPIES_MAX)) {
        // One set of attributes for all copies, from the first on.
        let mut first = 0_usize;
        // SAFETY: condition 1; the driver copies the lists.
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
        if code != CUresult::CUDA_SUCCESS {
            return code;
        }
    }
    CUresult::CUDA_SUCCESS
}

/// Fewer copies are submitted one by one.
const COPIES_MIN: usize = 4;
/// Copies of one call. Driver 580.159.04 crashes with 51,828
/// ([vLLM #49276](https://github.com/vllm-project/vllm/issues/49276)).
const COPIES_MAX: usize = 4096;

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::{ptr, slice};

    use super::super::library::Optional;
    use super::*;

    thread_local! {
        /// Copies of each call, and the call from which on the driver fails.
        static CALLS: RefCell<(Vec<usize>, usize)> = const { RefCell::new((Vec::new(), 0)) };
    }

    /// Copies within host memory.
    unsafe extern "C" fn copy_batch(
        to: *mut Address,
        from: *mut Address,
        sizes: *mut usize,
        count: usize,
        attributes: *mut CopyAttributes,
        first: *mut usize,
        num_attributes: usize,
        _: CUstream,
    ) -> CUresult {
        let fails = CALLS.with_borrow_mut(|(calls, fails_from)| {
            calls.push(count);
            calls.len() > *fails_from
        });
        if fails {
            return CUresult::CUDA_ERROR_INVALID_VALUE;
        }
        // SAFETY: lists of `count` elements.
        let to = unsafe { slice::from_raw_parts(to, count) };
        // SAFETY: as above.
        let from = unsafe { slice::from_raw_parts(from, count) };
        // SAFETY: as above.
        let sizes = unsafe { slice::from_raw_parts(sizes, count) };
        // SAFETY: one set of attributes.
        let attributes = unsafe { *attributes };
        // SAFETY: and one index.
        let first = unsafe { *first };
        assert_eq!((num_attributes, first, attributes.source_order), (1, 0, STREAM_ORDER));
        assert_eq!((attributes.from, attributes.to), (Location::HOST, Location::device(0)));
        for ((to, from), bytes) in to.iter().zip(from).zip(sizes) {
            let [to, from] = [to, from].map(|at| usize::try_from(*at).unwrap());
            let (to, from) = (ptr::with_exposed_provenance_mut::<u8>(to), from);
            // SAFETY: the test's own arrays.
            unsafe { to.copy_from_nonoverlapping(ptr::with_exposed_provenance(from), *bytes) };
        }
        CUresult::CUDA_SUCCESS
    }

    /// Makes `count` copies of two bytes each; returns the outcome, the copies of each call, and
    /// how many bytes have arrived.
    fn copied(count: usize, calls_max: usize) -> (CUresult, Vec<usize>, usize) {
        let bytes: Vec<u16> = (1..=u16::try_from(count).unwrap()).collect();
        let mut there = vec![0_u16; count];
        let address = |base: usize, index: usize| {
            u64::try_from(base.wrapping_add(index.wrapping_mul(2))).unwrap()
        };
        let from = bytes.as_ptr().expose_provenance();
        let to = there.as_mut_ptr().expose_provenance();
        let lists = (
            (0..count).map(|index| address(to, index)).collect(),
            (0..count).map(|index| address(from, index)).collect(),
            vec![2; count],
        );
        let locations = Locations { from: Location::HOST, to: Location::device(0) };
        CALLS.set((Vec::new(), calls_max));
        // SAFETY: both arrays have `count` elements of two bytes; this driver needs no stream.
        let code = unsafe { make_calls((copy_batch, ptr::null_mut()), lists, &locations) };
        let arrived = there.iter().zip(&bytes).take_while(|(to, from)| to == from).count();
        (code, CALLS.take().0, arrived)
    }

    #[test]
    fn many_copies_are_several_calls() {
        let cases: [(usize, &[usize]); 7] = [
            (4, &[4]),
            (4095, &[4095]),
            (4096, &[4096]),
            (4097, &[4096, 1]),
            (2 * 4096, &[4096, 4096]),
            (3 * 4096 + 1, &[4096, 4096, 4096, 1]),
            (51_828, &[&[4096; 12][..], &[2676]].concat()),
        ];
        for (count, calls) in cases {
            let done = (CUresult::CUDA_SUCCESS, calls.to_vec(), count);
            assert_eq!(copied(count, usize::MAX), done, "{count} copies");
        }
    }

    #[test]
    fn a_failing_call_is_the_last() {
        let (code, calls, arrived) = copied(3 * 4096 + 1, 1);
        assert_eq!(code, CUresult::CUDA_ERROR_INVALID_VALUE);
        assert_eq!((calls, arrived), (vec![4096, 4096], 4096));
    }

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
        let driver = Driver { version: 12060, pools: true, ..Driver::default() };
        assert!(call(driver, 100).is_none());
        let optional = Optional { copy_batch: Some(copy_batch), ..Optional::default() };
        let driver = Driver { version: 13000, optional, ..driver };
        assert!(call(driver, 100).is_some() && call(driver, 1).is_none());
    }
}
