//! Host pools: chunks of blocks in host memory, and copies between them and the device.
use std::ops::Range;

use kv_core::backend::{
    AnyBackend, Backend, ChunkLayout, ChunkShape, HostPool, KvStorage, NullBackend, Plane,
    PlaneLayout, PlaneShape, Queue, StorageView,
};
use kv_core::error::DeviceErrorKind;
use kv_core::{BlockId, BlockOrder, KvFormat};

use super::case;
use crate::case::{Case, CaseError, CaseResult, Outcome, device_error, ensure, refused, same};
use crate::device::{Device, arrive, dim, fetch, limited};
use crate::rng::Rng;

const NUM_BLOCKS: u32 = 9;
const SHAPE: ChunkShape = ChunkShape { blocks: 4, header_bytes: 100 };

pub(super) fn cases<B: Device>() -> Vec<Case<B>> {
    vec![
        case("tier/round_trip", round_trip),
        case("tier/pieces", pieces),
        case("tier/places", places),
        case("tier/order", order),
        case("tier/fence", fence),
        case("tier/drop_anytime", drop_anytime),
        case("tier/refusals", refusals),
        case("tier/foreign_handles", foreign_handles),
    ]
}

/// Two layers of one group: K and V differ in format and in `head_dim`. Layer 1 has no memory.
fn storage<B: Device>(backend: &B) -> Result<KvStorage<B::Buffer>, CaseError> {
    let layout = |format, head_dim| {
        PlaneLayout::new(PlaneShape {
            num_blocks: NUM_BLOCKS,
            block_size: 3,
            num_kv_heads: 3,
            head_dim,
            order: BlockOrder::Hnd,
            format,
        })
    };
    let layouts =
        [layout(KvFormat::F16, dim(backend, 8))?, layout(KvFormat::F32, dim(backend, 12))?];
    let mut storage = KvStorage::new(backend, layouts)?;
    for layer in [0, 2] {
        storage.allocate(backend, layer)?;
    }
    Ok(storage)
}

/// Uploads random bytes to every plane, and returns them.
fn fill<Q: Queue>(
    queue: &mut Q,
    storage: &KvStorage<Q::Buffer>,
    seed: u64,
) -> Result<Vec<Vec<u8>>, CaseError> {
    let mut rng = Rng::new(seed);
    let mut planes = Vec::new();
    for plane in storage.view().planes() {
        let layout = plane.layout();
        let bytes: Vec<u8> = (0..layout.plane_bytes()).map(|_| rng.bits() as u8).collect();
        let mut rest = bytes.as_slice();
        for segment in 0..layout.num_segments() {
            let (part, more) = rest.split_at(layout.segment_bytes(segment) as usize);
            let buffer = plane.segment(segment as usize).ok_or("a plane without a buffer")?;
            queue.upload(buffer, 0, part)?;
            rest = more;
        }
        planes.push(bytes);
    }
    Ok(planes)
}

/// Downloads every plane.
fn read<B: Device>(
    backend: &B,
    queue: &mut B::Queue,
    storage: &KvStorage<B::Buffer>,
) -> Result<Vec<Vec<u8>>, CaseError> {
    let mut planes = Vec::new();
    for plane in storage.view().planes() {
        let layout = plane.layout();
        let mut bytes = Vec::new();
        for segment in 0..layout.num_segments() {
            let buffer = plane.segment(segment as usize).ok_or("a plane without a buffer")?;
            let range = (0, layout.segment_bytes(segment));
            bytes.extend(fetch(backend.capabilities(), queue, buffer, range)?);
        }
        planes.push(bytes);
    }
    Ok(planes)
}

fn ids(blocks: &[u32]) -> Vec<BlockId> {
    blocks.iter().copied().map(BlockId).collect()
}

fn block_of<'a>(plane: &'a [u8], layout: &PlaneLayout, block: u32) -> &'a [u8] {
    let bytes = layout.block_bytes() as usize;
    &plane[block as usize * bytes..][..bytes]
}

/// Returns the bytes of a place in the plane with this index: K then V, layer by layer.
fn piece_of(layout: &ChunkLayout, place: u32, index: usize) -> Range<usize> {
    let kind = if index.is_multiple_of(2) { Plane::Key } else { Plane::Value };
    layout.piece(place, index as u32 / 2, kind)
}

fn round_trip<B: Device>(backend: &B) -> CaseResult {
    // One segment, then segments of two blocks.
    let two_blocks = 2 * 3 * 3 * 4 * u64::from(dim(backend, 12));
    for max in [u64::MAX, two_blocks] {
        let backend = limited(backend, |found| {
            let max = max.min(found.binding_bytes_max);
            found.with_binding_bytes_max(max)
        });
        let storage = storage(&backend)?;
        let mut queue = backend.queue()?;
        let mut expected = fill(&mut queue, &storage, 1)?;
        let mut pool = backend.host_pool(storage.view(), SHAPE, 1)?;
        let chunk = pool.take().ok_or("a new pool has a chunk")?;
        let written = queue.submit()?;
        let pending = pool.copy_out(&written, storage.view(), &ids(&[3, 8, 5]), chunk, 1)?;
        let chunk = arrive(backend.capabilities(), pending)?;
        let free = queue.submit()?;
        let copied = pool.copy_in(&free, storage.view(), &ids(&[0, 7, 3]), &chunk, 1)?;
        drop(chunk);
        queue.wait_for(&copied)?;
        for (plane, view) in expected.iter_mut().zip(storage.view().planes()) {
            let bytes = view.layout().block_bytes() as usize;
            let before = plane.clone();
            for (from, to) in [(3, 0), (8, 7), (5, 3)] {
                let source = block_of(&before, view.layout(), from);
                plane[to * bytes..][..bytes].copy_from_slice(source);
            }
        }
        let got = read(&backend, &mut queue, &storage)?;
        ensure(got == expected, || format!("planes differ with bindings of {max} bytes"))?;
    }
    Ok(Outcome::Holds)
}

fn pieces<B: Device>(backend: &B) -> CaseResult {
    let storage = storage(backend)?;
    let mut queue = backend.queue()?;
    let planes = fill(&mut queue, &storage, 2)?;
    let mut pool = backend.host_pool(storage.view(), SHAPE, 1)?;
    let layout = *pool.layout();
    same("a header is a whole page", layout.header_bytes(), ChunkLayout::ALIGN)?;
    same("layers with memory", layout.num_layers(), 2)?;
    let chunk = pool.take().ok_or("a new pool has a chunk")?;
    let after = queue.submit()?;
    let blocks = [4, 0, 8, 1];
    let pending = pool.copy_out(&after, storage.view(), &ids(&blocks), chunk, 0)?;
    let chunk = arrive(backend.capabilities(), pending)?;
    let bytes = chunk.as_ref();
    same("bytes of a chunk", bytes.len(), layout.bytes())?;
    same("alignment", bytes.as_ptr().align_offset(ChunkLayout::ALIGN), 0)?;
    let mut end = layout.header_bytes();
    for (place, block) in (0..).zip(blocks) {
        for (index, (plane, view)) in planes.iter().zip(storage.view().planes()).enumerate() {
            let piece = piece_of(&layout, place, index);
            ensure(
                piece.start >= end && piece.start.is_multiple_of(ChunkLayout::PIECE_ALIGN),
                || {
                    format!(
                        "piece {piece:?} of place {place} overlaps the one before or is unaligned"
                    )
                },
            )?;
            end = piece.end;
            ensure(bytes[piece] == *block_of(plane, view.layout(), block), || {
                format!("place {place}, plane {index} is not block {block}")
            })?;
        }
    }
    ensure(end <= bytes.len(), || format!("pieces end at {end} of {}", bytes.len()))?;
    Ok(Outcome::Holds)
}

fn places<B: Device>(backend: &B) -> CaseResult {
    let storage = storage(backend)?;
    let mut queue = backend.queue()?;
    fill(&mut queue, &storage, 3)?;
    let mut pool = backend.host_pool(storage.view(), SHAPE, 1)?;
    let layout = *pool.layout();
    let mut chunk = pool.take().ok_or("a new pool has a chunk")?;
    chunk.as_mut().fill(0xA5);
    let after = queue.submit()?;
    let pending = pool.copy_out(&after, storage.view(), &ids(&[6]), chunk, 2)?;
    let chunk = arrive(backend.capabilities(), pending)?;
    let written: Vec<_> = (0..4).map(|index| piece_of(&layout, 2, index)).collect();
    let changed = |at: &usize| written.iter().any(|piece| piece.contains(at));
    let outside = chunk.as_ref().iter().enumerate().find(|(at, b)| !changed(at) && **b != 0xA5);
    same("a byte outside of place 2 that was written", outside, None)?;
    Ok(Outcome::Holds)
}

fn order<B: Device>(backend: &B) -> CaseResult {
    let storage = storage(backend)?;
    let mut queue = backend.queue()?;
    let mut pool = backend.host_pool(storage.view(), SHAPE, 2)?;
    for round in 0..6 {
        // Nothing waits on the host before the chunk is read.
        let planes = fill(&mut queue, &storage, 10 + round)?;
        let written = queue.submit()?;
        let chunk = pool.take().ok_or("a pool of two chunks has one")?;
        let pending = pool.copy_out(&written, storage.view(), &ids(&[2]), chunk, 0)?;
        let chunk = arrive(backend.capabilities(), pending)?;
        fill(&mut queue, &storage, 100 + round)?;
        let free = queue.submit()?;
        let copied = pool.copy_in(&free, storage.view(), &ids(&[2]), &chunk, 0)?;
        queue.wait_for(&copied)?;
        let got = read(backend, &mut queue, &storage)?;
        for ((plane, got), view) in planes.iter().zip(&got).zip(storage.view().planes()) {
            let [expected, got] = [plane, got].map(|bytes| block_of(bytes, view.layout(), 2));
            ensure(got == expected, || format!("round {round}: bytes of another time"))?;
        }
    }
    Ok(Outcome::Holds)
}

/// Work that waits for the pool's fence overwrites blocks only once they are copied.
fn fence<B: Device>(backend: &B) -> CaseResult {
    let storage = storage(backend)?;
    let mut queue = backend.queue()?;
    let mut pool = backend.host_pool(storage.view(), SHAPE, 2)?;
    for round in 0..6 {
        let planes = fill(&mut queue, &storage, 20 + round)?;
        let written = queue.submit()?;
        let mut copy_out = |block| -> Result<_, CaseError> {
            let chunk = pool.take().ok_or("a pool of two chunks has one")?;
            Ok(pool.copy_out(&written, storage.view(), &ids(&[block]), chunk, 0)?)
        };
        let pending = [copy_out(2)?, copy_out(5)?];
        let copied = pool.fence()?;
        queue.wait_for(&copied)?;
        fill(&mut queue, &storage, 200 + round)?;
        queue.flush()?;
        for (pending, block) in pending.into_iter().zip([2, 5]) {
            let chunk = arrive(backend.capabilities(), pending)?;
            let views = storage.view().planes().zip(0..);
            for ((view, index), plane) in views.zip(&planes) {
                let piece = &chunk.as_ref()[piece_of(pool.layout(), 0, index)];
                let expected = block_of(plane, view.layout(), block);
                ensure(piece == expected, || format!("round {round}: block {block} is another"))?;
            }
        }
    }
    Ok(Outcome::Holds)
}

fn drop_anytime<B: Device>(backend: &B) -> CaseResult {
    let storage = storage(backend)?;
    let mut queue = backend.queue()?;
    fill(&mut queue, &storage, 4)?;
    let chunks = 3;
    let mut pool = backend.host_pool(storage.view(), SHAPE, chunks)?;
    for round in 0..9 {
        let mut taken = Vec::new();
        // A chunk whose copies still run is not handed out again before they end.
        for _ in 0..1_000_000 {
            taken.extend(pool.take());
            if taken.len() == chunks as usize {
                break;
            }
            std::thread::yield_now();
        }
        same(format!("chunks in round {round}"), taken.len(), chunks as usize)?;
        ensure(pool.take().is_none(), || "more chunks than reserved".to_owned())?;
        let chunk = taken.pop().ok_or("a chunk")?;
        let fence = queue.submit()?;
        match round % 3 {
            0 => drop(pool.copy_out(&fence, storage.view(), &ids(&[1, 2]), chunk, 0)?),
            1 => {
                let copied = pool.copy_in(&fence, storage.view(), &ids(&[1, 2]), &chunk, 0)?;
                drop(chunk);
                queue.wait_for(&copied)?;
            }
            _ => {
                let pending = pool.copy_out(&fence, storage.view(), &ids(&[1]), chunk, 3)?;
                drop(pool);
                pool = backend.host_pool(storage.view(), SHAPE, chunks)?;
                drop(arrive(backend.capabilities(), pending)?);
            }
        }
    }
    // The device still works, and a chunk outlives its pool.
    let mut chunk = pool.take();
    for _ in 0..1_000_000 {
        if chunk.is_some() {
            break;
        }
        std::thread::yield_now();
        chunk = pool.take();
    }
    let mut chunk = chunk.ok_or("a chunk")?;
    drop(pool);
    chunk.as_mut().fill(7);
    ensure(chunk.as_ref().iter().all(|byte| *byte == 7), || "bytes were lost".to_owned())?;
    read(backend, &mut queue, &storage)?;
    Ok(Outcome::Holds)
}

fn refusals<B: Device>(backend: &B) -> CaseResult {
    let mut storage = storage(backend)?;
    let mut queue = backend.queue()?;
    let planes = fill(&mut queue, &storage, 5)?;
    let fence = queue.submit()?;
    let no_blocks = ChunkShape { blocks: 0, ..SHAPE };
    let unsupported = device_error(DeviceErrorKind::Unsupported);
    let out_of_range = device_error(DeviceErrorKind::OutOfRange);
    refused("chunks of no block", backend.host_pool(storage.view(), no_blocks, 1), unsupported)?;
    let mut pool = backend.host_pool(storage.view(), SHAPE, 1)?;
    let chunk = pool.take().ok_or("a new pool has a chunk")?;
    let copy_in = |pool: &mut B::HostPool, view: StorageView<'_, _>, blocks: &[u32], first| {
        pool.copy_in(&fence, view, &ids(blocks), &chunk, first)
    };
    let view = storage.view();
    refused("a block past the last", copy_in(&mut pool, view, &[1, NUM_BLOCKS], 0), out_of_range)?;
    refused("a place past the last", copy_in(&mut pool, view, &[1, 2], 3), out_of_range)?;
    refused("no such place", copy_in(&mut pool, view, &[1], u32::MAX), out_of_range)?;
    refused("a block named twice", copy_in(&mut pool, view, &[1, 2, 1], 0), unsupported)?;
    // No block has no place, so any place is right.
    copy_in(&mut pool, view, &[], u32::MAX)?;
    let got = read(backend, &mut queue, &storage)?;
    ensure(got == planes, || "a refused call changed a plane".to_owned())?;
    storage.allocate(backend, 1)?;
    refused("one layer more", copy_in(&mut pool, storage.view(), &[1], 0), unsupported)?;
    let again = pool.copy_out(&fence, storage.view(), &ids(&[1]), chunk, 0);
    refused("one layer more, out", again, unsupported)?;
    ensure(pool.take().is_some(), || "a refused copy lost its chunk".to_owned())?;
    Ok(Outcome::Holds)
}

fn foreign_handles<B: Device>(backend: &B) -> CaseResult {
    let (own, other) = (AnyBackend::new(backend.clone()), AnyBackend::new(NullBackend::new()));
    let foreign = device_error(DeviceErrorKind::ForeignHandle);
    let (storage, strange) = (storage(&own)?, storage(&other)?);
    refused("a pool", own.host_pool(strange.view(), SHAPE, 1), foreign)?;
    let mut pool = own.host_pool(storage.view(), SHAPE, 2)?;
    let fences = (own.queue()?.submit()?, other.queue()?.submit()?);
    let mut take = || pool.take().ok_or("a pool of two chunks has one");
    let (chunk, second) = (take()?, take()?);
    let blocks = ids(&[1]);
    let view = storage.view();
    refused("a fence", pool.copy_in(&fences.1, view, &blocks, &chunk, 0), foreign)?;
    refused("planes", pool.copy_in(&fences.0, strange.view(), &blocks, &chunk, 0), foreign)?;
    refused("a fence, out", pool.copy_out(&fences.1, view, &blocks, second, 0), foreign)?;
    let strange_pool = other.host_pool(strange.view(), SHAPE, 1)?.take();
    let strange_chunk = strange_pool.ok_or("a new pool has a chunk")?;
    refused("a chunk", pool.copy_in(&fences.0, view, &blocks, &strange_chunk, 0), foreign)?;
    let mut second_pool = own.host_pool(storage.view(), SHAPE, 1)?;
    let strange_chunk = second_pool.take().ok_or("a new pool has a chunk")?;
    let copied = pool.copy_in(&fences.0, view, &blocks, &strange_chunk, 0);
    refused("a chunk of another pool", copied, foreign)?;
    let copied = pool.copy_out(&fences.0, view, &blocks, strange_chunk, 0);
    refused("a chunk of another pool, out", copied, foreign)?;
    Ok(Outcome::Holds)
}
