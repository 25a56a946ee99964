//! The archive of a kit: one file that unpacks itself, and what it may weigh.
//!
//! Programs of a kit embed the same machine code, some 13 MB that nothing makes smaller. A
//! compressor whose window reaches from one copy to the next stores it once.
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, Result, bail};

use crate::shell;

/// Largest archive.
const BYTES_MAX: u64 = 43_000_000;
/// A machine that is lent for minutes gets the tree and the archive together, and no more than
/// this.
const TRAVELS_MAX: u64 = 64 << 20;
/// Bytes between two copies of the same content that the compressor still finds.
const WINDOW: u64 = 64 << 20;
/// Its compressor, with one block: several would not see each other's content.
const COMPRESSOR: [&str; 4] = ["xz", "--threads=1", "--stdout", "--lzma2=preset=6,dict=64MiB"];
/// Folder inside an archive.
const NAME: &str = "kv-gpu";
/// How its name ends.
const EXTENSION: &str = ".sh";

/// What stands before the compressed kit. [`PLACE`] becomes the place of its first byte.
const UNPACK: &str = r#"#!/bin/sh
# A kit that checks and measures the CUDA backend of kv, for a machine with a card:
#   sh FILE [--device N] [--deadline SECONDS] [--out DIR]   unpacks ./kv-gpu and runs it
#   sh FILE --unpack                                        unpacks ./kv-gpu
# Needs tar, and xz or python3.
set -e
if test -e kv-gpu && ! test -f kv-gpu/run.sh; then
  echo "error: ./kv-gpu is there and no kit" >&2
  exit 1
fi
if command -v xz >/dev/null 2>&1; then decode="xz -dc"
else decode="python3 -c 'import lzma,shutil,sys
shutil.copyfileobj(lzma.open(sys.stdin.buffer),sys.stdout.buffer,1<<20)'"
fi
# Reports of earlier runs stay.
rm -rf kv-gpu/run.sh kv-gpu/bin kv-gpu/models kv-gpu/testdata kv-gpu/vectors
tail -c +@PLACE@ "$0" | eval "$decode" | tar -xf - || true
if ! test -x kv-gpu/run.sh; then
  echo "error: $0 is damaged, or neither xz nor python3 is there" >&2
  exit 1
fi
if test "$1" = --unpack; then exit 0; fi
exec kv-gpu/run.sh "$@"
"#;
/// As long as the number that takes its place.
const PLACE: &str = "@PLACE@";

/// What an archive weighs, and what it may.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Weights {
    /// Files of the kit.
    pub(super) unpacked: u64,
    pub(super) archive: u64,
    /// Tracked files of the tree.
    pub(super) tree: u64,
}

impl Weights {
    /// What is left for the archive beside the tree.
    pub(super) fn room(&self) -> u64 {
        BYTES_MAX.min(TRAVELS_MAX.saturating_sub(self.tree))
    }

    /// Refuses an archive that is too large.
    pub(super) fn check(&self) -> Result<()> {
        let Self { archive, tree, .. } = *self;
        let room = self.room();
        if archive > room {
            bail!(
                "the archive has {archive} bytes, {room} is the limit: {BYTES_MAX} at most, and \
                 {TRAVELS_MAX} together with the tree's {tree}"
            );
        }
        Ok(())
    }
}

/// Where an archive goes: the file that is named, or one in the folder.
pub(super) fn archive(place: &Path, commit: &str) -> PathBuf {
    let is_file = place.to_str().is_some_and(|name| name.ends_with(EXTENSION));
    if is_file { place.to_owned() } else { place.join(format!("{NAME}-{commit}{EXTENSION}")) }
}

/// Packs a kit; refuses one that is too large.
pub(super) fn pack(folder: &Path, place: &Path, commit: &str) -> Result<()> {
    let archive = archive(&std::path::absolute(place)?, commit);
    if let Some(parent) = archive.parent() {
        fs::create_dir_all(parent)?;
    }
    let unpacked = write(folder, &archive)?;
    let weights = Weights { unpacked, archive: fs::metadata(&archive)?.len(), tree: tree()? };
    println!("{}: {} bytes, {unpacked} unpacked", archive.display(), weights.archive);
    println!(
        "with the tree's {}: {} of {TRAVELS_MAX} bytes",
        weights.tree,
        weights.archive.saturating_add(weights.tree)
    );
    weights.check()
}

/// Writes the archive of a folder; the bytes of its files.
pub(super) fn write(folder: &Path, archive: &Path) -> Result<u64> {
    let files = in_order(folder)?;
    let unpacked = files.iter().map(|(_, bytes)| bytes).sum();
    for pair in files.windows(2) {
        let bytes = pair.iter().map(|(_, bytes)| bytes).sum::<u64>();
        if bytes > WINDOW {
            let names: Vec<_> = pair.iter().map(|(name, _)| name.as_str()).collect();
            bail!("{} have {bytes} bytes, which a window of {WINDOW} misses", names.join(", "));
        }
    }
    let list = archive.with_extension("list");
    let names: Vec<_> = files.iter().map(|(name, _)| format!("{name}\n")).collect();
    fs::write(&list, names.concat())?;
    let packed = compress(folder, archive, &list);
    fs::remove_file(&list)?;
    packed?;
    Ok(unpacked)
}

/// Every file of a kit from its root, with its bytes; programs first and side by side, so that the
/// compressor sees what they share.
fn in_order(folder: &Path) -> Result<Vec<(String, u64)>> {
    let mut files = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(next) = folders.pop() {
        for entry in fs::read_dir(&next)? {
            let (path, kind) = entry.map(|entry| (entry.path(), entry.file_type()))?;
            if kind?.is_dir() {
                folders.push(path);
                continue;
            }
            let name = path.strip_prefix(folder).context("a file outside its own folder")?;
            let name = name.to_str().context("a file name that is not text")?.to_owned();
            files.push((name, fs::metadata(&path)?.len()));
        }
    }
    files.sort_by_key(|(name, _)| (!name.starts_with("bin/"), name.clone()));
    Ok(files)
}

fn compress(folder: &Path, archive: &Path, list: &Path) -> Result<()> {
    let [compressor, args @ ..] = COMPRESSOR;
    let mut tar = shell::program("tar");
    // Owners are of no use elsewhere.
    tar.args(["-cf-", "--owner=0", "--group=0", "--numeric-owner", "--no-recursion"]);
    tar.arg(format!("--transform=s,^,{NAME}/,")).arg("-C").arg(folder).arg("-T").arg(list);
    let mut tar = tar.stdout(Stdio::piped()).spawn().context("cannot start `tar`")?;
    let stream = tar.stdout.take().context("tar has no output")?;
    let mut xz = shell::program(compressor);
    xz.args(args).stdin(stream).stdout(Stdio::piped());
    let mut xz = xz.spawn().with_context(|| format!("cannot start `{compressor}`: install it"))?;
    let mut packed = xz.stdout.take().context("xz has no output")?;
    let mut file = File::create(archive)?;
    file.write_all(header().as_bytes())?;
    let mut part = vec![0; 1 << 20];
    loop {
        let count = packed.read(&mut part)?;
        let Some(part) = part.get(..count).filter(|part| !part.is_empty()) else { break };
        file.write_all(part)?;
    }
    let (tar, xz) = (tar.wait()?, xz.wait()?);
    if !tar.success() || !xz.success() {
        bail!("packing failed: tar {tar}, xz {xz}");
    }
    Ok(())
}

/// The script in front, which knows its own length.
fn header() -> String {
    let first = UNPACK.len().saturating_add(1);
    let text = UNPACK.replace(PLACE, &format!("{first:07}"));
    assert!(text.len() == UNPACK.len(), "a place has the length of its mark");
    text
}

/// Bytes of the tracked files.
fn tree() -> Result<u64> {
    let mut git = shell::program("git");
    let names = shell::output(git.args(["ls-files", "-z"])).context("git lists no files")?;
    let names = names.split('\0').filter(|name| !name.is_empty());
    // A file that is tracked and not there does not travel.
    let sizes = names.filter_map(|name| fs::metadata(shell::root().join(name)).ok());
    Ok(sizes.map(|file| file.len()).sum())
}

#[cfg(test)]
#[cfg(unix)]
mod tests;
