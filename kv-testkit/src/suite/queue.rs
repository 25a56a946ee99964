//! Command queues.
use kv_core::backend::{Fence, Queue};

use super::case;
use crate::case::{Case, CaseResult, Outcome, same};
use crate::device::{Device, fetch, wait};

pub(super) fn cases<B: Device>() -> Vec<Case<B>> {
    vec![
        case("queue/order", order),
        case("queue/wait_for", wait_for),
        case("queue/fence_polls_and_waits", fences),
        case("queue/drop_anytime", drop_anytime),
        case("queue/upload_copies_its_source", upload_copies),
    ]
}

fn order<B: Device>(backend: &B) -> CaseResult {
    let mut queue = backend.queue()?;
    let buffer = backend.alloc(64)?;
    for round in 1..20_u8 {
        queue.upload(&buffer, 0, &[round; 64])?;
        queue.zero(&buffer, 0, 8)?;
        queue.upload(&buffer, 4, &[round ^ 0xFF; 4])?;
        if round % 3 == 0 {
            queue.submit()?;
        }
        let got = fetch(backend.capabilities(), &mut queue, &buffer, (0, 64))?;
        let mut expected = vec![round; 64];
        expected[..4].fill(0);
        expected[4..8].fill(round ^ 0xFF);
        same(format!("round {round}"), got, expected)?;
    }
    Ok(Outcome::Holds)
}

fn wait_for<B: Device>(backend: &B) -> CaseResult {
    let (mut writer, mut reader) = (backend.queue()?, backend.queue()?);
    let buffer = backend.alloc(1 << 16)?;
    for round in 1..10_u8 {
        writer.upload(&buffer, 0, &vec![round; 1 << 16])?;
        let written = writer.submit()?;
        reader.wait_for(&written)?;
        let got = fetch(backend.capabilities(), &mut reader, &buffer, (0, 1 << 16))?;
        same(format!("round {round} seen from the other queue"), got, vec![round; 1 << 16])?;
        writer.wait_for(&reader.submit()?)?;
    }
    Ok(Outcome::Holds)
}

fn fences<B: Device>(backend: &B) -> CaseResult {
    let mut queue = backend.queue()?;
    let nothing = queue.submit()?;
    wait(backend.capabilities(), &nothing)?;
    let buffer = backend.alloc(64)?;
    queue.upload(&buffer, 0, &[1; 64])?;
    let fence = queue.submit()?;
    let copy = fence.clone();
    wait(backend.capabilities(), &fence)?;
    wait(backend.capabilities(), &copy)?;
    let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
    let done = fence.poll(&mut cx).is_ready();
    same("poll after wait says ready", done, true)?;
    Ok(Outcome::Holds)
}

fn drop_anytime<B: Device>(backend: &B) -> CaseResult {
    let bytes = 1 << 14;
    for round in 0..8 {
        let mut queue = backend.queue()?;
        let buffer = backend.alloc(bytes)?;
        queue.upload(&buffer, 0, &vec![3; bytes as usize])?;
        let readback = queue.download(&buffer, 0, bytes)?;
        match round % 4 {
            0 => drop(readback),
            1 => drop(buffer),
            2 => drop(queue.submit()?),
            _ => {
                drop(buffer);
                queue.submit()?;
                drop(readback);
            }
        }
        drop(queue);
    }
    // The device still works.
    let mut queue = backend.queue()?;
    let buffer = backend.alloc(bytes)?;
    let fence = queue.submit()?;
    drop(queue);
    wait(backend.capabilities(), &fence)?;
    let mut queue = backend.queue()?;
    let got = fetch(backend.capabilities(), &mut queue, &buffer, (0, 4))?;
    same("a buffer that outlived its first queue", got, vec![0; 4])?;
    Ok(Outcome::Holds)
}

fn upload_copies<B: Device>(backend: &B) -> CaseResult {
    let mut queue = backend.queue()?;
    let buffer = backend.alloc(64)?;
    let mut source = vec![5_u8; 64];
    queue.upload(&buffer, 0, &source)?;
    source.fill(9);
    let got = fetch(backend.capabilities(), &mut queue, &buffer, (0, 64))?;
    same("the source as it was at the call", got, vec![5; 64])?;
    Ok(Outcome::Holds)
}
