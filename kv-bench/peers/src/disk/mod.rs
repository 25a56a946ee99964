//! Chunks on a disk in this library's folder and in stores of other libraries: the same chunks, the
//! same disk, the same order, in one run.
//!
//! In each round each contender gets an empty folder, writes all chunks in random order, is removed
//! from the page cache, and reads them back in another random order, each with [`THREADS`] calls at
//! once. Every other round has the reverse order; the first round is not counted. Figures are
//! medians.
//!
//! # What counts
//! A write ends when the chunks are on the disk: the file system is synced within its time. A read
//! ends in memory that was checked: by the contender's own checksum if it has one, and by the
//! chunk's CRC-64 otherwise. [`Contender::note`] says which, and how the contender reads.
//!
//! # What is checked
//! The warm-up checks every chunk of every contender by the chunk's own header and CRC-64. A pass
//! of reads fails if fewer bytes came from the disk than it read (`/proc/self/io`): it would have
//! measured the page cache.
mod files;
mod foyer;
mod opendal;
mod ours;
mod report;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use kv_bench::chunks::{Aligned, Chunks, on_threads, shuffled};

pub(crate) use self::report::Report;
use self::report::Sample;

/// Calls at once.
pub(crate) const THREADS: u32 = 4;

/// Options of the measurement.
#[derive(Debug)]
pub(crate) struct Options {
    /// A folder on the disk; what is written there is removed.
    pub(crate) dir: PathBuf,
    /// Bytes of all chunks.
    pub(crate) bytes: u64,
    /// Rounds after the warm-up.
    pub(crate) rounds: u32,
}

impl Default for Options {
    fn default() -> Self {
        let target = PathBuf::from("target");
        let dir = if target.is_dir() { target } else { PathBuf::from(".") };
        Self { dir, bytes: 512 << 20, rounds: 7 }
    }
}

/// A store that can be opened in an empty folder.
struct Contender {
    name: &'static str,
    /// The contender's way of reading and writing, and its checks.
    note: &'static str,
    /// The side that checks read chunks.
    checks: Checks,
    open: fn(&Path, &Chunks) -> Result<Box<dyn Store>>,
}

/// The side that checks read chunks.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Checks {
    /// The store does; the length is checked once more.
    Store,
    /// The store does not: the caller checks header and CRC-64.
    Caller,
    /// Neither side does, except for the length.
    Nobody,
}

/// A store of chunks that several threads call at once.
trait Store: Sync {
    /// Writes chunk `item`. It may still be in memory afterwards.
    fn put(&self, item: usize, bytes: &[u8]) -> Result<()>;

    /// Waits until what was written is in files.
    fn finish(&self) -> Result<()> {
        Ok(())
    }

    /// Reads chunk `item` and shows its bytes to `check`. `buffer` is memory that the store may
    /// read into.
    fn get(
        &self,
        item: usize,
        buffer: &mut Aligned,
        check: &dyn Fn(&[u8]) -> Result<()>,
    ) -> Result<()>;
}

const CONTENDERS: [Contender; 5] =
    [ours::CONTENDER, foyer::DIRECT, foyer::BUFFERED, opendal::CHECKED, opendal::UNCHECKED];

/// Measures all contenders.
pub(crate) fn run(options: &Options) -> Result<Report> {
    let chunks = Chunks::new(options.bytes)?;
    let mut report = Report::new(options, &chunks, &CONTENDERS);
    for round in 0..=options.rounds {
        let mut order: Vec<_> = CONTENDERS.iter().enumerate().collect();
        if round % 2 == 1 {
            order.reverse();
        }
        for (at, contender) in order {
            let sample = measure(options, &chunks, contender, round);
            let sample = sample.with_context(|| format!("{}, round {round}", contender.name))?;
            if round > 0 {
                report.push(at, sample);
            }
        }
    }
    Ok(report)
}

/// Measures one contender in a folder of its own.
fn measure(
    options: &Options,
    chunks: &Chunks,
    contender: &Contender,
    round: u32,
) -> Result<Sample> {
    let folder = tempfile::Builder::new().prefix("kv-bench-peers-").tempdir_in(&options.dir)?;
    let dir = folder.path();
    let store = (contender.open)(dir, chunks)?;
    let bytes = chunks.chunk_bytes() * u64::try_from(chunks.count())?;
    let mut buffers = chunks.buffers(THREADS);
    let order = |pass: u32| shuffled(chunks.count(), u64::from(round * 2 + pass + 1));

    files::sync(dir)?;
    let write = timed(|| {
        on_threads(&mut buffers, &order(0), |buffer, item| {
            chunks.complete(item, buffer)?;
            store.put(item, buffer.bytes())
        })?;
        store.finish()?;
        files::sync(dir)
    })?;

    files::forget(dir)?;
    let checks = if round == 0 { Checks::Caller } else { contender.checks };
    let before = files::bytes_read()?;
    let read = timed(|| {
        on_threads(&mut buffers, &order(1), |buffer, item| {
            store.get(item, buffer, &|read| {
                if checks == Checks::Caller {
                    return Ok(chunks.verify(item, read)?);
                }
                let read = u64::try_from(read.len())?;
                ensure!(read == chunks.chunk_bytes(), "{read} bytes of a chunk");
                Ok(())
            })
        })
    })?;
    let from_disk = files::bytes_read()? - before;
    ensure!(from_disk >= bytes, "{from_disk} bytes of {bytes} came from the disk");
    Ok(Sample { write: write.0, read: read.0, write_cpu: write.1, read_cpu: read.1 })
}

/// Returns the time of `run`, and the CPU time of the process meanwhile.
fn timed(run: impl FnOnce() -> Result<()>) -> Result<(Duration, Duration)> {
    let (begin, cpu) = (Instant::now(), files::cpu_time());
    run()?;
    Ok((begin.elapsed(), files::cpu_time().saturating_sub(cpu)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_contender_returns_what_was_written() {
        let options = Options { bytes: 24 << 20, rounds: 1, ..Options::default() };
        let report = run(&options).unwrap();
        let text = report.text();
        for contender in &CONTENDERS {
            assert!(text.contains(contender.name), "{text}");
        }
    }

    /// A store that keeps chunks in memory has read nothing from the disk.
    #[test]
    fn reads_that_are_not_from_the_disk_are_refused() {
        struct Memory(std::sync::Mutex<Vec<Vec<u8>>>);
        impl Store for Memory {
            fn put(&self, item: usize, bytes: &[u8]) -> Result<()> {
                self.0.lock().unwrap()[item] = bytes.to_vec();
                Ok(())
            }

            fn get(
                &self,
                item: usize,
                _: &mut Aligned,
                check: &dyn Fn(&[u8]) -> Result<()>,
            ) -> Result<()> {
                let bytes = self.0.lock().unwrap()[item].clone();
                check(&bytes)
            }
        }
        let memory = Contender {
            name: "memory",
            note: "",
            checks: Checks::Caller,
            open: |_, chunks| Ok(Box::new(Memory(vec![Vec::new(); chunks.count()].into()))),
        };
        let options = Options { bytes: 16 << 20, ..Options::default() };
        let chunks = Chunks::new(options.bytes).unwrap();
        let error = measure(&options, &chunks, &memory, 1).unwrap_err();
        assert!(error.to_string().contains("came from the disk"), "{error:#}");
    }
}
