//! A folder of chunks beside the disk itself.
use kv::tier::{BlockStore, DiskOptions, DiskStore};

use super::TierOptions;
use super::error::TierError;
use super::fio;
use super::pass::{Comparison, Pass, Passes, expect_chunk, soon, timed};
use super::raw::RawFile;
use super::report::TierLine;
use crate::chunks::{Aligned, Chunks, on_threads, shuffled};
use crate::measure::Progress;
use crate::num::{to_u64, to_usize};

/// Passes of a round: ours, plain and `fio`, writes and reads.
pub(super) const PASSES: u64 = 6;

/// Measures the folder.
pub(super) fn measure(
    options: &TierOptions,
    chunks: &Chunks,
    progress: &mut dyn Progress,
) -> Result<Vec<TierLine>, TierError> {
    let prefix = tempfile::Builder::new().prefix("kv-bench-tier-").tempdir_in(&options.dir);
    let folder = prefix.map_err(TierError::io("creation of a folder"))?;
    let raw_path = folder.path().join("raw");
    let sides = Sides {
        chunks,
        raw: RawFile::create(&raw_path)?,
        store: open(folder.path().join("chunks").as_path(), chunks)?,
    };
    let mut buffers = chunks.buffers(READERS.max(WRITERS));
    // Lays out the file.
    sides.write_plain(&mut buffers, 0)?;
    let [mut reads, mut plain_reads, mut fio_reads] = <[Passes; 3]>::default();
    let [mut writes, mut plain_writes, mut fio_writes] = <[Passes; 3]>::default();
    let size = (chunks.chunk_bytes(), chunks.count());
    let mut has_fio = true;
    for round in 0..=options.rounds {
        plain_writes.push(round, sides.write_plain(&mut buffers, round)?, progress);
        writes.push(round, sides.write(&mut buffers, round)?, progress);
        plain_reads.push(round, sides.read_plain(&mut buffers, round)?, progress);
        reads.push(round, sides.read(&mut buffers, round)?, progress);
        for (passes, direction, threads) in
            [(&mut fio_writes, "write", WRITERS), (&mut fio_reads, "read", READERS)]
        {
            match fio::run(&raw_path, direction, threads, size)? {
                Some(pass) => passes.push(round, pass, progress),
                None => has_fio = false,
            }
        }
    }
    let bytes = chunks.chunk_bytes() * to_u64(chunks.count());
    let case = |case, peer, goal, threads| Comparison { case, peer, goal, threads, bytes };
    let mut lines = vec![
        case(READ, PLAIN, READ_GOAL, READERS).line(&reads, &plain_reads),
        case(WRITE, PLAIN, WRITE_GOAL, WRITERS).line(&writes, &plain_writes),
    ];
    if has_fio {
        lines.push(case(READ, "fio", READ_GOAL, READERS).line(&reads, &fio_reads));
        lines.push(case(WRITE, "fio", WRITE_GOAL, WRITERS).line(&writes, &fio_writes));
    }
    Ok(lines)
}

fn open(path: &std::path::Path, chunks: &Chunks) -> Result<DiskStore, TierError> {
    let bytes = chunks.chunk_bytes() * to_u64(chunks.count());
    let options = DiskOptions::new(bytes * 2).with_floor(0);
    let store = DiskStore::open(path, options).map_err(TierError::other)?;
    if !store.wait_listed(soon()) {
        return Err(TierError::other("an empty folder is not listed"));
    }
    Ok(store)
}

struct Sides<'a> {
    chunks: &'a Chunks,
    raw: RawFile,
    store: DiskStore,
}

impl Sides<'_> {
    fn order(&self, round: u32) -> Vec<usize> {
        shuffled(self.chunks.count(), u64::from(round) + 1)
    }

    fn write_plain(&self, buffers: &mut [Aligned], round: u32) -> Result<Pass, TierError> {
        let (order, buffers) = (self.order(round), some(buffers, WRITERS));
        timed(|| on_threads(buffers, &order, |buffer, item| self.raw.write(item, buffer.bytes())))
    }

    fn write(&self, buffers: &mut [Aligned], round: u32) -> Result<Pass, TierError> {
        let (order, buffers) = (self.order(round), some(buffers, WRITERS));
        self.store.remove(&self.chunks.addresses(self.chunks.count()), soon())?;
        timed(|| {
            on_threads(buffers, &order, |buffer, item| {
                self.chunks.complete(item, buffer)?;
                self.store.put(&self.chunks.address(item)?, buffer.bytes(), soon())?;
                Ok(())
            })
        })
    }

    fn read_plain(&self, buffers: &mut [Aligned], round: u32) -> Result<Pass, TierError> {
        let (order, buffers) = (self.order(round), some(buffers, READERS));
        timed(|| {
            on_threads(buffers, &order, |buffer, item| self.raw.read(item, buffer.bytes_mut()))
        })
    }

    fn read(&self, buffers: &mut [Aligned], round: u32) -> Result<Pass, TierError> {
        let (order, buffers) = (self.order(round), some(buffers, READERS));
        timed(|| {
            on_threads(buffers, &order, |buffer, item| {
                let into = buffer.bytes_mut();
                let read = self.store.get(&self.chunks.address(item)?, into, soon());
                expect_chunk(read, into.len())?;
                self.chunks.verify(item, into)
            })
        })
    }
}

fn some(buffers: &mut [Aligned], count: u32) -> &mut [Aligned] {
    let count = to_usize(count).min(buffers.len());
    &mut buffers[..count]
}

const READ: &str = "disk to verified memory";
const WRITE: &str = "memory to disk";
const PLAIN: &str = "plain direct I/O";
const READERS: u32 = 4;
const WRITERS: u32 = 2;
const READ_GOAL: f64 = 0.85;
const WRITE_GOAL: f64 = 0.6;
