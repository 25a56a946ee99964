//! The cases: plain functions over a store.
use std::panic::resume_unwind;
use std::sync::Barrier;
use std::thread::{self, ScopedJoinHandle};
use std::time::{Duration, Instant};

use kv_tier::{
    BlockStore, ChunkAddress, ChunkName, ModelDigest, Put, Scope, StoreError, StoreErrorKind,
};

use super::{StoreFixture, chunk_address, chunk_bytes, soon};
use crate::case::{CaseError, CaseResult, Outcome, ensure, same};

/// One guarantee of stores.
#[derive(Debug, Clone, Copy)]
pub struct StoreCase {
    /// The guarantee.
    pub name: &'static str,
    /// Checks it.
    pub run: fn(&dyn StoreFixture) -> CaseResult,
}

/// Every case.
pub const STORE_CASES: &[StoreCase] = &[
    case("what_is_absent_is_no_error", absent),
    case("a_chunk_comes_back_byte_for_byte", round_trip),
    case("a_second_write_changes_nothing", second_write),
    case("no_bytes_are_no_chunk", empty),
    case("the_largest_chunk_comes_back", largest),
    case("a_root_is_a_room_of_its_own", other_root),
    case("names_that_begin_alike_differ", alike),
    case("lookups_answer_in_order", in_order),
    case("a_removed_chunk_is_absent", removed),
    case("a_root_is_removed_whole_or_the_store_refuses", removed_root),
    case("nothing_is_written_past_a_buffer", small_buffer),
    case("a_passed_deadline_has_no_effect", passed_deadline),
    case("one_name_may_be_written_by_eight_threads", one_name),
    case("threads_read_what_is_whole_or_nothing", whole_or_nothing),
    case("what_was_written_is_found_later", reopened),
    case("two_open_stores_are_one", two_stores),
];

const fn case(name: &'static str, run: fn(&dyn StoreFixture) -> CaseResult) -> StoreCase {
    StoreCase { name, run }
}

fn absent(fixture: &dyn StoreFixture) -> CaseResult {
    let store = fixture.open()?;
    let chunk = chunk_address(1, 1);
    let mut into = [0x5A; 64];
    same("read", store.get(&chunk, &mut into, soon())?, None)?;
    same("buffer", into, [0x5A; 64])?;
    same("lookup", store.contains(&[chunk], soon())?, vec![false])?;
    same("lookup of nothing", store.contains(&[], soon())?, vec![])?;
    store.remove(&[chunk, chunk_address(1, 2)], soon())?;
    store.remove(&[], soon())?;
    Ok(Outcome::Holds)
}

fn round_trip(fixture: &dyn StoreFixture) -> CaseResult {
    let store = fixture.open()?;
    for (n, length) in [1, 7, 4_095, 4_096, 4_097, 65_536, 100_000].into_iter().enumerate() {
        let chunk = chunk_address(2, n as u64);
        let bytes = chunk_bytes(&chunk, length);
        same(format!("write of {length}"), store.put(&chunk, &bytes, soon())?, Put::New)?;
        check_chunk(&*store, &chunk, length)?;
        // A buffer in which reads can be direct, where the store knows such a thing.
        let mut pages = vec![Page([0x5A; 4_096]); length.div_ceil(4_096) + 1];
        let mut into: Vec<&mut [u8; 4_096]> = pages.iter_mut().map(|page| &mut page.0).collect();
        if length == 4_096 {
            let got = store.get(&chunk, into[0].as_mut_slice(), soon())?;
            same("length on a page", got, Some(length))?;
            same("bytes on a page", into[0].as_slice(), bytes.as_slice())?;
            same("page after it", *into[1], [0x5A; 4_096])?;
            let other = chunk_address(2, 1_000);
            same("write from a page", store.put(&other, into[0].as_slice(), soon())?, Put::New)?;
            let mut back = vec![0; length];
            same("read of it", store.get(&other, &mut back, soon())?, Some(length))?;
            same("its bytes", back, bytes)?;
        }
    }
    Ok(Outcome::Holds)
}

fn second_write(fixture: &dyn StoreFixture) -> CaseResult {
    let store = fixture.open()?;
    let chunk = chunk_address(3, 1);
    let bytes = chunk_bytes(&chunk, 5_000);
    same("first", store.put(&chunk, &bytes, soon())?, Put::New)?;
    same("second", store.put(&chunk, &bytes, soon())?, Put::WasThere)?;
    check_chunk(&*store, &chunk, 5_000)?;
    Ok(Outcome::Holds)
}

fn empty(fixture: &dyn StoreFixture) -> CaseResult {
    let store = fixture.open()?;
    let chunk = chunk_address(4, 1);
    // A store may refuse the write, or refuse the read later; it never returns a chunk of 0 bytes.
    match store.put(&chunk, &[], soon()) {
        Ok(_) => {
            let read = store.get(&chunk, &mut [0; 16], soon());
            refused("read of no bytes", read, StoreErrorKind::Corrupt)?;
        }
        Err(error) => {
            same("refusal", error.kind(), StoreErrorKind::Corrupt)?;
            same("read", store.get(&chunk, &mut [0; 16], soon())?, None)?;
        }
    }
    Ok(Outcome::Holds)
}

fn largest(fixture: &dyn StoreFixture) -> CaseResult {
    let store = fixture.open()?;
    let (chunk, length) = (chunk_address(5, 1), fixture.chunk_bytes_max());
    same("write", store.put(&chunk, &chunk_bytes(&chunk, length), soon())?, Put::New)?;
    check_chunk(&*store, &chunk, length)?;
    store.remove(&[chunk], soon())?;
    Ok(Outcome::Holds)
}

fn other_root(fixture: &dyn StoreFixture) -> CaseResult {
    let store = fixture.open()?;
    let (chunk, other) = (chunk_address(6, 1), chunk_address(7, 1));
    store.put(&chunk, &chunk_bytes(&chunk, 100), soon())?;
    same("other root", store.get(&other, &mut [0; 200], soon())?, None)?;
    same("lookup", store.contains(&[other, chunk], soon())?, vec![false, true])?;
    store.remove(&[other], soon())?;
    check_chunk(&*store, &chunk, 100)?;
    same("write", store.put(&other, &chunk_bytes(&other, 90), soon())?, Put::New)?;
    check_chunk(&*store, &chunk, 100)?;
    check_chunk(&*store, &other, 90)?;
    Ok(Outcome::Holds)
}

fn alike(fixture: &dyn StoreFixture) -> CaseResult {
    let store = fixture.open()?;
    let root = chunk_address(8, 1).root;
    // Equal but for one byte, at each place.
    let names = (0..32).map(|place| {
        let mut name = [0; 32];
        name[place] = 1;
        ChunkAddress { root, name: ChunkName::new(name) }
    });
    let chunks: Vec<_> = names.collect();
    for chunk in &chunks {
        same("write", store.put(chunk, &chunk_bytes(chunk, 64), soon())?, Put::New)?;
    }
    chunks.iter().try_for_each(|chunk| check_chunk(&*store, chunk, 64))?;
    let none = ChunkAddress { root, name: ChunkName::new([0; 32]) };
    same("the name of zeroes", store.contains(&[none], soon())?, vec![false])?;
    Ok(Outcome::Holds)
}

fn in_order(fixture: &dyn StoreFixture) -> CaseResult {
    let store = fixture.open()?;
    let chunks: Vec<_> = (0..100).map(|n| chunk_address(9, n)).collect();
    let is_there = |n: usize| n.is_multiple_of(3) || n == 71;
    for (n, chunk) in chunks.iter().enumerate().filter(|(n, _)| is_there(*n)).rev() {
        store.put(chunk, &chunk_bytes(chunk, 10 + n), soon())?;
    }
    let expected: Vec<_> = (0..chunks.len()).map(is_there).collect();
    same("lookup", store.contains(&chunks, soon())?, expected.clone())?;
    let (mut turned, mut answers) = (chunks, expected);
    turned.reverse();
    answers.reverse();
    same("lookup backwards", store.contains(&turned, soon())?, answers)?;
    let twice = [turned[0], turned[0], turned[1]];
    same("lookup of one twice", store.contains(&twice, soon())?, vec![true, true, false])?;
    Ok(Outcome::Holds)
}

fn removed(fixture: &dyn StoreFixture) -> CaseResult {
    let store = fixture.open()?;
    let chunks = [1, 2, 3].map(|n| chunk_address(10, n));
    for chunk in &chunks {
        store.put(chunk, &chunk_bytes(chunk, 100), soon())?;
    }
    store.remove(&[chunks[0], chunk_address(10, 4), chunks[2]], soon())?;
    same("lookup", store.contains(&chunks, soon())?, vec![false, true, false])?;
    same("read", store.get(&chunks[0], &mut [0; 100], soon())?, None)?;
    same("write again", store.put(&chunks[0], &chunk_bytes(&chunks[0], 100), soon())?, Put::New)?;
    check_chunk(&*store, &chunks[0], 100)?;
    check_chunk(&*store, &chunks[1], 100)?;
    Ok(Outcome::Holds)
}

fn removed_root(fixture: &dyn StoreFixture) -> CaseResult {
    let store = fixture.open()?;
    let chunks = [(18, 1), (19, 1), (18, 2)].map(|(root, name)| chunk_address(root, name));
    for chunk in &chunks {
        store.put(chunk, &chunk_bytes(chunk, 100), soon())?;
    }
    let roots = Scope::Roots(vec![chunks[0].root, chunk_address(20, 1).root]);
    let expected = match store.remove_all(&roots, soon()) {
        Ok(_) => vec![false, true, false],
        Err(error) if error.kind() == StoreErrorKind::Unsupported => vec![true; 3],
        Err(error) => return Err(error.into()),
    };
    same("lookup", store.contains(&chunks, soon())?, expected.clone())?;
    // These chunks are of no model.
    let model = Scope::Model(ModelDigest::of_bytes(b"none"));
    match store.remove_all(&model, soon()) {
        Err(error) if error.kind() != StoreErrorKind::Unsupported => return Err(error.into()),
        Err(_) => {}
        Ok(removed) => same("chunks of a model", removed, 0)?,
    }
    same("lookup after it", store.contains(&chunks, soon())?, expected)?;
    check_chunk(&*store, &chunks[1], 100)?;
    Ok(Outcome::Holds)
}

fn small_buffer(fixture: &dyn StoreFixture) -> CaseResult {
    let store = fixture.open()?;
    for (n, length) in [100_usize, 8_192].into_iter().enumerate() {
        let chunk = chunk_address(11, n as u64);
        store.put(&chunk, &chunk_bytes(&chunk, length), soon())?;
        for room in [0, 1, length / 2, length - 1] {
            let mut memory = vec![0x5A; length + 64];
            let read = store.get(&chunk, &mut memory[..room], soon());
            refused(format_args!("{length} bytes into {room}"), read, StoreErrorKind::Corrupt)?;
            ensure(memory[room..].iter().all(|&byte| byte == 0x5A), || {
                format!("{length} bytes into {room}: written past the end")
            })?;
        }
        check_chunk(&*store, &chunk, length)?;
    }
    Ok(Outcome::Holds)
}

fn passed_deadline(fixture: &dyn StoreFixture) -> CaseResult {
    let store = fixture.open()?;
    let (kept, new) = (chunk_address(12, 1), chunk_address(12, 2));
    store.put(&kept, &chunk_bytes(&kept, 100), soon())?;
    let now = Instant::now();
    let mut into = [0x5A; 128];
    refused("read", store.get(&kept, &mut into, now), StoreErrorKind::Timeout)?;
    refused("write", store.put(&new, &[1; 100], now), StoreErrorKind::Timeout)?;
    refused("lookup", store.contains(&[kept], now), StoreErrorKind::Timeout)?;
    refused("removal", store.remove(&[kept], now), StoreErrorKind::Timeout)?;
    ensure(now.elapsed() < Duration::from_millis(200), || {
        format!("four refusals took {:?}", now.elapsed())
    })?;
    same("buffer", into, [0x5A; 128])?;
    same("lookup", store.contains(&[kept, new], soon())?, vec![true, false])?;
    check_chunk(&*store, &kept, 100)?;
    Ok(Outcome::Holds)
}

fn one_name(fixture: &dyn StoreFixture) -> CaseResult {
    let store = fixture.open()?;
    let (chunk, start) = (chunk_address(13, 1), Barrier::new(THREADS));
    let bytes = chunk_bytes(&chunk, 50_000);
    let write = || {
        start.wait();
        store.put(&chunk, &bytes, soon())
    };
    let puts: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(write)).collect();
        threads.into_iter().map(joined).collect()
    });
    let puts = puts.into_iter().collect::<Result<Vec<_>, _>>()?;
    ensure(puts.contains(&Put::New), || format!("nobody wrote it: {puts:?}"))?;
    check_chunk(&*store, &chunk, 50_000)?;
    store.remove(&[chunk], soon())?;
    same("one removal", store.get(&chunk, &mut [0; 64], soon())?, None)?;
    Ok(Outcome::Holds)
}

fn whole_or_nothing(fixture: &dyn StoreFixture) -> CaseResult {
    let store = fixture.open()?;
    let chunks: Vec<_> = (0..8).map(|n| chunk_address(14, n)).collect();
    let length = |n: usize| 3_000 + 17_000 * n;
    let start = Barrier::new(2);
    let write = || -> Result<(), StoreError> {
        start.wait();
        for _ in 0..4 {
            for (n, chunk) in chunks.iter().enumerate() {
                store.put(chunk, &chunk_bytes(chunk, length(n)), soon())?;
            }
            store.remove(&chunks, soon())?;
        }
        Ok(())
    };
    let read = || -> Result<(), CaseError> {
        let mut into = vec![0; length(8)];
        start.wait();
        for n in (0..chunks.len()).cycle().take(400) {
            let Some(bytes) = store.get(&chunks[n], &mut into, soon())? else { continue };
            let expected = chunk_bytes(&chunks[n], length(n));
            ensure(into[..bytes] == expected, || format!("{bytes} bytes of chunk {n} differ"))?;
        }
        Ok(())
    };
    let (written, read) = thread::scope(|scope| {
        let writer = scope.spawn(write);
        let read = read();
        (joined(writer), read)
    });
    written?;
    read?;
    Ok(Outcome::Holds)
}

/// Waits for a thread; its panic is the case's.
fn joined<T>(thread: ScopedJoinHandle<'_, T>) -> T {
    thread.join().unwrap_or_else(|panic| resume_unwind(panic))
}

fn reopened(fixture: &dyn StoreFixture) -> CaseResult {
    if !fixture.keeps() {
        return Ok(Outcome::Unsupported("the store keeps nothing".into()));
    }
    let chunk = chunk_address(15, 1);
    let store = fixture.open()?;
    same("write", store.put(&chunk, &chunk_bytes(&chunk, 70_000), soon())?, Put::New)?;
    drop(store);
    let store = fixture.open()?;
    same("lookup", store.contains(&[chunk], soon())?, vec![true])?;
    check_chunk(&*store, &chunk, 70_000)?;
    same("write", store.put(&chunk, &chunk_bytes(&chunk, 70_000), soon())?, Put::WasThere)?;
    Ok(Outcome::Holds)
}

fn two_stores(fixture: &dyn StoreFixture) -> CaseResult {
    if !fixture.keeps() {
        return Ok(Outcome::Unsupported("the store keeps nothing".into()));
    }
    let (one, two) = (fixture.open()?, fixture.open()?);
    let chunk = chunk_address(16, 1);
    same("lookup before", two.contains(&[chunk], soon())?, vec![false])?;
    same("write", one.put(&chunk, &chunk_bytes(&chunk, 9_000), soon())?, Put::New)?;
    same("lookup", two.contains(&[chunk], soon())?, vec![true])?;
    check_chunk(&*two, &chunk, 9_000)?;
    same("second write", two.put(&chunk, &chunk_bytes(&chunk, 9_000), soon())?, Put::WasThere)?;
    two.remove(&[chunk], soon())?;
    same("read of what the other removed", one.get(&chunk, &mut [0; 64], soon())?, None)?;
    same("lookup after", one.contains(&[chunk], soon())?, vec![false])?;
    Ok(Outcome::Holds)
}

/// Fails unless a chunk has its bytes, and nothing was written after them.
fn check_chunk(
    store: &dyn BlockStore,
    chunk: &ChunkAddress,
    length: usize,
) -> Result<(), CaseError> {
    let mut into = vec![0x5A; length + 100];
    same(format!("length of {}", chunk.name), store.get(chunk, &mut into, soon())?, Some(length))?;
    ensure(into[..length] == chunk_bytes(chunk, length), || {
        format!("{} has other bytes", chunk.name)
    })?;
    // A store may use the given buffer, but not the bytes after the chunk.
    let mut exact = vec![0x5A; length + 100];
    let read = store.get(chunk, &mut exact[..length], soon())?;
    same(format!("exact length of {}", chunk.name), read, Some(length))?;
    ensure(exact[length..].iter().all(|&byte| byte == 0x5A), || "written past the end".into())?;
    ensure(exact[..length] == into[..length], || "two reads differ".into())
}

fn refused<T>(
    what: impl std::fmt::Display,
    result: Result<T, StoreError>,
    kind: StoreErrorKind,
) -> Result<(), CaseError> {
    let got = result.map(drop).map_err(|error| error.kind());
    same(what, got, Err(kind))
}

#[derive(Clone)]
#[repr(align(4096))]
struct Page([u8; 4_096]);

const THREADS: usize = 8;
