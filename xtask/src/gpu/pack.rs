//! The archive of a kit: one file that unpacks itself, and its size limits.
//!
//! Programs of a kit embed the same machine code, 13 MB that do not compress. A compressor whose
//! window spans two copies stores it once.
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, Result, bail};

use crate::shell;

/// Largest archive.
const BYTES_MAX: u64 = 43_000_000;
/// Limit for a machine that gets the tree and the archive together.
const TRAVELS_MAX: u64 = 64 << 20;
/// Largest distance of two copies of the same content that the compressor finds.
const WINDOW: u64 = 64 << 20;
/// The compressor, with a single block, because blocks do not share content.
const COMPRESSOR: [&str; 4] = ["xz", "--threads=1", "--stdout", "--lzma2=preset=6,dict=64MiB"];
/// Folder inside an archive.
const NAME: &str = "kv-gpu";
/// Extension of the archive's name.
const EXTENSION: &str = ".sh";

/// The script before the compressed kit. [`PLACE`] becomes the offset of the kit's first byte.
const UNPACK: &str = r#"#!/bin/sh
# A kit that checks and measures the CUDA backend of kv, for a machine with a card:
#   sh FILE [--device N] [--deadline SECONDS] [--out DIR]   unpacks ./kv-gpu and runs it
#   sh FILE --unpack                                        unpacks ./kv-gpu
# Needs tar, and xz or python3.
set -e
if test -e kv-gpu && ! test -f kv-gpu/run.sh; then
  echo "error: ./kv-gpu exists and is not a kit" >&2
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
  echo "error: $0 is damaged, or neither xz nor python3 is installed" >&2
  exit 1
fi
if test "$1" = --unpack; then exit 0; fi
exec kv-gpu/run.sh "$@"
"#;
/// Has the length of the number that replaces it.
const PLACE: &str = "@PLACE@";

/// Sizes of an archive and their limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Weights {
    /// Bytes of the kit's files.
    pub(super) unpacked: u64,
    pub(super) archive: u64,
    /// Bytes of the tree's tracked files.
    pub(super) tree: u64,
}

impl Weights {
    /// Returns the bytes that the tree leaves for the archive.
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

/// Returns the path of an archive: the named file, or a file in the folder.
pub(super) fn archive(place: &Path, commit: &str) -> PathBuf {
    let is_file = place.to_str().is_some_and(|name| name.ends_with(EXTENSION));
    if is_file { place.to_owned() } else { place.join(format!("{NAME}-{commit}{EXTENSION}")) }
}

/// Packs a kit; refuses an archive that is too large.
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
        weights.archive + weights.tree
    );
    weights.check()
}

/// Writes the archive of a folder; returns the bytes of its files.
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

/// Lists every file of a kit from its root, with its bytes; programs come first and together, so
/// that the compressor finds their common content.
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
    // Owners do not matter elsewhere.
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

/// Makes the script, which contains its own length.
fn header() -> String {
    let first = UNPACK.len() + 1;
    let text = UNPACK.replace(PLACE, &format!("{first:07}"));
    assert!(text.len() == UNPACK.len(), "a place has the length of its mark");
    text
}

/// Returns the bytes of the tracked files.
fn tree() -> Result<u64> {
    let mut git = shell::program("git");
    let names = shell::output(git.args(["ls-files", "-z"])).context("git lists no files")?;
    let names = names.split('\0').filter(|name| !name.is_empty());
    // A tracked file that does not exist is not sent.
    let sizes = names.filter_map(|name| fs::metadata(shell::root().join(name)).ok());
    Ok(sizes.map(|file| file.len()).sum())
}

#[cfg(test)]
#[cfg(unix)]
mod tests;
