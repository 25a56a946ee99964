//! Memory of a device: allocation, upload, download, zero.
use kv_core::backend::Queue;
use kv_core::error::DeviceErrorKind;

use super::case;
use crate::case::{At, Case, CaseError, CaseResult, Outcome, device_error, refused, same};
use crate::device::{Device, fetch};
use crate::rng::Rng;

pub(super) fn cases<B: Device>() -> Vec<Case<B>> {
    vec![
        case("buffer/zeroed", zeroed),
        case("buffer/round_trip", round_trip),
        case("buffer/zero_range", zero_range),
        case("buffer/out_of_range", out_of_range),
        case("buffer/too_large_is_refused", too_large),
    ]
}

/// Downloads a whole buffer.
fn all<B: Device>(
    backend: &B,
    queue: &mut B::Queue,
    buffer: &B::Buffer,
    bytes: u64,
) -> Result<Vec<u8>, CaseError> {
    Ok(fetch(backend.capabilities(), queue, buffer, (0, bytes))?)
}

fn zeroed<B: Device>(backend: &B) -> CaseResult {
    let mut queue = backend.queue()?;
    for bytes in [4_u64, 64, 1000, 65_536] {
        // Dirty the memory and give it back, so that a recycled allocation would show.
        for _ in 0..2 {
            let buffer = backend.alloc(bytes)?;
            let got = all(backend, &mut queue, &buffer, bytes)?;
            same(format!("fresh buffer of {bytes} bytes"), got, vec![0; bytes as usize])?;
            queue.upload(&buffer, 0, &vec![0xA5; bytes as usize])?;
            queue.submit()?;
        }
    }
    Ok(Outcome::Holds)
}

fn round_trip<B: Device>(backend: &B) -> CaseResult {
    let mut queue = backend.queue()?;
    let mut rng = Rng::new(11);
    let buffer = backend.alloc(512)?;
    let mut expected = vec![0; 512];
    for _ in 0..40 {
        let begin = rng.below(128) * 4;
        let len = (rng.below(64) * 4 + 4).min(512 - begin);
        let bytes: Vec<u8> = (0..len).map(|_| rng.bits() as u8).collect();
        queue.upload(&buffer, u64::from(begin), &bytes)?;
        expected[begin as usize..(begin + len) as usize].copy_from_slice(&bytes);
        let range = (u64::from(begin / 2 / 4 * 4), 96.min(u64::from(512 - begin / 2)) / 4 * 4);
        let got = fetch(backend.capabilities(), &mut queue, &buffer, range)?;
        let part = &expected[range.0 as usize..(range.0 + range.1) as usize];
        same(format!("bytes {range:?}"), got, part.to_vec())?;
    }
    same("the whole buffer", all(backend, &mut queue, &buffer, 512)?, expected)?;
    queue.upload(&buffer, 512, &[]).at("upload of nothing at the end")?;
    Ok(Outcome::Holds)
}

fn zero_range<B: Device>(backend: &B) -> CaseResult {
    let mut queue = backend.queue()?;
    let buffer = backend.alloc(64)?;
    queue.upload(&buffer, 0, &[7; 64])?;
    queue.zero(&buffer, 16, 8)?;
    let mut expected = vec![7; 64];
    expected[16..24].fill(0);
    same("zero of bytes 16..24", all(backend, &mut queue, &buffer, 64)?, expected)?;
    Ok(Outcome::Holds)
}

fn out_of_range<B: Device>(backend: &B) -> CaseResult {
    let mut queue = backend.queue()?;
    let buffer = backend.alloc(64)?;
    for (at, bytes) in [(64_u64, 4_u64), (60, 8), (u64::MAX - 3, 8), (1 << 40, 4)] {
        let src = vec![1; bytes as usize];
        let range = device_error(DeviceErrorKind::OutOfRange);
        let place = |what: &str| format!("{what} of {bytes} bytes at {at} of 64");
        refused(place("upload"), queue.upload(&buffer, at, &src), range)?;
        refused(place("download"), queue.download(&buffer, at, bytes), range)?;
        refused(place("zero"), queue.zero(&buffer, at, bytes), range)?;
    }
    same("a refused call", all(backend, &mut queue, &buffer, 64)?, vec![0; 64])?;
    Ok(Outcome::Holds)
}

fn too_large<B: Device>(backend: &B) -> CaseResult {
    refused("a buffer of 2^62 bytes", backend.alloc(1 << 62), |error| {
        matches!(error, kv_core::CacheError::Device(e)
            if matches!(e.kind(), DeviceErrorKind::Unsupported | DeviceErrorKind::OutOfMemory))
    })?;
    backend.alloc(64).at("a small buffer after a refused one")?;
    Ok(Outcome::Holds)
}
